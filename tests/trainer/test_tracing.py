"""Traces on the meta device against the memory of a real step on the CPU, as torch's profiler records it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import Case, decided, write_settings
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from trainkit.errors import TrainingError
from trainkit.foresight.estimate import run_of, wanted_of
from trainkit.foresight.memory import simulate
from trainkit.foresight.strategies import Whole
from trainkit.foresight.trace import Kind, Trace, Wanted, pairs
from trainkit.trainer.loop import batches, optimizer_step
from trainkit.trainer.models.gpt import Gpt
from trainkit.trainer.settings import World, read_settings
from trainkit.trainer.setup import assemble
from trainkit.trainer.tracing.step import counted_at_most, traced

pytestmark = pytest.mark.torch
GLOBAL, MICRO = 8, 4
CLOSE = 0.001

LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 1024}  # fmt: skip
BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 1024}  # fmt: skip
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1024}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 1024, "pad_token_id": 0,
      "decoder_start_token_id": 0}  # fmt: skip
BF16: dict[str, Any] = {"precision": {"dtype": "bf16"}}
LORA: dict[str, Any] = {"peft": {"kind": "lora", "rank": 4}}


def gpt(**more: Any) -> dict[str, Any]:
    return {"kind": "gpt", "layers": 2, "heads": 4, "hidden_size": 64, "vocab_size": 1024, "dropout": 0.0, **more}


def hf(architecture: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"kind": "hf", "architecture": architecture, "config": config, **more}


def case(model: dict[str, Any], **sections: dict[str, Any]) -> Case:
    data = {"kind": "random", "sequence_length": 32, "high": 1024, "samples": 32, **sections.pop("data", {})}
    return Case({"kind": "single"}, 1, {"model": model, "data": data, **sections})


def predicted(asked: Case) -> tuple[Whole, Trace]:
    context = decided(asked, Path("nowhere"), GLOBAL, MICRO)
    trace = traced(wanted_of(context))
    return simulate(trace, run_of(context)), trace


def measured(asked: Case, folder: Path, corpus: Path = Path("nowhere")) -> int:
    """The highest number of bytes in the second step of a real run, with what was there before it."""
    settings, steps = read_settings(write_settings(folder / "run", asked, corpus, GLOBAL, MICRO)), 2
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        parts = assemble(settings, World(), torch.device("cpu"))
        source, began = batches(parts, 0), 0
        for number in range(steps):
            gc.collect()
            batch, began = next(source), time.time_ns()
            optimizer_step(parts, number, batch, max(1, batch.counted))
    del batch, source, parts
    recorded: Any = profiler.profiler
    now, peak, held = 0, 0, dict[int, int]()
    for at, size, place in sorted(allocations(recorded.kineto_results.experimental_event_tree())):
        if size > 0:
            held[place] = size
            now += size
        else:  # what earlier tests have left behind is not counted
            now -= held.pop(place, 0)
        peak = max(peak, now) if at >= began else now
    return peak


def allocations(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    """When, how many bytes (negative: given back), and where."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.alloc_size, fields.ptr
        waiting += event.children


def require_close(asked: Case, folder: Path, corpus: Path = Path("nowhere"), within: float = CLOSE) -> Trace:
    """A batch that the data source reads lies in numpy's memory, which the profiler does not see."""
    real = measured(asked, folder, corpus)
    strategy, trace = predicted(asked)
    peak, batch = strategy.device.peak, trace.batch * strategy.run.accumulation
    assert real * (1 - within) <= peak <= real * (1 + within) + batch, f"{peak} for {real}"
    return trace


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(case(gpt()), id="gpt"),
        pytest.param(
            case(hf("llama", LLAMA), efficiency={"gradient_checkpointing": True}, **BF16), id="llama bf16 checkpointing"
        ),
        pytest.param(case(hf("llama", LLAMA), **LORA, **BF16), id="llama LoRA"),
        pytest.param(case(hf("bert", BERT, task="sequence_classification")), id="bert"),
        pytest.param(case(hf("mixtral", {**LLAMA, "num_local_experts": 4}), **BF16), id="mixtral bf16"),
        pytest.param(case(hf("falcon", FALCON)), id="falcon"),
        pytest.param(case(hf("t5", T5, task="seq2seq_lm"), data={"target_length": 24}), id="t5"),
    ],
)
def test_a_step_takes_the_memory_that_was_traced(asked: Case, tmp_path: Path) -> None:
    require_close(asked, tmp_path)


def test_a_label_read_at_the_last_token_can_be_traced() -> None:
    config = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
              "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
              "vocab_size": 256}  # fmt: skip
    _, trace = predicted(case(hf("bart", config, task="sequence_classification")))
    assert len(trace.gradients) == len([each for each in trace.trained if "final_logits_bias" not in each.name])


def test_a_model_that_asks_for_values_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Gpt.forward

    def asking(self: Any, tokens: torch.Tensor, *more: Any, **others: Any) -> Any:
        assert tokens.tolist()
        return whole(self, tokens, *more, **others)

    monkeypatch.setattr(Gpt, "forward", asking)
    with pytest.raises(TrainingError, match="cannot be traced without a device"):
        predicted(case(gpt()))


@pytest.mark.needs("bitsandbytes>=0.50", "transformers>=5", "peft")
@pytest.mark.parametrize(
    ("quantize", "sections"),
    [({"bits": 4}, BF16), ({"bits": 4, "double_quant": False}, {}), ({"bits": 8}, BF16)],
    ids=["4", "4 plain", "8"],
)
def test_quantised_weights_are_packed_and_come_back_for_each_product(
    quantize: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    trace = require_close(case(hf("llama", LLAMA, quantize=quantize), **LORA, **sections), tmp_path)
    packed = next(each for each in trace.parameters if each.name.endswith("q_proj.base_layer.weight"))
    assert (packed.shape, packed.item) == ((64, 64), quantize["bits"] / 8)
    blocks = 64 * 64 // 64
    scales = {
        "4": blocks + 4 + 4 * (1 + 16 + 256),  # in 8 bits, their constant, and what bits stand for
        "4 plain": 4 * (blocks + 16),
        "8": 4 * 64,
    }
    assert packed.scales == scales[f"{quantize['bits']}{'' if quantize.get('double_quant', True) else ' plain'}"]


@pytest.mark.needs("bitsandbytes>=0.50", "transformers>=5", "peft")
def test_on_a_gpu_8_bits_are_multiplied_as_such() -> None:
    sections = {**LORA, **BF16}
    context = decided(case(hf("llama", LLAMA, quantize={"bits": 8}), **sections), Path("nowhere"), GLOBAL, MICRO)
    trace = traced(replace(wanted_of(context), device="cuda", capability=(9, 0)))
    rows, width = MICRO * 32, LLAMA["intermediate_size"]
    sizes = {(trace.names[name], size) for name, size in zip(trace.operators, trace.sizes, strict=True)}
    assert ("empty.memory_format", rows * width * 4) in sizes  # 32 bits of a product
    assert ("empty_like.default", rows * width * 2) in sizes  # fp16


def test_a_masked_model_makes_logits_of_hidden_tokens_alone(tmp_path: Path) -> None:
    config = {**BERT, "vocab_size": 6000, "hidden_size": 32, "num_hidden_layers": 1}
    asked = case(
        hf("bert", config, task="masked_lm", mask_token=1), data={"sequence_length": 256}, eval={"every_steps": 0}
    )
    trace = require_close(asked, tmp_path)
    rows = counted_at_most(decided(asked, Path("nowhere"), GLOBAL, MICRO).recipe, Wanted({}, MICRO, "cpu", "fp32"))
    assert rows == 3 * MICRO * 256 // 16, "3/16 of the tokens, where 15 % are hidden"
    assert rows * 6000 * 4 in trace.sizes
    assert MICRO * 256 * 6000 * 4 not in trace.sizes


@pytest.mark.parametrize(
    ("architecture", "least"), [("llama", 1000), ("llama", 100_000), ("falcon", 1000), ("t5", 1000), ("t5", 100_000)]
)
def test_units_by_size_may_return_anything_and_have_it_changed_in_place(architecture: str, least: int) -> None:
    strategy = {"kind": "fsdp", "auto_wrap": "size", "min_params": least}
    models = {
        "llama": hf("llama", LLAMA),
        "falcon": hf("falcon", FALCON),
        "t5": hf("t5", T5, task="seq2seq_lm"),
    }
    changes = case(models[architecture], data={"target_length": 24} if architecture == "t5" else {}).changes
    _, trace = predicted(Case(strategy, 2, changes))
    units = {number for number, each in enumerate(trace.modules) if each.unit}
    entered, reached = ({number for kind, number in pairs(trace.first) if kind == asked}
                        for asked in (Kind.ENTER, Kind.REACH))  # fmt: skip
    assert units
    assert units <= entered
    assert units <= reached
