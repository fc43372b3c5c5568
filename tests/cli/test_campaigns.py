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


@pytest.fixture
def fuzz() -> Any:
    """The campaign as a module."""
    loader = SourceFileLoader("fuzz", str(CAMPAIGN / "fuzz"))
    spec = spec_from_loader("fuzz", loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


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
    monkeypatch.setattr(fuzz, "BYTES", 350_000_000)
    assert fuzz.outcome_of(fuzz.Case("any", ["check"]), tmp_path)[0] == outcome


def test_a_failure_is_made_as_small_as_it_stays_one(fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(argv: Sequence[str]) -> int:
        return 9 if "bad" in argv and "x: 1" in Path("r.yaml").read_text() else 0

    monkeypatch.setattr(fuzz, "run_command_line", fails)
    case = fuzz.Case("any", ["plan", "a", "bad", "b"], {"r.yaml": b"a: 2\nx: 1\nb: 3\n", "other": b"1"}, {"NAME": "1"})
    found = fuzz.smaller(case, fuzz.signature("exit code 9", ""), tmp_path)
    assert (found.argv, found.files, found.environ) == (["plan", "bad"], {"r.yaml": b"x: 1"}, {})
