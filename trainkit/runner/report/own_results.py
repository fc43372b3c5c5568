"""What a program of the user's own is known to have done: steps, as the proof's hook saw them, and Trainer's files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.files import LARGEST, read_json, read_record
from trainkit.plan.model import Plan
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import Count, Seconds, read_shown

# Names in Trainer's result files -> those of a summary (transformers, trainer.py: TrainOutput, speed_metrics).
OF_TRAINER = {
    "train_loss": "mean_loss",
    "train_runtime": "train_seconds",
    "train_samples_per_second": "samples_per_second",
    "eval_loss": "eval_loss",
}
SPLITS = ("train_results.json", "eval_results.json")  # as Trainer.save_metrics names them; it adds all to the next
COMBINED = "all_results.json"
STATE = "trainer_state.json"


class Counted(NamedTuple):
    """What the hook has counted (trainkit/verify/steps.py)."""

    steps: Count
    seconds: Seconds = 0.0
    first_seconds: Seconds = 0.0


def own_results(plan: Plan, layout: RunLayout, started: float) -> dict[str, Any]:
    """Steps, losses and times by their names in a summary, as far as they are known. Empty for the built-in trainer.

    started: seconds since the epoch; result files of before are another run's.
    """
    if plan.program.kind == "builtin" or not layout.attempts:
        return {}
    seen = _counted_by_hook(plan, layout)
    if plan.program.kind != "hf":
        return seen
    found = _said_by_trainer(_output_folders(plan, layout), started)
    steps = max((each for each in (seen.get("steps"), found.get("steps")) if each is not None), default=None)
    return {**seen, **found, **({} if steps is None else {"steps": steps})}


def _counted_by_hook(plan: Plan, layout: RunLayout) -> dict[str, Any]:
    """What the first rank of this node was seen to do. The first step is not in the time of a step, for it warms up."""
    for file in sorted(layout.attempts[-1].shown.glob("steps-rank-*.json"), key=_rank_of)[:1]:
        counted = read_record(file, Counted, below=layout.root)
        if counted is None:
            return {}
        found: dict[str, Any] = {"steps": counted.steps}
        if counted.steps > 2 and counted.seconds > counted.first_seconds:
            found["step_seconds"] = (counted.seconds - counted.first_seconds) / (counted.steps - 2)
            if plan.batch.global_ is not None:
                found["samples_per_second"] = plan.batch.global_ / found["step_seconds"]
        return found
    return {}


def _rank_of(file: Path) -> int:
    number = file.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _said_by_trainer(folders: Iterable[Path], started: float) -> dict[str, Any]:
    """What Trainer's own files say of this run; the first of the folders that has any counts."""
    for folder in folders:
        found: dict[str, Any] = {}
        if states := list(_newer(started, folder / STATE, *folder.glob(f"checkpoint-*/{STATE}"))):
            found |= _of_state(max(states, key=lambda state: _number(state.get("global_step")) or 0))
        results = list(_newer(started, *(folder / name for name in SPLITS)))
        for each in results or _newer(started, folder / COMBINED):
            found |= {ours: each[name] for name, ours in OF_TRAINER.items() if _number(each.get(name)) is not None}
        if found:
            return found
    return {}


def _of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Steps and the latest losses in the order in which Trainer logged them."""
    found: dict[str, Any] = {}
    if isinstance(steps := state.get("global_step"), int):
        found["steps"] = steps
    log = state.get("log_history")
    for entry in log if isinstance(log, list) else ():
        named = (("final_loss", "loss"), ("eval_loss", "eval_loss")) if isinstance(entry, dict) else ()
        found |= {ours: entry[name] for ours, name in named if _number(entry.get(name)) is not None}
    return found


def _output_folders(plan: Plan, layout: RunLayout) -> Iterator[Path]:
    """Where the script may have had Trainer write: as seen in the ranks, as its words say, as a plan has it."""
    for shown in read_shown(str(layout.attempts[-1].root)).values():
        if shown.output_dir:
            yield Path(shown.output_dir)
    words = [str(word) for word in plan.commands[0].program]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--output_dir" and (given := value if equals else following):
            yield Path(given.replace("<run_dir>", str(layout.root))).absolute()
    yield layout.root / "output"


def _newer(started: float, *files: Path) -> Iterator[dict[str, Any]]:
    for file in files:
        with contextlib.suppress(OSError):
            if file.stat().st_mtime >= started - 1:  # some file systems keep whole seconds
                yield read_json(file, LARGEST)  # Trainer's state has every line of its log


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
