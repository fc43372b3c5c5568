"""The list of planted bugs does not rot: each can be planted, and the test that is to catch it is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from planted_bugs import BUGS, Bug

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_a_bug_is_one_line_that_is_there_once_and_its_test_is_there(bug: Bug) -> None:
    text = (ROOT / "trainkit" / bug.file).read_text()
    assert text.count(bug.old) == 1
    assert "\n" not in bug.old.rstrip("\n")
    ast.parse(text.replace(bug.old, bug.new))  # what is no Python at all proves nothing of a test
    file, _, test = bug.test.partition("::")
    assert re.search(rf"^def {test or 'test_'}", (ROOT / "tests" / file).read_text(), re.MULTILINE)


def test_every_part_that_a_run_trusts_has_bugs() -> None:
    assert len(BUGS) == len({bug.title for bug in BUGS}) >= 32
    parts = (
        "trainer/checkpoint/",
        "runner/supervisor/",
        "jobs/run_state",
        "rundir/listing",
        "files",
        "gpu_locks",
        "exit_",
    )
    assert {part for part in parts for bug in BUGS if part in bug.file} == set(parts)
