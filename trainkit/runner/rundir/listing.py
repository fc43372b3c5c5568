"""Run directories: list them, look at one, remove one. How a run is doing is told in jobs/states.py."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.files import hold_lock, is_locked, read_json, read_record, remove_file, remove_tree
from trainkit.plan.model import Text
from trainkit.runner.rundir.layout import RunLayout, subfolders
from trainkit.runner.rundir.records import Status


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run directory. started, ended: seconds since the epoch.

    rank: that failed first, where one did. launched: by the names `program`, `strategy` and `launcher`, as far as the
    plan says. argv: of the program, behind the interpreter.
    """

    layout: RunLayout
    started: float | None
    ended: float | None
    summary: Mapping[str, Any]
    rank: int | None = None
    launched: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """What was run, in a word or two: a script, a module, or the built-in trainer; empty where nothing says it."""
        if self.launched.get("program") == "builtin" or not self.argv:
            return self.launched.get("program", "")
        return " ".join(self.argv[:2]) if self.argv[0] == "-m" else Path(self.argv[0]).name


def list_runs(output_root: str, name: str | None = None) -> list[RunInfo]:
    """The runs under an output folder, oldest first; of one name, if it is given."""
    root = Path(output_root)
    parents = [root / name] if name else sorted(subfolders(root))
    runs = [read_run(path) for parent in parents for path in subfolders(parent) if is_run(path)]
    return sorted(runs, key=lambda run: run.layout.id)


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory. ValueError for a name that cannot be one."""
    layout = RunLayout(path)
    with contextlib.suppress(OSError):  # another user's: Path.is_file raises where it may not look
        return layout.plan.is_file() and layout.recipe.is_file()
    return False


def read_run(path: Path) -> RunInfo:
    """What the files of a run directory say. What is damaged reads as unknown: one run must not hide all others."""
    layout = RunLayout(path.absolute())
    status = read_status(layout) or Status()
    plan = _of_plan(read_json(layout.plan))
    return RunInfo(layout, status.started, status.ended, read_json(layout.summary), status.rank, *plan)


def read_status(layout: RunLayout) -> Status | None:
    """status.json; None where it is not there, or damaged."""
    return read_record(layout.status, Status, below=layout.root)


def _of_plan(plan: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What a plan says of who runs, and the program's words; of a damaged one, or one of another version, what fits."""
    launched = {}
    for name in ("program", "strategy", "launcher"):
        choice = plan.get(name)
        if isinstance(choice, dict) and isinstance(choice.get("kind"), str):
            launched[name] = choice["kind"]
    try:
        command = plan["commands"][0]
        start = command["wrapper"]["first"] + command["wrapper"]["count"]
        words = [str(Text.from_json(word)) for word in command["argv"][start:]]
    except (KeyError, IndexError, TypeError, ValueError):
        return launched, ()
    return launched, tuple(words[1:] if _is_interpreter(words) else words)


def _is_interpreter(words: Sequence[str]) -> bool:
    return len(words) > 1 and Path(words[0]).name.startswith("python")


def is_running(layout: RunLayout) -> bool | None:
    """Whether trainkit or the guardian of this run lives on this machine: either holds the run's lock.

    None where the lock cannot be looked at.
    """
    return is_locked(layout.lock)


def hold(layout: RunLayout) -> int:
    """Mark the run as running for as long as the returned descriptor is open in any process."""
    return hold_lock(layout.lock)  # which the guardian inherits


def is_linked(layout: RunLayout) -> bool:
    """Whether a link leads to it: in a folder that others may write to, that may be to runs that nobody meant."""
    return layout.root.is_symlink() or layout.root.parent.is_symlink()


def remove(layout: RunLayout) -> None:
    """Remove a run directory. Raises OSError."""
    folder = layout.root.parent
    remove_file(layout.plan, below=folder)  # first: a half-removed folder must not count as a run
    remove_tree(layout.root, below=folder)
