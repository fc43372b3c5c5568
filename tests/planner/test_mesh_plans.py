"""What a plan says of models in copies, in parts of matrices, and with experts on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.made_up_plans import PACKAGES
from trainkit.errors import RecipeError
from trainkit.foresight.estimate import by_formula
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan, decide
from trainkit.recipe.resolved import Resolved
from trainkit.tools.builtin.rules import DIVISIBLE

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
BASE = """
model: {kind: gpt, layers: 4, heads: 4, hidden_size: 64}
data: {kind: random, high: 256, samples: 64, sequence_length: 64}
strategy: {kind: fsdp}
batch: {global: 16, micro: 2}
train: {steps: 2}
devices: {type: cpu}
nodes: {processes_per_node: 4}
"""
LLAMA = {"kind": "hf", "architecture": "llama", "config": {"num_key_value_heads": 2}}
MISTRAL = {"kind": "hf", "architecture": "mistral"}  # with its window of 4,096 tokens
MOE = {"moe": {"experts": 4, "parallel": 2}}
SOFTWARE = {**PACKAGES, "transformers": "5.23.0", "peft": "0.21.2"}


def recipe_of(**sections: Any) -> dict[str, Any]:
    """The base with changes by section."""
    found: dict[str, Any] = yaml.safe_load(BASE)
    for name, changes in sections.items():
        found[name] = changes if "kind" in changes and name == "model" else {**found.get(name, {}), **changes}
    return found


def plan_of(layered: Layered, machine: Machine, **sections: Any) -> Plan:
    return build_plan(layered(recipe_of(**sections)), machine(packages=SOFTWARE)).plan


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"strategy": {"replicate": 2}}, "strategy.replicate", "keep one copy of the model"),
        ({"strategy": {"sharding": "hybrid_shard", "replicate": 3}}, "strategy.replicate", "as many ranks each"),
        (
            {"model": {"heads": 6, "hidden_size": 96}, "strategy": {"tensor": 3}},
            "strategy.tensor",
            "as many ranks each",
        ),
        ({"model": MOE, "strategy": {"kind": "ddp"}}, "model.moe.parallel", "only under fsdp"),
        ({"model": {"moe": {"experts": 6, "parallel": 3}}}, "model.moe.parallel", "groups of that size"),
        ({"model": MOE, "strategy": {"tensor": 4}}, "model.moe.parallel", "groups of that size"),
        ({"model": {"kind": "target", "target": "a:b"}, "strategy": {"tensor": 2}}, "strategy.tensor", "not known"),
        (
            {"model": {"kind": "hf", "architecture": "gpt_neox"}, "strategy": {"tensor": 2}},
            "strategy.tensor",
            "no plan",
        ),
        ({"model": LLAMA, "strategy": {"tensor": 4}}, "strategy.tensor", "as many heads"),
        ({"model": {"heads": 1}, "strategy": {"tensor": 2}}, "strategy.tensor", "as many heads"),
        ({"model": {"dropout": 0.1}, "strategy": {"tensor": 2}}, "strategy.tensor", "other masks"),
        ({"model": {"dropout": 0.1}, "strategy": {"context": 2}}, "strategy.context", "some tokens"),
        ({"peft": {"kind": "lora", "dropout": 0.1}, "strategy": {"context": 2}}, "strategy.context", "some tokens"),
        (
            {"model": {**LLAMA, "config": {"attention_dropout": 0.1}}, "strategy": {"context": 2}},
            "strategy.context",
            "some tokens",
        ),
        ({"model": {"moe": {"experts": 4}}, "strategy": {"context": 2}}, "strategy.context", "losses of routers"),
        ({"model": MISTRAL, "strategy": {"context": 2}}, "strategy.context", "without windows"),
        ({"model": {**LLAMA, "task": "masked_lm"}, "strategy": {"context": 2}}, "strategy.context", "one after the"),
        (
            {"model": LLAMA, "strategy": {"context": 2}, "efficiency": {"attention": "eager"}},
            "strategy.context",
            "takes",
        ),
        ({"peft": {"kind": "lora"}, "strategy": {"tensor": 2}}, "peft.kind", "are not divided beside"),
        ({"optimizer": {"name": "muon"}, "strategy": {"tensor": 2}}, "optimizer.name", "looks at whole matrices"),
        ({"optimizer": {"name": "torch.optim:Adamax"}, "model": MOE}, "optimizer.name", "stacks of experts"),
        ({"precision": {"dtype": "fp16"}, "model": MOE}, "precision.dtype", "scale their losses differently"),
        ({"strategy": {"tensor": 2, "offload": True}}, "strategy.offload", "exchanged where they are computed"),
        ({"strategy": {"tensor": 2}, "efficiency": {"compile": True}}, "efficiency.compile", "would break"),
    ],
)
def test_what_cannot_be_divided_is_refused_at_its_place(
    sections: dict[str, Any], key: str, words: str, layered: Layered, machine: Machine
) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(layered, machine, **sections)
    (found,) = caught.value.diagnostics
    assert (found.key, words in (found.why or "")) == (key, True)
    assert (found.hint or "").startswith("closest supported choice: ")


@pytest.mark.parametrize(
    ("sections", "batch", "words"),
    [
        ({"strategy": {"sharding": "hybrid_shard", "replicate": 2}}, (2, 2, 4), "2 copies of the model, in 2 shards"),
        ({"strategy": {"tensor": 2}}, (2, 4, 2), "2 shards, matrices in 2 parts"),
        ({"model": MOE}, (2, 2, 4), "4 shards, experts shared out over 2 ranks"),
        ({"model": LLAMA, "strategy": {"tensor": 2}}, (2, 4, 2), "matrices in 2 parts"),
        (
            {"model": {**MISTRAL, "config": {"sliding_window": None}}, "strategy": {"context": 2, "tensor": 2}},
            (2, 8, 1),
            "2 shards, samples in 2 parts, matrices in 2 parts",
        ),
    ],
)
def test_a_plan_says_how_the_ranks_are_arranged(
    sections: dict[str, Any], batch: tuple[int, int, int], words: str, layered: Layered, machine: Machine
) -> None:
    plan = plan_of(layered, machine, **sections)
    assert (plan.batch.micro, plan.batch.accumulation, plan.batch.ranks) == batch
    assert plan.batch.global_ == 16
    assert words in plan.strategy.reason


def test_hybrid_sharding_keeps_a_copy_on_each_node(layered: Layered, machine: Machine) -> None:
    hybrid = {"sharding": "hybrid_shard"}
    plan = plan_of(layered, machine, strategy=hybrid, nodes={"count": 2, "processes_per_node": 2})
    assert "2 copies of the model, in 2 shards each" in plan.strategy.reason
    one = plan_of(layered, machine, strategy={**hybrid, "version": 2})
    assert any("keeps one copy of the model on one node" in each.what for each in one.notices)


def test_parts_of_matrices_belong_inside_a_node(layered: Layered, machine: Machine) -> None:
    plan = plan_of(layered, machine, strategy={"tensor": 4}, nodes={"count": 2, "processes_per_node": 2})
    assert any("spread over nodes of 2 processes" in each.what for each in plan.notices)


def test_a_resume_does_not_depend_on_the_mesh(layered: Layered, machine: Machine) -> None:
    digests = {
        plan_of(layered, machine, model={"moe": {"experts": 4, **changes}}).training_digest
        for changes in ({}, {"parallel": 2})
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("sections", "less"),
    [
        ({"strategy": {"tensor": 2}}, ("activations", "communication")),
        ({"strategy": {"context": 2}}, ("activations",)),
        ({"model": {"moe": {"experts": 4, "parallel": 4}}}, ("communication",)),
    ],
)
def test_what_is_divided_takes_less(
    sections: dict[str, Any], less: tuple[str, ...], layered: Layered, machine: Machine
) -> None:
    plain = {**sections, "strategy": {}} if "model" not in sections else {"model": {"moe": {"experts": 4}}}
    parts = []
    for each in (plain, sections):
        context, *_ = decide(layered(recipe_of(**each)), machine(packages=SOFTWARE), (), (), (), foresee=lambda _: None)
        found = by_formula(context)
        assert found is not None
        parts.append(dict(found.parts))
    assert all(parts[1].get(name, 0) < parts[0][name] for name in less)


@pytest.mark.torch
@pytest.mark.needs("transformers>=5")
def test_each_architecture_that_is_named_has_a_plan_of_linear_layers() -> None:
    from transformers import AutoConfig

    for name in DIVISIBLE:
        plan = AutoConfig.for_model(name).base_model_tp_plan
        assert {"colwise", "rowwise"} <= set(plan.values()) <= {"colwise", "rowwise", "replicated_with_grad_allreduce"}
