"""The life of one run: lock its GPUs, write the run directory, start, follow, summarize."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from trainkit.errors import MachineError
from trainkit.files import cache_folder, refuse_links, write_json
from trainkit.launch_plan.model import Plan
from trainkit.machine.gpu_locks import GpuLocks, taken_by, user_name
from trainkit.runner.binding import BoundPlan, bind, container_values, run_values
from trainkit.runner.nodes.assembly import Assembly, assemble
from trainkit.runner.nodes.roll_call import Start
from trainkit.runner.rank.streams import holds_input
from trainkit.runner.rendezvous import LOOPBACK, free_port, group_of, local_address, node_place
from trainkit.runner.report.console import Terminal
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.failure import describe_failure, remarks
from trainkit.runner.report.gpu_watch import GpuWatch
from trainkit.runner.report.progress import Relay
from trainkit.runner.report.shortage import Shortage, shortage
from trainkit.runner.report.summary import build_summary, render_summary
from trainkit.runner.request import RunRequest
from trainkit.runner.rundir.create import create_run_dir, write_attempt, write_plan
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import clear_uploads, lock_run
from trainkit.runner.supervisor.channel import Spec
from trainkit.runner.supervisor.parent import Supervisor
from trainkit.runner.supervisor.processes import PASSED_ON, STOP, handled
from trainkit.runner.waiting import Queued, refuse_blocked, wait_for_gpus

NO_INPUT = (
    "standard input is not passed on: only a single rank without a launcher reads it; let the program read a file"
)
CHOICES = 10  # how often GPUs are chosen again when another run locks them first


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended. failure: for people; empty if it succeeded. lacking: where memory ran out."""

    verdict: Verdict
    layout: RunLayout
    summary: Mapping[str, Any]
    failure: str = ""
    lacking: Shortage | None = None


Told = Callable[[RunLayout, str], None]


def execute(request: RunRequest, told: Told = lambda *_: None) -> int:
    """Run the plan to its end and print its summary; the exit code of the run.

    told: called with the run directory when the run begins, and before that, with what it waits for, if it has to. From
    the first call on, signals end the run in order.
    Raises MachineError, before anything starts, if this machine cannot run it.
    """
    console = Terminal(request.environ)
    for number in PASSED_ON:  # a scheduler may send them at any time, even before the ranks start and after they end
        signal.signal(number, lambda *_: None)

    def tell(layout: RunLayout, why: str) -> None:
        told(layout, why)
        console.look()  # what is told may lead the output elsewhere

    ended = run_plan(request, console, tell)
    if ended.failure:
        console.say(ended.failure)
    if ended.lacking is not None and request.answer is not None:
        console.say("\n".join(request.answer(ended.lacking)))
    if ended.summary:
        console.say(render_summary(ended.summary, ended.layout.root))
    return ended.verdict.exit_code


def run_plan(request: RunRequest, console: Terminal, told: Told = lambda *_: None) -> FinishedRun:
    """Run the plan to its end. Raises MachineError, before anything starts, if this machine cannot run it."""
    cards: GpuLocks | None = None
    try:
        with contextlib.ExitStack() as until_begun:
            request, cards, queued = _lock_gpus(request, console, told, until_begun)
            plan = request.planned.plan
            for notice in plan.notices:
                if notice.severity == "warning":
                    console.say(f"warning: {notice.what}" + (f"\n  next: {notice.hint}" if notice.hint else ""))
            if not _keeps_stdin(plan) and holds_input(0):
                console.say(f"warning: {NO_INPUT}")
            started = time.time()
            begun = _prepare_run(request, console, queued)
        cards.sign(user_name(os.getuid()), str(begun.layout.root))
        try:
            # The guardian holds these too: if trainkit is killed, the GPUs are free only when all processes have ended.
            locks = (*begun.locks, *cards.fds)
            return _follow(_guardian_spec(plan, begun, started), begun, plan, console, locks, told)
        finally:
            for lock in begun.locks:
                os.close(lock)
    finally:
        if cards is not None:
            cards.release()


class _StartingRun(NamedTuple):
    """A run that is about to start on this node. locks: of the run directory, on node 0; job: the request's."""

    layout: RunLayout
    node: int
    group: int
    bound: BoundPlan
    assembly: Assembly
    locks: Sequence[int]
    job: str


def _lock_gpus(
    request: RunRequest, console: Terminal, told: Told, until_begun: contextlib.ExitStack
) -> tuple[RunRequest, GpuLocks, Queued | None]:
    """Lock the plan's GPUs, if it says so after waiting for them; the run directory of one that has waited.

    If another run has locked one first, plan again: the new plan chooses others, or is refused.
    """
    cards = GpuLocks(request.environ)
    for choice in range(CHOICES):
        plan = request.planned.plan
        refuse_blocked(plan)
        if plan.waits is not None:
            return wait_for_gpus(request, console, told, until_begun)
        if choice > 0:
            console.say("now: " + ", ".join(f"GPU {card.index} ({card.uuid})" for card in plan.cards))
        lost = cards.take([card.uuid for card in plan.cards], shared=plan.shares_cards)
        if lost is None:
            cards.sign(user_name(os.getuid()), "")
            return request, cards, None
        name = next(f"GPU {card.index} ({card.name})" for card in plan.cards if card.uuid == lost)
        # Between the probe that the plan was made from and this lock, another run may have started.
        what = f"{name} has just been locked by {taken_by(lost, request.environ)}"
        if request.again is None:
            raise MachineError(what, hint="start again when that run has ended, or choose other GPUs")
        console.say(f"{what}; choosing again")
        request = request.again(None)
    raise MachineError(f"other runs locked the chosen GPUs first, {CHOICES} times", hint="try again")


def _prepare_run(request: RunRequest, console: Terminal, queued: Queued | None) -> _StartingRun:
    """Meet the other nodes, if there are any; the complete run directory, and the bound plan of this node.

    queued: of a run that has waited, which gets the plan as it is now.
    """
    plan = request.planned.plan
    place = node_place(plan, request.node_rank, request.environ)
    several, group = plan.topology.nodes > 1, group_of(plan, place.node)
    locks: list[int] = []

    def bound(start: Start) -> BoundPlan:
        layout = RunLayout.of(start.run_dir)
        local = local_address(start.master, plan.topology.nodes)
        values = run_values(layout, start.port, place.node, start.master, local, plan.resume.path or "", start.attempt)
        if plan.container is not None:
            values |= container_values(request.environ)
        return bind(plan, values, request.environ, group)

    def make(start: Start) -> RunLayout:
        if queued:
            layout = queued.layout
        else:
            layout = RunLayout.of(request.run_dir) if request.run_dir else create_run_dir(plan.output_root, plan.name)
        locks.append(queued.lock if queued else lock_run(layout))
        if not request.run_dir:
            write_plan(layout, plan, request.recipe_yaml, request.command_shell)
        write_attempt(layout, start.attempt, plan, bound(start.at(str(layout.root))))
        return layout

    # Bind first, with any folder, to check that every variable is set. The run directory is created last, so that
    # a plan that cannot be bound leaves nothing behind.
    alone = Start(str(Path.cwd()), request.attempt, LOOPBACK, 0 if several else free_port())
    if caches := bound(alone).caches:
        try:
            os.makedirs(caches, exist_ok=True)
        except OSError as error:
            what = f"the container's caches cannot be kept in {caches}: {error.strerror}"
            raise MachineError(what, hint="set container.caches to a folder that you may write to") from error
    if several:
        if place.node:
            console.prefix = f"node {place.node} ({os.uname().nodename}): "

        def leave(number: int, _frame: object) -> NoReturn:  # `assemble` tells the other nodes before this one ends
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

        with handled(STOP, leave):
            assembly = assemble(plan, place, make, console.say, request.start_seconds, request.attempt, request.run_dir)
    else:
        assembly = Assembly(alone.at(str(make(alone).root)))
    layout, ready = RunLayout.of(assembly.start.run_dir), bound(assembly.start)
    return _StartingRun(layout, place.node, group, ready, assembly, locks, request.job)


def _guardian_spec(plan: Plan, begun: _StartingRun, started: float) -> Spec:
    layout, bound, attempt = begun.layout, begun.bound, begun.assembly.start.attempt
    locks = _lock_folder(bound.environment, str(layout.root))
    return Spec(
        run_dir=str(layout.root),
        status={
            "run_id": layout.id,
            "attempt": attempt,
            "started": started,
            **({"job": begun.job} if begun.job else {}),
        },
        attempt_dir=str(layout.attempt(attempt).root),
        trainkit_pid=os.getpid(),
        argv=bound.argv,
        preparations=[
            (title, argv, os.path.join(locks, f"{lock}.lock") if lock else "")
            for title, argv, lock in bound.preparations
        ],
        launcher=plan.launcher.kind,
        grace=plan.grace_seconds,
        ranks=plan.topology.groups[begun.group].processes,
        nodes=plan.topology.nodes,
        max_restarts=plan.max_restarts,
        keeps_stdin=_keeps_stdin(plan),
        # Only a terminal's foreground group may read from it; any other is stopped by SIGTTIN.
        foreground_group=os.getpgrp() if _keeps_stdin(plan) and os.isatty(0) else None,
        ignore=[signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [],  # nohup
        node=begun.node,
        neighbours=begun.assembly.neighbours,
        open_files=begun.assembly.open_files,
        hang=(plan.hang.after, plan.hang.start, plan.hang.ends),
        container=plan.container.kind if plan.container else "",
        end=bound.end,
    )


def _lock_folder(environ: Mapping[str, str], run_dir: str) -> str:
    """The folder of this user's locks: in the cache folder, or the run directory if there is no writable home."""
    home = environ.get("HOME") or os.path.expanduser("~")  # a container may have a user but no HOME
    folder = cache_folder({**environ, "HOME": home}, "locks") or run_dir
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return run_dir
    return folder if os.access(folder, os.W_OK) else run_dir


def _keeps_stdin(plan: Plan) -> bool:
    return plan.launcher.kind == "python" and plan.topology.world_size == 1 and plan.container is None


def _follow(
    spec: Spec,
    begun: _StartingRun,
    plan: Plan,
    console: Terminal,
    locks: Sequence[int],
    told: Told,
) -> FinishedRun:
    layout, begin = begun.layout, time.monotonic()
    attempt = layout.attempt(begun.assembly.start.attempt, begun.node)
    # Only node 0 shows the run's metrics.
    relay = Relay(None if begun.node else layout.metrics, attempt, console, is_ours=plan.program.kind == "builtin")
    watch = GpuWatch(plan.cards, layout.cards)
    lines = [each.fd for each in begun.assembly.neighbours]

    def on_begin() -> None:
        told(layout, "")
        if begun.node == 0:
            console.say(f"run directory: {layout.root}")
            if plan.resume.path is not None:
                step = f" (step {plan.resume.step})" if plan.resume.step else ""
                console.say(f"resuming from {plan.resume.path}{step}")

    try:
        supervisor = Supervisor(spec, begun.bound.environment, relay, console, (*locks, *lines), attempt)
        verdict = supervisor.run(on_begin, watch.start)
    finally:
        watch.close()
    if begun.node:  # node 0 writes the summary
        return FinishedRun(verdict, layout, {})
    clear_uploads(layout)
    seconds = time.monotonic() - begin
    summary: dict[str, Any] = {}
    try:  # an unreadable folder must not change the exit code
        summary = build_summary(plan, layout, verdict, seconds, relay.progress, watch)
        for remark in remarks(attempt, verdict):
            console.say(remark)
    except OSError as error:
        console.say(f"the files of the ranks cannot be read: {error.strerror}: {error.filename or attempt.root}")
    try:  # neither must a full disk
        refuse_links(layout.root)
        if summary:
            write_json(layout.summary, summary)
            if verdict.exit_code == 0 and (beside := summary.get("foresight")):
                keep_measured(plan, beside)
    except OSError as error:
        console.say(f"{layout.summary} could not be written: {error.strerror}")
    failure = describe_failure(verdict, attempt, relay.shown_rank) if verdict.exit_code != 0 else ""
    return FinishedRun(verdict, layout, summary, failure, shortage(verdict, attempt))


def keep_measured(plan: Plan, beside: Mapping[str, Any]) -> None:
    """Remember in the user's cache what a run took, for the estimates of the next ones on the same device."""
    from trainkit.foresight.measured import device_of, remember
    from trainkit.machine.probe import probe
    from trainkit.runner.report.foresight import record

    made = record(plan, beside)
    if made is not None:
        remember(device_of(probe(), plan.cards[0].name if plan.cards else ""), made)
