"""Optimizers under the strategies that they compose with: the same losses as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from strategy_runs import Case, largest_difference, write_corpus

from tests.warm_ranks import run_case

STEPS = 4
RATES = {"adafactor": 3e-2, "adagrad": 1e-2}
# Muon iterates in bf16, where the last digits of a gradient, summed in another order, count for more.
NEAR = {"muon": 2e-5}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


def losses(optimizer: str, strategy: str, corpus: Path, run_dir: Path) -> Mapping[int, float]:
    case = Case({"kind": strategy}, ranks=1 if strategy == "single" else 2).changed(
        optimizer={"name": optimizer, "lr": RATES.get(optimizer, 3e-3)},
        schedule={"warmup_steps": 0},
        model={"hidden_size": 64},
        train={"steps": STEPS},
        eval={"every_steps": 0},
    )
    return run_case(run_dir, case, corpus).losses


@pytest.mark.parametrize(
    ("optimizer", "strategies"),
    [
        ("adamw_anyprecision", ("fsdp", "zero2")),
        ("adagrad", ("fsdp",)),
        ("muon", ("ddp", "fsdp")),
        ("adafactor", ("ddp",)),
        ("adamw_bnb_8bit", ("ddp",)),
    ],
)
def test_an_optimizer_gives_the_losses_of_a_single_process(
    optimizer: str, strategies: tuple[str, ...], corpus: Path, tmp_path: Path
) -> None:
    alone = losses(optimizer, "single", corpus, tmp_path / "single")
    assert alone[STEPS] < alone[1]
    for strategy in strategies:
        found = losses(optimizer, strategy, corpus, tmp_path / strategy)
        assert largest_difference(alone, found) < NEAR.get(optimizer, 1e-6)
