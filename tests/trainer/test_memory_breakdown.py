"""The memory breakdown: what its figures are, against the arithmetic of the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainkit.runner.report.summary import render_summary
from trainkit.trainer.loop import train
from trainkit.trainer.metrics.result import result
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble
from trainkit.trainer.signals import Requests

MakeSettings = Callable[..., Settings]
SHORT: dict[str, Any] = {"train": {"steps": 2}, "eval": {"every_steps": 0}}


def outcome_of(settings: Settings) -> dict[str, Any]:
    parts = assemble(settings, World(), torch.device("cpu"))
    return result(parts, train(parts, 0, Metrics(settings.run_dir, [], main=False), Requests()))


@pytest.mark.parametrize(("name", "bytes_per_parameter"), [("adamw_torch", 8), ("sgd", 4)])
def test_weights_gradients_and_optimizer_state_have_their_bytes_per_parameter(
    name: str, bytes_per_parameter: int, make_settings: MakeSettings
) -> None:
    outcome = outcome_of(make_settings(**SHORT, optimizer={"name": name}))
    count, anatomy = outcome["parameters"], outcome["memory"][0]["anatomy"]
    assert (anatomy["parameters"], anatomy["gradients"]) == (4 * count, 4 * count)
    # AdamW counts its steps in one more number for each tensor of parameters.
    assert bytes_per_parameter * count <= anatomy["optimizer_state"] < bytes_per_parameter * count + 1000
    known = sum(anatomy[part] for part in ("parameters", "gradients", "optimizer_state", "activations"))
    assert anatomy["other"] == outcome["memory"][0]["rss"] - known


def test_recomputation_shows_in_the_activations(make_settings: MakeSettings) -> None:
    plain, saving = (
        outcome_of(make_settings(**SHORT, efficiency={"gradient_checkpointing": on}))["memory"][0]["anatomy"]
        for on in (False, True)
    )
    assert 0 < saving["activations"] < plain["activations"] / 2
    assert saving["optimizer_state"] == plain["optimizer_state"]


def test_activations_grow_with_the_micro_batch_and_with_nothing_else(make_settings: MakeSettings) -> None:
    short, long = (
        outcome_of(make_settings(**SHORT, data={"sequence_length": length}))["memory"][0]["anatomy"]
        for length in (16, 32)
    )
    assert 1.8 < long["activations"] / short["activations"] < 2.5
    assert long["gradients"] == short["gradients"] + 16 * 32 * 4  # 16 more positions of width 32


def test_the_summary_prints_it(make_settings: MakeSettings) -> None:
    summary = outcome_of(make_settings(**SHORT))
    shown = {"wall_seconds": 1.0, "global_batch": 16, "world_size": 1, "strategy": "single", "launcher": "python"}
    (row,) = [
        line
        for line in render_summary({**summary, **shown}, make_settings().run_dir).splitlines()
        if line.startswith("Memory of rank 0")
    ]
    for part in ("parameters", "gradients", "optimizer state", "activations", "other"):
        assert part in row
