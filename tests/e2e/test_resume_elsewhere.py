"""A checkpoint of one strategy or number of ranks goes on under another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import CASES, Case, Curve, finish, largest_difference, write_corpus, write_settings

from tests.warm_ranks import run_case, start_ranks

pytestmark = pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"dropout": 0.1},
    "train": {"steps": 8},
    "checkpoint": {"every_steps": 4, "keep": 0},
}
WRITERS = {name: CASES[name].changed(**CHANGES) for name in ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")}
READERS = {
    **WRITERS,
    "fsdp on one rank": Case({"kind": "fsdp"}, ranks=1).changed(**CHANGES),
    "zero3 on one rank": Case({"kind": "zero3"}, ranks=1).changed(**CHANGES),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Curve]]:
    """An uninterrupted run of each strategy, with a checkpoint after step 4."""
    folders = {name: tmp_path_factory.mktemp("runs") / name for name in WRITERS}
    return {name: (folder, run_case(folder, WRITERS[name], corpus)) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *(("single", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp on one rank"), ("fsdp", "single")),
        *(("single", "zero3"), ("zero3", "zero1"), ("zero1", "zero3 on one rank"), ("zero2", "fsdp"), ("ddp", "zero2")),
    ],
)
def test_losses_go_on_as_if_the_run_had_not_changed_its_strategy(
    writer: str, reader: str, whole: dict[str, tuple[Path, Curve]], corpus: Path, tmp_path: Path
) -> None:
    folder, curve = whole[writer]
    resumed = run_case(tmp_path / "run", READERS[reader], corpus, resume=folder / "checkpoints/step-00000004")
    rest = {step: loss for step, loss in curve.losses.items() if step > 4}
    assert largest_difference(rest, resumed.losses) < 1e-6
    ranks = "1 rank" if writer == "single" else "2 ranks"
    assert f"after step 4, saved by {writer} on {ranks}\n" in (tmp_path / "run/rank-0.log").read_text()


def test_ranks_write_in_the_background_what_they_would_have_written_at_once(
    whole: dict[str, tuple[Path, Curve]], corpus: Path, tmp_path: Path
) -> None:
    case = WRITERS["fsdp"].changed(checkpoint={"every_steps": 4, "keep": 0, "asynchronous": True})
    curve = run_case(tmp_path / "run", case, corpus)
    assert curve == whole["fsdp"][1]
    for step in (4, 8):
        name = f"checkpoints/step-{step:08d}/manifest.json"
        mine, other = (json.loads((folder / name).read_text()) for folder in (tmp_path / "run", whole["fsdp"][0]))
        assert mine["files"].keys() == other["files"].keys()
        shards = [file for file in mine["files"] if file.endswith(".distcp")]
        assert [mine["files"][file]["size"] for file in shards] == [other["files"][file]["size"] for file in shards]
    resumed = run_case(tmp_path / "resumed", case, corpus, resume=tmp_path / "run/checkpoints/step-00000004")
    assert resumed.losses == {step: loss for step, loss in curve.losses.items() if step > 4}


def test_a_checkpoint_of_another_model_is_refused_in_one_line(
    whole: dict[str, tuple[Path, Curve]], corpus: Path, tmp_path: Path
) -> None:
    saved = whole["single"][0] / "checkpoints/step-00000004"
    case = WRITERS["single"].changed(model={"layers": 3})
    assert finish(start_ranks(write_settings(tmp_path / "run", case, corpus), 1, resume=saved)) == [1]
    (line,) = (tmp_path / "run/rank-0.log").read_text().splitlines()
    assert line.startswith(f"error: the checkpoint {saved} belongs to another model, optimizer or precision: ")
