"""The files of a data set: those of a folder, or of what `save_to_disk` wrote, by split."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError
from trainkit.files import parse_json
from trainkit.hub.splits import READ, README, NoSuchPartError, files_by_split
from trainkit.trainer.data.source import reading
from trainkit.trainer.user_code import first_line


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """TrainingError where a data set has no such subset or split."""
    try:
        yield
    except NoSuchPartError as error:
        raise TrainingError(f"data.{error.key}: {path} {error.what}", hint=error.hint) from error


def split_files(path: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The parquet files of a folder, or else its JSON lines, by split; {} where it has neither."""
    with explained(path), reading(path):
        names = [name for name in _below(path) if name.endswith(READ)]
        readme = (path / README).read_text("utf-8", "replace") if (path / README).is_file() else ""
        found = files_by_split(names, readme, subset)
    return {split: [path / name for name in files] for split, files in found.items()}


def _below(path: Path) -> Iterator[str]:
    """The files below a folder, also behind links, from there. OSError for one that cannot be looked into."""

    def refuse(error: OSError) -> None:
        raise error

    for found, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        real = Path(found).resolve()
        # A link to a folder that it lies in would lead on for ever.
        folders[:] = [each for each in folders if Path(found, each).resolve() not in (real, *real.parents)]
        yield from ((Path(found) / name).relative_to(path).as_posix() for name in files)


def shards_by_split(path: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The files of what a recipe names, by split: a file, a plain folder, or what `save_to_disk` wrote.

    TrainingError where there is no such data.
    """
    if not path.exists():
        raise TrainingError(f"data.path: {path} does not exist", hint="check the path; it starts at the working folder")
    if path.is_file() or is_saved(path):
        refuse_subset(path, subset)
    if path.is_file():
        return {"train": [path]}
    found = _saved(path) or split_files(path, subset)
    if not found:
        raise TrainingError(
            f"data.path: {path} holds no data set: nothing of save_to_disk, no *.parquet and no *.jsonl"
        )
    return found


def refuse_subset(path: Path, subset: str | None) -> None:
    """TrainingError where a subset is asked for of what has none."""
    if subset is not None:
        what = f"data.subset: {path} has no subset {subset!r}"
        raise TrainingError(what, hint="leave data.subset out: it is for what a README.md lists")


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote the folder: a data set, or several as its splits."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _saved(path: Path) -> dict[str, list[Path]]:
    """The Arrow files of a saved data set, by split."""
    if not is_saved(path):
        return {}
    try:
        if (path / "dataset_dict.json").exists():
            names = parse_json((path / "dataset_dict.json").read_bytes())["splits"]
            folders = {str(name): path / str(name) for name in names}
        else:
            folders = {"train": path}
        return {
            name: [folder / str(each["filename"]) for each in _state(folder)["_data_files"]]
            for name, folder in folders.items()
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainingError(f"data.path: {path} is no sound data set: {first_line(error)}") from error


def _state(folder: Path) -> Any:
    return parse_json((folder / "state.json").read_bytes())
