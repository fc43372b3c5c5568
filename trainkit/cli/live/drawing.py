"""The parts of the screen, each drawn into so many columns and rows: curves, memory, ranks, the end of a log.

Curves are drawn in dots of Braille by this module: a screen may use 2 % of a core, and plotext needs as long for one
chart of noise (17 to 29 ms) as this module for four (24 ms, on the same machine).
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import chop_cells
from rich.text import Text

from trainkit.cli.diagnostics import one_line
from trainkit.cli.live.reading import LiveRun, Memory, Rank
from trainkit.colour import STATES, STYLES
from trainkit.metrics import PREFIX
from trainkit.runner.report.history import NO_CHART, PHASE, Curve
from trainkit.text import format_duration, format_measure, format_memory, format_rate, format_seconds, pluralize

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")  # of curves, in this order
# Metrics of the trainer that come first, and how they are called; others follow by their own names.
TITLES: Mapping[str, str] = {
    "loss": "loss",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "grad_norm": "gradient norm",
    "memory_bytes": "memory (GiB)",
}
PHASES = "seconds by phase"
SCALES: Mapping[str, float] = {"memory_bytes": 2**-30}
WITHOUT_CHART = NO_CHART | {f"{PREFIX}loss"}  # the evaluation's loss is in the chart of the loss
BRAILLE = "⣿"  # stands for all characters of Braille
# The bits of a character of Braille by four dots in its left or right half, counted from the top.
LEFT, RIGHT = (
    [sum(bit for at, bit in enumerate(bits) if four >> at & 1) for four in range(16)]
    for bits in ((1, 2, 4, 64), (8, 16, 32, 128))
)
LABEL = 10  # columns of the labels of an axis
FEW_COLUMNS = 20


class Look(NamedTuple):
    """What the terminal can show. colours: any at all. braille: the characters of Braille."""

    colours: bool = True
    braille: bool = True


class Line(NamedTuple):
    """A curve in a chart. sparse: drawn as marks, not as a line."""

    title: str
    curve: Curve
    style: str
    sparse: bool = False


def metrics_of(runs: Sequence[LiveRun]) -> list[str]:
    """What has a chart, in the order of the keys 1 to 9."""
    found = {name for run in runs for name in [*run.history.curves]}  # a copy: they may be read at this moment
    first = [name for name in TITLES if {name, f"{PREFIX}{name}"} & found]
    if "tokens_per_second" in first and "samples_per_second" in first:
        first.remove("samples_per_second")
    phases = [PHASES] if any(name.startswith(PHASE) for name in found) else []
    rest = sorted(each for each in found - {*TITLES} - WITHOUT_CHART if not each.startswith(PHASE))
    return [*first, *phases, *rest] or ["loss"]


def lines_of(runs: Sequence[LiveRun], current: LiveRun, metric: str) -> list[Line]:
    """The curves of a chart: of each run the metric and its evaluation, or the phases of the current one."""
    if metric == PHASES:
        # The start-up is part of the first step only, and longer than all others together.
        curves = current.history.curves.items()
        phases = [each for each in curves if each[0].startswith(PHASE) and each[0] != f"{PHASE}start"]
        styles = itertools.cycle(COLOURS)
        return [Line(name.removeprefix(PHASE), curve, next(styles)) for name, curve in phases]
    found = []
    for at, run in enumerate(runs):
        style, name = COLOURS[at % len(COLOURS)], "" if len(runs) == 1 else run.short_id
        if curve := run.history.curves.get(metric):
            found.append(Line(name, curve, style))
        if evaluated := run.history.curves.get(f"{PREFIX}{metric}"):
            found.append(Line("evaluation", evaluated, style if name else "bold", sparse=True))
    return found


def chart(
    metric: str,
    lines: Sequence[Line],
    width: int,
    height: int,
    look: Look,
    *,
    log: bool,
    number: int = 0,
    empty: str = "no values yet",
) -> Text:
    """A title with the latest values, the curves over the steps, and an axis below.

    number: the key that chooses it. empty: what it shows without any value.
    """
    scale = SCALES.get(metric, 1.0)
    text = Text(no_wrap=True)
    text.append(f"{number} " if number else "", "dim")
    text.append(f"{TITLES.get(metric) or one_line(metric)}{' (log)' if log else ''}", "bold")
    for at, line in enumerate(lines):
        latest = next((value for value in reversed(line.curve.values) if value is not None), None)
        gaps = line.curve.values.count(None)
        text.append(f"  {_mark(line, at, look)} ", line.style)
        text.append(f"{one_line(line.title)} " if line.title else "")
        text.append("-" if latest is None else f"{latest * scale:.4g}")
        text.append(f" ({gaps} not finite)" if gaps else "", "bold red")
    text.truncate(width, overflow="ellipsis")
    columns, rows = width - LABEL - 1, height - 3
    steps = [step for line in lines for step in (line.curve.steps[:1] + line.curve.steps[-1:])]
    if not steps or columns < FEW_COLUMNS or rows < 2:
        return _cropped(text.append("" if steps else f"\n  {empty}", "dim"), width, height)
    first, last = min(steps), max(steps)
    scaled = _scale(log=log, by=scale)
    ranges = [_by_column(line.curve, first, last, columns * 2, scaled) for line in lines]
    ends = [each for columns_of in ranges for found in columns_of if found for each in (found.low, found.high)]
    if not ends:
        what = "\n  no value that can be drawn" + (" on a logarithmic scale" if log else "")
        return _cropped(text.append(what, "dim"), width, height)
    low, high = min(ends), max(ends)
    if high - low < 1e-12 * max(1.0, abs(high)):
        apart = 0.3 if log else abs(high) * 0.05 or 1.0
        low, high = low - apart, high + apart
    canvas = _Canvas(columns, rows, low, high)
    for at, (line, found) in enumerate(zip(lines, ranges, strict=True)):
        (canvas.marks if line.sparse else canvas.curve)(at, found)
    marks = [_mark(line, at, look) for at, line in enumerate(lines)]
    marked = {0, rows - 1, *([rows // 2] if rows > 4 else [])}
    for row in range(rows):
        value = high - (high - low) * row / max(1, rows - 1)
        label = _label(10**value if log else value) if row in marked else ""
        text.append(f"\n{label:>{LABEL}}{'┤' if label else '│'}", "dim")
        for characters, owner in canvas.row(row, marks, braille=look.braille):
            text.append(characters, lines[owner].style if owner >= 0 else "")
    text.append(f"\n{' ' * LABEL}└{'─' * columns}", "dim")
    left, middle, right = (str(each) for each in (first, (first + last) // 2, last))
    below = f"{left}{middle:^{max(0, columns - len(left) - len(right))}}{right}" if columns > 30 else f"{left}  {right}"
    text.append(f"\n{' ' * (LABEL + 1)}{below}", "dim")
    return text


def _label(value: float) -> str:
    """The number with as many digits as there is room for."""
    return next(text for digits in (4, 3, 2) if len(text := f"{value:.{digits}g}") <= LABEL)


def _mark(line: Line, at: int, look: Look) -> str:
    """What a curve is drawn with where there is no Braille, or one character of it: without colours they differ."""
    if line.sparse:
        return "o"
    return (BRAILLE if look.braille else "*") if look.colours or not at else "+x#%@"[(at - 1) % 5]


def _scale(*, log: bool, by: float) -> Callable[[float], float | None]:
    """How a value is placed on the axis; None for one that has no place there."""
    if log:
        return lambda value: math.log10(value * by) if value > 0 else None
    return lambda value: value * by


class _Column(NamedTuple):
    """The values of the steps that fall into one column."""

    first: float
    last: float
    low: float
    high: float


def _by_column(
    curve: Curve, first: int, last: int, columns: int, scaled: Callable[[float], float | None]
) -> list[_Column | None]:
    """The lowest and the highest value of each column, so that no spike is lost, however many steps a column has."""
    found: list[_Column | None] = []
    at, each = 0, (last - first) / max(1, columns - 1)
    for column in range(columns):
        end = bisect_right(curve.steps, first + (column + 0.5) * each) if column < columns - 1 else len(curve.steps)
        part = curve.values[at:end]
        at = end
        values = [value for value in part if value is not None]
        ends = [scaled(value) for value in (values[0], values[-1], min(values), max(values))] if values else []
        known = [value for value in ends if value is not None]
        found.append(_Column(known[0], known[-1], min(known), max(known)) if known else None)
    return found


class _Canvas:
    """Dots of Braille, two by four in a character. A column of dots is a number of so many bits for each curve."""

    def __init__(self, columns: int, rows: int, low: float, high: float) -> None:
        self._columns, self._high, self._by = columns, high, (4 * rows - 1) / (high - low)
        self._curves: dict[int, list[int]] = {}
        self._marks: dict[tuple[int, int], int] = {}

    def _row(self, value: float) -> int:
        return round((self._high - value) * self._by)

    def curve(self, owner: int, found: Sequence[_Column | None]) -> None:
        """A line through the columns, over those without a value. owner: its number, by which it is coloured."""
        dots = self._curves[owner] = [0] * (2 * self._columns)

        def fill(column: int, one: int, other: int) -> None:
            least, most = min(one, other), max(one, other)
            dots[column] |= ((1 << (most - least + 1)) - 1) << least

        before: tuple[int, float] | None = None
        for column, part in enumerate(found):
            if part is None:
                continue
            if before is not None:
                start, value = before
                slope = (part.first - value) / (column - start)
                for between in range(start + 1, column + 1):
                    ends = (value + slope * (between - start - 1), value + slope * (between - start))
                    fill(between, *map(self._row, ends))
            fill(column, self._row(part.low), self._row(part.high))
            before = column, part.last

    def marks(self, owner: int, found: Sequence[_Column | None]) -> None:
        """A mark at each value."""
        for column, part in enumerate(found):
            if part is not None:
                self._marks[self._row(part.last) // 4, column // 2] = owner

    def row(self, row: int, marks: Sequence[str], *, braille: bool) -> Iterator[tuple[str, int]]:
        """The characters of a row in pieces of one owner; -1 owns what is empty. marks: of the curves."""
        piece, before = "", -1
        for column in range(self._columns):
            owner, dots = self._marks.get((row, column), -1), 0
            if owner < 0:
                for each, of in self._curves.items():
                    left, right = of[2 * column] >> 4 * row & 15, of[2 * column + 1] >> 4 * row & 15
                    if left or right:
                        owner, dots = each, dots | LEFT[left] | RIGHT[right]
            if owner != before:
                yield piece, before
                piece, before = "", owner
            as_dots = dots and braille and marks[owner] == BRAILLE
            piece += chr(0x2800 + dots) if as_dots else marks[owner] if owner >= 0 else " "
        yield piece, before


def bar(share: float, width: int, at: float | None = None) -> str:
    """A bar that is full to a share, with a line at another one."""
    filled = max(share > 0, round(min(1.0, share) * width))
    cells = ["█"] * filled + ["░"] * (width - filled)
    if at is not None:
        beside = filled if at > share else 0  # also a small difference is seen
        cells[min(width - 1, max(beside, round(at * width)))] = "│"
    return "".join(cells)


def header(run: LiveRun, style: str, width: int, _height: int = 1, *, longest_bar: int = 40) -> Text:
    """Name, id, state, steps with a bar, time left. style: of the run's curves where there are several runs."""
    state, progress = run.state, run.history.progress
    text = Text(no_wrap=True)
    text.append("■ " if style else "", style)
    text.append(run.name, "bold").append(f" {run.short_id}  ", "dim")
    text.append(one_line(state.title), STYLES[STATES.get(state.word, "title")])
    text.append(f"  attempt {state.attempt}" if state.attempt > 1 else "")
    tail = progress.position if progress.total or progress.step else ""
    remaining = progress.remaining(time.monotonic())
    if remaining is not None and state.word in ("running", "starting"):
        tail += f"  {format_duration(remaining)} left"
    room = width - text.cell_len - len(tail) - 4
    if progress.total and room >= 8 and longest_bar:
        text.append(f"  {bar(progress.step / progress.total, min(room, longest_bar))}", "cyan")
    text.append(f"  {tail}" if tail else "")
    text.truncate(width, overflow="ellipsis")
    return text


def outlook(run: LiveRun, width: int, height: int) -> Text:
    """The latest figures, and what comes next or how it ended. The reason of a failure may take several rows."""
    if went_wrong(run):
        rows = chop_cells(run.outlook, max(1, width))
        return _cropped(Text("\n".join(rows), STYLES["bad"], no_wrap=True), width, height)
    parts = []
    for name, words in (("loss", "loss"), (f"{PREFIX}loss", "evaluation loss")):
        if (value := _latest(run, name)) is not None:
            parts.append(f"{words} {format_measure(value)}")
    for name in ("tokens_per_second", "samples_per_second"):
        if value := _latest(run, name):
            parts.append(f"{format_rate(value)} {TITLES[name]}")
            break
    text = Text("  ".join(filter(None, (*parts, run.outlook))), no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    return text


def went_wrong(run: LiveRun) -> bool:
    """Whether it has ended by a fault."""
    return STATES.get(run.state.word) == "bad"


def _latest(run: LiveRun, name: str) -> float | None:
    curve = run.history.curves.get(name)
    return curve.values[-1] if curve and curve.values else None


def memory(run: LiveRun, width: int, height: int) -> Text:
    """A bar for each GPU, or for the ranks: used of the limit, with a line where the prediction lies."""
    text, found = Text(no_wrap=True), run.memory
    shown = found if len(found) <= height else sorted(found, key=lambda each: -each.used)[: max(1, height - 1)]
    for each in shown:
        text.append("memory " if each is shown[0] else "       ", "dim")
        text.append(f"{each.name} {format_memory(each.used)}")
        if each.limit:
            told = f" of {format_memory(each.limit)}"
            told += f", predicted {format_memory(each.foreseen)}" if each.foreseen else ""
            told += f", {each.busy}% busy" if each.busy is not None else ""
            room = min(40, width - 9 - len(each.name) - len(told) - 10)
            if room >= 8:
                mark = each.foreseen / each.limit if each.foreseen else None
                text.append(f" {bar(each.used / each.limit, room, mark)}", _how_full(each))
            text.append(told, "dim")
        elif each.busy is not None:
            text.append(f", {each.busy}% busy", "dim")
        text.append("\n")
    if len(found) > len(shown):
        text.append(f"       and {len(found) - len(shown)} more, with less", "dim")
    if not found:
        text.append("memory ", "dim").append("not known")
    return _cropped(text, width, height)


def _how_full(each: Memory) -> str:
    return "red" if each.used > 0.95 * each.limit else "yellow" if each.used > 0.85 * each.limit else "green"


def ranks(run: LiveRun, width: int, height: int) -> Text:
    """A row for each rank: where, in which phase since when, its step time, its own part of it, its memory.

    Of more than fit the stragglers and the slowest are shown.
    """
    text, found = Text(no_wrap=True), run.ranks
    text.append(f"{'rank':>5}  {'host':<14} {'now':<18} {'step':>8} {'own':>8} {'memory':>9}\n", "dim")
    shown: Sequence[Rank] = found
    if len(found) > height - 1:
        shown = sorted(found, key=lambda each: (not each.is_straggler, -each.own, -each.step))[: max(0, height - 2)]
    for each in shown:
        times = (format_seconds(value) if value else "-" for value in (each.step, each.own))
        row = f"{each.number:>5}  {one_line(each.host)[:14]:<14} {each.doing[:18]:<18} "
        row += " ".join(f"{value:>8}" for value in times)
        row += f" {format_memory(each.memory) if each.memory else '-':>9}"
        text.append(row).append(" straggler" if each.is_straggler else "", "bold yellow").append("\n")
    if len(found) > len(shown):
        text.append(f"{'':>5}  and {len(found) - len(shown)} more", "dim")
    elif not found:
        text.append(f"{'':>5}  none of {pluralize(run.world_size, 'rank')} is recorded", "dim")
    return _cropped(text, width, height)


def log(run: LiveRun, width: int, height: int) -> Text:
    """The last lines of the shown rank. A long line takes several rows: the end of an error says the most."""
    text = Text(no_wrap=True)
    text.append(f"log of rank {run.log_rank}", "bold").append(f"  {run.log_of or 'nothing yet'}", "dim")
    rows = deque[str](maxlen=max(0, height - 1))
    for line in run.log[-height:]:
        rows.extend(chop_cells(line, max(1, width)) or [""])
    return _cropped(text.append("".join(f"\n{row}" for row in rows)), width, height)


def _cropped(text: Text, width: int, height: int) -> Text:
    """The text in so many columns and rows: a line that was longer would go on in the next row."""
    text.rstrip()
    lines = [*text.split("\n", allow_blank=True)][: max(0, height)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)
