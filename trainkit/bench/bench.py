"""Run a recipe and its variants one after another, each as a run of its own, and account for all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainkit.bench.comparison import (
    Comparison,
    Measurement,
    MemoryKind,
    Row,
    as_csv,
    as_data,
    compare,
    measure,
    remaining,
)
from trainkit.errors import MachineError
from trainkit.files import publish
from trainkit.runner.execute import RunRequest, carry_out
from trainkit.runner.report.console import Stream, Terminal
from trainkit.runner.report.failure import describe_failure
from trainkit.runner.report.progress import last_lines
from trainkit.runner.supervisor.processes import STOP, handled
from trainkit.text import format_duration


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe to be run, or the reason why it cannot be (`refusal`)."""

    name: str
    description: str
    request: RunRequest | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is compared. base: the name of the candidate that the others are measured by."""

    recipe: str
    machine: str
    memory: MemoryKind
    base: str
    candidates: Sequence[Candidate]
    repeat: int


class BenchTerminal(Terminal):
    """Shows trainkit's own lines of a run, and how far the whole bench is on the live line."""

    whole: Callable[[], str]  # says how far

    def program(self, stream: Stream, data: bytes) -> None:
        """Nothing: a comparison is no place for the output of each program, which is in its logs."""

    def live(self, line: Callable[[int], str]) -> bool:
        """The run's line behind the whole's. True even without a terminal: one last line for each run is enough."""

        def both(width: int) -> str:
            whole = self.whole()
            return f"{whole}  {line(max(width - len(whole) - 2, 0))}"[: max(width - 1, 0)]

        super().live(both)
        return True


@dataclass
class _Bench:
    """The state of a bench: what has been measured, and how long each run took."""

    setup: Setup
    measured: dict[str, list[Measurement]] = field(default_factory=dict)
    walls: list[float] = field(default_factory=list)
    begun: int = 0
    begun_at: float = 0.0
    stopped_by: int | None = None
    started: float = field(default_factory=time.monotonic)

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal."""
        self.stopped_by = number

    @property
    def runnable(self) -> int:
        """How many runs there are in all."""
        return sum(each.request is not None for each in self.setup.candidates) * self.setup.repeat

    def comparison(self) -> Comparison:
        """What is known so far, in the recipe's order."""
        setup, runs = self.setup, self.measured
        rows = [
            Row(each.name, each.description, tuple(runs[each.name])) for each in setup.candidates if each.name in runs
        ]
        missing = [each.name for each in setup.candidates if each.name not in runs]
        return Comparison(setup.recipe, setup.machine, setup.memory, compare(rows, setup.base), missing)


def run_all(setup: Setup, folder: Path, console: BenchTerminal) -> tuple[Comparison, int | None]:
    """Run every candidate `repeat` times, in rounds, so that a slow spell of the machine hits all of them alike.

    bench.csv and bench.json in the folder are renewed after each run. Returns what was found, and the signal that
    ended it early. Raises MachineError where the folder cannot be made.
    """
    bench = _Bench(setup)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "name another folder with --output"
        raise MachineError(f"the folder {folder} cannot be made: {error.strerror}", hint=hint) from error
    for candidate in setup.candidates:
        if candidate.request is None:
            bench.measured[candidate.name] = [Measurement("refused", reason=candidate.refusal)]
            console.say(f"{candidate.name}: refused: {candidate.refusal}")
    # Between two runs a signal is only remembered, so that what has been measured is still written.
    with handled(STOP, bench.stop):
        for _ in range(setup.repeat):
            for candidate in setup.candidates:
                if bench.stopped_by is None and candidate.request is not None:
                    _run_one(bench, candidate, candidate.request, console)
                    found = bench.comparison()
                    publish(folder / "bench.csv", as_csv(found))
                    publish(folder / "bench.json", json.dumps(as_data(found), indent=2, ensure_ascii=False) + "\n")
    return bench.comparison(), bench.stopped_by


def _run_one(bench: _Bench, candidate: Candidate, request: RunRequest, console: BenchTerminal) -> None:
    bench.begun += 1
    bench.begun_at = time.monotonic()
    described = f": {candidate.description}" if candidate.description else ""
    console.say(f"{bench.begun} of {bench.runnable}  {candidate.name}{described}  ({_clock(bench)})")
    try:
        console.whole = lambda: f"{bench.begun}/{bench.runnable} {candidate.name}, {_clock(bench)} |"
        ended = carry_out(request, console)
    except MachineError as error:
        measurement = Measurement("refused", int(error.exit_code), str(error))
        console.say(f"refused: {error}")
    else:
        # The end of every rank's standard error: there a failure says what it was.
        logs = sorted(ended.layout.attempt(1).logs.glob("rank-*.err"))
        errors = "\n".join(line for log in logs for line in last_lines(log))
        measurement = measure(ended.summary, bench.setup.memory, errors, str(ended.layout.root))
        if ended.verdict.failure == "signal":
            bench.stopped_by = ended.verdict.signal
        elif ended.verdict.exit_code != 0:  # no rank's output was shown, so the failed one's is quoted
            console.say(describe_failure(ended.verdict, ended.layout.attempt(1), None))
    bench.walls.append(time.monotonic() - bench.begun_at)
    bench.measured.setdefault(candidate.name, []).append(measurement)


def _clock(bench: _Bench) -> str:
    now = time.monotonic()
    left = remaining(bench.walls, bench.runnable - len(bench.walls), now - bench.begun_at)
    rest = "" if left is None else f", about {format_duration(left)} left"
    return f"{format_duration(now - bench.started)} so far{rest}"
