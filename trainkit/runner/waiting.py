"""A run that waits for its GPUs: its place in line, its run directory, and what it says meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from trainkit.errors import Diagnostic, MachineError, TrainkitError
from trainkit.files import remove_tree, write_json
from trainkit.launch_plan.model import GpuWait, Plan
from trainkit.machine.facts import Gpu
from trainkit.machine.gpu_locks import GpuLocks, Signature, holder, user_name
from trainkit.machine.gpu_queue import Ticket
from trainkit.machine.probe import CARD_PROBES, probe
from trainkit.machine.selection import is_idle, occupants, usable
from trainkit.runner.report.console import Terminal
from trainkit.runner.request import RunRequest
from trainkit.runner.rundir.create import create_run_dir, write_plan
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import lock_run
from trainkit.runner.rundir.records import Pids, Status
from trainkit.runner.supervisor.processes import STOP, handled, signal_name
from trainkit.text import pluralize

POLL_SECONDS = 0.1  # between looks at tickets and locks: a few system calls
DRIVER_SECONDS = 0.5  # between questions to the driver, by the first in line alone


@dataclass(frozen=True, slots=True)
class Queued:
    """The run directory of a run that has waited, and the descriptor of its lock."""

    layout: RunLayout
    lock: int


def wait_for_gpus(
    request: RunRequest,
    console: Terminal,
    on_queued: Callable[[RunLayout, str], None],
    until_begun: ExitStack,
) -> tuple[RunRequest, GpuLocks, Queued | None]:
    """Wait until the plan's GPUs are free and it is the run's turn, and lock them. The request is planned anew by then.

    on_queued: called with the run directory, and for what it waits, if it does not start at once. until_begun: closed
    when the run begins. Up to then Ctrl-C leaves nothing; a run that is ended otherwise is recorded as such. Raises
    MachineError and RecipeError where the plan is refused meanwhile.
    """
    plan, environ = request.planned.plan, request.environ
    assert plan.waits is not None
    ticket = Ticket(environ, plan.waits.count, plan.waits.among, Signature(os.getpid(), _user(), plan.name))
    cards = GpuLocks(environ)
    try:
        reserved = {uuid for each in ticket.before() for uuid in each.among}
        if plan.waits.ready and reserved.isdisjoint(card.uuid for card in plan.cards) and _lock(cards, plan):
            return request, cards, None
        queued = until_begun.enter_context(_queued(request))
        line = _Line(plan.waits, ticket, environ)
        told: object = None
        while True:
            while why := line.obstacle():
                if line.who != told:
                    text = f"waits for {_wanted(plan.waits)}: {why}"
                    _write_status(queued.layout, text)
                    if told is None:
                        on_queued(queued.layout, text)
                    console.say(text)
                    told = line.who
                time.sleep(POLL_SECONDS)
            assert request.again is not None
            request = replace(request.again(ticket.number), begun=request.begun)
            plan = request.planned.plan
            refuse_blocked(plan)
            if plan.waits is None or (plan.waits.ready and _lock(cards, plan)):
                console.say("now: " + ", ".join(f"GPU {card.index} ({card.uuid})" for card in plan.cards))
                return request, cards, queued
            line.forget()
    except BaseException:
        cards.release()
        raise
    finally:
        ticket.release()


class _Line:
    """What keeps a run from starting, looked at as seldom as will do. who: is in the way; its changes are told."""

    def __init__(self, waits: GpuWait, ticket: Ticket, environ: Mapping[str, str]) -> None:
        self._waits, self._ticket, self._environ = waits, ticket, environ
        self._asked = 0.0  # of the monotonic clock, when the driver was
        self._said = ""
        self.who: object = ()

    def obstacle(self) -> str:
        """In words; empty where the run can start."""
        before = self._ticket.before()
        reserved = {uuid for each in before for uuid in each.among}
        own = [uuid for uuid in self._waits.among if uuid not in reserved]
        if len(own) < self._waits.count:
            first = before[0]
            which = f"for {pluralize(first.amount, 'GPU')}"
            more = f", and {len(before) - 1} more" if len(before) > 1 else ""
            self.who = [each.number for each in before]
            return f"before it {first.run} waits {which} (pid {first.pid}, {first.user}){more}"
        held = {uuid: hold for uuid in own if (hold := holder(uuid, self._environ))}
        if len(own) - len(held) < self._waits.count:
            self.who = held
            runs = dict.fromkeys(f"{h.run or 'one that starts'} (pid {h.pid}, {h.user})" for h in held.values())
            return f"it is next; {pluralize(len(held), 'GPU')} held by {', '.join(runs)}"
        if time.monotonic() - self._asked > DRIVER_SECONDS:
            found = {gpu.uuid: gpu for gpu in usable(probe(CARD_PROBES, ticket=self._ticket.number).gpus)}
            busy = [gpu for uuid in own if (gpu := found.get(uuid)) and not is_idle(gpu, self._waits.idle_below)]
            gone = [uuid for uuid in own if uuid not in found]
            self._asked = time.monotonic()
            if len(own) - len(busy) - len(gone) >= self._waits.count:
                self._said = ""
            else:
                self.who = (gone, {gpu.uuid: _users_of(gpu) for gpu in busy})
                lost = [f"the driver reports no {uuid}" for uuid in gone]
                self._said = "; ".join(("it is next", *lost, *map(occupants, busy)))
        return self._said

    def forget(self) -> None:
        """The plan has found the GPUs busy again: look anew, after a while."""
        self._asked = 0.0
        time.sleep(POLL_SECONDS)


def _users_of(gpu: Gpu) -> tuple[object, ...]:
    """Who uses a GPU: a change of these is told, one of its memory is not."""
    return gpu.held_by, gpu.wanted_by, tuple(each.pid for each in gpu.processes)


def refuse_blocked(plan: Plan) -> None:
    """Raise MachineError with all for which this machine cannot run a plan."""
    if plan.blockers:
        raise MachineError(Diagnostic("error", notice.what, hint=notice.hint) for notice in plan.blockers)


def _lock(cards: GpuLocks, plan: Plan) -> bool:
    if cards.take([card.uuid for card in plan.cards]) is not None:
        return False
    cards.sign(_user(), "")
    return True


def _wanted(waits: GpuWait) -> str:
    return f"{waits.count} of {len(waits.among)} GPUs" if waits.count < len(waits.among) else "its GPUs"


def _user() -> str:
    return user_name(os.getuid())


@contextmanager
def _queued(request: RunRequest) -> Iterator[Queued]:
    """The run directory of a run while it waits, with the plan as it is so far; at the start it gets the final one."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    plan = request.planned.plan
    with handled(STOP, leave):
        layout = create_run_dir(plan.output_root, plan.name)
        lock = -1
        try:
            lock = lock_run(layout)
            _write_status(layout, "")
            write_plan(layout, plan, request.recipe_yaml, request.command_shell)
            yield Queued(layout, lock)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                _remove(layout)
            else:
                _write_end(layout, error)
            if lock >= 0:
                os.close(lock)
            raise


def _remove(layout: RunLayout) -> None:
    remove_tree(layout.root, below=layout.root.parent)
    with suppress(OSError):  # other runs of the name are there
        layout.root.parent.rmdir()
        layout.root.parent.parent.rmdir()


def _write_status(layout: RunLayout, why: str, **more: object) -> None:
    """status.json of a run that has not started: who waits, so that it can be cancelled, and for what."""
    known = Status("queued", layout.id, why=why or None, host=os.uname().nodename, pids=Pids.of(os.getpid()))
    write_json(layout.status, {**known._asdict(), "pids": known.pids._asdict(), **more}, below=layout.root)


def _write_end(layout: RunLayout, error: BaseException) -> None:
    """How a run has ended before it has begun: by a signal, or because it is refused now."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        number = error.code - 128
        how = {"exit_code": error.code, "failure": "signal", "signal": number}
        why = f"trainkit received {signal_name(number)} while the run waited for GPUs"
    else:
        code = int(error.exit_code) if isinstance(error, TrainkitError) else 3
        how, why = {"exit_code": code, "failure": "trainkit"}, str(error)
    with suppress(OSError):  # a full disk: the error itself counts
        _write_status(layout, why, state="ended", ended=time.time(), **how)
