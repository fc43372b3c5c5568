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


_WIDE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 2048}  # fmt: skip
_BERT = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": 2048}  # fmt: skip
_T5 = {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32, "vocab_size": 2048,
       "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
_GPT = {"kind": "gpt", "layers": 4, "heads": 4, "hidden_size": 128, "vocab_size": 256, "dropout": 0.0}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt": _GPT,
    "gpt wide": {**_GPT, "layers": 6, "heads": 6, "hidden_size": 192, "vocab_size": 4096},
    "gpt dropout": {**_GPT, "dropout": 0.1},
    "moe": {**_GPT, "moe": {"experts": 4, "top_k": 2}},
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
        return decided(Case(self.strategy, self.ranks, changes), corpus, whole, self.micro)


def write_texts(path: Path) -> None:
    """Rows of texts of many lengths, which fill samples together."""
    chance = random.Random(0)
    texts = ("".join(chance.choices("abcdefgh ", k=chance.randint(5, 60))) for _ in range(600))
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))


def steps() -> Iterator[Trial]:
    """Alone and divided over two ranks."""
    for model, techniques, micro, accumulation, optimizer in (
        ("gpt", (), 16, 1, ""),
        ("gpt wide", ("bf16",), 8, 2, ""),
        ("gpt wide", ("bf16", "whole"), 8, 2, ""),
        ("gpt wide", ("selective",), 8, 2, ""),
        ("gpt dropout", (), 8, 2, "sgd"),
        ("gpt", ("packed",), 8, 1, ""),
        ("gpt", (), 1, 2, "adamw_torch_foreach"),
        ("gpt", (), 1, 2, "adafactor"),
        ("moe", (), 8, 1, ""),
        ("llama", ("bf16", "whole"), 8, 2, ""),
        ("llama", ("bf16",), 4, 4, ""),
        ("llama", ("bf16", "lora"), 4, 2, ""),
        ("qwen2", (), 8, 1, ""),
        ("gpt2", ("bf16",), 8, 1, ""),
        ("bert", (), 8, 2, ""),
        ("t5", (), 8, 1, ""),
        ("t5", ("whole",), 8, 2, ""),
    ):
        yield Trial(model, techniques, micro, accumulation, optimizer=optimizer, length=64)
        fsdp = {"kind": "fsdp"}
        yield Trial(model, techniques, micro, accumulation, fsdp, 2, optimizer, 64, counted=model != "moe")


def zero() -> Iterator[Trial]:
    """DeepSpeed's three stages on two and four ranks, with and without offload."""
    kinds = [{"kind": "zero1"}, {"kind": "zero2"}, {"kind": "zero3"}, {"kind": "zero1", **OFFLOADED},
             {"kind": "zero2", **OFFLOADED}, {"kind": "zero3", **OFFLOADED}, {"kind": "zero3", **BOTH}]  # fmt: skip
    for kind in kinds:
        yield Trial("gpt wide", (), 4, 2, kind, 2, length=64)
        yield Trial("llama", ("bf16",), 4, 1, kind, 2, length=64)
        yield Trial("llama", ("bf16", "whole"), 2, 2, kind, 4, length=64)


def savings() -> Mapping[str, Mapping[str, tuple[Trial, Trial]]]:
    """By model and technique: the run without it and with it."""
    found = {}
    for model in ("llama", "qwen2", "gpt2", "bert", "t5"):
        base = Trial(model, (), 16, optimizer="adamw_torch_foreach")
        small = Trial(model, (), 1, optimizer="adamw_torch_foreach", length=16)  # which is highest in its update
        changed = {
            "micro batch halved": Trial(model, (), 8, 2, optimizer=base.optimizer),
            **{name: Trial(model, (name,), 16, optimizer=base.optimizer)
               for name in ("bf16", "whole", "selective", "lora")},
            "adafactor": Trial(model, (), 16, optimizer="adafactor"),
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
        techniques = [name for name, share in (("bf16", 0.5),) if chance.random() < share]
        techniques += chance.choice(((), (), ("whole",), ("selective",)))
        if not model.startswith("gpt ") and model != "gpt" and chance.random() < 0.2:
            techniques.append("lora")
        optimizer = chance.choice(("", "", "adamw_torch_foreach", "adafactor", "sgd"))
        strategy, ranks = chance.choice((({"kind": "single"}, 1), ({"kind": "single"}, 1), ({"kind": "single"}, 1),
                                         ({"kind": "fsdp"}, 2), ({"kind": "ddp"}, 2)))  # fmt: skip
        sizes = chance.randint(1, 10), chance.randint(1, 3)
        config = {depth: chance.randint(1, 5)}
        yield Trial(
            model, tuple(techniques), *sizes, strategy, ranks, optimizer, chance.choice((16, 32, 64, 96)), config
        )


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
        techniques = (("bf16",) if chance.random() < 0.3 else ()) + chance.choice(((), (), ("whole",), ("selective",)))
        length = chance.choice((64, 128, 256))
        yield Trial(model, techniques, max(1, chance.choice((1024, 2048, 4096)) // length), chance.randint(1, 2),
                    config=config, length=length)  # fmt: skip
