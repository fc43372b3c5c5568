"""What is proven, as data: every case with its words, what it is compared with, and what is expected.

Tolerances: `EXACT` where the arithmetic is the same in another order, in fp32; `NEAR` where other kernels compute it;
`ROUGH` where one of both casts weights or activations to 16 bits; `FALLEN` where such norms have fallen to a fifth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proof import Case
from proof_checks import (
    CALLER,
    SHIPPED,
    estimated_micro,
    foreseen,
    measured,
    out_of_memory,
    peak_below,
    resumed,
    run_and_compare,
    searched,
    shown_card,
    two_runs,
)

EXACT, NEAR, ROUGH, FALLEN = 1e-4, 1e-3, 6e-2, 0.2
FP32 = ("precision.dtype=fp32", "precision.tf32=false")
BF16 = ("precision.dtype=bf16",)
FP16 = ("precision.dtype=fp16", "optimizer.lr=1e-4")
EVERY = ("efficiency.gradient_checkpointing.every=true",)
SELECTIVE = (*EVERY, "efficiency.gradient_checkpointing.selective=true")
COMPILED = (*BF16, "efficiency.compile.enabled=true")
GRAPHS = (*COMPILED, "efficiency.compile.mode=reduce-overhead")
DETERMINISTIC = ("train.deterministic=true",)
ASYNCHRONOUS = (*BF16, *DETERMINISTIC, "checkpoint.asynchronous=true")
SINGLE, IN_BF16, FSDP_BF16 = "strategy/single", "precision/bf16", "strategy/fsdp bf16"
USAGE = 2  # trainkit's exit code of a refused combination
Row = tuple[tuple[str, ...], str, float]  # words, the case it is like, tolerance
HERE_TOO = {  # on a CPU, too, where the kit itself is tried: one of each kind
    SINGLE, "strategy/ddp", "strategy/fsdp", "strategy/zero2", "technique/selective", "technique/accumulation 1",
    "technique/fused", "technique/moe", "resume/deterministic single",
}  # fmt: skip


def preset(name: str, *words: str) -> tuple[str, ...]:
    """A strategy's preset with more words."""
    return ("--with", f"strategy/{name}", *words)


def by(launcher: str) -> tuple[str, ...]:
    """Started by this launcher."""
    return (f"launcher.kind={launcher}",)


def rows(group: str, table: Mapping[str, Row], **more: Any) -> list[Case]:
    """A case of phase 2 for each row."""
    found = []
    for name, (words, like, tolerance) in table.items():
        here, needs = f"{group}/{name}" in HERE_TOO, needed(words)
        found.append(Case(2, group, name, run_and_compare, words=words, like=like, tolerance=tolerance, on_cpu=here,
                          needs=needs, **more))  # fmt: skip
    return found


# Packages of other people -> what of a case's words uses them.
USED = {
    "deepspeed": ("zero", "deepspeed"),
    "bitsandbytes": ("bnb", "qlora"),
    "peft": ("lora",),
    "transformers": ("efficiency-table", "llama", "olmoe", "t5"),
}


def needed(words: tuple[str, ...]) -> tuple[str, ...]:
    """Packages of other people that these words use."""
    text = " ".join(words)
    return tuple(package for package, marks in USED.items() if any(mark in text for mark in marks))


STRATEGIES: dict[str, Row] = {
    "ddp": (preset("ddp", *FP32), SINGLE, EXACT),
    "ddp torchrun": (preset("ddp", *by("torchrun"), *FP32), SINGLE, EXACT),
    "ddp accelerate": (preset("ddp", *by("accelerate"), *FP32), SINGLE, EXACT),
    "fsdp": (preset("fsdp", *FP32), SINGLE, EXACT),
    "fsdp shard_grad_op": (preset("fsdp-shard-grad-op", *FP32), SINGLE, EXACT),
    "fsdp offload": (preset("fsdp-offload", *FP32), SINGLE, EXACT),
    "fsdp torchrun": (preset("fsdp", *by("torchrun"), *FP32), SINGLE, EXACT),
    "zero1": (preset("zero1", *FP32), SINGLE, EXACT),
    "zero2": (preset("zero2", *FP32), SINGLE, EXACT),
    "zero3": (preset("zero3", *FP32), SINGLE, EXACT),
    "zero2 offload": (preset("zero2-offload", *FP32), SINGLE, EXACT),
    "zero3 offload": (preset("zero3-offload", *FP32), SINGLE, EXACT),
    "zero2 deepspeed": (preset("zero2", *by("deepspeed"), *FP32), SINGLE, EXACT),
    "ddp bf16": (preset("ddp", *BF16), IN_BF16, NEAR),
    "fsdp bf16": (preset("fsdp", *BF16), IN_BF16, ROUGH),
    "zero1 bf16": (preset("zero1", *BF16), IN_BF16, ROUGH),
    "zero2 bf16": (preset("zero2", *BF16), IN_BF16, ROUGH),
    "zero3 bf16": (preset("zero3", *BF16), IN_BF16, ROUGH),
}

PRECISIONS: dict[str, Row] = {
    "tf32": (("precision.dtype=fp32", "precision.tf32=true"), SINGLE, ROUGH),
    "bf16 against fp32": (BF16, SINGLE, ROUGH),
    "fp16": (FP16, "", 0.0),
    "fp16 fsdp": (preset("fsdp", *FP16), "", 0.0),
    "fp16 zero1": (preset("zero1", *FP16), "", 0.0),
    "fp16 zero2": (preset("zero2", *FP16), "", 0.0),
    "fp16 zero3": (preset("zero3", *FP16), "", 0.0),
    "auto": (("precision.dtype=auto",), IN_BF16, NEAR),
    "eval bf16": ((*FP32, "precision.eval=bf16"), "", 0.0),
    "pure bf16": (("--with", "precision/pure-bf16"), "", 0.0),
    "pure bf16 fsdp": (("--with", "precision/pure-bf16", *preset("fsdp")), "", 0.0),
}

TECHNIQUES: dict[str, Row] = {
    "checkpointing": ((*FP32, *EVERY), SINGLE, EXACT),
    "selective": ((*FP32, *SELECTIVE), SINGLE, EXACT),
    "selective bf16": ((*BF16, *SELECTIVE), IN_BF16, NEAR),
    "selective fsdp": (preset("fsdp", *FP32, *SELECTIVE), SINGLE, EXACT),
    "eager attention": ((*FP32, "efficiency.attention=eager"), SINGLE, NEAR),
    "accumulation 1": ((*FP32, "batch.micro=null", "batch.accumulation=1"), SINGLE, EXACT),
    "accumulation 8": ((*FP32, "batch.micro=2"), SINGLE, EXACT),
    "fused": ((*FP32, "optimizer.name=adamw_torch_fused"), SINGLE, EXACT),
    "fused fsdp": (preset("fsdp", *FP32, "optimizer.name=adamw_torch_fused"), SINGLE, EXACT),
    "fused fp16": ((*FP16, "optimizer.name=adamw_torch_fused"), "", 0.0),
    "foreach": ((*FP32, "optimizer.name=adamw_torch_foreach"), SINGLE, EXACT),
    "8bit": ((*FP32, "optimizer.name=adamw_bnb_8bit"), "", 0.0),
    "adafactor": ((*FP32, "optimizer.name=adafactor"), "", 0.0),
    "sgd": ((*FP32, "optimizer.name=sgd", "optimizer.lr=1e-2"), "", 0.0),
    "workers": ((*FP32, "data.workers=2"), SINGLE, EXACT),
    "not pinned": ((*FP32, "data.pin_memory=false"), SINGLE, EXACT),
    "dropout": ((*BF16, "model.dropout=0.1"), "", 0.0),
    "moe": ((*BF16, "model.moe={experts: 4, top_k: 2}"), "", 0.0),
    "lora": ((f"{SHIPPED}lora", "train.steps=6", *BF16), "", 0.0),
    "hf bert": (
        (f"{SHIPPED}efficiency-table", "model.config.num_hidden_layers=2", "train.epochs=0.05", "logging.every_steps=1",
         "efficiency.attention=sdpa", *BF16), "", 0.0),
    "profile": ((*BF16, "profile.steps=3"), IN_BF16, NEAR),
    "predict": ((*BF16, *DETERMINISTIC, "predict=validation"), "", 0.0),
    "text": ((f"{SHIPPED}quickstart", "train.steps=30", *BF16), "", 0.0),
}  # fmt: skip

COMPILING: dict[str, Row] = {
    "default": (COMPILED, IN_BF16, ROUGH),
    "whole-model": ((*COMPILED, "efficiency.compile.scope=model"), IN_BF16, ROUGH),
    "fp32": ((*FP32, "efficiency.compile.enabled=true"), SINGLE, NEAR),
    "checkpointing": ((*COMPILED, *EVERY), IN_BF16, ROUGH),
    "fsdp": (preset("fsdp", *COMPILED), FSDP_BF16, ROUGH),
    "fsdp selective": (preset("fsdp", *COMPILED, *SELECTIVE), FSDP_BF16, ROUGH),
    "ddp": (preset("ddp", *COMPILED), IN_BF16, ROUGH),
    "graphs 1 micro step": ((*GRAPHS, "batch.micro=16"), IN_BF16, ROUGH),
    "autotune no graphs": (
        (*COMPILED, "model.layers=2", "efficiency.compile.mode=max-autotune-no-cudagraphs"), "", 0.0),
}  # fmt: skip
# CUDA graphs keep gradients of one micro step only: https://github.com/pytorch/pytorch/issues/169545
REFUSED: dict[str, Row] = {
    "graphs 2 micro steps": (GRAPHS, "", 0.0),
    "graphs fsdp": (preset("fsdp", *GRAPHS, "batch.micro=16"), "", 0.0),
}

TINY_ON_CARD = ("--variant", "tiny", "devices.type=cuda", "nodes.processes_per_node=1")
QLORA, QLORA_4_BITS = (f"{SHIPPED}llama-70b-qlora", *TINY_ON_CARD), "model/qlora 4 bits"
MODELS: dict[str, Row] = {  # shipped recipes with random weights
    "qlora fp4": ((*QLORA, "model.quantize.quant_type=fp4"), "", 0.0),
    "qlora fsdp": ((*QLORA, *preset("fsdp")), QLORA_4_BITS, ROUGH),
    "qlora zero3": ((*QLORA, *preset("zero3")), QLORA_4_BITS, FALLEN),
    "qlora 8 bits": ((*QLORA, "model.quantize!=8"), "", 0.0),
    "lora, weights in bf16": ((f"{SHIPPED}llama-8b-lora", *TINY_ON_CARD), "", 0.0),
    "seq2seq": ((f"{SHIPPED}t5-summarization", *TINY_ON_CARD), "", 0.0),
    "olmoe": ((f"{SHIPPED}olmoe-full", *TINY_ON_CARD), "", 0.0),
}
# A model of 8 billion parameters with random weights, as in the head of the recipe: 24 GiB are to be enough.
LLAMA_8B = (
    "hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, "
    "num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192"
)
LARGE = (
    f"{SHIPPED}llama-8b-lora",
    f"model!={{kind: hf, architecture: llama, config: {{{LLAMA_8B}}}}}",
    "data!={kind: random, samples: 256, low: 0, high: 128256, sequence_length: 2048}",
    "train!={steps: 4}",
    "schedule.warmup_steps=1",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
)

RESUMED: dict[str, tuple[str, ...]] = {
    "deterministic single": (*BF16, *DETERMINISTIC, "model.dropout=0.1"),
    "deterministic fsdp": preset("fsdp", *BF16, *DETERMINISTIC),
    "deterministic zero2": preset("zero2", *BF16, *DETERMINISTIC),
    "deterministic fp16": (*FP16, *DETERMINISTIC),
    "not deterministic": BF16,
    "deterministic qlora": (*QLORA, *DETERMINISTIC, "train.steps=12"),
    "asynchronous single": ASYNCHRONOUS,
    "asynchronous ddp": preset("ddp", *ASYNCHRONOUS),
    "asynchronous fsdp": preset("fsdp", *ASYNCHRONOUS),
}

NAMED: dict[str, tuple[tuple[str, ...], int]] = {  # words, exit code
    "index": (("devices.select=[0]",), 0),
    "uuid": (("devices.select=[{uuid}]",), 0),
    "short uuid": (('devices.select=["{short}"]',), 0),
    "count": (("devices.select=1",), 0),
    "free": (("devices.select=free",), 0),
    "fastest": (("devices.select=1", "devices.order=fastest"), 0),
    "caller gives uuid": ((f"{CALLER}{{uuid}}",), 0),
    "caller gives index": ((f"{CALLER}0",), 0),
    "torchrun": (("devices.select=[0]", "launcher.kind=torchrun", "strategy.kind=ddp"), 0),
    "accelerate": (("devices.select=[0]", "launcher.kind=accelerate"), 0),
    "deepspeed": (("devices.select=[0]", "launcher.kind=deepspeed", "strategy.kind=ddp"), 0),
    "no such card": (("devices.select=[77]",), 4),
}

TOO_LARGE = ("efficiency.attention=eager", "model.hidden_size=2048", "model.heads=16", "model.layers=8",
             "data.sequence_length=1024", "batch.global=1024", "batch.micro=1024", "data.samples=1024",
             "train.steps=1", "eval.every_steps=0", *FP32)  # fmt: skip
AUTO_MICRO = ("batch.micro=auto", "batch.global=256", *BF16, "data.sequence_length=512", "model.hidden_size=512")
SEARCHED = (*AUTO_MICRO, "batch.memory_mib=8192", "efficiency.attention=eager")  # of which there is no estimate
GATES = "on an H100 (SXM) or H200 40 % MFU (124M: 33 %), and 357 samples/s of bert-large; told on others"
FINITE = "finite losses, near to the reference where there is one"
SPEEDS = {"124M": 30, "350M": 35, "bert-large": 40, "760M": 40, "1300M": 45}  # seconds
MEMORY = {"124M": 40, "350M": 40, "bert-large": 40, "760M": 48, "1300M": 64}  # GiB

CASES: tuple[Case, ...] = (
    Case(1, "facts", "machine", measured("facts"), 20, "trainkit's facts are those of NVML and torch", on_cpu=True),
    *rows("strategy", {"single": (FP32, "", 0.0)}, turn=1, expected="the reference, in fp32"),
    *rows("precision", {"bf16": (BF16, "", 0.0)}, turn=1, expected="the reference, in bf16"),
    *rows("strategy", STRATEGIES, turn=2, seconds=25, expected="the losses of the reference"),
    *(
        Case(2 if name != "free" else 3, "device", name, shown_card, 12,  # free: of other processes, too
             f"exit code {code}" if code else "the card of the plan, as cuda:0", 3,
             words=words, exit_code=code, needs=needed(words))
        for name, (words, code) in NAMED.items()
    ),
    *rows("precision", PRECISIONS, turn=3, expected=FINITE),
    *(
        Case(2, "resume", name, resumed, 35, "within 1 %; equality is told" if words == BF16 else "bit-equal", 3,
             words=words, on_cpu=f"resume/{name}" in HERE_TOO, needs=needed(words))
        for name, words in RESUMED.items()
    ),
    *rows("technique", TECHNIQUES, turn=3, expected=FINITE),
    *rows("model", {"qlora 4 bits": (QLORA, "", 0.0)}, turn=3, seconds=30, expected=FINITE),
    *rows("model", MODELS, turn=4, seconds=30, expected=FINITE),
    *rows("compile", REFUSED, turn=4, seconds=5, expected="refused, with the reason", exit_code=USAGE),
    *rows("compile", COMPILING, turn=4, seconds=60, expected="losses and gradient norms of the uncompiled run"),
    # Into the compile cache for what is timed: few at once, for they share the card's memory.
    *(
        Case(2, "warm", size, measured("warm", size), 120, "compiled ahead", 5 + number // 2, memory=MEMORY[size])
        for number, size in enumerate(SPEEDS)
    ),
    Case(3, "memory", "out of memory", out_of_memory, 25, "exit code 1, a hint, memory given back", 1, words=TOO_LARGE),
    Case(3, "memory", "8 billion on 24 GiB", peak_below(24), 150, "what the recipe says that it takes", 2, words=LARGE,
         memory=30, needs=needed(LARGE)),
    Case(3, "memory", "micro auto", estimated_micro, 20, "decided by the estimate, and there is room", 2,
         words=AUTO_MICRO, memory=12),
    Case(3, "memory", "micro searched", searched, 40, "the largest that fits, then remembered", 2, words=SEARCHED,
         memory=12),
    Case(3, "memory", "foreseen", foreseen, 1, "allocated: mean 1 %, largest 3 %; reserved: mean 2 %", 3, on_cpu=True),
    Case(3, "sharing", "two runs", two_runs, 60, "refused, or side by side, as asked", 3, words=BF16),
    Case(3, "cost", "card sampling", measured("sampling"), 8, "below 1 ms of CPU time a second", 4),
    *(
        Case(3, "speed", size, measured("speed", size), seconds, GATES, 5 + number, on_cpu=number == 0,
             memory=MEMORY[size])
        for number, (size, seconds) in enumerate(SPEEDS.items())
    ),
    Case(3, "speed", "loop", measured("loop"), 45, "0.99 of a bare loop's speed, 1.00 of Accelerate and HF Trainer", 10,
         on_cpu=True, memory=16),
    Case(3, "table", "recipe", measured("table", "recipe"), 90, "speed and memory of the recipe's variants", 11,
         on_cpu=True, memory=16),
    Case(3, "calibrate", "memory", measured("memory"), 60, "measured memory by category", 12, on_cpu=True, memory=40),
    Case(3, "table", "more", measured("table", "more"), 80, "speed and memory of further techniques", 13, memory=16),
)  # fmt: skip
