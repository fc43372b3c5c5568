"""What is to be said of the chosen cards: where the choice came from, who is on them, and which would be faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.occupancy import is_idle, is_part, occupants
from trainkit.machine.selection import allocation, restriction, speed, unread
from trainkit.plan.model import Notice

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

MIB = 2**20
FREE = "`devices.select: free` takes idle cards; `devices.when_busy: warn` starts beside them."


def card_remarks(resolved: Resolved, cards: Sequence[Gpu], facts: Facts) -> tuple[Notice, ...]:
    """Every remark on the cards that a run is to use."""
    return (
        *_origin(facts),
        *_busy(resolved, cards, facts),
        *_mixed(resolved, cards, facts),
        *_counting(facts),
    )


def idle_below(resolved: Resolved) -> int:
    """The recipe's threshold, in bytes."""
    return resolved.recipe.devices.idle_below * MIB


def _origin(facts: Facts) -> Iterator[Notice]:
    if not restriction(facts):
        return
    job = facts.allocation
    giver = f", the allocation of {job.scheduler} job {job.job}" if job and job.job else ""
    yield Notice("note", f"Cards were chosen inside the caller's {restriction(facts)}{giver}.")
    if wrong := unread(facts):
        what = f"`{wrong}` in {restriction(facts)} names no one card here, and hides what stands behind it."
        yield Notice("warning", what, "Export the cards that `trainkit gpus` shows.")


def _busy(resolved: Resolved, cards: Sequence[Gpu], facts: Facts) -> Iterator[Notice]:
    """Facts from a file are a snapshot, which says nothing of the moment of the start."""
    for gpu in cards:
        if is_idle(gpu, idle_below(resolved)):
            continue
        what = f"{occupants(gpu)[0].upper()}{occupants(gpu)[1:]}."
        if facts.origin:
            yield Notice("note", f"When the facts were taken: {what}")
        elif resolved.recipe.devices.when_busy == "warn" and gpu.compute_mode == "default":
            yield Notice("warning", what, "devices.when_busy: warn starts the run all the same.")
        else:
            yield Notice("blocker", what, FREE)


def _mixed(resolved: Resolved, cards: Sequence[Gpu], facts: Facts) -> Iterator[Notice]:
    names = sorted({gpu.name for gpu in cards})
    if len(names) > 1:
        what = f"The cards differ ({', '.join(names)}): every step waits for the slowest."
        yield Notice("warning", what, "Select cards of one kind.")
    if isinstance(resolved.recipe.devices.select, list) or any(map(is_part, cards)):
        return
    best = max(allocation(facts), key=speed)
    if cards and speed(best) > max(map(speed, cards)):
        what = f"Card {cards[0].index} ({cards[0].name}) is slower than card {best.index} ({best.name}), left out here."
        yield Notice("warning", what, "`devices.order: fastest` takes the fastest first; a list names cards outright.")
    elif len(names) > 1 and speed(cards[0]) < speed(best):
        what = f"Rank 0 sits on the slower card {cards[0].index} ({cards[0].name})."
        yield Notice("warning", what, "`devices.order: fastest` puts the fastest first.")


def _counting(facts: Facts) -> Iterator[Notice]:
    """CUDA counts fastest first where nobody tells it otherwise, nvidia-smi and schedulers by PCI address."""
    counted = any(part.strip().isdecimal() for part in (facts.visible_devices or "").split(","))
    if counted and facts.device_order is None and len({gpu.name for gpu in facts.gpus}) > 1:
        what = f"CUDA_VISIBLE_DEVICES={facts.visible_devices} is read as nvidia-smi counts; CUDA alone would count the "
        hint = "Export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name cards by UUID."
        yield Notice("warning", f"{what}fastest card as 0, and the cards here differ.", hint)
