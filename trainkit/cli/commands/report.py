"""`trainkit report`: one page about runs, to look at, send and keep."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trainkit.cli.commands.runs import runs_named
from trainkit.cli.diagnostics import write_text
from trainkit.cli.file_system import write_file
from trainkit.cli.options import Root, Runs
from trainkit.errors import MachineError, UsageError
from trainkit.files import open_regular
from trainkit.text import format_size, join_names

if TYPE_CHECKING:
    from trainkit.runner.rundir.listing import RunInfo

FILE = "report.html"
Output = Annotated[
    Path | None,
    Option(
        "--output", "-o", metavar="FILE", help=f"Default: {FILE} in the run directory; of several runs, in this folder."
    ),
]


def report(
    runs: Runs = None,
    root: Root = "runs",
    output: Output = None,
    force: Annotated[bool, Option("--force", help="Replace a file that is no report.")] = False,
    open_: Annotated[bool, Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Write a page about one or several runs: curves, time, samples, predictions, plan, recipe, failures.

    The page is one file of HTML that needs no network. A run that is still running is shown as far as it is.

    Example: trainkit report quickstart

    Example: trainkit report quickstart my-run -o both.html
    """
    infos = runs_named(runs, root)
    target = output or (infos[0].layout.root if len(infos) == 1 else Path()) / FILE
    size = write_report(infos, target, force=force)
    write_text(f"written to {target} ({format_size(size)})\n")
    if open_:
        show(target)


def write_report(
    infos: list[RunInfo], target: Path, *, bench: tuple[str, list[str], str] | None = None, force: bool = False
) -> int:
    """Write the page; its size in bytes. UsageError for a file that is none of ours.

    bench: a title, what the runs are called, and a table as text.
    """
    from trainkit.html_report.collect import collect, labels_of
    from trainkit.html_report.page import MARK, MOST, page

    if len(infos) > MOST:
        raise UsageError(f"{len(infos)} runs cannot be told from each other in one chart", hint=f"name at most {MOST}")
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint=f"name a file: -o {target / FILE}")
    if not force and target.exists() and not _starts_with(target, MARK.encode()):
        raise UsageError(f"{target} exists, and is no report", hint="name another file with -o, or add --force")
    title, labels, comparison = bench or ("", labels_of(infos), "")
    found = [collect(info, label, os.environ) for info, label in zip(infos, labels, strict=True)]
    text = page(found, title or join_names(labels, 4), comparison)
    write_file(target, text, "name a file that can be written with -o")
    return len(text.encode())


def _starts_with(path: Path, start: bytes) -> bool:
    try:
        with os.fdopen(open_regular(path, links=True), "rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def show(target: Path) -> None:
    """Open a page in a browser. MachineError where there is none, or no display."""
    import webbrowser

    seen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not seen or not webbrowser.open(target.absolute().as_uri()):
        what = "no browser can be opened here" if seen else "no browser can be opened: this session has no display"
        raise MachineError(what, hint=f"copy the file to your machine and open it there: {target.absolute()}")
