"""Rules that are asked with every decision of a plan, and the tables of how settings reach a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.launch_plan.context import Context
from trainkit.optimizers import ON_DEEPSPEED, OPTIMIZERS, Incompatibility
from trainkit.recipe.merge import value_at
from trainkit.recipe.resolved import Asked
from trainkit.recipe.schema.fields import schema
from trainkit.rule import Check, Rule
from trainkit.text import pluralize

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

PlanRule = Check[Context]
InputRule = Check[Asked]  # before a device is chosen
SHARED = ("ddp", "fsdp", *ON_DEEPSPEED)  # strategies that need a process group


def incompatible(key: str, when: Callable[[Context], object], why: str, instead: str) -> Rule[Context]:
    """A rule against choices that cannot run together."""
    return Rule(key, when, _choices, f"closest supported choice: {instead}", why)


def unsupported_optimizers(program: str) -> tuple[Rule[Context], ...]:
    """For each optimizer the strategies and devices with which programs of a kind cannot use it."""

    def rule(name: str, found: Incompatibility) -> Rule[Context]:
        def meets(c: Context) -> bool:
            fits = not found.strategies or c.strategy in found.strategies
            return c.recipe.optimizer.name == name and fits and (not found.devices or c.device in found.devices)

        return incompatible("optimizer.name", meets, found.reason, found.instead)

    rows = ((name, found) for name, each in OPTIMIZERS.items() for found in each.unsupported)
    return tuple(rule(name, found) for name, found in rows if program in found.programs)


def _choices(c: Context) -> str:
    ranks = pluralize(c.ranks, "process", "es")
    return (
        f"unsupported combination: strategy {c.strategy} with launcher {c.launcher}, {ranks} on {c.device}, {c.dtype}"
    )


@dataclass(frozen=True, slots=True)
class Support:
    """The way of the settings at or below a key.

    by: what carries them, as people write it (`--learning_rate`, `deepspeed.json`, `the launch`); empty where nothing
        does, and then `why` and `instead` say so.
    accepted: values that the program follows by itself. part_of: the key that is the cause where that is lost, too.
    implied_by: the key whose value, where it is carried, may imply this one, which nobody wrote then.
    """

    by: str = ""
    why: str = ""
    instead: str = ""
    accepted: tuple[object, ...] = ()
    part_of: str = ""
    implied_by: str = ""


Table = Mapping[str, Support]  # by dotted key; the longest prefix of a key counts, and "" is that of all


def unsupported(why: str, instead: str, *accepted: object) -> Support:
    """For settings that reach no program of a kind. accepted: values that the program follows by itself."""
    return Support("", why, instead, accepted)


# Sections that only a recipe with every default written out has together, for a program that none of them reaches.
WHOLE = {"data", "efficiency", "eval", "logging", "model", "optimizer", "sample", "schedule", "train"}
LAUNCH = Support("the launch")
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
OWN_CHECKPOINT = unsupported(
    "which folder holds a checkpoint of the program's own is not known",
    "pass the checkpoint in program.args, as resume_from_checkpoint, and leave checkpoint.resume out",
    "never",
)


def way(table: Table, key: str) -> Support | None:
    """The table's entry for a key; None where it has none."""
    while key not in table and key:
        key = key.rpartition(".")[0]
    return table.get(key)


def unreached(resolved: Resolved, table: Table, kind: str) -> Iterator[Diagnostic]:
    """An error for each key that a layer gives and that cannot reach a program of this kind. Defaults may be lost."""
    if resolved.recipe.program.reads_recipe and kind != "builtin":  # it finds them all in the recipe itself
        return
    lost = {key: way(table, key) for key in _lost(resolved, table)}
    for part, found in list(lost.items()):
        if found and resolved.given(found.part_of) == resolved.given(part):  # which nobody wrote: the part implies it
            lost.pop(found.part_of, None)
        if found and found.implied_by not in lost and resolved.given(found.implied_by) == resolved.given(part):
            lost.pop(part)
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
        if resolved.given(key) is None or (found and (found.by or value_at(resolved.tree, key) in found.accepted)):
            continue
        if whole and value_at(resolved.tree, key) in (each.default for each in schema().settings.get(key, ())):
            continue
        yield key


def _is_whole(resolved: Resolved) -> bool:
    """Whether one file gives every section, as runs of plain programs once left it: a default is no wish there."""
    given = {(key.partition(".")[0], origin.source) for key in resolved.history if (origin := resolved.given(key))}
    return any({name for name, each in given if each == source} >= WHOLE for _, source in given)
