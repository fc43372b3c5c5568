"""Colours: when a stream gets them, and that every state of a run has one."""

from __future__ import annotations

import io
import re

import pytest

from trainkit.colour import STATES, Colour
from trainkit.schedulers.jobs.run_state import BY_FAILURE, BY_SCHEDULER, RunState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "terminal", "pipe"),
    [
        ({"TERM": "xterm-256color"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "0"}, False, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        ({"TERM": "xterm", "FORCE_COLOR": ""}, True, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_a_stream_gets_colours_by_what_it_is_and_what_the_user_sets(
    environ: dict[str, str], *, terminal: bool, pipe: bool
) -> None:
    assert Colour(Terminal(), environ).is_on is terminal
    assert Colour(io.StringIO(), environ).is_on is pipe


def test_a_painted_text_ends_in_the_terminals_own_colour_and_nothing_stays_nothing() -> None:
    colour = Colour(Terminal(), {"TERM": "xterm"})
    assert colour.paint("done", "good") == "\x1b[32mdone\x1b[0m"
    assert not colour.paint("", "good")
    assert Colour(io.StringIO(), {}).paint("done", "good") == "done"


def test_every_state_of_a_run_has_a_role() -> None:
    assert RunState.__doc__
    named = RunState.__doc__.partition("word: ")[2].partition("\n\n")[0]
    words = set(re.findall(r"\w+", re.sub(r"\([^)]*\)|\bor\b", "", named)))
    assert words == STATES.keys()
    assert {*BY_FAILURE.values(), *(word for word, _ in BY_SCHEDULER.values())} <= STATES.keys()
