"""Options of sbatch as it reads them."""

from __future__ import annotations

import pytest

from trainkit.schedulers.slurm_options import directives, line_words, options

SCRIPT = """#!/bin/bash
# a comment
##SBATCH --qos=none
# SBATCH --qos=none
#SBATCH -J "my job" -N2 # of two
#SBATCH --time 10:00
  # above the first command

#SBATCH --exclusive --part=gpu
#SBATCH --requeue
echo here
#SBATCH --qos=late
"""


def test_lines_count_down_to_the_first_command_and_no_further() -> None:
    found = [(each.name, each.value, each.line) for each in directives(SCRIPT)]
    assert found == [
        ("job-name", "my job", 5),
        ("nodes", "2", 5),
        ("time", "10:00", 6),
        ("exclusive", None, 9),
        ("partition", "gpu", 9),
        ("requeue", None, 10),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" --a=b  c", ["--a=b", "c"]),
        (' --comment=\'a b\' --x="c \\" d"', ["--comment=a b", '--x=c " d']),
        (" a\\ b # c", ["a b"]),
        (" --x='#1' y#z", ["--x=#1", "y"]),
        (" ''", [""]),
    ],
)
def test_a_line_has_words_as_sbatch_takes_them(text: str, words: list[str]) -> None:
    assert line_words(text) == words


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("-n4", [("ntasks", "4")]),
        ("-n 4", [("ntasks", "4")]),
        ("-lu", [("label", None), ("unbuffered", None)]),
        ("-K1", [("kill-on-bad-exit", "1")]),
        ("-K -l", [("kill-on-bad-exit", None), ("label", None)]),
        ("--tasks-per-node 4", [("ntasks-per-node", "4")]),
        ("--exclusive=user", [("exclusive", "user")]),
    ],
)
def test_short_long_and_old_names_mean_the_same(word: str, read: list[tuple[str, str | None]]) -> None:
    assert [(each.name, each.value) for each in options(word.split())] == read


def test_what_slurm_has_not_is_known_as_such() -> None:
    assert [(each.name, each.known) for each in options(["--nosuch=1", "word", "--nodes=1"])] == [
        ("nosuch", False),
        ("word", False),
        ("nodes", True),
    ]
