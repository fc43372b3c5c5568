"""Files and lines of tests/corpus: what import writes, plan accepts on a machine that fits; else import says why."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cli
ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"
# What cannot be imported, and why, by the place in the corpus.
REFUSED = {
    "scripts/ablation.sh": "it starts 4 programs",
    "deepspeed/onebit.json": "optimizer.type OnebitAdam has no counterpart",
    "deepspeed/lamb.json": "optimizer.type Lamb has no counterpart",
}


def load_survey() -> ModuleType:
    """scripts/survey as a module."""
    loader = SourceFileLoader("survey", str(ROOT / "scripts" / "survey"))
    spec = importlib.util.spec_from_loader("survey", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules["survey"] = module
    loader.exec_module(module)
    return module


SURVEY = load_survey()
CASES: dict[str, Any] = {case.place: case for case in SURVEY.cases(CORPUS)}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty home, and the caller's folder again at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    yield


@pytest.mark.parametrize("place", sorted(CASES.keys() - REFUSED.keys()))
def test_what_import_writes_is_planned(place: str, tmp_path: Path) -> None:
    found = SURVEY.survey(CASES[place], "8xh100", tmp_path)
    assert found.outcome == "plans", f"{found.said}\n{found.recipe}"


@pytest.mark.parametrize("place", sorted(REFUSED))
def test_what_cannot_be_imported_says_why(place: str, tmp_path: Path) -> None:
    found = SURVEY.survey(CASES[place], "8xh100", tmp_path)
    assert found.outcome == "import refuses"
    assert REFUSED[place] in found.said
    assert not found.recipe


def test_the_survey_finds_every_kind_of_case() -> None:
    kinds = {case.kind for case in CASES.values()}
    assert kinds == {"deepspeed file", "accelerate file", "shell script", "line"}
