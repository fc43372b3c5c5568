"""`trainkit watch`: runs as they go on, on a screen of curves; without a terminal as lines of text."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainkit.cli.commands.runs import runs_named
from trainkit.cli.options import Root, Runs

if TYPE_CHECKING:
    from trainkit.cli.live.reading import LiveRun

EVERY_SECONDS = 1.0
WIDTH, ROWS = 120, 10  # of the text without a terminal


def watch(runs: Runs = None, root: Root = "runs") -> None:
    """Watch runs: curves, memory, ranks, the end of the log. Several runs share the charts. No run is touched.

    Without a terminal, print what is known, and a line for each logged step until the end.

    Example: trainkit watch quickstart
    """
    from trainkit.cli.live.reading import LiveRun
    from trainkit.colour import Colour

    watched = [LiveRun(run.layout) for run in runs_named(runs, root)]
    # Textual reads from standard input and writes to standard error.
    if all(os.isatty(fd) for fd in (0, 1, 2)) and os.environ.get("TERM", "dumb") not in ("", "dumb"):
        from trainkit.cli.live.drawing import Look
        from trainkit.cli.live.screen import show

        is_on = Colour(sys.stdout, os.environ).is_on
        os.environ.pop("NO_COLOR", None)
        if not is_on:
            os.environ["NO_COLOR"] = "1"  # Textual takes an empty value for a request, too
        has_braille = sys.stderr.encoding.lower().startswith("utf") and os.environ["TERM"] != "linux"
        show(watched, Look(is_on, has_braille))
        return
    try:
        _print(watched)
    except KeyboardInterrupt:  # the run goes on
        return


def _print(runs: list[LiveRun]) -> None:
    """A block of each run, then a line for each step that it has logged, and for each state, until no more can come."""
    from trainkit.cli.live import drawing

    said: dict[LiveRun, tuple[object, ...]] = {}
    while True:
        for run in runs:
            run.read()
            progress = run.history.progress
            now = (run.state.word, run.state.attempt, progress.logged, progress.evaluation)
            if said.get(run) != now:
                parts = (drawing.header(run, "", WIDTH, longest_bar=0), drawing.outlook(run, WIDTH, ROWS))
                lines = ["  ".join(part.plain for part in parts).rstrip(), *(() if run in said else _block(run))]
                sys.stdout.write("".join(f"{line}\n" for line in lines))
            said[run] = now
        sys.stdout.flush()
        if not any(run.state.is_followed for run in runs):
            return
        time.sleep(EVERY_SECONDS)


def _block(run: LiveRun) -> Iterator[str]:
    """What the screen would show of memory, ranks and the log."""
    from trainkit.cli.live import drawing

    for part in (drawing.memory, drawing.ranks, drawing.log):
        yield from part(run, WIDTH, ROWS).plain.split("\n")
