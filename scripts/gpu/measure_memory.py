"""Memory of a step by category: measured after and within each phase, beside what trainkit says of it."""

from __future__ import annotations

from typing import Any

from measure_parts import MIB, Asked, Row, each_built, occupied, peaks, synchronize

SIZES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "1300M": (24, 16, 2048)}  # layers, heads, width
BF16, EVERY = "precision.dtype=bf16", "efficiency.gradient_checkpointing.every=true"
# Size, micro batch, more words.
CONFIGURATIONS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "124M fp32": ("124M", 16, ("precision.dtype=fp32",)),
    "124M bf16": ("124M", 16, (BF16,)),
    "124M bf16, micro 4": ("124M", 4, (BF16,)),
    "124M bf16, checkpointing": ("124M", 16, (BF16, EVERY)),
    "124M bf16, selective": ("124M", 16, (BF16, EVERY, "efficiency.gradient_checkpointing.selective=true")),
    "124M bf16, eager": ("124M", 8, (BF16, "efficiency.attention=eager")),
    "350M bf16": ("350M", 8, (BF16,)),
    "350M bf16, fused": ("350M", 8, (BF16, "optimizer.name=adamw_torch_fused")),
    "350M pure bf16": ("350M", 8, ("--with", "precision/pure-bf16")),
    "350M bf16, fsdp": ("350M", 8, (BF16, "--with", "strategy/fsdp")),
    "350M bf16, ddp": ("350M", 8, (BF16, "--with", "strategy/ddp")),
    "1300M bf16": ("1300M", 4, (BF16,)),
}


def words_of(asked: Asked, name: str) -> list[str]:
    """The recipe of a configuration, in words."""
    size, micro, more = CONFIGURATIONS[name]
    layers, heads, width = (2, 2, 32) if asked.tiny else SIZES[size]
    length, vocabulary = (32, 128) if asked.tiny else (1024, 50304)
    micro = 2 if asked.tiny else micro
    return [asked.recipe(), f"model.layers={layers}", f"model.heads={heads}", f"model.hidden_size={width}",
            f"model.vocab_size={vocabulary}", f"batch.micro={micro}", f"batch.global={2 * micro}",
            f"data.high={vocabulary}", f"data.sequence_length={length}", "data.samples=64", *more]  # fmt: skip


def memory(asked: Asked) -> dict[str, Any]:
    """Bytes of each configuration."""
    names = list(CONFIGURATIONS)[:1] if asked.tiny else list(CONFIGURATIONS)
    problems: list[str] = []
    before = occupied(asked)

    def looked_at(name: str, parts: Any) -> Row:
        phases = Phases(asked)
        phases.note("built")
        step(parts, phases)
        highest = max(phases.highest, default=None)
        told = parts.memory.record(parts.strategy, highest)
        return {
            "configuration": name,
            "parameters": parts.parameters.training,
            "micro": parts.settings.batch.micro,
            **phases.row,
            **{f"trainkit {key} MiB": value / MIB for key, value in told.items() if value is not None},
            **peaks(asked, before),
            "allocated MiB": None if highest is None else highest / MIB,
        }

    rows = each_built(asked, {name: words_of(asked, name) for name in names}, looked_at, problems)
    return {"problems": problems, "said": f"{len(rows)} of {len(names)} configurations", "memory": rows}


class Phases:
    """What is allocated after each phase, and at its highest in it."""

    def __init__(self, asked: Asked) -> None:
        self.row: dict[str, float] = {}
        self.highest: list[int] = []
        self._asked = asked

    def note(self, phase: str) -> None:
        """A phase is over."""
        import torch

        if self._asked.cuda:
            synchronize("cuda")
            self.highest.append(torch.cuda.max_memory_allocated())
            self.row[f"{phase} MiB"] = torch.cuda.memory_allocated() / MIB
            self.row[f"{phase} peak MiB"] = self.highest[-1] / MIB
            torch.cuda.reset_peak_memory_stats()


def step(parts: Any, phases: Phases) -> None:
    """Two whole steps, then one in its phases, as `trainkit.trainer.loop.optimizer_step` does it."""
    from trainkit.trainer.loop import batches, optimizer_step, split_micro
    from trainkit.trainer.optim import casts_kept

    given, strategy = batches(parts, 0), parts.strategy
    for number in range(2):
        batch = next(given)
        optimizer_step(parts, number, batch, batch.counted)
    phases.note("first steps")
    batch = next(given)
    micros = split_micro(batch, parts)
    with casts_kept():
        for index, inputs in enumerate(micros):
            last = index + 1 == len(micros)
            with strategy.micro_step(last=last):
                with parts.autocast:
                    loss = strategy.model(**inputs)
                phases.note(f"forward {index}")
                strategy.backward(loss / max(1, batch.counted), last=last)
                del loss
            phases.note(f"backward {index}")
    strategy.update(1e-4)
    phases.note("update")
