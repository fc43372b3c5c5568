"""What a trace for ZeRO-3 says beyond others: DeepSpeed acts at every module, and has its own linear layer."""

from __future__ import annotations

from typing import Any

from trainkit.foresight.trace import ACTIVATIONS, Kind, Trace, Wanted, pairs
from trainkit.recipe.schema import Recipe
from trainkit.trainer.tracing.step import traced

GPT = {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 32, "vocab_size": 256}
LLAMA = {
    "kind": "hf",
    "architecture": "llama",
    "config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 256,
    },
}


def trace(model: dict[str, Any], strategy: str, **sections: Any) -> Trace:
    data = {"kind": "random", "sequence_length": 16, "high": 256, "samples": 8}
    recipe = Recipe.model_validate({"model": model, "data": data, "strategy": {"kind": strategy}, **sections})
    names = ("model", "data", "precision", "efficiency", "peft", "strategy")
    given = recipe.model_dump(mode="json", by_alias=True)
    return traced(Wanted({name: given[name] for name in names}, micro=2, device="cpu", dtype="bf16"))


def test_every_module_is_marked_and_a_tied_weight_belongs_also_to_who_asks_for_it() -> None:
    found = trace(GPT, "zero3")
    owners = [each.name for each in found.modules if 0 in each.own]
    assert found.parameters[0].name == "tokens.weight"
    assert owners == ["", "tokens"]  # the output layer is the model's own
    assert {"blocks.0", "blocks.0.attention", "blocks.0.attention.out"} <= {each.name for each in found.modules}
    entered = [number for kind, number in pairs(found.first) if kind == Kind.ENTER]
    left = [number for kind, number in pairs(found.first) if kind == Kind.LEAVE]
    assert sorted(entered) == sorted(left)


def test_frozen_linear_layers_keep_their_inputs_only_in_stage_3() -> None:
    def kept(strategy: str, **sections: Any) -> int:
        found = trace(LLAMA, strategy, **sections)
        return sum(size for size, part in zip(found.sizes, found.parts, strict=True) if part == ACTIVATIONS)

    assert kept("zero3") == kept("zero1")
    adapters = {"peft": {"kind": "lora", "rank": 2}}
    assert kept("zero3", **adapters) > kept("zero1", **adapters)
