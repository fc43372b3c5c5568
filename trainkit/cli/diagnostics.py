"""Diagnostics as text: location, error, the source line with a caret, the reason, and a hint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from trainkit.colour import LABELS, NO_COLOUR, Colour
from trainkit.distribution import is_install
from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.secrets import mask_values
from trainkit.text import strip_control

_WIDTH = 110  # of a shown source line; a longer one is cut around the caret
_MOST_SHOWN = 100  # diagnostics; the rest is counted


def write_text(text: str) -> None:
    """Write to standard output what people read; what programs read is written as it is."""
    sys.stdout.write(strip_control(text))


def write_labelled(text: str) -> None:
    """As `write_text`, with the labels in colour on a terminal."""
    sys.stdout.write(Colour(sys.stdout, os.environ).labels(strip_control(text)))


def show_diagnostics(diagnostics: Iterable[Diagnostic]) -> None:
    """Write diagnostics to standard error, in colours on a terminal."""
    text = render_diagnostics(diagnostics, Colour(sys.stderr, os.environ))
    if text:
        sys.stderr.write(text)


def render_diagnostics(diagnostics: Iterable[Diagnostic], colour: Colour = NO_COLOUR) -> str:
    """All diagnostics as one text, with the number of errors at the end where there are several."""
    found = list(diagnostics)
    for at, (each, following) in enumerate(pairwise(found)):
        if each.hint == following.hint and is_install(each.hint):  # one command for all packages is said once
            found[at] = replace(each, hint="")
    text = "".join(render_diagnostic(each, colour) for each in found[:_MOST_SHOWN])
    errors = sum(each.severity == "error" for each in found)
    if len(found) > _MOST_SHOWN:
        text += f"… and {len(found) - _MOST_SHOWN} more\n"
    return text + (f"{errors} errors\n" if errors > 1 else "")


def render_diagnostic(diagnostic: Diagnostic, colour: Colour = NO_COLOUR) -> str:
    """One diagnostic::

    team.yaml:3:12: error: batch.micro must be auto, a whole number (1 or more) or null, not the text 'x'
      3 |   micro: x
        |          ^
      from: file team.yaml
      why:  Samples per rank in one forward pass.
      next: write a number
    """
    origin = diagnostic.origin
    role = LABELS[diagnostic.severity]
    place = f"{colour.paint(one_line(origin.place), 'title')}: " if origin else ""
    lines = [f"{place}{colour.paint(diagnostic.severity, role)}: {one_line(diagnostic.what)}"]
    if origin:
        lines += _source_lines(origin, colour.paint(("^" * max(origin.length, 1))[:_WIDTH], role))
        if origin.layer and origin.place not in origin.layer:
            lines.append(f"  from: {one_line(origin.layer)}")
    if diagnostic.why:
        lines.append(f"  why:  {one_line(diagnostic.why)}")
    if diagnostic.hint:
        lines.append(f"  {colour.paint('next', LABELS['next'])}: {one_line(diagnostic.hint)}")
    return "\n".join(lines) + "\n"


def one_line(text: str) -> str:
    """The text without secrets by value, and without anything that could move the cursor of a terminal."""
    return strip_control(mask_values(text).replace("\n", " ").replace("\t", "\ufffd"))


def _source_lines(origin: Origin, caret: str) -> list[str]:
    if not origin.line or not origin.text:
        return []
    start = max(origin.column - 1 - _WIDTH // 2, 0) if len(origin.text) > _WIDTH else 0
    shown = origin.text[start : start + _WIDTH]
    number = str(origin.line)
    # A tab before the caret is repeated: the caret stays below its character whatever the tab width.
    lead = "".join("\t" if char == "\t" else " " for char in shown[: origin.column - 1 - start])
    shown = "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in shown)
    return [f"  {number} | {shown}", f"  {' ' * len(number)} | {lead}{caret}"]
