"""The memory breakdown: what its figures are, against the arithmetic of the optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.training import MakeSettings, trained
from trainkit.runner.report.summary import render_summary
from trainkit.trainer.distributed import process_group
from trainkit.trainer.settings import Settings, World

SHORT: dict[str, Any] = {"train": {"steps": 2}, "eval": {"every_steps": 0}}


def anatomy_of(settings: Settings) -> dict[str, Any]:
    """The bytes of rank 0 by what they are for."""
    found: dict[str, Any] = trained(settings).result["memory"][0]["anatomy"]
    return found


@pytest.mark.parametrize(("name", "bytes_per_parameter"), [("adamw_torch", 8), ("sgd", 4)])
def test_weights_gradients_and_optimizer_state_have_their_bytes_per_parameter(
    name: str, bytes_per_parameter: int, make_settings: MakeSettings
) -> None:
    outcome = trained(make_settings(**SHORT, optimizer={"name": name})).result
    count, anatomy = outcome["parameters"], outcome["memory"][0]["anatomy"]
    assert (anatomy["parameters"], anatomy["gradients"]) == (4 * count, 4 * count)
    # AdamW counts its steps in one more number for each tensor of parameters.
    assert bytes_per_parameter * count <= anatomy["optimizer_state"] < bytes_per_parameter * count + 1000
    known = sum(anatomy[part] for part in ("parameters", "gradients", "optimizer_state"))
    known += max(anatomy["activations"], anatomy["update_temporaries"])  # which are not there at the same time
    assert anatomy["other"] == outcome["memory"][0]["rss"] - known


def test_recomputation_shows_in_the_activations(make_settings: MakeSettings) -> None:
    plain, saving = (
        anatomy_of(make_settings(**SHORT, efficiency={"gradient_checkpointing": on})) for on in (False, True)
    )
    assert 0 < saving["activations"] < plain["activations"] / 2
    assert saving["optimizer_state"] == plain["optimizer_state"]


@pytest.mark.needs("torch>=2.8")  # before, nobody can look into a block that is recomputed
def test_a_recomputed_block_is_what_it_would_have_kept(make_settings: MakeSettings) -> None:
    plain, whole, selective = (
        anatomy_of(make_settings(**SHORT, model={"layers": 3}, efficiency={"gradient_checkpointing": on}))
        for on in (False, True, {"every": 1, "selective": True})
    )
    assert plain["recomputed_block"] == 0
    assert whole["activations"] + 3 * whole["recomputed_block"] == plain["activations"]
    # Products are kept then, also those that no operator behind them needs.
    assert 0 < selective["recomputed_block"] < whole["recomputed_block"]
    assert selective["activations"] + 3 * selective["recomputed_block"] > plain["activations"]


@pytest.mark.needs("torch>=2.8")  # before, nobody can look into a block that is recomputed
def test_16_bit_copies_of_weights_are_no_activations(make_settings: MakeSettings) -> None:
    low, own, recomputed = (
        anatomy_of(make_settings(**SHORT, precision=precision, efficiency={"gradient_checkpointing": on}))
        for precision, on in (
            ({"dtype": "bf16"}, False),
            ({"dtype": "bf16", "weights": "bf16"}, False),
            ({"dtype": "bf16"}, True),
        )
    )
    width, length, norms = 32, 32, 5  # positions and norms are not cast
    cast = low["parameters"] // 4 - width * length - norms * 2 * width
    assert low["weight_copies"] == recomputed["weight_copies"] == 2 * cast
    assert own["weight_copies"] == 0
    assert recomputed["activations"] + 2 * recomputed["recomputed_block"] == low["activations"]


def test_copies_of_frozen_weights_are_no_activations_either(make_settings: MakeSettings) -> None:
    tuned = {"peft": {"kind": "lora", "rank": 2}, "precision": {"dtype": "bf16"}}
    short, long = (anatomy_of(make_settings(**SHORT, **tuned, data={"sequence_length": size})) for size in (16, 32))
    assert short["weight_copies"] == long["weight_copies"] > 0


@pytest.mark.parametrize(
    ("name", "least", "most"), [("adamw_torch_foreach", 0.9, 1.01), ("adamw_torch_fused", 0, 0.01), ("sgd", 0, 0.4)]
)
def test_what_an_update_takes_for_itself(name: str, least: float, most: float, make_settings: MakeSettings) -> None:
    anatomy = anatomy_of(make_settings(**SHORT, optimizer={"name": name}))
    assert least <= anatomy["update_temporaries"] / anatomy["parameters"] <= most


@pytest.mark.needs("torch>=2.8")  # as above; FSDP2 on a CPU has 2.7
def test_shards_are_watched_too_and_what_cannot_be_is_not_known(make_settings: MakeSettings) -> None:
    with process_group(World(), torch.device("cpu"), needed=True):
        anatomy = anatomy_of(
            make_settings(
                **SHORT,
                strategy={"kind": "fsdp"},
                optimizer={"name": "adamw_torch_foreach"},
                efficiency={"gradient_checkpointing": {"every": 1, "selective": True}},
            )
        )
    assert 0.9 <= anatomy["update_temporaries"] / anatomy["parameters"] <= 1.01
    assert anatomy["recomputed_block"] > 0
    once = make_settings(train={"steps": 1}, eval={"every_steps": 0})
    assert anatomy_of(once)["update_temporaries"] is None


def test_activations_grow_with_the_micro_batch_and_with_nothing_else(make_settings: MakeSettings) -> None:
    short, long = (anatomy_of(make_settings(**SHORT, data={"sequence_length": length})) for length in (16, 32))
    assert 1.8 < long["activations"] / short["activations"] < 2.5
    assert long["gradients"] == short["gradients"] + 16 * 32 * 4  # 16 more positions of width 32


def test_the_summary_prints_it(make_settings: MakeSettings) -> None:
    summary = trained(make_settings(**SHORT)).result
    shown = {"wall_seconds": 1.0, "global_batch": 16, "world_size": 1, "strategy": "single", "launcher": "python"}
    (row,) = [
        line
        for line in render_summary({**summary, **shown}, make_settings().run_dir).splitlines()
        if line.startswith("Memory of rank 0")
    ]
    for part in ("parameters", "gradients", "optimizer state", "activations", "other"):
        assert part in row
    assert "weight copies" not in row  # there are none
    assert "update temporaries" not in row  # the fused update makes a few numbers
