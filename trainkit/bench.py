"""`trainkit bench`: a recipe compared with its variants; what a run gave, the runs themselves, table and plot."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from trainkit.errors import MachineError
from trainkit.files import publish
from trainkit.foresight.published import published
from trainkit.runner.execute import run_plan
from trainkit.runner.report.console import Stream, Terminal
from trainkit.runner.report.exit_status import KILLED
from trainkit.runner.report.failure import describe_failure
from trainkit.runner.report.summary import headline
from trainkit.runner.request import RunRequest
from trainkit.runner.supervisor.processes import STOP, handled
from trainkit.runner.together import LOOK_SECONDS, ChildRun, RunsTogether, errors_of, summary_of
from trainkit.text import MIB, format_duration, format_measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Outcome = Literal["ok", "failed", "out of memory", "interrupted", "refused"]
MemoryKind = Literal["gpu", "rss"]
# Of which several runs have a median.
Figure = Literal["seconds", "samples_per_second", "final_loss", "eval_loss", "evaluation"]

# What a rank's standard error holds when memory, of a GPU or of the machine, ran out.
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "MemoryError", "can't allocate memory", "bad_alloc")
# Long heads for prose, short ones for columns.
MEMORY_MEANING: Mapping[MemoryKind, str] = {
    "gpu": "GPU memory occupied (NVML, fullest GPU)",
    "rss": "peak resident memory (RSS of the largest rank)",
}
MEMORY_HEAD: Mapping[MemoryKind, str] = {"gpu": "GPU memory", "rss": "peak RSS"}
_REASON = 100  # characters of a failure's reason in the table; files hold all of it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe to be run, or the reason why it cannot be (`refusal`). line: behind `trainkit run`, the same run."""

    name: str
    description: str
    request: RunRequest | None
    refusal: str = ""
    line: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """What is compared. base: the name of the candidate that the others are measured by.

    jobs: how many runs at once; above 1 each of them is a process of its own, with some of these GPUs (UUIDs),
    or those that it waits for itself.
    """

    recipe: str
    machine: str
    memory: MemoryKind
    base: str
    candidates: Sequence[Candidate]
    repeat: int
    jobs: int = 1
    gpus: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run, or one that was refused. Seconds and bytes; None is what the run did not report.

    seconds: of training where the trainer reports it, else of the whole run.
    """

    outcome: Outcome
    exit_code: int | None = None
    reason: str = ""
    seconds: float | None = None
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    final_loss: float | None = None
    evaluation: float | None = None
    evaluated: str = ""  # what that is: the name of a metric, or loss
    run_directory: str = ""
    eval_loss: float | None = None
    rates_cover: str = ""  # which steps samples_per_second is of


@dataclass(frozen=True, slots=True)
class VariantRow:
    """One variant with all its runs. Figures are those of the runs that succeeded.

    speed, memory: samples per second and memory as multiples of the base's; None where either is unknown.
    """

    name: str
    description: str
    runs: tuple[Measurement, ...]
    speed: float | None = None
    memory: float | None = None

    @property
    def outcome(self) -> Outcome:
        """Of the first run that did not succeed; ``ok`` when all did."""
        return next((run.outcome for run in self.runs if run.outcome != "ok"), "ok")

    @property
    def reason(self) -> str:
        return next((run.reason for run in self.runs if run.outcome != "ok"), "")

    @property
    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest samples per second; None for fewer than two runs."""
        rates = self._known("samples_per_second")
        return (min(rates), max(rates)) if len(rates) > 1 else None

    @property
    def evaluated(self) -> str:
        """What `evaluation` is; empty where no run has one."""
        return next((run.evaluated for run in self.runs if run.evaluated), "")

    @property
    def rates_cover(self) -> str:
        """Which steps the samples per second are of; empty where no run has any."""
        return next((run.rates_cover for run in self.runs if run.outcome == "ok" and run.rates_cover), "")

    @property
    def memory_bytes(self) -> int | None:
        """The highest of the runs."""
        return max(self._known("memory_bytes"), default=None)

    def median(self, figure: Figure) -> float | None:
        """Of the runs that report it."""
        known = self._known(figure)
        # A loss that is not a number is the result of its variant, and has no order.
        return next((value for value in known if math.isnan(value)), median(known)) if known else None

    def _known(self, figure: Figure | Literal["memory_bytes"]) -> list[Any]:
        values = [getattr(run, figure) for run in self.runs if run.outcome == "ok"]
        return [value for value in values if value is not None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A bench as far as it has come. machine: a description of what it ran on; not_run: variants without a run."""

    recipe: str
    machine: str
    memory: MemoryKind
    rows: Sequence[VariantRow]
    not_run: Sequence[str] = ()

    @property
    def complete(self) -> bool:
        """Whether every variant ran, and succeeded."""
        return not self.not_run and all(row.outcome == "ok" for row in self.rows)


def measure(summary: Mapping[str, Any], kind: MemoryKind, errors: str, run_directory: str) -> Measurement:
    """What a run's summary says. errors: the end of the ranks' standard error, which shows what a failure was."""
    outcome, reason = _outcome(summary, errors)
    ranks, cards = summary.get("memory") or (), summary.get("gpu_memory_occupied") or {}
    used = cards.values() if kind == "gpu" else [rank["rss"] for rank in ranks if rank.get("rss")]
    trained = summary.get("train_seconds")
    evaluated, evaluation = headline(summary) or ("", None)
    return Measurement(
        outcome,
        summary.get("exit_code"),
        reason,
        seconds=trained if trained is not None else summary.get("wall_seconds"),
        samples_per_second=summary.get("samples_per_second"),
        memory_bytes=max(used, default=None),
        final_loss=summary.get("final_loss"),
        evaluation=evaluation,
        evaluated=evaluated,
        run_directory=run_directory,
        eval_loss=loss if isinstance(loss := summary.get("eval_loss"), int | float) else None,
        rates_cover=str(summary.get("rates_cover") or ""),
    )


def _outcome(summary: Mapping[str, Any], errors: str) -> tuple[Outcome, str]:
    code, why = summary.get("exit_code"), str(summary.get("why") or "")
    if code == 0:
        return "ok", ""
    if summary.get("failure") == "signal":
        return "interrupted", why
    traces = (line.strip() for line in reversed(errors.splitlines()) if any(trace in line for trace in OUT_OF_MEMORY))
    if line := next(traces, ""):
        return "out of memory", line
    if code == KILLED:
        return "out of memory", f"{why} (exit code {KILLED}: most likely the kernel's, when memory ran out)"
    return "failed", f"{why} (exit code {code})" if str(code) not in why else why


def compare(rows: Sequence[VariantRow], base: str) -> list[VariantRow]:
    """The rows with their speed and memory relative to the row named `base`, where that succeeded.

    A speed that covers other steps than the base's is not compared.
    """
    reference = next((row for row in rows if row.name == base and row.outcome == "ok"), None)
    if reference is None:
        return list(rows)

    def ratio(value: float | None, by: float | None) -> float | None:
        return value / by if value is not None and by else None

    speed, memory = reference.median("samples_per_second"), reference.memory_bytes
    found = []
    for row in rows:
        by = speed if row.rates_cover == reference.rates_cover else None
        faster, larger = ratio(row.median("samples_per_second"), by), ratio(row.memory_bytes, memory)
        found.append(replace(row, speed=faster, memory=larger))
    return found


def remaining(walls: Sequence[float], left: int, spent: float = 0.0) -> float | None:
    """Seconds that so many more runs may take, by the mean of those before; None before the first has ended.

    spent: seconds that the first of them has taken so far.
    """
    if not walls or not left:
        return None
    mean = sum(walls) / len(walls)
    return mean * (left - 1) + max(mean - spent, 0.0)


class BenchTerminal(Terminal):
    """Shows trainkit's own lines of a run, and how far the whole bench is on the live line."""

    whole: Callable[[], str]  # says how far

    def program(self, stream: Stream, data: bytes) -> None:
        """Nothing: a comparison is no place for the output of each program, which is in its logs."""

    def live(self, line: Callable[[int], str]) -> bool:
        """The run's line behind the whole's. True even without a terminal: one last line for each run is enough."""

        def both(width: int) -> str:
            whole, of_run = self.whole(), line(width)
            beside = f"{whole}  {of_run}"
            return beside if "\n" not in beside and len(beside) < width else f"{whole[: max(width - 1, 0)]}\n{of_run}"

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
    together: RunsTogether = field(init=False)

    def __post_init__(self) -> None:
        self.together = RunsTogether(
            self.setup.jobs, None if self.setup.gpus is None else [*self.setup.gpus], os.environ
        )

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Remember a signal, and pass it on to the runs that are processes of their own."""
        self.stopped_by = number
        self.together.signal(number)

    @property
    def runnable(self) -> int:
        """How many runs there are in all."""
        return sum(each.request is not None for each in self.setup.candidates) * self.setup.repeat

    def clock(self) -> str:
        """The time so far, and what is left by the runs before."""
        now = time.monotonic()
        left = remaining(self.walls, self.runnable - len(self.walls), now - self.begun_at)
        rest = "" if left is None else f", about {format_duration(left / self.setup.jobs)} left"
        return f"{format_duration(now - self.started)} so far{rest}"

    def begin(self, candidate: Candidate, where: str = "") -> str:
        """Count one more run; what is said of it."""
        self.begun += 1
        self.begun_at = time.monotonic()
        described = f": {candidate.description}" if candidate.description else ""
        return f"{self.begun} of {self.runnable}  {candidate.name}{described}{where}  ({self.clock()})"

    def end(self, name: str, begun: float, measurement: Measurement) -> None:
        """Keep what a run of a candidate gave, and how long it took."""
        self.walls.append(time.monotonic() - begun)
        self.measured.setdefault(name, []).append(measurement)

    def running_line(self) -> str:
        """How far several runs at once are."""
        names = ", ".join(each.name for each in self.together.children)
        return f"{len(self.walls)}/{self.runnable} ended, running: {names}, {self.clock()}"

    def comparison(self) -> Comparison:
        """What is known so far, in the recipe's order."""
        setup, runs = self.setup, self.measured
        done = [each for each in setup.candidates if each.name in runs]
        rows = [VariantRow(each.name, each.description, tuple(runs[each.name])) for each in done]
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
    runs = [each for _ in range(setup.repeat) for each in setup.candidates if each.request is not None]
    with handled(STOP, bench.stop):
        if setup.jobs > 1:
            _run_together(bench, runs, folder, console)
        else:
            for candidate in runs:
                if bench.stopped_by is None and candidate.request is not None:
                    _run_one(bench, candidate, candidate.request, console)
                    _write(bench, folder)
    return bench.comparison(), bench.stopped_by


def _write(bench: _Bench, folder: Path) -> None:
    found = bench.comparison()
    publish(folder / "bench.csv", as_csv(found))
    publish(folder / "bench.json", json.dumps(as_data(found), indent=2, ensure_ascii=False) + "\n")


def _run_together(bench: _Bench, runs: Sequence[Candidate], folder: Path, console: BenchTerminal) -> None:
    """Run several at once, in this order, each as soon as there are GPUs for it alone."""
    waiting, together = deque(runs), bench.together
    console.whole = bench.running_line
    try:
        while waiting or together.children:
            for child in together.take_ended():
                _take_measurement(bench, child, console)
                _write(bench, folder)
            if bench.stopped_by is not None:
                waiting.clear()
            while waiting and together.has_room(gpus_of(waiting[0])):
                candidate = waiting.popleft()
                gpus = gpus_of(candidate)
                where = "" if together.gpus is None else f" on {', '.join(together.gpus[:gpus])}"
                console.say(bench.begin(candidate, where))
                log = folder / f"{bench.begun}-{re.sub('[^A-Za-z0-9._-]', '_', candidate.name)}.log"
                together.start(candidate.name, candidate.line, log, gpus)
            for name, why in together.newly_waiting():
                console.say(f"{name} {why}")
            console.live(lambda _: "")
            time.sleep(LOOK_SECONDS)
    finally:
        together.close()


def gpus_of(candidate: Candidate) -> int:
    """How many GPUs its plan has."""
    return len(candidate.request.planned.plan.cards) if candidate.request else 0


def _take_measurement(bench: _Bench, child: ChildRun, console: BenchTerminal) -> None:
    """Of a run that has ended as a process of its own."""
    layout, code = child.layout, child.process.returncode
    if layout is None:
        measurement = Measurement("refused", code, child.refusal())
        console.say(f"{child.name}: refused: {measurement.reason}")
    else:
        measurement = measure(summary_of(layout, code), bench.setup.memory, errors_of(layout), str(layout.root))
        if measurement.outcome == "interrupted":
            bench.stopped_by = bench.stopped_by or max(code - 128, 1)
        elif measurement.outcome != "ok":
            console.say(f"{child.name}: {measurement.outcome}: {measurement.reason}\n  {child.log}")
    bench.end(child.name, child.begun, measurement)


def _run_one(bench: _Bench, candidate: Candidate, request: RunRequest, console: BenchTerminal) -> None:
    console.say(bench.begin(candidate))
    try:
        console.whole = lambda: f"{bench.begun}/{bench.runnable} {candidate.name}, {bench.clock()} |"
        ended = run_plan(request, console)
    except MachineError as error:
        measurement = Measurement("refused", int(error.exit_code), str(error))
        console.say(f"refused: {error}")
    except (KeyboardInterrupt, SystemExit) as stop:  # a signal, while it waited for GPUs
        bench.stopped_by = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0) - 128
        return
    else:
        measurement = measure(ended.summary, bench.setup.memory, errors_of(ended.layout), str(ended.layout.root))
        if ended.verdict.failure == "signal":
            bench.stopped_by = ended.verdict.signal
        elif ended.verdict.exit_code != 0:  # no rank's output was shown, so the failed one's is quoted
            console.say(describe_failure(ended.verdict, ended.layout.attempt(1), None))
    bench.end(candidate.name, bench.begun_at, measurement)


def render(found: Comparison) -> str:
    """The table, with what its memory column means below."""
    others = {row.name: said for row in found.rows if (said := published(found.recipe, row.name))}
    head: tuple[str, ...] = (
        *("variant", "time", "samples/s", "vs base", MEMORY_HEAD[found.memory], "vs base", "final loss"),
        *(["eval loss"] if (has_loss := any(row.median("eval_loss") is not None for row in found.rows)) else ()),
        *([evaluated] if (evaluated := _evaluated(found.rows)) else ()),
        *(["published (V100)"] if others else ()),
    )
    measured: Mapping[Figure, bool] = {"eval_loss": has_loss, "evaluation": bool(evaluated)}
    shown = [figure for figure, is_shown in measured.items() if is_shown]
    lines = [head, *(_cells(row, shown, others) for row in found.rows)]
    widths = [max(len(line[column]) for line in lines if len(line) == len(head)) for column in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines)
    text = "".join(_line(line, widths) for line in lines)
    text += f"{found.recipe} on {found.machine}; memory is {MEMORY_MEANING[found.memory]}\n"
    text += "".join(f"{line}\n" for line in _definitions(found.rows))
    return text + (f"not run: {', '.join(found.not_run)}\n" if found.not_run else "")


def _definitions(rows: Sequence[VariantRow]) -> Iterator[str]:
    """What samples/s means in a table; where it is not the same in all rows, which rows cannot be compared."""
    covered: dict[str, list[str]] = {}
    for row in rows:
        if row.rates_cover:
            covered.setdefault(row.rates_cover, []).append(row.name)
    for cover, names in covered.items():
        of = f" of {', '.join(names)}" if len(covered) > 1 else ""
        yield f"samples/s{of} is global batch \N{MULTIPLICATION SIGN} steps \N{DIVISION SIGN} seconds of {cover}"
    if len(covered) > 1:
        yield "warning: these rates are of different parts of the runs, and are not compared with one another"


def as_csv(found: Comparison) -> str:
    """One line for each variant. Seconds, samples per second and bytes; an empty cell is unknown."""
    stream = io.StringIO()
    columns = list(_record(VariantRow("", "", ()), found.memory))  # the head is there before the first row is
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_record(row, found.memory) for row in found.rows)
    return stream.getvalue()


def as_data(found: Comparison) -> dict[str, Any]:
    """Everything, each run included, as JSON can hold it: a loss that is no number is null."""
    return {
        "recipe": found.recipe,
        "machine": found.machine,
        "memory": MEMORY_MEANING[found.memory],
        "rows": [
            {**_record(row, found.memory), "runs": [_finite(asdict(run)) for run in row.runs]} for row in found.rows
        ],
        "not_run": list(found.not_run),
    }


def rate(value: float) -> str:
    """Samples per second with three digits that mean something."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _record(row: VariantRow, memory: MemoryKind) -> dict[str, Any]:
    lowest, highest = row.spread or (None, None)
    return _finite(
        {
            "variant": row.name,
            "description": row.description,
            "outcome": row.outcome,
            "reason": row.reason,
            "runs": len(row.runs),
            "seconds": row.median("seconds"),
            "samples_per_second": row.median("samples_per_second"),
            "samples_per_second_lowest": lowest,
            "samples_per_second_highest": highest,
            "memory_bytes": row.memory_bytes,
            "memory_kind": memory,
            "relative_speed": row.speed,
            "relative_memory": row.memory,
            "samples_per_second_covers": row.rates_cover,
            "final_loss": row.median("final_loss"),
            "eval_loss": row.median("eval_loss"),
            "evaluation": row.median("evaluation"),
            "evaluated": row.evaluated,
        }
    )


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def _evaluated(rows: Sequence[VariantRow]) -> str:
    """The head of the column of a metric: none where nothing but the loss, or not everywhere the same, was measured."""
    names = {row.evaluated for row in rows if row.evaluated}
    return f"eval {names.pop()}" if len(names) == 1 and names != {"loss"} else ""


def _cells(row: VariantRow, evaluations: Sequence[Figure], others: Mapping[str, str]) -> tuple[str, ...]:
    if row.outcome != "ok":
        return (row.name, f"{row.outcome}: {row.reason[:_REASON]}" if row.reason else row.outcome)
    figures: tuple[tuple[float | None, Callable[[float], str]], ...] = (
        (row.median("seconds"), "{:.2f} s".format),
        (row.median("samples_per_second"), rate),
        (row.speed, "{:.2f}".format),
        (row.memory_bytes, lambda value: f"{value / MIB:,.0f} MiB"),
        (row.memory, "{:.2f}".format),
        (row.median("final_loss"), format_measure),
        *((row.median(each), format_measure) for each in evaluations),
    )
    cells = ("-" if value is None else text(value) for value, text in figures)
    return (row.name, *cells, *((others.get(row.name, ""),) if others else ()))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(cells) < len(widths):  # a reason takes the place of the figures
        return f"{cells[0]:<{widths[0]}}  {cells[1]}\n"
    rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([f"{cells[0]:<{widths[0]}}", *rest]) + "\n"


FORMATS = ("png", "svg")
_ROW_INCHES = 0.42
# White behind the text: the lines of the grid and of the base pass below them.
_LABEL: dict[str, Any] = {
    "va": "center",
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "boxstyle": "square,pad=0.12"},
}
_MIDDLE, _LIGHT, _EDGE, _PALE = "#8f8f8f", "#dddddd", "#111111", "#8c8c8c"


def can_plot() -> bool:
    """Whether matplotlib is installed; nothing of it is loaded."""
    return find_spec("matplotlib") is not None


def draw(found: Comparison, folder: Path) -> list[Path]:
    """Write bench.png and bench.svg into the folder; their paths."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = list(found.rows)
    # Text stays text in SVG; a fixed salt makes the same figure the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trainkit", "font.size": 9, "hatch.linewidth": 0.6}):
        # A figure of its own, not pyplot's: no window system is looked for, no state is shared.
        figure = Figure(figsize=(11, 1.75 + _ROW_INCHES * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        memory = [None if row.memory_bytes is None else row.memory_bytes / MIB for row in rows]
        _draw(left, rows, memory, [None] * len(rows), "{:,.0f} MiB".format, color=_LIGHT, hatch="///")
        left.set_title("Memory (less is better)", loc="left", fontweight="bold")
        left.set_xlabel(f"{MEMORY_MEANING[found.memory]}, MiB")
        rates, spreads = [row.median("samples_per_second") for row in rows], [row.spread for row in rows]
        _draw(right, rows, rates, spreads, rate, color=_MIDDLE)
        right.set_title("Throughput (more is better)", loc="left", fontweight="bold")
        right.set_xlabel("samples per second")
        left.set_yticks(range(len(rows)), [row.name for row in rows])
        left.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
        based = "; the dashed line is the base" if any(row.speed is not None for row in rows) else ""
        figure.suptitle(f"{found.recipe} on {found.machine}{based}", x=0.01, ha="left", fontsize=10)
        paths = [folder / f"bench.{kind}" for kind in FORMATS]
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw(
    axes: Axes,
    rows: Sequence[VariantRow],
    values: Sequence[float | None],
    spreads: Sequence[tuple[float, float] | None],
    label: Callable[[float], str],
    **style: Any,
) -> None:
    """Bars with their values written behind them, the base's as a dashed line; what did not run says why.

    values, spreads: of each row, None where unknown; label: how a value is written at its bar; style: of the bars.
    """
    shown = [
        value if row.outcome == "ok" and value is not None else 0.0 for row, value in zip(rows, values, strict=True)
    ]
    axes.barh(range(len(rows)), shown, height=0.66, edgecolor=_EDGE, linewidth=0.8, zorder=2, **style)
    ends = [max(value, spread[1]) if spread else value for value, spread in zip(shown, spreads, strict=True)]
    axes.set_xlim(0, (max(ends, default=0) or 1) * 1.2)
    for place, (row, value, end, spread) in enumerate(zip(rows, shown, ends, spreads, strict=True)):
        text = label(value) if value else row.outcome if row.outcome != "ok" else "not reported"
        axes.annotate(
            text, (end, place), (5, 0), textcoords="offset points", style="normal" if value else "italic", **_LABEL
        )
        if spread:  # from the slowest to the fastest of several runs
            axes.plot(spread, (place, place), color=_EDGE, linewidth=1.4, marker="|", markersize=7, zorder=4)
    if rows and shown[0] and rows[0].speed is not None:
        axes.axvline(shown[0], color=_EDGE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    axes.grid(axis="x", color=_PALE, linewidth=0.4, alpha=0.6, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
