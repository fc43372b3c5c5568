"""Which cards a run gets: `devices.select` applied inside what the caller's CUDA_VISIBLE_DEVICES allows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.hardware.facts import Facts, Gpu


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen cards in rank order.

    cards: what was found; shorter than asked for when `missing` is not empty.
    missing: what was asked for and is not there, one sentence each.
    """

    cards: tuple[Gpu, ...]
    missing: tuple[str, ...] = ()


def allocation(facts: Facts) -> tuple[Gpu, ...]:
    """The cards that the caller may use, in the order of CUDA_VISIBLE_DEVICES, else in PCI order.

    As CUDA reads the variable: an invalid entry hides itself and all after it, a duplicate empties the list
    (CUDA C programming guide, environment variables).
    """
    if facts.visible_devices is None:
        return tuple(sorted(facts.gpus, key=lambda gpu: gpu.index))
    allowed: list[Gpu] = []
    for entry in facts.visible_devices.split(","):
        found = matching(entry.strip(), facts.gpus)
        if len(found) != 1:
            break
        if found[0] in allowed:
            return ()
        allowed.append(found[0])
    return tuple(allowed)


def matching(entry: int | str, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The cards that an index, a UUID or a UUID prefix (with or without ``GPU-``) names."""
    name = str(entry)
    if name.isdecimal():
        return tuple(gpu for gpu in gpus if gpu.index == int(name))
    if not name:
        return ()
    return tuple(gpu for gpu in gpus if gpu.uuid.startswith(name) or gpu.uuid.removeprefix("GPU-").startswith(name))


def ordered(gpus: Sequence[Gpu], order: str) -> tuple[Gpu, ...]:
    """`pci` keeps the allocation's order; `fastest` puts the newest architecture with the most memory first.

    CUDA's own FASTEST_FIRST is a guess whose rule is not documented; this one is written into the plan card by card.
    """
    if order != "fastest":
        return tuple(gpus)
    return tuple(sorted(gpus, key=lambda gpu: (gpu.compute_capability, gpu.memory_total), reverse=True))


def take(count: int, allowed: Sequence[Gpu]) -> Selection:
    """The first `count` cards of the allocation."""
    asked = "1 GPU is" if count == 1 else f"{count} GPUs are"
    missing = () if count <= len(allowed) else (f"{asked} asked for, {len(allowed)} can be used here",)
    return Selection(tuple(allowed[:count]), missing)


def pick(names: Sequence[int | str], facts: Facts) -> Selection:
    """The named cards in the given order, each of which must lie inside the allocation."""
    allowed = allocation(facts)
    cards: list[Gpu] = []
    missing: list[str] = []
    for name in names:
        found = matching(name, allowed)
        if len(found) == 1:
            cards.append(found[0])
        elif found:
            missing.append(f"`{name}` names {len(found)} cards ({', '.join(gpu.uuid for gpu in found)})")
        elif matching(name, facts.gpus):
            missing.append(f"card `{name}` lies outside CUDA_VISIBLE_DEVICES={facts.visible_devices}")
        else:
            missing.append(f"there is no card `{name}` here")
    return Selection(tuple(cards), tuple(missing))


def duplicates(names: Sequence[int | str], facts: Facts) -> tuple[str, ...]:
    """The entries of a list that name a card for a second time, also by its UUID after its index."""
    seen: set[str] = set()
    twice: list[str] = []
    for name in names:
        found = matching(name, facts.gpus)
        identity = found[0].uuid if len(found) == 1 else str(name)
        if identity in seen:
            twice.append(str(name))
        seen.add(identity)
    return tuple(twice)
