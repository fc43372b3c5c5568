"""What a plan says of memory and time: whether the run fits, what would make it fit, and what it does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.foresight.estimate import Foresee
from trainkit.foresight.render import time_in_words, verdict
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Foresight
from trainkit.planner.changes import Changed, fits, needless, on_more_nodes, remedy, what_if
from trainkit.planner.env import segments_grow
from trainkit.text import format_memory

WORTH = 1.03  # times as fast a step must be without a technique for a remark on it
ALL = "see which machines it fits on: `trainkit estimate RECIPE --on all`"


def rows(found: Foresight | None) -> tuple[tuple[str, str], ...]:
    """(label, words) of the plan's page."""
    if found is None:
        return ()
    name, size = found.largest
    where = f"{format_memory(found.total)} of {format_memory(found.limit)} on each rank"
    words = f"{where}: {verdict(found)}; most of it {name} ({format_memory(size)})"
    time = time_in_words(found)
    return (("memory", words), *((("time", time),) if time else ()))


def room_for_the_run(context: Context, foresee: Foresee) -> Iterator[Diagnostic]:
    """That it does not fit, at its start or in its steps, with what to change; or what it does without as well."""
    found = context.foresight
    if found is None:
        return
    if fits(found):
        yield from _not_needed(context, found, foresee)
        return
    # On another machine nothing is stopped, nor is a program whose code may do otherwise; nor where the margin decides.
    sure = 1 + found.margin
    on_host = found.headroom >= 0 and found.host > found.host_limit
    lacks = found.total / sure > found.limit or (on_host and found.host / sure > found.host_limit)
    certain = lacks or found.start_verdict != "fits"
    tell = blocker if certain and not context.facts.origin and context.program == "builtin" else warning
    suggested = remedy(context, foresee) or on_more_nodes(context, foresee)
    hint = _hint(suggested) if suggested else ALL
    if found.start_verdict != "fits":
        yield tell(_start(context, found), hint)
    if found.verdict == "too large" and on_host:
        taken = f"{format_memory(found.host)} of the machine's memory"
        yield tell(f"the run does not fit: it takes {taken}, which has {format_memory(found.host_limit)}", hint)
    elif found.verdict != "fits":
        name, size = found.largest
        doubt = "may not fit" if found.verdict == "tight" else "does not fit"
        what = (
            f"the run {doubt}: each rank takes {format_memory(found.total)}, highest in {found.moment}, and has "
            f"{format_memory(found.limit)}; most of it is {name} ({format_memory(size)})"
        )
        yield tell(what, hint) if found.verdict == "too large" else warning(what, hint)


def _start(context: Context, found: Foresight) -> str:
    device, host = found.start
    if context.cards and device > found.limit:
        whole = f"each GPU takes {format_memory(device)} while {context.strategy} is set up"
        return f"the run does not fit at its start: {whole}, and has {format_memory(found.limit)}"
    return (
        f"the run does not fit at its start: {context.processes} ranks take {format_memory(host)} of the machine's "
        f"memory while the model is read or drawn, and there are {format_memory(found.host_limit)}"
    )


def _hint(found: Changed) -> str:
    costs = f" ({found.change.costs})" if found.change.costs else ""
    return f"set {found.change.words}: then it takes {format_memory(found.foresight.total)}{costs}"


def _not_needed(context: Context, found: Foresight, foresee: Foresee) -> Iterator[Diagnostic]:
    if not context.cards:
        return
    for what, other in needless(context, foresee):
        without = f"{format_memory(other.foresight.total)} of {format_memory(found.limit)}"
        times = found.step / other.foresight.step if found.step and other.foresight.step else 1.0
        if times < WORTH and "accumulation" in what:
            continue
        costs = (
            f"a step takes {times:.2f} times as long" if times >= WORTH else "it makes room for larger batches alone"
        )
        yield note(f"it fits without {what}, too ({without}): with it {costs}", f"set {other.change.words}")


class Lacking(Protocol):
    """How memory ran out; bytes, 0 where that is not known. See :class:`trainkit.runner.report.shortage.Shortage`."""

    @property
    def rank(self) -> int | None: ...
    @property
    def wanted(self) -> int: ...
    @property
    def allocated(self) -> int: ...
    @property
    def unused(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def host(self) -> bool: ...
    @property
    def moment(self) -> str: ...
    @property
    def splintered(self) -> bool: ...


EXPANDABLE = "env.PYTORCH_ALLOC_CONF=expandable_segments:True"
MOST = 4  # suggestions
# Of what was foreseen, that a change is to come to where a run ended and nothing says how much there was.
UNKNOWN = 0.75
# Bytes for tensors that there are at least and at most, where a request of so many was refused in a moment of the step.
RoomAt = Callable[[Context, int, str], tuple[int, int] | None]


def answer(context: Context, lacking: Lacking, foresee: Foresee, room_at: RoomAt) -> Iterator[str]:
    """What was missing where, and what to change in this recipe, the best first. For a run that ran out of memory."""
    yield f"memory ran out{_told(lacking)}"
    found = context.foresight
    if found is not None:
        yield f"  expected were {format_memory(found.total)} of {format_memory(found.limit)}, highest in {found.moment}"
    if lacking.splintered and context.cards and not segments_grow(context):
        pieces = format_memory(lacking.unused)
        yield f"next: {EXPANDABLE} (torch held {pieces} in pieces that were too small, more than was missing)"
    suggested = [*_suggested(context, lacking, foresee, room_at)] if found else []
    for line in suggested or _of_own_program(context):
        yield f"next: {line}"


def _told(lacking: Lacking) -> str:
    where = f" on rank {lacking.rank}" if lacking.rank is not None else ""
    when = f" in {lacking.moment}" if lacking.moment else ""
    what = " (the machine's)" if lacking.host else ""
    if not lacking.wanted:
        return f"{what}{where}{when}"
    had = f", with {format_memory(lacking.allocated)} in use" if lacking.allocated else ""
    unused = f" and {format_memory(lacking.unused)} held unused" if lacking.unused else ""
    of = f" of {format_memory(lacking.limit)}" if lacking.limit else ""
    return f"{what}{where}{when}: {format_memory(lacking.wanted)} were wanted{had}{unused}{of}"


def _suggested(context: Context, lacking: Lacking, foresee: Foresee, room_at: RoomAt) -> Iterator[str]:
    """Changes with what they come to. What was measured beyond what was foreseen is added to each figure."""
    found = context.foresight
    assert found is not None
    if lacking.host and context.cards:
        yield from _of_the_host(context, found, foresee)
        return
    granted = room_at(context, lacking.wanted, lacking.moment) if lacking.wanted else None
    more, least, most = _measured(found, lacking, granted)

    def told(changed: Changed) -> Changed:
        return replace(changed, foresight=replace(changed.foresight, total=changed.foresight.total + more))

    def taking(room: int) -> Changed | None:
        return remedy(context, lambda other: _within(foresee(other), room - more))

    less = [told(each) for each in what_if(context, foresee)]
    less = [each for each in less if each.foresight.total < found.total + more]
    enough = [each for each in less if fits(each.foresight) and each.foresight.total <= least]
    enough.sort(key=lambda each: (not each.change.same, each.foresight.step or 0.0))
    first = enough[:MOST]
    if not any(each.change.same for each in enough):
        # The same numbers with what is likely enough go before others with what certainly is.
        ways = [each for room in (least, (least + most) // 2) if (each := taking(room))]
        ways.sort(key=lambda each: not each.change.same)
        first = [*map(told, ways[:1]), *first][:MOST]
    first += [each for each in less if each not in first][: MOST - len(first)]
    for each in first:
        costs = f"; {each.change.costs}" if each.change.costs else ""
        yield f"{each.change.words} ({format_memory(each.foresight.total)} in all{costs})"


def _of_the_host(context: Context, found: Foresight, foresee: Foresee) -> Iterator[str]:
    """Of a run on GPUs, what takes less of the machine's memory: at the start, while it trains, and of its data."""
    workers = getattr(context.recipe.data, "workers", 0) or 0
    if workers:
        yield f"data.workers={workers // 2} ({workers} processes of each rank load data)"
    for each in what_if(context, foresee):
        told = each.foresight
        if fits(told) and max(told.start[1], told.host) < max(found.start[1], found.host):
            yield f"{each.change.words} ({format_memory(max(told.start[1], told.host))} of the machine's memory)"


def _measured(found: Foresight, lacking: Lacking, granted: tuple[int, int] | None) -> tuple[int, int, int]:
    """Bytes that the run took beyond what was foreseen, and that a process has at least and at most.

    granted: bytes for tensors that it has at least and at most, by where on the timeline it was refused.
    """
    outside = found.total - found.reserved
    if lacking.allocated:  # of a GPU, whose allocator tells all of it
        held = lacking.allocated + lacking.unused
        has = min(found.limit, held + lacking.free + outside) if lacking.limit else found.limit
        return max(0, held + lacking.wanted + outside - found.total), has, has
    if granted is None:
        return 0, int(found.total * UNKNOWN), found.total
    return 0, granted[0] + outside, granted[1] + outside


def _within(found: Foresight | None, room: int) -> Foresight | None:
    """An estimate with less room."""
    if found is None or found.total <= room:
        return found
    return replace(found, verdict="too large")


def _of_own_program(context: Context) -> Iterator[str]:
    """For a program whose memory is not known: its settings that take less, in the guides' order."""
    recipe, batch, kind = context.recipe, context.batch, context.recipe.program.kind
    if kind == "torch":
        yield "lower the batch size of the script, and accumulate gradients over more passes"
        yield "compute in 16 bits (torch.autocast), and recompute activations (torch.utils.checkpoint)"
        return
    if batch.micro and batch.micro > 1:
        most = max(1, batch.micro // 4)  # nothing tells how much is missing
        less = next(each for each in range(most, 0, -1) if batch.micro % each == 0)
        yield f"batch.micro={less} batch.accumulation={(batch.accumulation or 1) * batch.micro // less}"
    elif batch.micro is None:
        yield "batch.micro: less than the script's own"
    if context.dtype == "fp32" and context.cards:
        yield "precision.dtype=bf16"
    if not recipe.efficiency.gradient_checkpointing.every and kind == "hf":
        yield "efficiency.gradient_checkpointing=true"
    if context.strategy in ("single", "ddp") and context.ranks > 1:
        yield "strategy.kind=fsdp"
    elif context.strategy in ("zero1", "zero2"):
        yield "strategy.kind=zero3"
    if recipe.optimizer.name.startswith("adamw_torch") and kind == "hf" and context.cards:
        yield "optimizer.name=adamw_bnb_8bit"
