"""Which GPUs a run gets: `devices.select` applied inside what the caller's CUDA_VISIBLE_DEVICES allows. Pure.

What MIG has split counts as its parts: from here on a GPU is what one process can use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainkit.machine.facts import Facts, Gpu

# devices.order -> CUDA_DEVICE_ORDER, and why it is set
ORDER = {
    "pci": ("PCI_BUS_ID", "GPUs are counted as nvidia-smi counts them"),
    "fastest": ("FASTEST_FIRST", "GPUs are counted as CUDA counts them by itself"),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen GPUs in rank order.

    cards: what was found; shorter than asked for when `missing` is not empty.
    missing: what was asked for and is not there, one sentence each.
    """

    cards: tuple[Gpu, ...]
    missing: tuple[str, ...] = ()


def usable(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs in PCI order, a split one replaced by its parts, which keep its index and have names of their own."""
    in_order = sorted(gpus, key=lambda gpu: gpu.index)
    return tuple(unit for gpu in in_order for unit in (_parts(gpu) if gpu.mig else [gpu]))


def _parts(gpu: Gpu) -> list[Gpu]:
    """What MIG has split off a GPU, each as a GPU of its own."""
    return [
        replace(
            gpu,
            uuid=part.uuid,
            name=f"{gpu.name} MIG {part.profile}",
            memory_total=part.memory_total,
            memory_free=part.memory_free,
            memory_reserved=part.memory_reserved,
            processes=part.processes,
            held_by=part.held_by,
            wanted_by=part.wanted_by,
            instances=(),
        )
        for part in gpu.instances
    ]


def is_part(gpu: Gpu) -> bool:
    """Whether a GPU of :func:`usable` is a part that MIG split off: a split GPU itself is not among these."""
    return gpu.mig


def kind_of_cards(cards: Sequence[Gpu]) -> Literal["nvidia", "mig", "amd"]:
    """What launchers and programs must know of GPUs; `nvidia` also where there are none."""
    if any(map(is_part, cards)):
        return "mig"
    return "amd" if any(gpu.vendor == "amd" for gpu in cards) else "nvidia"


def is_simulated(gpu: Gpu) -> bool:
    """Whether a GPU is that of a machine profile, which has no UUID."""
    return gpu.uuid.startswith("profile-")


def allocation(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs that the caller may use, in the order of the variables that say so, else in PCI order."""
    return _allocated(facts)[0]


def unread(facts: Facts) -> str:
    """The entry of the caller's variables that names no GPU: CUDA ignores it and all later ones; empty for none."""
    return _allocated(facts)[1]


def _allocated(facts: Facts) -> tuple[tuple[Gpu, ...], str]:
    units = usable(facts.gpus)
    if any(gpu.vendor == "amd" for gpu in facts.gpus):
        # ROCm reads ROCR_VISIBLE_DEVICES first; what HIP_VISIBLE_DEVICES (or, without it, CUDA_VISIBLE_DEVICES) then
        # counts is what that left.
        inner, wrong = _allowed(facts.rocr_devices, units, {gpu.uuid: gpu.index for gpu in units})
        visible = facts.visible_devices if facts.hip_devices is None else facts.hip_devices
        cards, second = _allowed(visible, inner, {gpu.uuid: position for position, gpu in enumerate(inner)})
        return cards, wrong or second
    # Where the caller's CUDA_DEVICE_ORDER does not say how to count, schedulers and nvidia-smi count in PCI order.
    order = "fastest" if facts.device_order == "FASTEST_FIRST" else "pci"
    return _allowed(facts.visible_devices, units, _numbers(facts.gpus, order))


def _allowed(visible: str | None, units: Sequence[Gpu], number: Mapping[str, int]) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that a variable leaves, and the entry that ends its reading early; -1 and nothing do so on purpose.

    As CUDA reads CUDA_VISIBLE_DEVICES: an invalid entry hides itself and all after it, a duplicate empties the list,
    and the index of a split GPU means its first part (CUDA C programming guide, environment variables).
    """
    if visible is None:
        return tuple(units), ""
    allowed: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        found = matching(entry, units, number)
        if entry.isdecimal():
            found = found[:1]
        if len(found) != 1:
            return tuple(allowed), "" if entry == "-1" else entry
        if found[0] in allowed:
            return (), entry
        allowed.append(found[0])
    return tuple(allowed), ""


def restriction(facts: Facts) -> str:
    """The caller's variable that limits the GPUs, as it would be written; empty where none does."""
    amd = any(gpu.vendor == "amd" for gpu in facts.gpus)
    given = {"ROCR_VISIBLE_DEVICES": facts.rocr_devices, "HIP_VISIBLE_DEVICES": facts.hip_devices} if amd else {}
    given["CUDA_VISIBLE_DEVICES"] = facts.visible_devices
    return " ".join(f"{name}={value}" for name, value in given.items() if value is not None)


def matching(entry: int | str, gpus: Sequence[Gpu], number: Mapping[str, int] | None = None) -> tuple[Gpu, ...]:
    """The GPUs that an index, a UUID or a UUID prefix (with or without ``GPU-``) names.

    number: how the GPUs are counted, by UUID; by default in PCI order.
    """
    name = str(entry)
    if name.isdecimal():
        return tuple(gpu for gpu in gpus if (number or {}).get(gpu.uuid, gpu.index) == int(name))
    if not name:
        return ()
    return tuple(gpu for gpu in gpus if gpu.uuid.startswith(name) or gpu.uuid.removeprefix("GPU-").startswith(name))


def _numbers(gpus: Sequence[Gpu], order: str) -> Mapping[str, int]:
    """The number of each GPU and part by UUID, counted in an order of `devices.order`; parts have their GPU's."""
    count = {gpu.index: position for position, gpu in enumerate(ordered(gpus, order))} if order == "fastest" else {}
    return {unit.uuid: count.get(unit.index, unit.index) for unit in (*usable(gpus), *gpus)}


def speed(gpu: Gpu) -> tuple[float, tuple[int, int], int]:
    """What GPUs are ranked by: units times clock where the driver reports them, then architecture, then memory."""
    return (gpu.cores or 0) * (gpu.clock_limit or 0), gpu.compute_capability, gpu.memory_total


def ordered(gpus: Sequence[Gpu], order: str) -> tuple[Gpu, ...]:
    """`pci` keeps the allocation's order; `fastest` puts the fastest GPU first.

    CUDA's own FASTEST_FIRST is a guess whose rule is not documented; this one is written into the plan GPU by GPU.
    """
    return tuple(sorted(gpus, key=speed, reverse=True)) if order == "fastest" else tuple(gpus)


def take(count: int, allowed: Sequence[Gpu]) -> Selection:
    """The first `count` GPUs of the allocation."""
    asked = "1 GPU is" if count == 1 else f"{count} GPUs are"
    missing = () if count <= len(allowed) else (f"{asked} requested, {len(allowed)} available",)
    return Selection(tuple(allowed[:count]), missing)


def take_free(count: int | None, allowed: Sequence[Gpu], idle_below: int) -> Selection:
    """Idle GPUs: first those without computing processes, then those with the most free memory.

    count: how many; None for all that are idle. idle_below: bytes, as for :func:`is_idle`.
    """
    idle = [gpu for gpu in allowed if is_idle(gpu, idle_below)]
    # A stable sort: GPUs that are alike stay in the order that devices.order has put them in.
    idle.sort(key=lambda gpu: (bool(_computing(gpu)), -gpu.memory_free))
    number = max(len(idle), 1) if count is None else count
    if number <= len(idle):
        return Selection(tuple(idle[:number]))
    asked = "1 idle GPU is" if number == 1 else f"{number} idle GPUs are"
    busy = [f"; {occupants(gpu)}" for gpu in allowed if not is_idle(gpu, idle_below)]
    return Selection(tuple(idle), (f"{asked} requested, {len(idle)} of {len(allowed)} are free{''.join(busy)}",))


def take_when_idle(count: int, allowed: Sequence[Gpu], idle_below: int) -> Selection:
    """Any GPUs, for a run that waits until they are idle: those that are now, and before it has to wait, others too.

    They are in the order of `allowed`. idle_below: bytes, as for :func:`is_idle`.
    """
    possible = [gpu for gpu in allowed if gpu.compute_mode != "prohibited"]  # which no waiting opens
    if count > len(possible):
        return take(count, possible)
    idle = take_free(None, possible, idle_below).cards
    chosen = [*idle, *(gpu for gpu in possible if gpu not in idle)][:count]
    return Selection(tuple(gpu for gpu in possible if gpu in chosen))


def pick(names: Sequence[int | str], facts: Facts, order: str = "pci") -> Selection:
    """The named GPUs in the given order, each inside the allocation. order: how indices count, of `devices.order`."""
    allowed, number = allocation(facts), _numbers(facts.gpus, order)
    found = [(name, matching(name, allowed, number)) for name in names]
    return Selection(
        tuple(cards[0] for _, cards in found if len(cards) == 1),
        tuple(_why_not(name, cards, facts, number) for name, cards in found if len(cards) != 1),
    )


def _why_not(name: int | str, found: Sequence[Gpu], facts: Facts, number: Mapping[str, int]) -> str:
    """Why a name matches no single GPU of the allocation. found: those of the allocation that it names."""
    if found and not is_part(found[0]):
        return f"`{name}` names {len(found)} GPUs ({', '.join(gpu.uuid for gpu in found)})"
    if not found and matching(name, usable(facts.gpus), number):
        return f"GPU `{name}` is outside {restriction(facts)}"
    split = matching(name, facts.gpus, number)
    parts = found or [part for gpu in split[:1] for part in _parts(gpu)]
    if parts:
        return f"GPU `{name}` is split by MIG; name one of its parts: {', '.join(part.uuid for part in parts)}"
    return f"GPU `{name}` is split by MIG into no parts" if split else f"there is no GPU `{name}` here"


def duplicates(names: Sequence[int | str], facts: Facts, order: str = "pci") -> tuple[str, ...]:
    """The entries of a list that name a GPU for a second time, also by its UUID after its index."""
    units, number = usable(facts.gpus), _numbers(facts.gpus, order)
    found = [matching(name, units, number) for name in names]
    identities = [cards[0].uuid if len(cards) == 1 else str(name) for name, cards in zip(names, found, strict=True)]
    return tuple(str(name) for place, name in enumerate(names) if identities[place] in identities[:place])


def is_idle(gpu: Gpu, idle_below: int) -> bool:
    """Whether a run can have a GPU to itself: no run has or awaits it, and less than `idle_below` bytes are in use."""
    alone = gpu.compute_mode == "default" or (gpu.compute_mode == "exclusive" and not _computing(gpu))
    return gpu.held_by is None and gpu.wanted_by is None and alone and _occupied(gpu) < idle_below


def occupants(gpu: Gpu) -> str:
    """What keeps a GPU busy, as a sentence."""
    name = gpu.uuid if is_part(gpu) else f"GPU {gpu.index}"
    if gpu.compute_mode == "prohibited":
        return f"{name} is closed to computing (nvidia-smi -c 0 opens it)"
    held = gpu.held_by
    run = [f"held by the trainkit run {held.run or '(just starting)'} (pid {held.pid}, {held.user})"] if held else []
    next_ = gpu.wanted_by
    run += [f"next for the trainkit run {next_.run} (pid {next_.pid}, {next_.user}), which waits"] if next_ else []
    used = f"{_occupied(gpu) / 2**30:.1f} GiB of {gpu.memory_total / 2**30:.0f} in use"
    return f"{name} is busy: {', '.join((*run, used, *_computing(gpu)))}"


def _computing(gpu: Gpu) -> list[str]:
    """Who computes on a GPU, one phrase each; what only draws on it is left out."""
    return [
        f"pid {each.pid} ({': '.join(filter(None, (each.user, each.command))) or 'not visible from here'})"
        for each in gpu.processes
        if not each.graphics
    ]


def _occupied(gpu: Gpu) -> int:
    """Bytes that are in use for computing: neither the driver's own nor a desktop's."""
    drawn = sum(each.memory or 0 for each in gpu.processes if each.graphics)
    return max(gpu.memory_total - gpu.memory_free - gpu.memory_reserved - drawn, 0)
