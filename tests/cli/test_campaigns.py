"""A small sample of each campaign: that it runs, finds nothing in what it tries, and finds what is broken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest

from tests.loaded_scripts import run_script, script


@pytest.mark.e2e
def test_what_nobody_expects_is_answered(tmp_path: Path) -> None:
    done = run_script("campaign/fuzz", "--seed", "7000", "--cases", "70", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "70 cases" in done.stdout and "0 failed" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


@pytest.fixture
def fuzz() -> Any:
    return script("campaign/fuzz")


@pytest.fixture(scope="module")
def kill() -> Any:
    return script("campaign/kill")


@pytest.fixture(scope="module")
def left_alone(kill: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nobody kills."""
    run = kill.start(tmp_path_factory.mktemp("left-alone"), "python", "single")
    assert run.process.wait(kill.PATIENCE) == 0
    return run


def _raises(argv: Sequence[str]) -> int:
    raise RuntimeError("the place does not matter")


def _turns(argv: Sequence[str]) -> int:
    while True:
        pass


def _fills(argv: Sequence[str]) -> int:
    return len(bytearray(400_000_000)) and 0


@pytest.mark.parametrize(
    ("command", "outcome"),
    [(_raises, "exit code 70"), (_turns, "too slow"), (_fills, "too large"), (lambda argv: 3, "exit code 3"),
     (lambda argv: 2, "answered")],
)  # fmt: skip
def test_a_command_that_does_not_answer_is_a_failure(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any, outcome: str
) -> None:
    monkeypatch.setattr(fuzz, "run_command_line", command)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setattr(fuzz, "BYTES", 200_000_000)
    assert fuzz.outcome_of(fuzz.Case("any", ["check"]), tmp_path)[0] == outcome


def test_a_failure_is_made_as_small_as_it_stays_one(fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(argv: Sequence[str]) -> int:
        return 9 if "bad" in argv and "x: 1" in Path("r.yaml").read_text() else 0

    monkeypatch.setattr(fuzz, "run_command_line", fails)
    case = fuzz.Case("any", ["plan", "a", "bad", "b"], {"r.yaml": b"a: 2\nx: 1\nb: 3\n", "other": b"1"}, {"NAME": "1"})
    found = fuzz.smaller(case, fuzz.signature("exit code 9", ""), tmp_path)
    assert (found.argv, found.files, found.environ) == (["plan", "bad"], {"r.yaml": b"x: 1"}, {})


def test_a_hundred_kills_show_every_pair_of_values(kill: Any) -> None:

    every = list(kill.cases(0))
    possible = set[Any]().union(*map(cases.pairs, every))
    assert set[Any]().union(*map(cases.pairs, every[:100])) == possible
    assert len(every) == len(set(every)) > 1000


@pytest.mark.e2e
@pytest.mark.parametrize(("name", "target"), [("KILL", "trainkit"), ("TERM", "program")])
def test_a_killed_run_is_as_promised(kill: Any, left_alone: Any, tmp_path: Path, name: str, target: str) -> None:
    case = kill.Case("python", "single", name, target, "between steps")
    assert kill.attempt(case, kill.losses(left_alone.directory()), tmp_path) == (True, [])


@pytest.mark.e2e
def test_a_run_that_is_not_as_promised_is_a_failure(kill: Any, left_alone: Any) -> None:
    reference = kill.losses(left_alone.directory())
    assert list(reference) == list(range(1, kill.STEPS + 1))
    assert kill.differing({3: 1.0, 4: reference[4]}, reference) == [f"step 3: 1.0 in place of {reference[3]}"]
    case = kill.Case("python", "single", "KILL", "wrapper", "between steps")
    assert kill.of_records(left_alone, case, 3) == ["exit code 3, and not [137]"]
    assert kill.damaged_checkpoints(left_alone.directory()) == []
    max(left_alone.directory().glob("checkpoints/step-*/*"), key=lambda path: path.stat().st_size).write_bytes(b"")
    assert kill.damaged_checkpoints(left_alone.directory()) != []


@pytest.mark.e2e
def test_planted_bugs_are_caught(tmp_path: Path) -> None:
    if why := script("campaign/security_strangers.py").why_no_namespace():
        pytest.skip(why)
    done = run_script("campaign/mutants", "--only", "a hang has the exit code", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 bugs, 0 survived, 0 errors" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


@pytest.mark.parametrize(
    ("old", "new", "test", "outcome"),
    [
        ("1", "2", "test_sum.py::test_sum", "caught"),
        ("1", "2", "test_sum.py::test_nothing", "survived"),
        ("1", "(", "test_sum.py::test_sum", "error"),  # it cannot be imported: no test has looked at what it does
        ("3", "2", "test_sum.py::test_sum", "error"),
        ("1", "2", "test_sum.py::test_absent", "error"),
    ],
)
def test_a_bug_that_survives_is_told_from_one_that_is_caught_or_cannot_be_tried(
    tmp_path: Path, old: str, new: str, test: str, outcome: str
) -> None:
    mutants = script("campaign/mutants")
    for name, text in (("trainkit/own_sum.py", "ONE = 1\n"), ("tests/test_sum.py", SUM)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "trainkit/__init__.py").touch()
    bug = mutants.Bug("any", "own_sum.py", test, old, new)
    assert mutants.outcome_of(bug, tmp_path)[0] == outcome
    assert (tmp_path / "trainkit/own_sum.py").read_text() == "ONE = 1\n"


SUM = """\
from trainkit.own_sum import ONE

def test_sum():
    assert ONE + ONE == 2

def test_nothing():
    assert ONE
"""
