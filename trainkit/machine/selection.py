"""Which cards a run gets: `devices.select` applied inside what the caller's CUDA_VISIBLE_DEVICES allows. Pure.

What MIG has split counts as its parts: from here on a card is what one process can use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.occupancy import computing, is_idle, is_part, occupants

# devices.order -> CUDA_DEVICE_ORDER, and why it is set
ORDER = {
    "pci": ("PCI_BUS_ID", "cards are counted as nvidia-smi counts them"),
    "fastest": ("FASTEST_FIRST", "cards are counted as CUDA counts them by itself"),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen cards in rank order.

    cards: what was found; shorter than asked for when `missing` is not empty.
    missing: what was asked for and is not there, one sentence each.
    """

    cards: tuple[Gpu, ...]
    missing: tuple[str, ...] = ()


def usable(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The cards in PCI order, a split one replaced by its parts, which keep its index and have names of their own."""
    return tuple(
        unit for gpu in sorted(gpus, key=lambda gpu: gpu.index) for unit in (parts(gpu) if gpu.mig else (gpu,))
    )


def parts(gpu: Gpu) -> tuple[Gpu, ...]:
    """What MIG has split off a card, each as a card of its own."""
    return tuple(
        replace(
            gpu,
            uuid=part.uuid,
            name=f"{gpu.name} MIG {part.profile}",
            memory_total=part.memory_total,
            memory_free=part.memory_free,
            memory_reserved=0,
            processes=part.processes,
            held_by=part.held_by,
            instances=(),
        )
        for part in gpu.instances
    )


def allocation(facts: Facts) -> tuple[Gpu, ...]:
    """The cards that the caller may use, in the order of the variables that say so, else in PCI order.

    As CUDA reads CUDA_VISIBLE_DEVICES: an invalid entry hides itself and all after it, a duplicate empties the list,
    and the index of a split card means its first part (CUDA C programming guide, environment variables). Indices count
    in PCI order unless the caller's CUDA_DEVICE_ORDER says otherwise. ROCm reads ROCR_VISIBLE_DEVICES first, and what
    HIP_VISIBLE_DEVICES (or, without it, CUDA_VISIBLE_DEVICES) then counts is what that left.
    """
    return _allocated(facts)[0]


def unread(facts: Facts) -> str:
    """The entry of the caller's variables that names no card: CUDA ignores it and all later ones; empty for none."""
    return _allocated(facts)[1]


def _allocated(facts: Facts) -> tuple[tuple[Gpu, ...], str]:
    units = usable(facts.gpus)
    if any(gpu.vendor == "amd" for gpu in facts.gpus):
        inner, wrong = _allowed(facts.rocr_devices, units, {gpu.uuid: gpu.index for gpu in units})
        visible = facts.visible_devices if facts.hip_devices is None else facts.hip_devices
        cards, second = _allowed(visible, inner, {gpu.uuid: position for position, gpu in enumerate(inner)})
        return cards, wrong or second
    return _allowed(facts.visible_devices, units, numbers(facts.gpus, told_order(facts)))


def restriction(facts: Facts) -> str:
    """The caller's variable that limits the cards, as it would be written; empty where none does."""
    amd = any(gpu.vendor == "amd" for gpu in facts.gpus)
    given = {"ROCR_VISIBLE_DEVICES": facts.rocr_devices, "HIP_VISIBLE_DEVICES": facts.hip_devices} if amd else {}
    given["CUDA_VISIBLE_DEVICES"] = facts.visible_devices
    return " ".join(f"{name}={value}" for name, value in given.items() if value is not None)


def told_order(facts: Facts) -> str:
    """How the caller's environment tells CUDA to count; where it does not, as nvidia-smi and schedulers do."""
    return "fastest" if facts.device_order == "FASTEST_FIRST" else "pci"


def _allowed(visible: str | None, units: Sequence[Gpu], number: Mapping[str, int]) -> tuple[tuple[Gpu, ...], str]:
    """The cards that a variable leaves, and the entry that ends its reading early; -1 and nothing do so on purpose."""
    if visible is None:
        return tuple(units), ""
    allowed: list[Gpu] = []
    for entry in visible.split(","):
        found = matching(entry.strip(), units, number)
        if entry.strip().isdecimal():
            found = found[:1]
        if len(found) != 1:
            return tuple(allowed), "" if entry.strip() == "-1" else entry.strip()
        if found[0] in allowed:
            return (), entry.strip()
        allowed.append(found[0])
    return tuple(allowed), ""


def numbers(gpus: Sequence[Gpu], order: str) -> Mapping[str, int]:
    """The number of each card and part by UUID, counted in an order of `devices.order`; parts have their card's."""
    count = {gpu.index: position for position, gpu in enumerate(ordered(gpus, order))} if order == "fastest" else {}
    return {unit.uuid: count.get(unit.index, unit.index) for unit in (*usable(gpus), *gpus)}


def matching(entry: int | str, gpus: Sequence[Gpu], number: Mapping[str, int] | None = None) -> tuple[Gpu, ...]:
    """The cards that an index, a UUID or a UUID prefix (with or without ``GPU-``) names.

    number: how the cards are counted, by UUID; by default in PCI order.
    """
    name = str(entry)
    if name.isdecimal():
        return tuple(gpu for gpu in gpus if (number or {}).get(gpu.uuid, gpu.index) == int(name))
    if not name:
        return ()
    return tuple(gpu for gpu in gpus if gpu.uuid.startswith(name) or gpu.uuid.removeprefix("GPU-").startswith(name))


def speed(gpu: Gpu) -> tuple[float, tuple[int, int], int]:
    """What cards are ranked by: units times clock where the driver tells them, then architecture, then memory."""
    return (gpu.cores or 0) * (gpu.clock_limit or 0), gpu.compute_capability, gpu.memory_total


def ordered(gpus: Sequence[Gpu], order: str) -> tuple[Gpu, ...]:
    """`pci` keeps the allocation's order; `fastest` puts the fastest card first.

    CUDA's own FASTEST_FIRST is a guess whose rule is not documented; this one is written into the plan card by card.
    """
    return tuple(sorted(gpus, key=speed, reverse=True)) if order == "fastest" else tuple(gpus)


def take(count: int, allowed: Sequence[Gpu]) -> Selection:
    """The first `count` cards of the allocation."""
    asked = "1 GPU is" if count == 1 else f"{count} GPUs are"
    missing = () if count <= len(allowed) else (f"{asked} asked for, {len(allowed)} can be used here",)
    return Selection(tuple(allowed[:count]), missing)


def take_free(count: int | None, allowed: Sequence[Gpu], idle_below: int) -> Selection:
    """Idle cards: first those without computing processes, then those with the most free memory.

    count: how many; None for all that are idle. idle_below: bytes, as for :func:`is_idle`.
    """
    idle = [gpu for gpu in allowed if is_idle(gpu, idle_below)]
    idle.sort(key=lambda gpu: (bool(computing(gpu)), -gpu.memory_free))
    number = max(len(idle), 1) if count is None else count
    if number <= len(idle):
        return Selection(tuple(idle[:number]))
    asked = "1 idle GPU is" if number == 1 else f"{number} idle GPUs are"
    busy = [f"; {occupants(gpu)}" for gpu in allowed if not is_idle(gpu, idle_below)]
    return Selection(tuple(idle), (f"{asked} asked for, {len(idle)} of {len(allowed)} can be had{''.join(busy)}",))


def pick(names: Sequence[int | str], facts: Facts, order: str = "pci") -> Selection:
    """The named cards in the given order, each inside the allocation. order: how indices count, of `devices.order`."""
    allowed, number = allocation(facts), numbers(facts.gpus, order)
    cards: list[Gpu] = []
    missing: list[str] = []
    for name in names:
        found = matching(name, allowed, number)
        if len(found) == 1:
            cards.append(found[0])
        else:
            missing.append(_unnamed(name, found, facts, number))
    return Selection(tuple(cards), tuple(missing))


def _unnamed(name: int | str, found: Sequence[Gpu], facts: Facts, number: Mapping[str, int]) -> str:
    if found and is_part(found[0]):
        return f"card `{name}` is split by MIG; name one of its parts: {', '.join(gpu.uuid for gpu in found)}"
    if found:
        return f"`{name}` names {len(found)} cards ({', '.join(gpu.uuid for gpu in found)})"
    if matching(name, usable(facts.gpus), number):
        return f"card `{name}` lies outside {restriction(facts)}"
    whole = matching(name, facts.gpus, number)
    if whole and whole[0].instances:
        return (
            f"card `{name}` is split by MIG; name one of its parts: {', '.join(each.uuid for each in parts(whole[0]))}"
        )
    return f"card `{name}` is split by MIG into no parts" if whole else f"there is no card `{name}` here"


def duplicates(names: Sequence[int | str], facts: Facts, order: str = "pci") -> tuple[str, ...]:
    """The entries of a list that name a card for a second time, also by its UUID after its index."""
    seen: set[str] = set()
    twice: list[str] = []
    for name in names:
        found = matching(name, usable(facts.gpus), numbers(facts.gpus, order))
        identity = found[0].uuid if len(found) == 1 else str(name)
        if identity in seen:
            twice.append(str(name))
        seen.add(identity)
    return tuple(twice)
