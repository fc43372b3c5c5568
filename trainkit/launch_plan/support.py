"""What decides whether a recipe can run as a whole, and one corner of it that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainkit.errors import Diagnostic
from trainkit.optimizers import ON_DEEPSPEED
from trainkit.recipe.merge import value_at
from trainkit.recipe.schema.fields import schema

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved


Amount = Literal["one", "several"]
SHARED = ("ddp", "fsdp", *ON_DEEPSPEED)  # strategies that need a process group


@dataclass(frozen=True, slots=True)
class Combination:
    """The choices that may not go together. ranks: over all nodes. order: of the chosen cards' indices."""

    strategy: str
    launcher: str
    program: str
    device: str
    ranks: Amount
    nodes: Amount = "one"
    dtype: str = "fp32"
    eval_dtype: Literal["same", "other"] = "same"
    evaluates: str = "fp32"  # the format of evaluation
    recompute: Literal["whole", "selective"] = "whole"  # of the blocks that gradient_checkpointing names
    restarts: Literal["no", "yes"] = "no"
    order: Literal["ascending", "other"] = "ascending"
    cards: Literal["nvidia", "mig", "amd"] = "nvidia"
    seen: Amount = "one"  # cards that each process sees for every rank of its node
    total: Literal["open", "given"] = "open"  # the global batch
    saving: Literal["waited for", "asynchronous"] = "waited for"
    optimizer: str = "adamw_torch"
    weights: str = "fp32"
    compiled: Literal["no", "auto", "model", "blocks"] = "no"
    graphs: Literal["none", "recorded"] = "none"  # CUDA graphs, by what compiles the model
    passes: Amount = "one"  # forward and backward, in each optimizer step
    adapters: Literal["none", "lora", "dora"] = "none"
    quantized: str = "0"  # bits of frozen weights
    swapping: Literal["no", "nvme"] = "no"
    attention: str = "auto"
    model: str = "gpt"
    micro: Literal["given", "searched"] = "given"
    xla_settings: Literal["none", "given"] = "none"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One unsupported corner. when: field of Combination -> values; all must match."""

    when: dict[str, tuple[str, ...]]
    key: str  # the recipe key to point at
    reason: str
    instead: str

    def matches(self, combination: Combination) -> bool:
        """Whether the combination lies in this corner."""
        return all(getattr(combination, name) in values for name, values in self.when.items())


@dataclass(frozen=True, slots=True)
class Reach:
    """The way of the settings at or below a key.

    by: what carries them, as people write it (`--learning_rate`, `deepspeed.json`, `the launch`); empty where nothing
        does, and then `why` and `instead` say so.
    anyway: values that the program follows by itself. part_of: the key that is the cause where that is lost, too.
    """

    by: str = ""
    why: str = ""
    instead: str = ""
    anyway: tuple[object, ...] = ()
    part_of: str = ""


Table = Mapping[str, Reach]  # by dotted key; the longest prefix of a key counts, and "" is that of all


def no_way(why: str, instead: str, *anyway: object) -> Reach:
    """For settings that reach no program of a kind. anyway: values that the program follows by itself."""
    return Reach("", why, instead, anyway)


# Sections that only a recipe with every default written out has together, for a program that none of them reaches.
WHOLE = {"data", "efficiency", "eval", "logging", "model", "optimizer", "sample", "schedule", "train"}
LAUNCH = Reach("the launch")
# What is decided before any program starts, whatever it is.
LAUNCHED: Table = dict.fromkeys(
    (
        "version",
        "name",
        "program",
        "devices",
        "nodes",
        "launcher",
        "hang",
        "container",
        "env",
        "env_from",
        "cluster",
        "output",
        "strategy.kind",
    ),
    LAUNCH,
)
# Of programs that save by themselves.
OWN_CHECKPOINT = no_way(
    "which folder holds a checkpoint of the program's own is not known",
    "pass the checkpoint in program.args, as resume_from_checkpoint, and leave checkpoint.resume out",
    "never",
)


def way(table: Table, key: str) -> Reach | None:
    """The table's entry for a key; None where it has none."""
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((table[prefix] for prefix in prefixes if prefix in table), None)


def unreached(resolved: Resolved, table: Table, kind: str) -> Iterator[Diagnostic]:
    """An error for each key that a layer gives and that cannot reach a program of this kind. Defaults may be lost."""
    if resolved.recipe.program.reads_recipe and kind != "builtin":  # it finds them all in the recipe itself
        return
    lost = {key: way(table, key) for key in _lost(resolved, table)}
    for part, found in list(lost.items()):
        if found and resolved.given(found.part_of) == resolved.given(part):  # which nobody wrote: the part implies it
            lost.pop(found.part_of, None)
    for key, found in lost.items():
        if found and found.part_of in lost:
            continue
        parts = [part for part, each in lost.items() if each and each.part_of == key]
        hint = (found and found.instead) or f"leave {key} out, or pass what it means in program.args"
        yield Diagnostic(
            "error",
            f"{key} cannot reach a program of kind {kind}",
            key=key,
            origin=resolved.given(key),
            why=found.why if found else "its libraries have no such setting",
            hint=f"{hint}, and leave {' and '.join(parts)} out" if parts else hint,
        )


def _lost(resolved: Resolved, table: Table) -> Iterator[str]:
    """The keys that a layer gives and that nothing carries, but for values that are in force anyway."""
    whole = _is_whole(resolved)
    for key in resolved.history:
        found = way(table, key)
        if resolved.given(key) is None or (found and (found.by or value_at(resolved.tree, key) in found.anyway)):
            continue
        if whole and value_at(resolved.tree, key) in (each.default for each in schema().settings.get(key, ())):
            continue
        yield key


def _is_whole(resolved: Resolved) -> bool:
    """Whether one file gives every section, as runs of plain programs once left it: a default is no wish there."""
    given = {(key.partition(".")[0], origin.source) for key in resolved.history if (origin := resolved.given(key))}
    return any({name for name, each in given if each == source} >= WHOLE for _, source in given)
