"""The screen of `trainkit watch`: Textual arranges the parts by the terminal's size, reads keys, and paints changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, Thread
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.events import Resize
from textual.geometry import Size
from textual.widget import Widget

from trainkit.cli.live import drawing
from trainkit.cli.live.drawing import COLOURS, Look
from trainkit.cli.live.reading import LiveRun

LEAST_SECONDS, MOST_SECONDS = 1.0, 10.0  # between two looks
SHARE = 60  # the pause after a look, in multiples of its CPU time: less than 2 % of a core
FOUR_CHARTS = (110, 34)  # columns and rows from which on there are four
PANE = 64  # columns that a run needs beside others
MOST_ROWS, LEAST_LOG, MOST_WHY = 4, 5, 3  # rows of the ranks, the log and the reason of a failure on a small screen
HELP = (
    ("q", "leave; the run is not touched"),
    ("tab, shift+tab", "the next curve, the one before"),
    ("1 to 9", "the curve of that number"),
    ("l", "the curves' scale: linear or logarithmic"),
    ("r, R", "the log of the next rank, the one before"),
    ("left, right", "of several runs the next one, the one before"),
    ("?", "this list, or the log again"),
)


class Part(Widget):
    """A part of the screen, which is painted only when what it shows has changed."""

    DEFAULT_CSS = "Part { height: 1; }"

    def __init__(self, draw: Callable[[int, int], Text], files: Lock, **known: Any) -> None:
        """draw: into so many columns and rows. files: held while what it draws is being read."""
        super().__init__(**known)
        self._draw, self._shown, self._files = draw, Text(), files

    def redraw(self) -> None:
        """Draw it again in its present size. Skipped while files are read: everything is drawn after that."""
        if self._files.acquire(blocking=False):
            try:
                text = self._draw(self.size.width, self.size.height)
            finally:
                self._files.release()
            if text != self._shown:
                self._shown = text
                self.refresh()

    def render(self) -> Text:
        return self._shown

    def on_resize(self) -> None:
        self.redraw()


class WatchScreen(App[None]):
    """All runs: a header of each, their curves in the same charts, and below each one's memory, ranks and log."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    #charts { layout: grid; grid-size: 1 1; height: 1fr; }
    #charts Part { height: 1fr; width: 1fr; }
    .four #charts { grid-size: 2 2; grid-gutter: 0 2; }
    .pane { width: 1fr; margin: 0 1 0 0; }
    .help { display: none; }
    .helping .help { display: block; }
    .helping .log { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", priority=True),
        Binding("ctrl+c", "quit", priority=True),
        Binding("ctrl+q", "quit", priority=True),
        Binding("ctrl+z", "suspend_process", priority=True),
        Binding("tab", "curve(1)", priority=True),
        Binding("shift+tab", "curve(-1)", priority=True),
        *(Binding(str(number), f"choose({number})") for number in range(1, 10)),
        Binding("l", "log_scale"),
        Binding("r", "rank(1)"),
        Binding("R", "rank(-1)"),
        Binding("right", "run(1)"),
        Binding("left", "run(-1)"),
        Binding("question_mark", "help"),
    ]

    def __init__(self, runs: Sequence[LiveRun], look: Look) -> None:
        super().__init__(ansi_color=True)  # the colours of the user's own terminal, and with NO_COLOR none
        self.failure: Exception | None = None
        self.runs, self._shows = runs, look
        self._current, self._first, self._is_log = 0, 0, False
        self._files = Lock()
        self._spent = time.process_time()

    def compose(self) -> ComposeResult:
        part, several = partial(Part, files=self._files), len(self.runs) > 1
        for at, run in enumerate(self.runs):
            yield part(partial(drawing.header, run, COLOURS[at % len(COLOURS)] if several else ""))
        if not several:
            yield part(partial(drawing.outlook, self.current), classes="outlook")
        with Container(id="charts"):
            for place in range(4):
                yield part(partial(self._chart, place))
        with Horizontal(id="panes"):
            for run in self.runs:
                with Vertical(classes="pane"):
                    if several:
                        yield part(partial(drawing.outlook, run), classes="outlook")
                    yield part(partial(drawing.memory, run), classes="memory")
                    yield part(partial(drawing.ranks, run), classes="ranks")
                    yield part(partial(drawing.log, run), classes="log")
                    yield part(_help, classes="help")
        yield part(self._keys)

    @property
    def current(self) -> LiveRun:
        """The run whose outlook, log and phases are shown where there is room for one."""
        return self.runs[self._current]

    def on_mount(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self._arrange(self.size)
        self.call_after_refresh(self._begin_look)  # the first look takes seconds where much was logged

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size)

    def _begin_look(self) -> None:
        """Read what is new, in a thread: a scheduler or a disk may take seconds to answer, and keys must not wait."""
        # Not asyncio's own: it would wait for the answer before it lets the process end.
        Thread(target=self._look_at_all, name="look", daemon=True).start()

    def _look_at_all(self) -> None:
        error = None
        try:
            for run in self.runs:
                run.read_state()
                with self._files:
                    run.read_files()
        except Exception as found:  # noqa: BLE001 - raised again where it ends the screen
            error = found
        with contextlib.suppress(RuntimeError):  # the screen is gone
            self.call_later(self._end_look, error)

    def _end_look(self, error: Exception | None) -> None:
        if error is not None:
            raise error
        self._show()
        before, self._spent = self._spent, time.process_time()
        self.set_timer(min(MOST_SECONDS, max(LEAST_SECONDS, SHARE * (self._spent - before))), self._begin_look)

    def _show(self) -> None:
        """Draw what has changed."""
        if self.is_running:
            self._arrange(self.size)
            for part in self.query(Part):
                part.redraw()

    def _arrange(self, size: Size) -> None:
        """Choose how many charts and runs fit, and how many rows each part has."""
        width, height = size
        self.screen.set_class(width >= FOUR_CHARTS[0] and height >= FOUR_CHARTS[1], "four")
        charts = [*self.query("#charts Part")]
        for chart in charts[1:]:
            chart.display = self.screen.has_class("four")
        all_fit = width >= PANE * len(self.runs)
        highest = 0
        for at, (pane, run) in enumerate(zip(self.query(".pane"), self.runs, strict=True)):
            pane.display = all_fit or at == self._current
            most = MOST_ROWS if height < FOUR_CHARTS[1] else 2 * MOST_ROWS
            rows = {".memory": max(1, min(len(run.memory), most // 2)), ".ranks": max(1, min(len(run.ranks), most)) + 1}
            # Charts take what is left: of a failure, and where there are no curves, the log says more.
            failed = drawing.went_wrong(run)
            wrapped = sum(1 + len(line) // max(1, width - 2) for line in run.log)
            share = 0.4 if failed or not run.history.curves else 0.25
            rows[".log"] = max(LEAST_LOG, min(wrapped + 1, int(share * height)))
            why = min(MOST_WHY, 1 + len(run.outlook) // max(1, width)) if failed else 1
            if len(self.runs) == 1:
                self.query_one(".outlook").styles.height = why
            else:
                rows[".outlook"] = why
            if self.screen.has_class("helping"):
                rows[".help"] = len(HELP) + 1
                del rows[".log"]
            for name, count in rows.items():
                pane.query_one(name).styles.height = count
            if pane.display:
                highest = max(highest, sum(rows.values()))
        self.query_one("#panes").styles.height = highest

    def _chart(self, place: int, width: int, height: int) -> Text:
        metrics = drawing.metrics_of(self.runs)
        if place >= len(metrics):
            return Text()
        at = (self._first + place) % len(metrics)
        lines = drawing.lines_of(self.runs, self.current, metrics[at])
        empty = self.current.without_curves
        return drawing.chart(
            metrics[at], lines, width, height, self._shows, log=self._is_log, number=at + 1, empty=empty
        )

    def _keys(self, width: int, _height: int) -> Text:
        keys = [("q", "leave"), ("tab 1-9", "curve"), ("l", "log scale"), ("r", "rank"), ("?", "keys")]
        if len(self.runs) > 1:
            keys.insert(4, ("←→", "run"))
        text = Text(no_wrap=True)
        for key, what in keys:
            text.append(f" {key} ", "reverse").append(f" {what}  ")
        text.truncate(width, overflow="ellipsis")
        return text

    def action_curve(self, by: int) -> None:
        self._first = (self._first + by) % len(drawing.metrics_of(self.runs))
        self._show()

    def action_choose(self, number: int) -> None:
        if number <= len(drawing.metrics_of(self.runs)):
            self._first = number - 1
            self._show()

    def action_log_scale(self) -> None:
        self._is_log = not self._is_log
        self._show()

    def action_rank(self, by: int) -> None:
        run = self.current
        run.shown_rank = (run.log_rank + by) % run.world_size
        if self._files.acquire(blocking=False):
            run.read_log()
            self._files.release()
        self._show()

    def action_run(self, by: int) -> None:
        self._current = (self._current + by) % len(self.runs)
        self._show()

    def action_help(self) -> None:
        self.screen.toggle_class("helping")
        self._show()

    def _handle_exception(self, error: Exception) -> None:
        """End, and leave the error to the command line, which reports it: Textual would print a traceback."""
        self.failure = error
        self.exit(return_code=1)


def _help(width: int, height: int) -> Text:
    text = Text(no_wrap=True).append("keys", "bold")
    return text.append("".join(f"\n  {key:<15} {what}"[: width + 1] for key, what in HELP[: max(0, height - 1)]))


def show(runs: Sequence[LiveRun], look: Look) -> None:
    """Show the runs until a key ends it. Raises what went wrong meanwhile."""
    for name in ("LINES", "COLUMNS"):  # Textual would hold them above the terminal's own size, and miss every new one
        os.environ.pop(name, None)
    screen = WatchScreen(runs, look)
    screen.run(mouse=False)  # the terminal's own selection stays
    if screen.failure is not None:
        raise screen.failure
