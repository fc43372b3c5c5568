"""Number formats: how far each goes from fp32, evaluation in a format of its own, and fp16 that cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import Case, largest_difference

from tests.trainer.training import MakeSettings, parts_of, trained
from tests.warm_ranks import run_case
from trainkit.errors import TrainingError
from trainkit.trainer.optim import SkippedSteps
from trainkit.trainer.settings import Settings

STEPS = 12
SHORT: dict[str, Any] = {"train": {"steps": STEPS}, "eval": {"every_steps": 0}}

# Relative distance from the fp32 loss at any of the first 12 steps: measured 9e-5, 7e-6, and 2.2e-4 with bf16 weights.
DISTANCE = {"bf16": 5e-4, "fp16": 5e-5, "weights": 1e-3}


def losses(settings: Settings) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trained(settings).lines}


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ({"dtype": "bf16"}, "bf16"),
        ({"dtype": "fp16"}, "fp16"),
        ({"dtype": "bf16", "weights": "bf16"}, "weights"),
    ],
)
def test_a_16_bit_format_stays_near_fp32_and_is_not_fp32(
    make_settings: MakeSettings, precision: dict[str, str], name: str
) -> None:
    optimizer = {"optimizer": {"name": "adamw_anyprecision"}} if name == "weights" else {}
    full, low = losses(make_settings(**SHORT)), losses(make_settings(**SHORT, precision=precision, **optimizer))
    assert 0 < largest_difference(full, low) < DISTANCE[name]
    assert low[STEPS] < low[1]


def test_weights_gradients_and_moments_in_bf16_take_half_the_memory(make_settings: MakeSettings) -> None:
    held = {}
    for weights in ("fp32", "bf16"):
        parts = trained(make_settings(**SHORT, precision={"dtype": "bf16", "weights": weights})).parts
        optimizer = vars(parts.strategy)["optimizer"]
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        held[weights] = sum(tensor.nbytes for tensor in [*parts.strategy.model.parameters(), *moments])
    assert held["bf16"] == held["fp32"] / 2


def test_evaluation_in_a_format_of_its_own_leaves_training_as_it_is(make_settings: MakeSettings) -> None:
    found = {}
    for dtype in ("same", "bf16"):
        settings = make_settings(
            train={"steps": 3}, eval={"every_steps": 3}, precision={"dtype": "fp32", "eval": dtype}
        )
        progress = trained(settings).progress
        found[dtype] = progress.loss, progress.eval_loss
    assert found["same"][0] == found["bf16"][0]
    assert found["same"][1] != found["bf16"][1]
    assert found["same"][1] == pytest.approx(found["bf16"][1], rel=5e-3)


def test_fp16_that_skips_every_step_ends_the_run_and_names_bf16(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(train={"steps": 60}, precision={"dtype": "fp16"}))
    with torch.no_grad():
        next(parts.strategy.model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match="fp16 has skipped the 24 steps up to step 24") as caught:
        trained(parts)
    assert "precision to bf16" in caught.value.diagnostics[0].hint


def test_skipped_steps_are_counted_and_stand_in_the_result(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(train={"steps": 6}, precision={"dtype": "fp16"}))
    vars(parts.strategy)["scaler"]._init_scale = 2.0**40  # overflows until it has been halved often enough
    found = trained(parts)
    skipped = [line["skipped_steps"] for line in found.lines if "loss" in line]
    assert skipped[-1] == found.result["skipped_steps"] > 0
    assert skipped == sorted(skipped)


def test_a_few_skipped_steps_are_no_reason_to_stop() -> None:
    watch = SkippedSteps()
    for step in range(1, 200):
        watch.note(step, total=step - step // 20)  # one step in twenty goes through
    resumed = SkippedSteps()
    resumed.note(1000, total=900)
    resumed.note(1010, total=905)
    resumed.note(1010 + SkippedSteps.PATIENCE - 1, total=905 + SkippedSteps.PATIENCE - 1)
    with pytest.raises(TrainingError, match=f"skipped the {SkippedSteps.PATIENCE} steps"):  # one more is one too many
        resumed.note(1010 + SkippedSteps.PATIENCE, total=905 + SkippedSteps.PATIENCE)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_bf16_weights_give_the_same_losses_spread_over_ranks(kind: str, corpus_folder: Path, tmp_path: Path) -> None:
    def curve(strategy: str, ranks: int) -> dict[int, float]:
        case = Case({"kind": strategy}, ranks=ranks).changed(
            precision={"dtype": "bf16", "weights": "bf16"}, optimizer={"name": "adamw_anyprecision"}, **SHORT
        )
        return dict(run_case(tmp_path / strategy, case, corpus_folder).losses)

    assert largest_difference(curve("single", 1), curve(kind, 2)) < 2e-3
