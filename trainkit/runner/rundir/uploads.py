"""What uploads to the Hub keep in a run directory (trainkit/trainer/checkpoint/pushing.py), and its end."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainkit.files import read_json
from trainkit.runner.rundir.layout import RunLayout

EXPORT_SUFFIX = ".export"  # of a folder that is made to be uploaded


def clear_uploads(run: RunLayout) -> None:
    """Remove what is left where a KILL has ended the uploads too, which clean up behind themselves otherwise.

    Where every checkpoint is to be uploaded, those that are not stay: the next attempt goes on with them.
    """
    folder = run.pushes
    if folder.is_symlink() or not folder.is_dir():
        return
    settings = read_json(run.root / "trainer.json")
    try:
        keeps = settings["recipe"]["checkpoint"]["push_to_hub"]["strategy"] == "all"
    except (KeyError, TypeError):  # torn, or of another release
        keeps = True
    for path in sorted(folder.glob("*")):
        if not keeps or _is_unfinished(path):
            shutil.rmtree(path, ignore_errors=True)
    if not any(folder.glob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".") or path.suffix == EXPORT_SUFFIX
