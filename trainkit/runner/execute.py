"""The whole life of one run: bind the plan, write the run directory, start, follow, account."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import Diagnostic, MachineError
from trainkit.files import cache_folder, publish, refuse_links, write_json
from trainkit.machine.card_locks import Cards, taken_by, user_name
from trainkit.plan.model import EnvironmentDiff, Plan, Planned, Text, Variable
from trainkit.recipe.layers.secrets import MASK, is_secret_name
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
from trainkit.runner.supervisor.parent import Supervisor

ATTEMPT = 1
NO_INPUT = (
    "standard input is not handed on: only a single rank without a launcher reads it; let the program read a file"
)
TRIES = 20  # names for a run directory
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
    again: Callable[[], RunRequest] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended. failure: what a user should read of it; empty for one that succeeded."""

    verdict: Verdict
    layout: RunLayout
    summary: Mapping[str, Any]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """Exactly what is started: argv, what runs before, and the ranks' whole environment."""

    argv: tuple[str, ...]
    preparations: tuple[tuple[str, Sequence[str], str], ...]  # title, argv, name of the lock
    environment: Mapping[str, str]


def execute(request: RunRequest) -> int:
    """Run the plan to its end and say how it went; the exit code of the run.

    Raises MachineError, before anything starts, when this machine cannot run it.
    """
    console = Terminal(request.environ)
    ended = carry_out(request, console)
    if ended.failure:
        console.say(ended.failure)
    if ended.summary:
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
        layout, group, bound = _bind(request)
        cards.sign(user_name(os.getuid()), str(layout.root))
        lock = hold(layout)
        try:
            write_run_dir(layout, plan, bound, request.recipe_yaml, request.command_shell)
            console.say(f"run directory: {layout.root}")
            if plan.resume.path is not None:
                step = f" (step {plan.resume.step})" if plan.resume.step else ""
                console.say(f"goes on from {plan.resume.path}{step}")
            spec = _spec(plan, layout, group, bound, started)
            # The guardian holds these too: should trainkit be killed, run and cards are not free before all is ended.
            locks = (lock, *cards.fds)
            return _follow(spec, bound.environment, plan, layout, console, locks)
        finally:
            os.close(lock)
    finally:
        cards.release()


def _take_cards(request: RunRequest, console: Terminal) -> tuple[RunRequest, Cards]:
    """Lock the plan's cards. Where another run was quicker, plan again: the new plan chooses others, or refuses."""
    cards = Cards(request.environ)
    for choice in range(CHOICES):
        plan = request.planned.plan
        if plan.blockers:
            raise MachineError(Diagnostic("error", notice.what, hint=notice.hint) for notice in plan.blockers)
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


def _bind(request: RunRequest) -> tuple[RunLayout, int, BoundPlan]:
    """A new run directory, the index of this node's group, and what is started there."""
    plan = request.planned.plan
    rank = node_rank(plan, request.node_rank, request.environ)
    master, port = rendezvous(plan)
    local, group = local_address(master, plan.topology.nodes), group_of(plan, rank)

    def bound(layout: RunLayout) -> BoundPlan:
        # The launchers of all nodes find each other by this id, so on several it must not depend on the node. Node 0
        # hosts a rendezvous of its own for every run: two runs of one name do not meet by mistake.
        run_id = layout.id if plan.topology.nodes == 1 else plan.name
        return bind(plan, run_values(run_id, layout, port, rank, master, local), request.environ, group)

    # The folder does not matter here: bound only to see whether every variable is there. The run directory is created
    # last, so that what cannot be bound leaves nothing behind.
    bound(RunLayout(Path.cwd()))
    layout = create_run_dir(plan.output_root, plan.name)
    return layout, group, bound(layout)


def run_values(run_id: str, layout: RunLayout, port: int, rank: int, master: str, local: str) -> dict[Variable, str]:
    """A value for every variable that a plan may hold. rank: of the node; master, local: addresses of node 0 and this.

    The layout's root must be absolute.
    """
    return {
        Variable.RUN_ID: run_id,
        Variable.RUN_DIR: str(layout.root),
        Variable.ATTEMPT_DIR: str(layout.attempt(ATTEMPT).root),
        Variable.PORT: str(port),
        Variable.NODE_RANK: str(rank),
        Variable.MASTER_ADDR: master,
        Variable.LOCAL_ADDR: local,
        Variable.IS_HOST: "true" if rank == 0 else "false",
    }


def bind(plan: Plan, values: Mapping[Variable, str], environ: Mapping[str, str], group: int = 0) -> BoundPlan:
    """Fill in the plan's variables. Raises MachineError when a variable that `env_from` names is not in environ."""

    def argv(texts: tuple[Text, ...]) -> tuple[str, ...]:
        return tuple(item.bind(values) for item in texts)

    return BoundPlan(
        argv(plan.commands[group].argv),
        tuple((item.title, argv(item.argv), item.lock) for item in plan.preparations),
        child_environment(plan.environment, values, environ),
    )


def child_environment(
    diff: EnvironmentDiff, values: Mapping[Variable, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """The ranks' whole environment: the caller's without what the plan unsets, what it takes, and what it sets."""
    if missing := [name for name in diff.take if name not in environ]:
        raise MachineError(
            Diagnostic(
                "error",
                f"the environment has no {name}, which the recipe takes from it (env_from)",
                key="env_from",
                hint=f"set it (export {name}=…) or remove it from env_from",
            )
            for name in missing
        )

    # What is taken may be among what is unset; what is set counts over all. A pattern's * is its last character.
    exact, prefixes = set(diff.unset), tuple(item[:-1] for item in diff.unset if item.endswith("*"))
    child = {name: value for name, value in environ.items() if name not in exact and not name.startswith(prefixes)}
    child |= {name: environ[name] for name in diff.take}
    return child | {name: value.bind(values) for name, value in diff.set}


def create_run_dir(output_root: str, name: str) -> RunLayout:
    """A new run directory <output_root>/<name>/<timestamp>-<id>. Raises MachineError when it cannot be created."""
    parent = Path(output_root).absolute() / name
    for _ in range(TRIES):
        # The time sorts runs by age, the random part keeps apart those of one second.
        root = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            root.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise MachineError(
                f"the run directory {root} cannot be created: {error.strerror}",
                hint="set output.root to a folder that you may write to",
            ) from error
        return RunLayout(root)
    raise MachineError(f"no free name for a run directory was found in {parent}", hint="check that it is a folder")


def write_run_dir(layout: RunLayout, plan: Plan, bound: BoundPlan, recipe_yaml: str, command_shell: str) -> None:
    """Write recipe, plan, script, environment and planned files."""
    from trainkit.plan.serialize import plan_to_json

    attempt = layout.attempt(ATTEMPT)
    attempt.logs.mkdir(parents=True)
    attempt.ranks.mkdir()
    publish(layout.recipe, recipe_yaml)
    publish(layout.plan, json.dumps(plan_to_json(plan), indent=2) + "\n")
    publish(layout.command, command_shell, mode=0o777)
    publish(layout.environment, _masked_environment(plan.environment, bound.environment))
    for file in plan.files:
        path = layout.root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, file.content)


def _masked_environment(diff: EnvironmentDiff, bound: Mapping[str, str]) -> str:
    """The environment diff as text. What was taken from the caller, and what is named like a secret, is masked."""
    lines = [f"unset {name}" for name in diff.unset]
    for name in sorted({*(name for name, _ in diff.set), *diff.take}):
        hidden = name in diff.take or is_secret_name(name)
        value = bound[name] if bound[name].isprintable() else bound[name].encode("unicode_escape").decode("ascii")
        lines.append(f"{name}={MASK if hidden else value}")
    return "".join(f"{line}\n" for line in lines)


def _spec(plan: Plan, layout: RunLayout, group: int, bound: BoundPlan, started: float) -> Spec:
    locks = _lock_folder(bound.environment, str(layout.root))
    return Spec(
        run_dir=str(layout.root),
        status={"run_id": layout.id, "attempt": ATTEMPT, "started": started},
        attempt_dir=str(layout.attempt(ATTEMPT).root),
        trainkit_pid=os.getpid(),
        argv=bound.argv,
        preparations=[(title, argv, os.path.join(locks, f"{lock}.lock")) for title, argv, lock in bound.preparations],
        launcher=plan.launcher.kind,
        grace=plan.grace_seconds,
        ranks=plan.topology.groups[group].processes,
        nodes=plan.topology.nodes,
        max_restarts=plan.max_restarts,
        keeps_stdin=_keeps_stdin(plan),
        # Only a terminal's foreground group may read from it; any other is stopped by SIGTTIN.
        foreground_group=os.getpgrp() if _keeps_stdin(plan) and os.isatty(0) else None,
        ignore=[signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [],  # nohup
    )


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


def _follow(
    spec: Spec, environment: Mapping[str, str], plan: Plan, layout: RunLayout, console: Terminal, locks: Sequence[int]
) -> Ended:
    begin, attempt = time.monotonic(), layout.attempt(ATTEMPT)
    relay = Relay(layout.metrics, attempt, console)
    watch = CardWatch(plan.cards, layout.cards)
    try:
        verdict = Supervisor(spec, environment, relay, console, locks).run(watch.start)
    finally:
        watch.close()
    seconds = time.monotonic() - begin
    # On several nodes each has a run directory of its own, and only rank 0 measures.
    has_rank_0 = plan.topology.nodes == 1 or relay.shown_rank == 0
    summary: dict[str, Any] = {}
    try:  # folders that the program has closed must not change the exit code
        summary = build_summary(plan, layout, verdict, seconds, relay.progress, watch, has_rank_0)
        for remark in remarks(attempt, verdict):
            console.say(remark)
    except OSError as error:
        console.say(f"what the ranks have left cannot be read: {error.strerror}: {error.filename or attempt.root}")
    try:  # nor a full disk
        refuse_links(layout.root)
        if summary:
            write_json(layout.summary, summary)
    except OSError as error:
        console.say(f"{layout.summary} could not be written: {error.strerror}")
    failure = describe_failure(verdict, attempt, relay.shown_rank) if verdict.exit_code != 0 else ""
    return Ended(verdict, layout, summary, failure)
