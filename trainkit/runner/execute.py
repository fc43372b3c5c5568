"""The whole life of one run: bind the plan, write the run directory, start, follow, account."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import Diagnostic, MachineError
from trainkit.files import cache_folder, write_json
from trainkit.machine.card_locks import Cards, taken_by, user_name
from trainkit.plan.model import Plan, Planned
from trainkit.runner.materialize import Bindings, BoundPlan, bind, create_run_dir, write_run_dir
from trainkit.runner.rank.streams import holds_input
from trainkit.runner.rendezvous import group_of, local_address, node_rank, rendezvous
from trainkit.runner.report.card_watch import CardWatch
from trainkit.runner.report.console import Terminal
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.failure import describe_failure, remarks
from trainkit.runner.report.progress import Relay
from trainkit.runner.report.summary import build_summary, render_summary
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import hold
from trainkit.runner.supervisor.channel import Spec
from trainkit.runner.supervisor.parent import Job, Supervisor

ATTEMPT = 1
NO_INPUT = (
    "standard input is not handed on: only a single rank without a launcher reads it; let the program read a file"
)
CHOICES = 10  # how often cards are chosen again when other runs are quicker


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to run. recipe_yaml and command_shell are written into the run directory as they are.

    node_rank: this machine's number among several; None asks the scheduler's variables.
    again: plan again, from the machine as it is by then, for when another run has taken a card meanwhile.
    """

    planned: Planned
    recipe_yaml: str
    command_shell: str
    environ: Mapping[str, str]
    node_rank: int | None = None
    console: Terminal | None = None
    again: Callable[[], RunRequest] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended. failure: what a user should read of it; empty for one that succeeded."""

    verdict: Verdict
    layout: RunLayout
    summary: Mapping[str, Any]
    failure: str = ""


def execute(request: RunRequest) -> int:
    """Run the plan to its end and say how it went; the exit code of the run.

    Raises MachineError, before anything starts, when this machine cannot run it.
    """
    console = request.console or Terminal(request.environ)
    ended = carry_out(request, console)
    if ended.failure:
        console.say(ended.failure)
    console.say(render_summary(ended.summary, ended.layout.root))
    return ended.verdict.exit_code


def carry_out(request: RunRequest, console: Terminal) -> Ended:
    """Run the plan to its end. Raises MachineError, before anything starts, when this machine cannot run it."""
    request, cards = _take_cards(request, console)
    plan = request.planned.plan
    for notice in plan.notices:
        if notice.severity == "warning":
            console.say(f"warning: {notice.what}" + (f"\n  next: {notice.hint}" if notice.hint else ""))
    if not _keeps_stdin(plan) and holds_input(0):
        console.say(f"warning: {NO_INPUT}")
    started = time.time()
    try:
        layout, bindings, bound = _bind(request)
        cards.sign(user_name(os.getuid()), str(layout.root))
        lock = hold(layout)
        try:
            write_run_dir(layout, plan, bound, request.recipe_yaml, request.command_shell)
            console.say(f"run directory: {layout.root}")
            job = _job(plan, layout, bindings, bound, started)
            # The guardian holds these too: should trainkit be killed, run and cards are not free before all is ended.
            return _follow(job, plan, layout, console, (lock, *cards.fds))
        finally:
            os.close(lock)
    finally:
        cards.release()


def _take_cards(request: RunRequest, console: Terminal) -> tuple[RunRequest, Cards]:
    """Lock the plan's cards. Where another run was quicker, plan again: the new plan chooses others, or refuses."""
    cards = Cards(request.environ)
    for choice in range(CHOICES):
        plan = request.planned.plan
        _refuse_blocked(plan)
        if choice > 0:
            console.say("now: " + ", ".join(f"card {card.index} ({card.uuid})" for card in plan.cards))
        lost = cards.take([card.uuid for card in plan.cards], shared=plan.shares_cards)
        if lost is None:
            cards.sign(user_name(os.getuid()), "")
            return request, cards
        name = next(f"card {card.index} ({card.name})" for card in plan.cards if card.uuid == lost)
        # Between the probe that the plan was made from and this lock, another run may have started.
        what = f"{name} was taken meanwhile by {taken_by(lost, request.environ)}"
        if request.again is None:
            raise MachineError(what, hint="start again when that run has ended, or choose other cards")
        console.say(f"{what}; choosing again")
        request = request.again()
    raise MachineError(f"other runs took the chosen cards {CHOICES} times", hint="try again")


def _refuse_blocked(plan: Plan) -> None:
    if blockers := [notice for notice in plan.notices if notice.severity == "blocker"]:
        raise MachineError(Diagnostic("error", notice.what, hint=notice.hint) for notice in blockers)


def _bind(request: RunRequest) -> tuple[RunLayout, Bindings, BoundPlan]:
    """The run directory is created last: what cannot be bound leaves nothing behind."""
    plan = request.planned.plan
    rank = node_rank(plan, request.node_rank, request.environ)
    master, port = rendezvous(plan)
    local = local_address(master, plan.topology.nodes)
    group = group_of(plan, rank)

    def bindings(layout: RunLayout) -> Bindings:
        # The launchers of all nodes find each other by this id, so on several it must not depend on the node. Node 0
        # hosts a rendezvous of its own for every run: two runs of one name do not meet by mistake.
        run_id = layout.id if plan.topology.nodes == 1 else plan.name
        return Bindings(run_id, str(layout.root), ATTEMPT, port, rank, master, local, group)

    # The folder does not matter here: bound only to see whether every variable is there.
    bind(plan, bindings(RunLayout(Path.cwd())), request.environ)
    layout = create_run_dir(plan.output_root, plan.name)
    return layout, bindings(layout), bind(plan, bindings(layout), request.environ)


def _job(plan: Plan, layout: RunLayout, bindings: Bindings, bound: BoundPlan, started: float) -> Job:
    attempt = layout.attempt(ATTEMPT)
    locks = _lock_folder(bound.environment, str(layout.root))
    keeps_stdin = _keeps_stdin(plan)
    spec = Spec(
        run_dir=str(layout.root),
        status={"run_id": layout.id, "attempt": ATTEMPT, "started": started},
        attempt_dir=str(attempt.root),
        trainkit_pid=os.getpid(),
        argv=bound.argv,
        preparations=[item._replace(lock=os.path.join(locks, f"{item.lock}.lock")) for item in bound.preparations],
        launcher=plan.launcher.kind,
        grace=plan.grace_seconds,
        ranks=plan.topology.groups[bindings.group].processes,
        nodes=plan.topology.nodes,
        max_restarts=plan.max_restarts,
        foreground_group=os.getpgrp() if keeps_stdin and os.isatty(0) else None,
        ignore=[signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [],  # nohup
    )
    return Job(spec, bound.environment, attempt, keeps_stdin)


def _lock_folder(environ: Mapping[str, str], run_dir: str) -> str:
    """The folder of this user's locks: the cache folder, or the run directory where there is no writable home."""
    home = environ.get("HOME") or os.path.expanduser("~")  # a container may have a user but no HOME
    folder = cache_folder({**environ, "HOME": home}, "locks") or run_dir
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return run_dir
    return folder if os.access(folder, os.W_OK) else run_dir


def _keeps_stdin(plan: Plan) -> bool:
    return plan.launcher.kind == "python" and plan.topology.world_size == 1


def _follow(job: Job, plan: Plan, layout: RunLayout, console: Terminal, locks: tuple[int, ...]) -> Ended:
    begin = time.monotonic()
    relay = Relay(layout, ATTEMPT, console)
    watch = CardWatch(plan.cards, layout.cards)
    try:
        verdict = Supervisor(job, relay, console, locks).run(watch.start)
    finally:
        watch.close()
    seconds = time.monotonic() - begin
    # On several nodes each has a run directory of its own, and only rank 0 measures.
    has_rank_0 = plan.topology.nodes == 1 or relay.shown_rank == 0
    summary = build_summary(plan, layout, verdict, seconds, relay.progress, watch, has_rank_0)
    for remark in remarks(job.attempt):
        console.say(remark)
    try:  # a full disk must not change the exit code
        write_json(layout.summary, summary)
    except OSError as error:
        console.say(f"{layout.summary} could not be written: {error.strerror}")
    failure = describe_failure(verdict, job.attempt, relay.shown_rank) if verdict.exit_code != 0 else ""
    return Ended(verdict, layout, summary, failure)
