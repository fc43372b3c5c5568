"""The runs of `foresight`: models and techniques small enough for a CPU, alone and on several ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strategy_runs import Case, decided

from trainkit.launch_plan.context import Context

Changes = Mapping[str, Mapping[str, Any]]  # to the recipe, by section


def _hf(architecture: str, task: str = "causal_lm", **config: Any) -> dict[str, Any]:
    return {"kind": "hf", "architecture": architecture, "task": task, "config": config}


_WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 2048}  # fmt: skip
_BERT: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": 2048}  # fmt: skip
_T5: dict[str, Any] = {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32, "vocab_size": 2048,
       "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
_GPT = {"kind": "gpt", "layers": 4, "heads": 4, "hidden_size": 128, "vocab_size": 256, "dropout": 0.0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt": _GPT,
    "gpt wide": {**_GPT, "layers": 6, "heads": 6, "hidden_size": 192, "vocab_size": 4096},
    "gpt dropout": {**_GPT, "dropout": 0.1},
    "moe": {**_GPT, "moe": {"experts": 4, "top_k": 2}},
    "moe, every expert": {**_GPT, "moe": {"experts": 4, "top_k": 4}},
    "llama": _hf("llama", **_WIDE),
    "qwen2": _hf("qwen2", **_WIDE),
    "gpt2": _hf("gpt2", n_layer=3, n_head=4, n_embd=128, vocab_size=2048),
    "bert": _hf("bert", "sequence_classification", **_BERT),
    "t5": _hf("t5", "seq2seq_lm", **_T5),
}
WHOLE: Changes = {"efficiency": {"gradient_checkpointing": True}}
SELECTIVE: Changes = {"efficiency": {"gradient_checkpointing": {"every": 1, "selective": True}}}
BF16: Changes = {"precision": {"dtype": "bf16"}}
LORA: Changes = {"peft": {"kind": "lora", "rank": 8}}
PACKED: Changes = {"data": {"kind": "dataset", "packing": "isolated", "sequence_length": 64}}
TECHNIQUES: Mapping[str, Changes] = {"bf16": BF16, "whole": WHOLE, "selective": SELECTIVE, "lora": LORA,
                                     "packed": PACKED}  # fmt: skip
OFFLOADED = {"offload_optimizer": "cpu"}
BOTH = {**OFFLOADED, "offload_param": "cpu"}


@dataclass(frozen=True)
class Trial:
    """A run: a model with techniques and an optimizer, on one rank or several. counted: whether a bound holds for it.

    micro, accumulation: of a rank. length: tokens of a sample.
    """

    model: str
    techniques: tuple[str, ...] = ()
    micro: int = 8
    accumulation: int = 1
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"kind": "single"})
    ranks: int = 1
    optimizer: str = ""
    length: int = 128
    config: Mapping[str, Any] = field(default_factory=dict)  # more of the model's
    counted: bool = True

    @property
    def name(self) -> str:
        sizes = f"{self.micro} x {self.length}" + (
            f", accumulation {self.accumulation}" if self.accumulation > 1 else ""
        )
        return ", ".join(filter(None, (self.model, *self.techniques, self.optimizer, sizes)))

    @property
    def where(self) -> str:
        kind, *more = self.strategy.values()
        offloads = " + offload of both" if "offload_param" in self.strategy else " + offload" if more else ""
        if kind == "fsdp":
            offloads = "".join(f", {name} {value}" for name, value in self.strategy.items() if name != "kind")
        return f"{kind}{offloads}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def context(self, corpus: Path) -> Context:
        """Its plan. corpus: a file of texts."""
        model = dict(MODELS[self.model])
        if model["kind"] == "gpt":
            model |= self.config
        else:
            model["config"] = {**model["config"], **self.config}
        data = {"kind": "random", "sequence_length": self.length, "high": 256, "samples": 64}
        if self.model == "t5":
            data["target_length"] = self.length * 3 // 4
        changes: dict[str, Any] = {"model": model, "data": data}
        for each in self.techniques:
            changes |= TECHNIQUES[each]
        if changes["data"]["kind"] == "dataset":
            changes["data"] = {**changes["data"], "path": str(corpus), "validation_path": str(corpus)}
        if self.optimizer:
            changes["optimizer"] = {"name": self.optimizer}
        whole = self.micro * self.accumulation * self.ranks
        whole //= self.strategy.get("tensor", 1) * self.strategy.get("context", 1)
        return decided(Case(self.strategy, self.ranks, changes), corpus, whole, self.micro)


def write_texts(path: Path) -> None:
    """Rows of texts of many lengths, which fill samples together."""
    chance = random.Random(0)
    texts = ("".join(chance.choices("abcdefgh ", k=chance.randint(5, 60))) for _ in range(600))
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))


def steps() -> Iterator[Trial]:
    """Alone and divided over two ranks."""
    for model, techniques, micro, accumulation, length, optimizer in (
        ("gpt", (), 16, 1, 64, ""),
        ("gpt wide", ("bf16",), 2, 2, 32, ""),
        ("gpt wide", ("bf16", "whole"), 4, 1, 32, ""),
        ("gpt wide", ("selective",), 8, 2, 32, ""),
        ("gpt dropout", (), 8, 2, 64, "sgd"),
        ("gpt", ("packed",), 16, 1, 64, ""),
        ("gpt wide", (), 1, 2, 16, "adafactor"),
        ("moe", (), 8, 1, 64, ""),
        ("moe, every expert", (), 8, 1, 64, ""),
        ("llama", ("bf16", "whole"), 4, 2, 32, ""),
        ("llama", ("lora",), 4, 2, 64, ""),
        ("qwen2", (), 8, 1, 64, "adamw_torch_foreach"),
        ("gpt2", ("bf16",), 4, 1, 32, ""),
        ("bert", (), 8, 2, 64, ""),
        ("t5", ("whole",), 8, 2, 64, ""),
    ):
        even = model != "moe"  # else its router decides
        yield Trial(model, techniques, micro, accumulation, optimizer=optimizer, length=length, counted=even)
        if optimizer == "adafactor":  # which FSDP does not take
            continue
        fsdp = {"kind": "fsdp"}
        yield Trial(model, techniques, micro, accumulation, fsdp, 2, optimizer, length, counted=even)


def meshes() -> Iterator[Trial]:
    """Models in copies, and blocks that several ranks have parts of."""
    shared: dict[str, Any] = {"moe": {"experts": 4, "top_k": 4, "parallel": 2}}
    hybrid = {"kind": "fsdp", "sharding": "hybrid_shard", "replicate": 2}
    divided = {"kind": "fsdp", "tensor": 2}
    yield Trial("gpt wide", (), 4, 1, hybrid, 4, length=32)
    for ranks in (2, 4):
        yield Trial("gpt wide", (), 4, 2, divided, ranks, length=32)
        yield Trial("llama", ("whole",), 4, 1, divided, ranks, length=64)
        yield Trial("qwen2", (), 8, 1, divided, ranks, length=64)
        yield Trial("moe, every expert", (), 8, 1, {"kind": "fsdp"}, ranks, length=64, config=shared)
        yield Trial("gpt wide", (), 4, 2, {"kind": "fsdp", "context": 2}, ranks, length=64)
        yield Trial("llama", ("whole",), 4, 1, {"kind": "fsdp", "context": 2}, ranks, length=64)
    yield Trial("moe, every expert", (), 8, 1, {**hybrid, **divided}, 8, length=64, config=shared)


def zero() -> Iterator[Trial]:
    """DeepSpeed's three stages on two and four ranks, with and without offload."""
    kinds = [{"kind": "zero1"}, {"kind": "zero2"}, {"kind": "zero3"}, {"kind": "zero1", **OFFLOADED},
             {"kind": "zero2", **OFFLOADED}, {"kind": "zero3", **OFFLOADED}, {"kind": "zero3", **BOTH}]  # fmt: skip
    for kind in kinds:
        yield Trial("gpt wide", (), 4, 2, kind, 2, length=32)
        yield Trial("llama", ("bf16",), 2, 1, kind, 2, length=32)
    for kind in kinds[2:5]:
        yield Trial("llama", ("whole",), 2, 2, kind, 4, length=32)


def savings() -> Mapping[str, Mapping[str, tuple[Trial, Trial]]]:
    """By model and technique: the run without it and with it."""
    found = {}
    for model in ("llama", "qwen2", "gpt2", "bert", "t5"):
        base = Trial(model, (), 16, optimizer="adamw_torch_foreach", length=32)
        small = Trial(model, (), 1, optimizer="adamw_torch_foreach", length=16)  # which is highest in its update
        changed = {
            "micro batch halved": Trial(model, (), 8, 2, optimizer=base.optimizer, length=32),
            **{name: Trial(model, (name,), 16, optimizer=base.optimizer, length=32)
               for name in ("bf16", "whole", "selective", "lora")},
            "adafactor": Trial(model, (), 16, optimizer="adafactor", length=32),
        }  # fmt: skip
        found[model] = {name: (base, each) for name, each in changed.items()}
        found[model]["fused"] = small, Trial(model, (), 1, optimizer="adamw_torch_fused", length=16)
    return found


def drawn(count: int, seed: int) -> Iterator[Trial]:
    """Runs at random."""
    chance = random.Random(seed)
    for _ in range(count):
        model = chance.choice(("gpt", "gpt wide", "gpt dropout", "llama", "qwen2", "gpt2", "bert", "t5"))
        depth = {"gpt2": "n_layer", "llama": "num_hidden_layers", "qwen2": "num_hidden_layers",
                 "bert": "num_hidden_layers", "t5": "num_layers"}.get(model, "layers")  # fmt: skip
        techniques = [name for name, share in (("bf16", 0.3),) if chance.random() < share]
        techniques += chance.choice(((), (), ("whole",), ("selective",)))
        if not model.startswith("gpt ") and model != "gpt" and chance.random() < 0.2:
            techniques.append("lora")
        optimizer = chance.choice(("", "", "adamw_torch_foreach", "adafactor", "sgd"))
        strategy, ranks = chance.choice((({"kind": "single"}, 1), ({"kind": "single"}, 1), ({"kind": "single"}, 1),
                                         ({"kind": "fsdp"}, 2), ({"kind": "ddp"}, 2)))  # fmt: skip
        if strategy["kind"] == "fsdp" and optimizer == "adafactor":  # which FSDP does not take
            optimizer = "sgd"
        sizes = chance.randint(1, 8), chance.randint(1, 2)
        config = {depth: chance.randint(1, 5)}
        yield Trial(model, tuple(techniques), *sizes, strategy, ranks, optimizer, chance.choice((16, 32, 48)), config)


def timed(count: int, seed: int) -> Iterator[Trial]:
    """Runs of one rank at random, long enough for a clock."""
    chance = random.Random(seed)
    for _ in range(count):
        model = chance.choice(("gpt", "gpt wide", "llama", "qwen2", "gpt2", "bert"))
        width = chance.choice((128, 192, 256, 384))
        key = {"gpt2": "n_embd"}.get(model, "hidden_size")
        heads = {"gpt2": "n_head", "gpt": "heads", "gpt wide": "heads"}.get(model, "num_attention_heads")
        config = {key: width, heads: width // 32}
        if model in ("llama", "qwen2"):
            config["num_key_value_heads"] = width // 64
        techniques = (("bf16",) if chance.random() < 0.2 else ()) + chance.choice(((), (), ("whole",), ("selective",)))
        length, tokens = (
            chance.choice((32, 64, 128)),
            chance.choice((256, 512) if "bf16" in techniques else (512, 1024, 2048)),
        )
        yield Trial(model, techniques, max(1, tokens // length), 1,
                    config=config, length=length)  # fmt: skip


# Model, ranks, and the share of the largest candidate's memory that there is.
AUTO = (("gpt wide", 1, 0.45), ("llama", 1, 0.65), ("gpt wide", 2, 0.45), ("llama", 2, 0.65))


def chosen_by_itself(model: str, ranks: int) -> dict[str, dict[str, Any]]:
    """A recipe that leaves its strategy, its micro batch and checkpointing open."""
    return {
        "model": dict(MODELS[model]),
        "data": {"kind": "random", "sequence_length": 128, "high": 256, "samples": 64},
        "batch": {"global": 8 * ranks},
        "precision": {"dtype": "fp32"},
        "devices": {"type": "cpu"},
        "nodes": {"processes_per_node": ranks},
        "strategy": {"kind": "auto"},
    }


@dataclass(frozen=True)
class Short:
    """A run without enough memory.

    share: of the peak of its tensors, that there is; 0: the address space is limited. like: the recipe of trainkit's
    trainer that takes as much, for a script of one's own.
    """

    name: str
    recipe: Mapping[str, Any]
    share: float
    like: Mapping[str, Any] | None = None


def _run(
    model: str, micro: int, *changes: Changes, ranks: int = 1, whole: int = 0, length: int = 128
) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "version": 1,
        "model": dict(MODELS[model]),
        "data": {"kind": "random", "sequence_length": length, "high": 256, "samples": 64},
        "batch": {"global": whole or micro * ranks, "micro": micro},
        "train": {"steps": 2},
        "eval": {"every_steps": 0},
        "checkpoint": {"at_end": False},
        "devices": {"type": "cpu"},
        "nodes": {"processes_per_node": ranks},
        "strategy": {"kind": "single" if ranks == 1 else "ddp"},
    }
    for each in changes:
        for section, values in each.items():
            recipe[section] = {**recipe.get(section, {}), **values}
    return recipe


def _own(*changes: Changes) -> dict[str, Any]:
    """A script on transformers' Trainer."""
    recipe = _run("gpt", 16, *changes)
    for section in ("model", "data", "eval", "checkpoint"):
        del recipe[section]
    return {**recipe, "program": {"kind": "hf", "script": "train.py"}}


def short() -> Iterator[Short]:
    """Runs without enough memory."""
    fsdp, zero3 = ({"strategy": {"kind": kind}} for kind in ("fsdp", "zero3"))
    yield Short("gpt, micro 32", _run("gpt wide", 32), 0.6)
    yield Short("gpt, micro 1", _run("gpt wide", 1, whole=2, length=512), 0.8)
    yield Short("gpt, micro 1, checkpointing on", _run("gpt wide", 1, WHOLE, whole=2, length=512), 0.85)
    yield Short("gpt, checkpointing on", _run("gpt wide", 16, WHOLE), 0.6)
    yield Short("llama, selective checkpointing, bf16", _run("llama", 16, SELECTIVE, BF16), 0.6)
    yield Short("llama, LoRA", _run("llama", 16, LORA), 0.5)
    yield Short("llama, LoRA, micro 1, checkpointing on", _run("llama", 1, LORA, WHOLE, whole=2, length=512), 0.8)
    yield Short("gpt, ddp on 2 ranks", _run("gpt wide", 16, ranks=2), 0.6)
    yield Short("llama, fsdp on 2 ranks", _run("llama", 16, fsdp, ranks=2), 0.6)
    yield Short("gpt, zero3 on 2 ranks", _run("gpt wide", 16, zero3, ranks=2), 0.6)
    yield Short("a script of one's own on Trainer", _own(), 0.6, _run("llama", 16))
    yield Short("the same with checkpointing on", _own(WHOLE), 0.6, _run("llama", 16, WHOLE))
    yield Short("t5, micro 16", _run("t5", 16, {"data": {"target_length": 96}}), 0.6)
    yield Short("gpt, the address space", _run("gpt wide", 32, length=512), 0)


# A script that knows nothing of trainkit, and says what its peak is.
OWN_SCRIPT = """
import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        ids = torch.full((128,), number % 256)
        return {"input_ids": ids, "labels": ids}


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
arguments.save_strategy = "no"
config = LlamaConfig(hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=2048)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows()).train()
"""


_LLAMA = """
version: 1
model: {kind: hf, architecture: llama, config: {%s, num_key_value_heads: 8, vocab_size: 128256,
  max_position_embeddings: 8192}}
data: {kind: random, sequence_length: 4096}
precision: bf16
train: {steps: 10}
batch: {global: 128, micro: 1}
strategy: {kind: fsdp}
efficiency: {gradient_checkpointing: true}
nodes: {count: %d}
"""
LLAMA_8B = _LLAMA % ("hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32", 1)
LLAMA_70B = _LLAMA % ("hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, num_attention_heads: 64", 8)
