"""A small sample of each campaign: that it runs, finds nothing in what it tries, and finds what is broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parents[2] / "scripts" / "campaign"


def campaign(name: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A campaign's outcome."""
    argv = [sys.executable, str(CAMPAIGN / name), *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_what_nobody_expects_is_answered(tmp_path: Path) -> None:
    done = campaign("fuzz", "--seed", "7000", "--cases", "70", "--workers", "2", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "70 cases" in done.stdout and "0 failed" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


def module_of(name: str) -> Any:
    """A campaign as a module."""
    loader = SourceFileLoader(name, str(CAMPAIGN / name))
    spec = spec_from_loader(name, loader)
    assert spec
    module = sys.modules[name] = module_from_spec(spec)  # where dataclasses look
    loader.exec_module(module)
    return module


@pytest.fixture
def fuzz() -> Any:
    """The campaign `fuzz`."""
    return module_of("fuzz")


@pytest.fixture(scope="module")
def kill() -> Any:
    """The campaign `kill`."""
    return module_of("kill")


@pytest.fixture(scope="module")
def left_alone(kill: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nobody kills."""
    run = kill.start(tmp_path_factory.mktemp("left-alone"), kill.Case("python", "single", "", "", ""))
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
    possible = set[Any]().union(*map(kill.pairs, every))
    assert set[Any]().union(*map(kill.pairs, every[:100])) == possible
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


def test_planted_bugs_are_caught(tmp_path: Path) -> None:
    if why := module_of("security_strangers.py").why_no_namespace():
        pytest.skip(why)
    done = campaign("mutants", "--only", "a hang has the exit code", folder=tmp_path)
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
    mutants = module_of("mutants")
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
FICKLE = """\
from pathlib import Path

def test_steady(tmp_path):
    (tmp_path / "left").touch()

def test_fickle(tmp_path):
    (tmp_path / "seen").touch()
    rounds = Path(__file__).with_name("rounds")
    rounds.write_text(rounds.read_text() + "." if rounds.exists() else ".")
    assert rounds.read_text() != "..", "it was the second time"
"""


def test_a_test_that_fails_once_of_many_times_is_named_and_its_failure_kept(tmp_path: Path) -> None:
    (tmp_path / "test_rounds.py").write_text(FICKLE)
    words = ("--times", "2", "--loops", "1", "--writers", "1", "--keep", "kept", str(tmp_path / "test_rounds.py"))
    # pytest names tests from a folder that depends on where the checkout is, unless it is told one.
    done = campaign("repeat", *words, "--", "-p", "no:xdist", f"--rootdir={tmp_path}", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 runs,   1 failed  test_rounds::test_fickle" in done.stdout
    assert "2 runs,   0 failed  test_rounds::test_steady" in done.stdout
    assert "2 tests, 4 runs beside 1 loops and 1 writers, 1 failed" in done.stdout
    (report,) = (tmp_path / "kept").glob("*.txt")
    assert report.name == "round-2-test_rounds-test_fickle.txt" and "it was the second time" in report.read_text()
    assert list((tmp_path / "kept").glob("round-2/*/seen")) and not list((tmp_path / "kept").glob("round-*/*/left"))


def test_a_round_in_which_nothing_ran_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_rounds.py").write_text("import nothing_of_this_name\n")
    done = campaign("repeat", "--times", "1", "--loops", "0", str(tmp_path / "test_rounds.py"), folder=tmp_path)
    assert done.returncode == 1
    assert "nothing_of_this_name" in "".join(path.read_text() for path in (tmp_path / "found").glob("*.txt"))
