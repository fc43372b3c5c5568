"""Settings and text for trainer tests that run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import Case, write_corpus, write_settings

from tests.trainer.tiny_tokenizer import save_tokenizer
from trainkit.trainer.settings import Settings, read_settings

MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder in a test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def make_settings(corpus_folder: Path, tmp_path: Path) -> MakeSettings:
    """Settings of a small single-process run, with changes by section."""
    made = 0

    def make(**changes: dict[str, Any]) -> Settings:
        nonlocal made
        made += 1
        case = Case({"kind": "single"}, ranks=1).changed(**changes)
        return read_settings(write_settings(tmp_path / f"run-{made}", case, corpus_folder))

    return make


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a small tokenizer, as of `tiny_tokenizer`, and gives its folder."""
    return lambda **options: save_tokenizer(tmp_path_factory.mktemp("tokenizer"), **options)
