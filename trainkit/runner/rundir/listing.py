"""Run directories: list them, look at one, remove old ones. A run that is still on is never removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.runner.rundir.layout import RunLayout


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run directory. state: starting, running, ended, or lost (neither trainkit nor its guardian saw the end)."""

    layout: RunLayout
    state: str
    exit_code: int | None
    why: str
    started: float | None  # seconds since the epoch
    ended: float | None
    summary: Mapping[str, Any]


def list_runs(output_root: str, name: str | None = None) -> list[RunInfo]:
    """The runs under an output folder, oldest first; of one name, if it is given."""
    root = Path(output_root)
    parents = [root / name] if name else sorted(_subfolders(root))
    runs = [read_run(path) for parent in parents for path in _subfolders(parent) if is_run(path)]
    return sorted(runs, key=lambda run: run.layout.id)


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    layout = RunLayout(path)
    return layout.plan.is_file() and layout.recipe.is_file()


def read_run(path: Path) -> RunInfo:
    """What the files of a run directory say."""
    layout = RunLayout(path.absolute())
    status = read_json(layout.status)
    state = str(status.get("state", "lost"))
    if state != "ended" and not is_running(layout):
        state = "lost"
    return RunInfo(
        layout,
        state,
        status.get("exit_code"),
        str(status.get("why") or ""),
        status.get("started"),
        status.get("ended"),
        read_json(layout.summary),
    )


def is_running(layout: RunLayout) -> bool:
    """Whether trainkit or the guardian of this run lives on this machine: either holds the run's lock."""
    try:
        fd = os.open(layout.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def hold(layout: RunLayout) -> int:
    """Mark the run as running for as long as the returned descriptor is open in any process."""
    fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def prunable(runs: Sequence[RunInfo], keep: int) -> list[RunInfo]:
    """The runs to remove so that the newest `keep` of each name stay; running ones always stay."""
    by_name: dict[str, list[RunInfo]] = {}
    for run in runs:
        by_name.setdefault(run.layout.name, []).append(run)
    old = [
        run
        for group in by_name.values()
        for run in sorted(group, key=lambda r: r.layout.id)[: max(0, len(group) - keep)]
    ]
    return [run for run in old if run.state in ("ended", "lost")]


def remove(run: RunInfo) -> bool:
    """Remove a run directory; False when the run has come to life. A half-removed run is no longer taken for one."""
    if is_running(run.layout):
        return False
    with contextlib.suppress(FileNotFoundError):
        run.layout.plan.unlink()
    shutil.rmtree(run.layout.root)
    return True


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when the file is not there or not whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _subfolders(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
