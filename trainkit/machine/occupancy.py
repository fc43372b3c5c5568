"""How busy a card is, and with whom. Pure."""

from __future__ import annotations

from trainkit.machine.facts import Gpu


def is_part(gpu: Gpu) -> bool:
    """Whether a card of `selection.usable` is a part that MIG split off; there, split cards themselves are left out."""
    return gpu.mig


def is_made_up(gpu: Gpu) -> bool:
    """Whether a card is that of a machine profile, which has no UUID."""
    return gpu.uuid.startswith("profile-")


def computing(gpu: Gpu) -> tuple[str, ...]:
    """Who computes on a card, one phrase each; what only draws on it is left out."""
    return tuple(
        f"pid {each.pid} ({': '.join(filter(None, (each.user, each.command))) or 'not visible from here'})"
        for each in gpu.processes
        if not each.graphics
    )


def occupied(gpu: Gpu) -> int:
    """Bytes that are in use for computing: neither the driver's own nor a desktop's."""
    drawn = sum(each.memory or 0 for each in gpu.processes if each.graphics)
    return max(gpu.memory_total - gpu.memory_free - gpu.memory_reserved - drawn, 0)


def is_idle(gpu: Gpu, idle_below: int) -> bool:
    """Whether a run can have a card to itself: no run holds it, and less than `idle_below` bytes are occupied."""
    alone = gpu.compute_mode == "default" or (gpu.compute_mode == "exclusive" and not computing(gpu))
    return gpu.held_by is None and alone and occupied(gpu) < idle_below


def occupants(gpu: Gpu) -> str:
    """What keeps a card busy, as a sentence."""
    name = gpu.uuid if is_part(gpu) else f"card {gpu.index}"
    if gpu.compute_mode == "prohibited":
        return f"{name} is closed to computing (nvidia-smi -c 0 opens it)"
    held = gpu.held_by
    run = (f"held by the trainkit run {held.run or '(just starting)'} (pid {held.pid}, {held.user})",) if held else ()
    who = computing(gpu)
    used = f"{occupied(gpu) / 2**30:.1f} GiB of {gpu.memory_total / 2**30:.0f} in use"
    return f"{name} is busy: {', '.join((*run, used, *who))}"
