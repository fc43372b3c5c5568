"""Nodes, processes and devices: how many ranks there are, and which rank sits on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainkit.errors import Diagnostic, RecipeError
from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.occupancy import is_made_up, is_part
from trainkit.machine.selection import (
    Selection,
    allocation,
    duplicates,
    ordered,
    pick,
    restriction,
    take,
    take_free,
)
from trainkit.plan.model import NodeGroup, Notice, Topology
from trainkit.planner.card_notices import card_remarks, idle_below
from trainkit.text import counted

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

Device = Literal["cpu", "cuda", "mps", "xla"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks on devices. cards: the chosen GPUs in rank order, empty off CUDA or where this machine lacks them."""

    topology: Topology
    cards: tuple[Gpu, ...]
    device_reason: str
    notices: tuple[Notice, ...] = ()


def choose_device(resolved: Resolved, facts: Facts) -> tuple[Device, str]:
    """The kind of device and why: as asked for, else CUDA, then MPS, then CPU; never XLA by itself."""
    devices = resolved.recipe.devices
    if devices.select == "none":
        if devices.type in {"cuda", "mps", "xla"}:
            raise RecipeError(
                Diagnostic(
                    "error",
                    f"devices.type is {devices.type}, but devices.select is none",
                    key="devices.select",
                    origin=resolved.origin("devices.select"),
                    hint="Leave devices.select out to use a card, or set devices.type to cpu.",
                )
            )
        return "cpu", "devices.select is none"
    if devices.type != "auto":
        return devices.type, f"devices.type is {devices.type}"
    if not isinstance(devices.select, str) or devices.select == "free":
        return "cuda", "devices.select asks for cards"
    if allocation(facts):
        return "cuda", f"{counted(len(allocation(facts)), 'GPU')} can be used here"
    if facts.gpus:
        return "cpu", f"{restriction(facts) or 'MIG'} hides every GPU"
    if facts.mps:
        return "mps", "Apple silicon without a CUDA card"
    return "cpu", "there is no GPU here"


def place(resolved: Resolved, facts: Facts) -> Placement:
    """Decide device, processes per node and cards. Raises RecipeError for what is wrong on any machine."""
    device, reason = choose_device(resolved, facts)
    if device == "cuda":
        return _place_on_cards(resolved, facts, reason)
    _refuse_selection_off_cuda(resolved, device)
    processes = resolved.recipe.nodes.processes_per_node
    if processes == "auto":
        processes = 1 if device in ("mps", "xla") or resolved.recipe.strategy.kind == "single" else 2
    notices = _off_cards(resolved, facts, device, reason)
    return Placement(_topology(resolved, device, (device,) * processes), (), reason, notices)


def _off_cards(resolved: Resolved, facts: Facts, device: Device, reason: str) -> tuple[Notice, ...]:
    """What a run that uses no CUDA card should know; the empty variable hides cards on purpose, others may be stale."""
    if device == "mps" and not facts.mps:
        return (Notice("blocker", "This machine has no MPS device.", "Set devices.type to auto or cpu."),)
    devices = resolved.recipe.devices
    if device != "cpu" or devices.type != "auto" or devices.select == "none":
        return ()
    if not facts.gpus and devices.select != "all":
        return ()
    severity: Literal["note", "warning"] = "note" if facts.visible_devices == "" else "warning"
    hint = "Set devices.type to cpu if that is meant, else see `trainkit gpus`."
    return (Notice(severity, f"The run uses the CPU: {reason}.", hint),)


def _place_on_cards(resolved: Resolved, facts: Facts, reason: str) -> Placement:
    recipe = resolved.recipe
    selection, wanted = _select(resolved, facts)
    explicit = recipe.nodes.processes_per_node
    if explicit not in {"auto", wanted}:
        raise RecipeError(
            Diagnostic(
                "error",
                f"{wanted} cards are selected for {explicit} processes on each node",
                key="nodes.processes_per_node",
                origin=resolved.origin("nodes.processes_per_node") or resolved.origin("devices.select"),
                why="Each process uses exactly one card.",
                hint=f"Set nodes.processes_per_node to {wanted}, or devices.select to {explicit}.",
            )
        )
    notices = tuple(
        Notice("blocker", f"Not on this machine: {what}{_why_none(facts)}.", _hint(recipe.devices.select, facts))
        for what in selection.missing
    )
    if selection.missing:
        return Placement(_topology(resolved, "cuda", _names_without_cards(resolved, wanted)), (), reason, notices)
    return Placement(
        _topology(resolved, "cuda", tuple(gpu.uuid for gpu in selection.cards)),
        selection.cards,
        reason,
        card_remarks(resolved, selection.cards, facts),
    )


def _why_none(facts: Facts) -> str:
    """Why no card can be used; empty where one can."""
    if allocation(facts):
        return ""
    if facts.gpus:
        return f": {restriction(facts) or 'MIG'} hides every card"
    told = next((facts.notes[name] for name in ("gpus", "amd", "nvidia") if name in facts.notes), "")
    return f": {told}" if told else ""


def _hint(select: object, facts: Facts) -> str:
    return (
        "Wait, or name cards and set devices.when_busy: warn."
        if select == "free" and allocation(facts)
        else "`devices.select: auto` takes what is there."
    )


def _select(resolved: Resolved, facts: Facts) -> tuple[Selection, int]:
    """The cards, and how many were asked for."""
    recipe = resolved.recipe
    select, allowed = recipe.devices.select, ordered(allocation(facts), recipe.devices.order)
    if isinstance(select, list):
        _check_list(resolved, facts, select)
        return pick(select, facts, recipe.devices.order), len(select)
    count = recipe.nodes.processes_per_node
    if select == "free":
        _check_one_node(resolved)
        amount = count if count != "auto" else 1 if recipe.strategy.kind == "single" else None
        selection = take_free(amount, allowed, idle_below(resolved))
        return selection, amount or max(len(selection.cards), 1)
    if select == "all":
        wanted = max(len(allowed), 1)
    elif isinstance(select, int):
        wanted = select
    elif recipe.nodes.processes_per_node != "auto":
        wanted = recipe.nodes.processes_per_node
    else:
        wanted = 1 if recipe.strategy.kind == "single" else max(len(allowed), 1)
    return take(wanted, allowed), wanted


def _check_list(resolved: Resolved, facts: Facts, select: list[int | str]) -> None:
    problems = []
    if not select:
        problems.append(("devices.select is an empty list", "Use `none` for no card, or name at least one."))
    own = "Name each card once; a process needs a card of its own."
    problems += [
        (f"devices.select names card `{name}` twice", own)
        for name in duplicates(select, facts, resolved.recipe.devices.order)
    ]
    problems += [
        (f"devices.select names `{name}`, which no card can be", "Name cards by index (from 0), UUID or MIG id.")
        for name in select
        if not str(name).strip() or (isinstance(name, int) and name < 0)
    ]
    by_name = [name for name in select if not str(name).isdecimal()]
    if by_name and resolved.recipe.nodes.count > 1:
        problems.append(
            (
                f"devices.select names `{by_name[0]}`, but the run has {resolved.recipe.nodes.count} nodes",
                "Use indices or a count.",
            )
        )
    if problems:
        origin = resolved.origin("devices.select")
        raise RecipeError(
            Diagnostic("error", what, key="devices.select", origin=origin, hint=hint) for what, hint in problems
        )


def _check_one_node(resolved: Resolved) -> None:
    if resolved.recipe.nodes.count > 1:
        raise RecipeError(
            Diagnostic(
                "error",
                f"devices.select is free, but the run has {resolved.recipe.nodes.count} nodes",
                key="devices.select",
                origin=resolved.origin("devices.select"),
                why="Which cards are idle differs from machine to machine, and one plan serves all nodes.",
                hint="Let the scheduler choose, or use a count.",
            )
        )


def _refuse_selection_off_cuda(resolved: Resolved, device: Device) -> None:
    if isinstance(resolved.recipe.devices.select, str):
        return
    raise RecipeError(
        Diagnostic(
            "error",
            f"devices.select chooses CUDA cards, but the run uses {device}",
            key="devices.select",
            origin=resolved.origin("devices.select"),
            hint="Set devices.type to cuda, or leave devices.select out.",
        )
    )


def _names_without_cards(resolved: Resolved, wanted: int) -> tuple[str, ...]:
    """What to write where this machine lacks the cards, so that the plan can be read: the recipe's list, or indices."""
    select = resolved.recipe.devices.select
    return (
        tuple(str(name) for name in select)
        if isinstance(select, list)
        else tuple(str(index) for index in range(wanted))
    )


def _topology(resolved: Resolved, device: Device, devices: tuple[str, ...]) -> Topology:
    return Topology(device, (NodeGroup(resolved.recipe.nodes.count, len(devices), devices),))


def name_cards(placement: Placement, launcher: str, strategy: str) -> Topology:
    """The topology with each card named as is sound for those who read CUDA_VISIBLE_DEVICES.

    A UUID is the same card whatever the order of counting. Other nodes have other UUIDs, HIP counts, and
    DeepSpeed reads the variable as integers (its launcher: https://github.com/deepspeedai/DeepSpeed/issues/5278;
    its runtime: cuda_accelerator.py, _get_nvml_gpu_id).
    """
    group = placement.topology.groups[0]
    if not placement.cards or kind_of_cards(placement.cards) == "mig":
        return placement.topology
    counts = launcher == "deepspeed" or strategy.startswith("zero") or group.count > 1
    counts = counts or any(is_made_up(gpu) for gpu in placement.cards)
    if not counts and kind_of_cards(placement.cards) == "nvidia":
        return placement.topology
    devices = tuple(str(gpu.index) for gpu in placement.cards)
    return Topology(placement.topology.device, (NodeGroup(group.count, group.processes, devices),))


def kind_of_cards(cards: Sequence[Gpu]) -> Literal["nvidia", "mig", "amd"]:
    """What launchers and programs must know of cards; `nvidia` also where there are none."""
    if any(map(is_part, cards)):
        return "mig"
    return "amd" if any(gpu.vendor == "amd" for gpu in cards) else "nvidia"
