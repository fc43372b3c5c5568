"""Run directories: list them, look at one, remove old ones. A run that is still on is never removed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.files import hold_lock, is_locked, read_json
from trainkit.plan.model import Text
from trainkit.runner.rundir.layout import RunLayout, subfolders

STATES = ("queued", "starting", "running", "requeued", "ended")
WAITING = ("queued", "requeued")  # in a scheduler's queue
LATEST = 1e11  # seconds since the epoch: what datetime can show


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run directory. state: queued, starting, running, requeued, ended, lost (nobody saw the end), or
    unknown (it runs, or ran, on another machine, whose lock cannot be seen here).

    rank: that failed first, where one did. launched: by the names `program`, `strategy` and `launcher`, as far as the
    plan says. argv: of the program, behind the interpreter.
    """

    layout: RunLayout
    state: str
    exit_code: int | None
    why: str
    started: float | None  # seconds since the epoch
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
    status = read_json(layout.status)
    state = status.get("state")
    seen = state in ("ended", *WAITING) or (state in STATES and is_running(layout))
    others = _of_other_nodes(layout) if state != "ended" and state not in WAITING else {}
    if not seen and not others and state in STATES and status.get("host") not in (None, os.uname().nodename):
        state = "unknown"  # where a lock of another machine may not be seen
    elif not seen or others:
        state, status = "lost", {**status, **others, "why": status.get("why") or others.get("why")}
    exit_code = status.get("exit_code")
    return RunInfo(
        layout,
        str(state),
        exit_code if isinstance(exit_code, int) else None,
        str(status.get("why") or ""),
        _time(status.get("started")),
        _time(status.get("ended")),
        read_json(layout.summary),
        rank if isinstance(rank := status.get("rank"), int) else None,
        *_of_plan(read_json(layout.plan)),
    )


def _of_other_nodes(layout: RunLayout) -> dict[str, Any]:
    """How the run ended, as another node says it: node 0, which ends last, was gone by then; else nothing."""
    attempts = layout.attempts[-1:]
    files = [file for attempt in attempts for file in sorted(attempt.nodes.glob("*.json"))]
    ended = [known for known in map(read_json, files) if known.get("state") == "ended" and known.get("failure")]
    return {name: ended[0].get(name) for name in ("why", "exit_code", "ended")} if ended else {}


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


def is_running(layout: RunLayout) -> bool:
    """Whether trainkit or the guardian of this run lives on this machine: either holds the run's lock."""
    return is_locked(layout.lock)


def hold(layout: RunLayout) -> int:
    """Mark the run as running for as long as the returned descriptor is open in any process."""
    return hold_lock(layout.lock)  # which the guardian inherits


def prunable(runs: Sequence[RunInfo], keep: int) -> list[RunInfo]:
    """The runs to remove so that the newest `keep` of each name stay; running ones always stay, and what is linked."""
    by_name: dict[str, list[RunInfo]] = {}
    for run in sorted(runs, key=lambda run: run.layout.id, reverse=True):
        by_name.setdefault(run.layout.name, []).append(run)
    old = [run for newest_first in by_name.values() for run in reversed(newest_first[keep:])]
    # In a folder that others may write to, a link may lead to runs that nobody meant.
    return [run for run in old if run.state in ("ended", "lost") and not _is_linked(run.layout)]


def _is_linked(layout: RunLayout) -> bool:
    return layout.root.is_symlink() or layout.root.parent.is_symlink()


def remove(run: RunInfo) -> bool:
    """Remove a run directory; False when it is running again."""
    if is_running(run.layout) or _is_linked(run.layout):
        return False
    with contextlib.suppress(FileNotFoundError):
        run.layout.plan.unlink()  # first: a half-removed folder must not count as a run
    shutil.rmtree(run.layout.root)
    return True


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < LATEST else None
