"""Traces by formula: parameters of models that are well known, and peaks beside those of real traces."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.foresight.estimate import SECTIONS
from trainkit.foresight.formula import formula
from trainkit.foresight.memory import simulate
from trainkit.foresight.strategies import Run
from trainkit.foresight.trace import COPIES, GRADIENTS, Kind, Trace, Wanted, pairs
from trainkit.recipe.schema import Recipe

GPT: dict[str, Any] = {"kind": "gpt", "layers": 2, "hidden_size": 64, "heads": 4}


def hf(architecture: str, task: str = "causal_lm", **config: Any) -> dict[str, Any]:
    return {"kind": "hf", "architecture": architecture, "task": task, "config": config}


def wanted(model: dict[str, Any], length: int = 64, *, micro: int = 2, device: str = "cuda", dtype: str = "bf16",
           **sections: Any) -> Wanted:  # fmt: skip
    data = {"kind": "random", "sequence_length": length}
    weights = sections.pop("weights", "fp32")
    precision = {"dtype": dtype, "weights": weights}
    recipe = Recipe.model_validate({"model": model, "data": data, "precision": precision, **sections})
    written = recipe.model_dump(mode="json", by_alias=True)
    capability = (9, 0) if device == "cuda" else (0, 0)
    return Wanted({name: written[name] for name in SECTIONS}, micro, device, dtype, capability)


def made(*args: Any, **more: Any) -> Trace:
    trace = formula(wanted(*args, **more), {})
    assert trace is not None
    return trace


SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160}
LLAMA = hf("llama", **SMALL, num_key_value_heads=2, vocab_size=500)
LARGE: dict[str, Any] = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("model", "size"),
    [
        (hf("gpt2"), 124_439_808),
        (hf("opt"), 125_239_296),
        (hf("bert", "sequence_classification", **LARGE), 335_143_938),
        (hf("roberta", "masked_lm", max_position_embeddings=514, type_vocab_size=1), 124_697_433),
        (hf("t5", "seq2seq_lm"), 60_506_624),
        (hf("gpt_neox", **LARGE, vocab_size=50304), 405_334_016),
        (hf("llama", intermediate_size=14336, num_key_value_heads=8, vocab_size=128256), 8_030_261_248),
        (hf("mistral"), 7_241_732_096),
        (hf("mixtral"), 46_702_792_704),
        (hf("gemma", num_hidden_layers=18, hidden_size=2048, num_attention_heads=8, num_key_value_heads=1,
            intermediate_size=16384), 2_506_172_416),
        (hf("phi3"), 3_821_079_552),
        (hf("qwen2", num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2,
            intermediate_size=4864, tie_word_embeddings=True), 494_032_768),
        (hf("qwen3", num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
            intermediate_size=3072, tie_word_embeddings=True), 596_049_920),
    ],
)  # fmt: skip
def test_models_have_as_many_parameters_as_they_are_known_to(model: dict[str, Any], size: int) -> None:
    assert made(model, 16, micro=1).size == size


@pytest.mark.unit
def test_a_folders_settings_are_read_and_the_recipes_go_before_them() -> None:
    recipe = wanted({"kind": "hf", "path": "/models/one", "config": {"num_hidden_layers": 1}})
    settings = {"model_type": "llama", **SMALL, "vocab_size": 500, "num_key_value_heads": 2}
    trace = formula(recipe, settings)
    assert trace is not None
    assert sum(each.name.endswith("q_proj.weight") for each in trace.parameters) == 1
    assert trace.parameters[0].shape == (500, 64)


@pytest.mark.unit
def test_an_unknown_architecture_has_no_formula() -> None:
    assert formula(wanted(hf("mamba")), {}) is None
    assert formula(wanted(hf("llama", "sequence_classification")), {}) is None
    assert formula(wanted(GPT, efficiency={"attention": "eager"}), {}) is None


@pytest.mark.unit
def test_every_trained_parameter_gets_one_gradient_and_what_is_taken_is_given_back() -> None:
    trace = made(LLAMA, efficiency={"gradient_checkpointing": {"every": 1}})
    ready = [number for kind, number in pairs(trace.first) if kind == Kind.READY]
    assert sorted(ready) == sorted(trace.gradients.values()) == list(range(len(trace.parameters)))
    taken = {number for kind, number in pairs(trace.first) if kind == Kind.TAKE}
    freed = {number for kind, number in pairs(trace.first) if kind == Kind.FREE}
    assert {trace.parts[number] for number in taken - freed} == {GRADIENTS, COPIES}


@pytest.mark.unit
def test_adapters_alone_are_trained() -> None:
    trace = made(LLAMA, peft={"kind": "lora", "rank": 4})
    assert len(trace.trained) == 2 * 2 * 7
    assert all(".lora_" in each.name for each in trace.trained)


@pytest.mark.unit
@pytest.mark.parametrize(("quantize", "least", "most"), [({"bits": 8}, 1.0, 1.1), ({"bits": 4}, 0.5, 0.55)])
def test_quantised_layers_are_small_and_their_values_are_made_for_each_product(
    quantize: dict[str, Any], least: float, most: float
) -> None:
    trace = made({**LLAMA, "quantize": quantize}, peft={"kind": "lora"}, weights="bf16")
    layers = [each for each in trace.parameters if ".base_layer." in each.name]
    assert len(layers) == 2 * 7
    assert all(least * each.size <= each.bytes <= most * each.size + 1200 for each in layers)
    assert "dequantize.default" in trace.names


@pytest.mark.unit
def test_fewer_activations_are_kept_where_blocks_are_computed_again() -> None:
    peaks = [
        simulate(made(LLAMA, 256, efficiency={"gradient_checkpointing": asked}), Run()).device.peak
        for asked in ({"every": 1}, {"every": 1, "selective": True}, {"every": False})
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.unit
@pytest.mark.parametrize("selective", [False, True])
def test_what_is_computed_again_is_none_of_the_models_own_work(selective: bool) -> None:
    again = made(LLAMA, 256, efficiency={"gradient_checkpointing": {"every": 1, "selective": selective}})
    once = made(LLAMA, 256, efficiency={"gradient_checkpointing": {"every": False}})
    assert once.recomputed == 0
    assert again.flops - again.recomputed == pytest.approx(once.flops)
    assert (again.recomputed == 0) == selective  # what it keeps are all products


CHECKPOINTED: dict[str, Any] = {"efficiency": {"gradient_checkpointing": {"every": 1}}}
SELECTIVE: dict[str, Any] = {"efficiency": {"gradient_checkpointing": {"every": 1, "selective": True}}}
LORA: dict[str, Any] = {"peft": {"kind": "lora", "rank": 4, "dropout": 0.1}}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model", "more"),
    [
        (GPT, {}),
        ({**GPT, "dropout": 0.1}, {"device": "cpu", "dtype": "fp32"}),
        ({**GPT, "moe": {"experts": 4, "every": 2}}, CHECKPOINTED),
        (LLAMA, {"strategy": {"kind": "fsdp"}}),
        (LLAMA, {**LORA, **CHECKPOINTED}),
        (hf("qwen3", **SMALL, num_key_value_heads=2, head_dim=16, vocab_size=500), {"weights": "bf16", **SELECTIVE}),
        (hf("gemma", **SMALL, num_key_value_heads=1, head_dim=16, vocab_size=500), {"device": "cpu"}),
        (hf("phi3", **SMALL, num_key_value_heads=2, vocab_size=500, pad_token_id=0), {"dtype": "fp16"}),
        (hf("mixtral", **SMALL, num_key_value_heads=2, num_local_experts=4, vocab_size=500), {"micro": 1}),
        (hf("gpt_neox", **SMALL, vocab_size=500), {"micro": 4}),
        (hf("gpt2", n_layer=2, n_embd=64, n_head=4, vocab_size=500), SELECTIVE),
        (hf("gpt_neox", **SMALL, vocab_size=500), {"dtype": "fp32"}),
        (hf("opt", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, ffn_dim=160, vocab_size=500,
            word_embed_proj_dim=64), {"strategy": {"kind": "zero3"}}),
        (hf("bert", "sequence_classification", **SMALL, vocab_size=500), LORA),
        (hf("roberta", "masked_lm", **SMALL, vocab_size=500), CHECKPOINTED),
        (hf("t5", "seq2seq_lm", num_layers=2, d_model=64, d_kv=16, num_heads=4, d_ff=160, vocab_size=500), {}),
    ],
)  # fmt: skip
def test_it_is_like_a_trace_of_the_model_itself(model: dict[str, Any], more: dict[str, Any]) -> None:
    from trainkit.trainer.tracing.step import traced

    asked = wanted(model, 128, **more)
    real, own = traced(asked), formula(asked, {})
    assert own is not None
    assert own.parameters == real.parameters
    if asked.recipe["strategy"]["kind"] != "zero3":  # whose trace also has modules without parameters
        assert own.modules == real.modules
    assert (own.buffers, own.batch) == (real.buffers, real.batch)
    strategy = asked.recipe["strategy"]
    run = Run(
        strategy=strategy["kind"] if strategy["kind"] == "fsdp" else "single",
        ranks=4 if strategy["kind"] == "fsdp" else 1,
        accumulation=2,
        dtype=asked.dtype,
        weights=asked.recipe["precision"]["weights"],
        device=asked.device,
        options=strategy,
    )
    # cuBLAS's own memory is in both, and is most of what a small model takes.
    mine, its = (simulate(each, run).device.peak - (2**26 if asked.device == "cuda" else 0) for each in (own, real))
    assert mine == pytest.approx(its, rel=0.1)
    if model.get("architecture") != "mixtral":  # torch counts no FLOPs of grouped products
        assert own.flops == pytest.approx(real.flops, rel=0.15)
        assert own.recomputed == pytest.approx(real.recomputed, rel=0.15)
        for name in {each.format for each in real.work}:
            flops = [
                sum(each.count * each.flops for each in trace.work if each.format == name) for trace in (own, real)
            ]
            assert flops[0] == pytest.approx(flops[1], rel=0.15)
    assert sum(each.count * each.bytes for each in own.work) == pytest.approx(
        sum(each.count * each.bytes for each in real.work), rel=0.15
    )
