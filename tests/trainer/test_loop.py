"""The loop with one process: accumulation, techniques that must not change the result, evaluation, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.trainer.training import CPU, MakeSettings, parts_of, trained
from trainkit.trainer.metrics.evaluation import Evaluation
from trainkit.trainer.randomness import seed_generators
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import prepared_model

SHORT = {"train": {"steps": 5}}


def with_micro(settings: Settings, micro: int) -> Settings:
    batch = dataclasses.replace(settings.batch, micro=micro, accumulation=settings.batch.global_ // micro)
    return dataclasses.replace(settings, batch=batch)


def test_accumulation_gives_the_update_of_one_large_batch(make_settings: MakeSettings) -> None:
    curves = [trained(with_micro(make_settings(**SHORT), micro)).losses for micro in (16, 8, 1)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert curves[2] == pytest.approx(curves[0], rel=1e-6)
    assert curves[0][-1] < curves[0][0]


def test_eager_and_fused_attention_agree(make_settings: MakeSettings) -> None:
    fused = trained(make_settings(**SHORT)).losses
    eager = trained(make_settings(**SHORT, efficiency={"attention": "eager"})).losses
    assert eager == pytest.approx(fused, rel=1e-5)


def test_attention_does_not_see_the_future(make_settings: MakeSettings) -> None:
    for attention in ("sdpa", "eager"):
        model = prepared_model(make_settings(efficiency={"attention": attention}))
        tokens = torch.randint(0, 256, (1, 16))
        changed = tokens.clone()
        changed[0, 10:] = 0
        assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])


def test_weights_depend_on_the_seed_alone(make_settings: MakeSettings) -> None:
    weights = []
    for seed in (0, 0, 1):
        seed_generators(seed + 7)  # whatever was drawn before
        settings = make_settings(train={"seed": seed})
        weights.append(prepared_model(settings).state_dict()["tokens.weight"].clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_evaluation_does_not_depend_on_how_passes_are_shared(make_settings: MakeSettings) -> None:
    """What each of 3 ranks counts, put together, is what one rank counts alone, a last short pass included."""
    parts = parts_of(make_settings())
    settings = make_settings(train={"seed": 0}, eval={"batches": 5})
    settings = dataclasses.replace(settings, batch=dataclasses.replace(settings.batch, eval_micro=4))

    def passes(world: World) -> list[tuple[int, ...]]:
        validation, encoder = parts.source.validation, parts.source.encoder
        return Evaluation(settings, validation, world, CPU, model=parts.model, encoder=encoder).passes

    assert passes(World(0, 0, 1)) == passes(World(2, 2, 3))
    assert len({index for chosen in passes(World()) for index in chosen}) == sum(map(len, passes(World())))
    first = parts.evaluation.measured(parts.strategy, parts.eval_autocast)["loss"]
    assert parts.evaluation.measured(parts.strategy, parts.eval_autocast)["loss"] == first
    assert parts.strategy.model.training


def test_metrics_say_what_the_design_promises(make_settings: MakeSettings) -> None:
    lines = trained(make_settings(train={"steps": 4}, logging={"every_steps": 2}, eval={"every_steps": 4})).lines
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 4]
    promised = {"step", "loss", "learning_rate", "seconds", "samples_per_second", "memory_bytes", "grad_norm"}
    assert all(promised <= line.keys() for line in steps)
    assert [line["step"] for line in lines if "eval_loss" in line] == [4]


def test_a_share_of_the_steps_is_so_many_of_them_rounded_up(make_settings: MakeSettings) -> None:
    changes: dict[str, Any] = {"eval": {"every_steps": 0.3}, "checkpoint": {"every_steps": 0.5, "keep": 0}}
    run = trained(make_settings(train={"steps": 7}, **changes))
    assert [line["step"] for line in run.lines if "eval_loss" in line] == [3, 6, 7]
    saved = (run.parts.settings.run_dir / "checkpoints").glob("step-*")
    assert sorted(int(path.name[-8:]) for path in saved) == [4, 7]


def test_epochs_become_steps(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(train={"steps": None, "epochs": 2.0}))
    assert parts.steps == -(-2 * len(parts.source.train) // 16)


def test_the_result_holds_what_the_summary_needs(make_settings: MakeSettings) -> None:
    run = trained(make_settings(**SHORT, sample={"prompt": "def ", "tokens": 12}))
    found = run.result
    assert found["steps"] == 5
    assert found["samples"] == 5 * 16
    assert found["final_loss"] == run.progress.loss
    assert found["corpus"]["unigram_entropy"] > 1
    assert found["sample"].startswith("def ")
    assert found["memory"][0]["rss"] > 50e6
    assert run.result["sample"] == found["sample"]
