"""The plan as a page that a person reads: what `trainkit plan` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from trainkit.launch_plan.model import Notice, Plan, Text, Variable
from trainkit.launch_plan.render.shell import lines, quoted
from trainkit.text import pluralize, wrapped

WIDTH = 96
# The order of the page: what stops the run first.
SEVERITIES = ("blocker", "warning", "note")
TIMES = "\N{MULTIPLICATION SIGN}"
OWN = "the script's own"  # what nobody has given


def render(plan: Plan, width: int = WIDTH) -> str:
    """Plain text of at most so many columns, except for longer single words."""
    sections = (
        _title,
        _blockers,
        _training,
        _head,
        _topology,
        _batch,
        _techniques,
        _commands,
        _preparations,
        _environment,
        _files,
        _job,
        _notices,
    )
    return "\n".join("\n".join(section(plan, width)) + "\n" for section in sections if any(section(plan, width)))


def _title(plan: Plan, width: int) -> Iterator[str]:
    yield f"Plan of {plan.name}"


def _blockers(plan: Plan, width: int) -> Iterator[str]:
    """What stops the run comes before all that will not happen."""
    if plan.blockers:
        yield "This machine cannot run it"
    yield from _each(plan.blockers, width)


def _training(plan: Plan, width: int) -> Iterator[str]:
    if plan.training:
        yield "What is trained"
    for label, words in plan.training:
        yield from _wrapped(f"{label:<10}{words}", width, " " * 12)


def _head(plan: Plan, width: int) -> Iterator[str]:
    resume = f"{plan.resume.path} (step {plan.resume.step})" if plan.resume.path else "nothing"
    restarts = f", restarted at most {plan.max_restarts} times" if plan.max_restarts else ""
    yield "How"
    yield from _row("strategy", plan.strategy.kind, plan.strategy.reason, width)
    yield from _row("launcher", plan.launcher.kind, f"{plan.launcher.reason}{restarts}", width)
    yield from _row("program", plan.program.kind, plan.program.reason, width)
    if plan.container:
        yield from _row("container", plan.container.kind, plan.container.image, width)
    yield from _row("device", plan.device.kind, plan.device.reason, width)
    yield from _row("resumes", resume, f"{plan.resume.reason}{_queued_again(plan)}", width)
    yield from _row("hangs", *_hang(plan), width)
    yield from _row("writes", f"{plan.output_root}/{plan.name}/<timestamp>-<id>/", "", width)


def _queued_again(plan: Plan) -> str:
    """What a later attempt of a job starts from; empty where there is none, or its program is given no checkpoint."""
    words = (word for command in plan.commands for word in command.argv)
    again = plan.job is not None and plan.job.requeue and any(Variable.RESUME in word.parts for word in words)
    return "; a restart resumes from its own newest checkpoint" if again else ""


def _hang(plan: Plan) -> tuple[str, str]:
    """What happens when no rank moves any more."""
    hang = plan.hang
    if hang.after == 0:
        return "no watch", "disabled by the recipe"
    after = "limit learned from step times" if hang.after is None else f"limit {hang.after:g} s"
    then = "names the blocking rank and ends the run" if hang.ends else "names the blocking rank, does not end the run"
    return ("end" if hang.ends else "report"), f"{after}: {then}" + (f" ({hang.reason})" if hang.reason else "")


def _row(label: str, value: str, reason: str, width: int) -> list[str]:
    line = f"{label:<10}{value:<11} {reason}" if len(value) < 12 else f"{label:<10}{value}  {reason}"
    return _wrapped(line.rstrip(), width, " " * 12)


def _topology(plan: Plan, width: int) -> Iterator[str]:
    topology = plan.topology
    seen = sum(group.count * len(group.devices) for group in topology.groups)
    where = f"{pluralize(seen, 'GPU')} ({topology.device})" if seen > topology.world_size else topology.device
    yield f"Topology: {pluralize(topology.nodes, 'node')}, {pluralize(topology.world_size, 'rank')} on {where}"
    first = 0
    for group in topology.groups:
        if group.count > 1:
            yield f"  on each of {group.count} nodes, {pluralize(group.processes, 'process', 'es')}:"
        label, start = ("rank", first) if group.count == 1 else ("local rank", 0)
        several = len(group.devices) > group.processes
        for position, device in enumerate(group.devices):
            where = f"GPU {device}" if device.isdecimal() else device
            if position < len(plan.cards):
                card = plan.cards[position]
                where = f"GPU {card.index}: {card.name}" + (f", {card.uuid}" if card.uuid else "")
            if not several:
                yield f"  {label} {start + position} on {where}"
            else:
                who = f"{label} {start}" if group.processes == 1 else f"each of {group.processes} processes"
                yield f"  {who} sees {where}"
        first += group.count * group.processes


def _batch(plan: Plan, width: int) -> Iterator[str]:
    batch = plan.batch
    passes = ("micro", "accumulation") if batch.search else (_side(batch.micro), _side(batch.accumulation))
    sides = f" {TIMES} ".join((*passes, str(batch.ranks)))
    unknown = batch.global_ is batch.micro is batch.accumulation is None
    yield f"Batch: {OWN}" if unknown else f"Batch: {_side(batch.global_)} = {sides}"
    if not unknown:
        alike = plan.topology.world_size // batch.ranks  # ranks that compute the same samples, each with its part
        groups = "ranks" if alike == 1 else f"groups of {alike} ranks, which compute the same samples"
        yield from _wrapped(f"samples per optimizer step = micro batch {TIMES} accumulation {TIMES} {groups}", width)
    if batch.search:
        sizes = ", ".join(map(str, batch.search))
        found = f"micro batch: found at the start, the largest of {sizes} that fits; accumulation follows"
        yield from _wrapped(found, width)
    if batch.eval_micro is not None:
        yield f"  evaluation: {batch.eval_micro} samples per rank in one pass"


def _side(size: int | None) -> str:
    return OWN if size is None else str(size)


def _techniques(plan: Plan, width: int) -> Iterator[str]:
    if plan.techniques:
        yield "Techniques"
    for each in plan.techniques:
        yield from _wrapped(f"{each.key} {each.value}: {each.speed}. Memory: {each.memory}.", width)


def _commands(plan: Plan, width: int) -> Iterator[str]:
    for group, command in zip(plan.topology.groups, plan.commands, strict=True):
        yield "Command" if plan.topology.nodes == 1 else f"Command on each of {group.count} nodes"
        yield from _words(command.container, width, last=False)
        yield from _words(command.launcher, width, last=False)
        yield from _words(command.wrapper, width, last=False)
        yield from _words(command.program, width, last=True)


def _words(words: tuple[Text, ...], width: int, *, last: bool) -> Iterator[str]:
    if not words:
        return
    packed = list(lines((quoted(word) for word in words), width - 6))
    for position, line in enumerate(packed):
        end = "" if last or position < len(packed) - 1 else " \\"
        yield f"{'  ' if position == 0 else '    '}{line}{end}"


def _preparations(plan: Plan, width: int) -> Iterator[str]:
    for item in plan.preparations:
        yield f"Before the ranks start, once on each node: {item.title}"
        yield from _words(item.argv, width, last=True)


def _environment(plan: Plan, width: int) -> Iterator[str]:
    yield "Environment of the ranks"
    for name, value in plan.environment.set:
        yield f"  {name}={quoted(value)}"
    if plan.environment.take:
        yield from _wrapped(f"taken from yours: {', '.join(plan.environment.take)}", width)
    if plan.environment.added:
        added = ", ".join(name for name, _ in plan.environment.added)  # `trainkit explain NAME` has the values
        yield from _wrapped(f"added by {plan.launcher.kind} itself: {added}", width)
    kept = {name for name, _ in (*plan.environment.set, *plan.environment.added)} | set(plan.environment.take)
    removed = (name for name in plan.environment.unset if name not in kept)
    yield from _wrapped(f"removed: {', '.join(removed)}", width)


def _files(plan: Plan, width: int) -> Iterator[str]:
    if plan.files:
        yield "Files written into the run directory"
    for file in plan.files:
        yield f"  {file.path} ({len(file.content.encode())} bytes)"


def _job(plan: Plan, width: int) -> Iterator[str]:
    if plan.job is None:
        return
    job = f"Job ({plan.job.scheduler}): {plan.job.file}, which `trainkit submit` "
    if plan.job.hosts:
        yield from wrapped(f"{job}starts on {', '.join(plan.job.hosts)} through {plan.job.submit[0]}", width)
    else:
        yield f"{job}gives to {plan.job.submit[0]}"
    yield from (f"  {line}" for line in str(plan.job.content).splitlines())
    yield from _words(plan.job.submit, width, last=True)
    if plan.job.step:
        yield "It starts on every node through"
        yield from _words(plan.job.step, width, last=True)


def _notices(plan: Plan, width: int) -> Iterator[str]:
    others = [notice for notice in plan.notices if notice.severity != "blocker"]
    if others:
        yield "Remarks"
    yield from _each(others, width)


def _each(notices: Iterable[Notice], width: int) -> Iterator[str]:
    ordered = sorted(notices, key=lambda notice: SEVERITIES.index(notice.severity))
    for notice, following in zip_longest(ordered, ordered[1:]):
        yield from _wrapped(f"{notice.severity}: {notice.what}", width)
        if notice.installs:  # a line to paste, once for all packages
            yield from [f"    {notice.hint}"] if following is None or following.hint != notice.hint else []
        elif notice.hint:
            yield from _wrapped(f"  {notice.hint}", width)


def _wrapped(line: str, width: int, below: str = "    ") -> list[str]:
    return wrapped(line, width, "  ", below)
