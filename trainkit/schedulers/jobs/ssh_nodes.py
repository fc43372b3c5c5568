"""Runs on machines without a queue: who submits starts the nodes through ssh, and leaves the run to them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn

import trainkit
from trainkit.errors import Diagnostic, MachineError, RecipeError
from trainkit.files import parse_json, publish, write_json
from trainkit.launch_plan.model import Plan, Variable, bind_words
from trainkit.recipe.resolved import Resolved
from trainkit.runner.binding import require_env_from
from trainkit.runner.nodes.control import LOST_SECONDS, PATIENCE
from trainkit.runner.report.console import Terminal, lead_output
from trainkit.runner.report.exit_status import KILLED
from trainkit.runner.rundir.create import create_run_dir, write_plan
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_status
from trainkit.runner.rundir.records import Status
from trainkit.runner.supervisor.processes import (
    STOP,
    ProcessId,
    end_self,
    end_tree,
    handled,
    reason_of_signal,
    signal_name,
)
from trainkit.schedulers import ssh
from trainkit.schedulers.base import RefusedError
from trainkit.schedulers.client import ask
from trainkit.schedulers.jobs.records import (
    Submission,
    hold_submitter,
    read_submission,
    update_status,
    write_submission,
)
from trainkit.text import join_names

AT_ONCE = 32  # hosts
SECONDS = 60.0  # for ssh, the login shell, and the import of trainkit from a slow disk
# What ssh or the shell there say -> what to do.
HINTS = {
    "cluster.setup line": "try the line by hand there: ssh {host}",
    "Host key verification failed": "connect once by hand, and compare the key: ssh {host}",
    "Permission denied": "let ssh in without a password: ssh-copy-id {host}",
    "No module named trainkit": "install trainkit for the interpreter there, or name another: cluster.python",
    "cannot execute": "cluster.python names the interpreter there",
    "No such file or directory": "cluster.python names the interpreter there, and cluster.workdir the folder",
    "not found": "cluster.python names the interpreter there",
}


def addresses(plan: Plan, resolved: Resolved, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where ssh goes for each host. RecipeError where two are the same machine, MachineError where ssh is missing."""
    assert plan.job is not None
    words = bind_words(plan.job.submit, {})
    found: list[ssh.Address] = []
    for position, host in enumerate(plan.job.hosts):
        try:
            where = ask(ssh.address(words, host), environ)
        except RefusedError as error:
            raise RecipeError(resolved.error("cluster", f"ssh: {error}")) from error
        if where in found:
            what = f"{host} and {plan.job.hosts[found.index(where)]} are the same machine for ssh, {where.name}"
            raise RecipeError(resolved.error(f"cluster.hosts.{position}", what, "name each machine once"))
        found.append(where)
    return tuple(each.name for each in found)


def commands(plan: Plan) -> Iterator[str]:
    """The script of a node, and the commands that would be run."""
    assert plan.job is not None
    yield f"{plan.job.content}".rstrip()
    for number, host in enumerate(plan.job.hosts):
        yield shlex.join((*bind_words(plan.job.submit, {}), "--", host)) + f" node.sh as node {number}"


def versions(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """What each host has. MachineError with every host that would not do."""
    job = plan.job
    assert job is not None
    words = bind_words(job.submit, {})
    python = plan.commands[0].wrapper[0].bind({})

    def tried(host: str) -> str | Diagnostic:
        try:
            return ask(ssh.version(words, host, python), environ, SECONDS)
        except RefusedError as error:
            return why_not(host, str(error))
        except MachineError as error:
            return Diagnostic("error", f"{host}: {error}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [*zip(job.hosts, pool.map(tried, job.hosts), strict=True)]
    if wrong := [each for _, each in found if isinstance(each, Diagnostic)]:
        raise MachineError(wrong)
    yield from (f"{host} has {each}" for host, each in found)


def why_not(host: str, said: str) -> Diagnostic:
    """Why a host cannot be used, and what to do. said: by ssh, or the shell there."""
    hint = next((hint for words, hint in HINTS.items() if words in said), "try it by hand: ssh {host}")
    return Diagnostic("error", f"{ssh.bare(host)}: {said}", hint=hint.format(host=host))


MARK = b"\x1etrainkit-node "  # before each line that is for the submitter, and not for people
SILENT_SECONDS = 300.0  # without a beat, for a submitter whose machine is gone or asleep
SEE_SECONDS = 10.0  # for the run directory to be seen: NFS shows new files late
CHUNK = 1 << 16
MOST = 1 << 24  # bytes of a line
GONE = 128 + signal.SIGTERM


class TiedNode:
    """This node, tied to the submitter by ssh's pipes until the run has begun on all nodes.

    Until then it obeys what comes, and ends where nothing comes. Then the submitter leaves it to itself.
    """

    def __init__(self, layout: RunLayout, attempt: int, node: int) -> None:
        """Report that this node is there, and take the variables.

        Raises SystemExit when the submitter is gone, or this machine does not see the run directory.
        """
        self._layout, self._attempt, self._node = layout, attempt, node
        self._out = os.dup(1)
        orders = os.dup(0)  # which, like the other, no child inherits
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        until = time.monotonic() + SEE_SECONDS
        while not layout.plan.exists():
            if time.monotonic() > until:
                self._tell({"refused": f"it does not see {layout.root}"})
                raise SystemExit(4)
            time.sleep(0.2)
        if not os.access(layout.root, os.W_OK):
            self._tell({"refused": f"it may not write to {layout.root}"})
            raise SystemExit(4)
        self._tell({"ready": True, "host": os.uname().nodename, "version": trainkit.__version__})
        submission = read_submission(layout.root)
        come = Orders(orders)
        lines = iter(come)
        first = next(lines, None)
        if first is None:
            raise SystemExit(GONE)
        values = parse_json(first).get("environ")
        if not isinstance(values, dict):
            raise MachineError("what has started this node is no trainkit submit")
        os.environ.update({str(name): str(value) for name, value in values.items()})
        host = submission.host if submission else "another machine"
        threading.Thread(target=self._obey, args=(lines, come, host), daemon=True).start()

    def run(self, execute: Callable[[], int]) -> int:
        """Execute this node's part. Where it is told to end before the run has begun, node 0 writes that down."""

        def leave(number: int, _frame: object) -> NoReturn:
            raise SystemExit(128 + number)

        with handled(STOP, leave):
            try:
                return execute()
            except (SystemExit, KeyboardInterrupt) as leaving:
                code = leaving.code if isinstance(leaving, SystemExit) else 128 + signal.SIGINT
                ended = (read_status(self._layout) or Status()).state == "ended"
                if isinstance(code, int) and code - 128 in STOP and not self._node and not ended:
                    why, failure = reason_of_signal(code - 128)
                    end = {"exit_code": code, "failure": failure, "why": why, "signal": code - 128}
                    update_status(self._layout, **end, state="ended", ended=time.time())
                raise

    def begun(self, layout: RunLayout, _waits: str) -> None:
        """The run begins here: lead the output into the run directory, and tell the submitter."""
        # Machines that append to one file would write over each other's lines.
        own = layout.attempt(self._attempt, self._node).launcher_log
        lead_output(own if self._node else layout.job_output, layout.root)
        self._tell({"begun": True})

    def _tell(self, what: dict[str, object]) -> None:
        sys.stdout.flush()  # what came before stands before
        os.write(self._out, MARK + json.dumps(what).encode() + b"\n")

    def _obey(self, lines: Iterator[bytes], orders: Orders, host: str) -> None:
        for line in lines:
            order = parse_json(line)
            if order.get("leave"):
                with contextlib.suppress(OSError):  # the submitter is gone by now
                    self._tell({"left": True})
                os.close(self._out)
                orders.close()
                return
            if isinstance(number := order.get("signal"), int):
                os.kill(os.getpid(), number)
        submitter = f"trainkit on {host}, which was starting the run,"
        silent = f"nothing was heard for {SILENT_SECONDS:.0f} s of {submitter} so that it ends"
        end_self(silent if orders.silent else f"{submitter} is gone, or out of reach")


class Orders:
    """Lines as they come, to the end of the input, or of our patience. silent: whether it was patience that ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.silent = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            while selector.select(SILENT_SECONDS):
                data = os.read(self._fd, CHUNK)
                *lines, rest = (rest + data).split(b"\n")
                yield from lines
                if not data or len(rest) > MOST:
                    return
        self.silent = True

    def close(self) -> None:
        os.close(self._fd)


class Node:
    """One node by its ssh. ready: its trainkit is there; begun: the run is, on it; left: it needs no ssh any more."""

    def __init__(self, number: int, host: str, argv: Sequence[str]) -> None:
        self.number, self.host, self._given = number, ssh.bare(host), host
        # A session of its own: a Ctrl-C in the terminal is this process's alone, and ssh can ask nobody anything.
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self.ready = self.begun = self.left = False
        self.refused = ""
        self.said: list[str] = []  # before it was ready
        self._rest = {"out": b"", "err": b""}  # of lines that are not yet complete
        self._unsent = deque[bytes]()
        self._writing = threading.Lock()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def name(self) -> str:
        """As people are told of it."""
        return f"node {self.number} ({self.host})"

    def send(self, message: Mapping[str, object]) -> None:
        """An order; kept where ssh does not take it now. For any thread and for signal handlers, and never waits."""
        self._unsent.append(json.dumps(message).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Send what is kept, as far as it is taken. Where another is at it, that one sends it, or the next call."""
        stream = self.process.stdin
        assert stream is not None
        if not self._writing.acquire(blocking=False):
            return
        try:
            while self._unsent and not stream.closed:
                rest = self._unsent[0][os.write(stream.fileno(), self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:  # ssh has ended, which the loop sees
            self._unsent.clear()
        finally:
            self._writing.release()

    def release(self) -> None:
        """End its input, and by that the node; of one that is left, only its ssh."""
        assert self.process.stdin is not None
        with self._writing:
            self.process.stdin.close()
        if self.left:
            self.process.terminate()

    def take(self, stream: str, data: bytes) -> list[str]:
        """The lines that are for people, of what it says; the last one as well where that is its end (no data)."""
        *lines, self._rest[stream] = (self._rest[stream] + data).split(b"\n")
        if not data and self._rest[stream]:
            lines, self._rest[stream] = [*lines, self._rest[stream]], b""
        shown = list[str]()
        for line in lines:
            if stream == "out" and line.startswith(MARK):
                shown += self._hear(parse_json(line.removeprefix(MARK)))
            elif text := line.decode("utf-8", "replace").rstrip("\r"):
                (shown if self.ready else self.said).append(text)
        return shown

    def _hear(self, message: Mapping[str, object]) -> list[str]:
        """A line that is for the submitter; what was said before it, once the node is there."""
        if not self.ready:
            self.refused = str(message.get("refused") or "")
            if not self.refused and message.get("version") != trainkit.__version__:
                self.refused = f"it has trainkit {message.get('version')}, and this machine {trainkit.__version__}"
            self.ready = not self.refused
            return self.said if self.ready else []
        self.begun = self.begun or message.get("begun") is True
        self.left = self.left or message.get("left") is True
        return []

    @property
    def why_not(self) -> Diagnostic:
        """Why it has not come, and what to do."""
        if self.refused:
            hint = "the run directory is on a file system that all hosts share: output.root, cluster.workdir"
            return Diagnostic("error", f"{self.host}: {self.refused}", hint=hint)
        said = "; ".join(each.strip() for each in self.said)
        return why_not(self._given, said or f"ssh ended with exit code {self.process.poll()}")


TURN_SECONDS = 0.2
BEAT_SECONDS = 5.0
READY_SECONDS = 120.0  # for ssh, the login shell, and the import of trainkit from a slow disk
EARLY_SECONDS = 5.0  # for the others to end by themselves, when a node has ended before the run began
LINGER_SECONDS = 20.0  # for the others, once node 0 has ended, which ends last
LEAVE_SECONDS = 10.0  # for a node whose input has ended before it started anything, or that is left to itself
UNREACHED = 255  # what ssh exits with where it has not reached the host, or has lost it (ssh(1))


class SshStart:
    """The start of a run, and the ssh of each of its nodes meanwhile. lock: by which the run is seen to be started."""

    def __init__(
        self, plan: Plan, layout: RunLayout, argv: Sequence[Sequence[str]], environ: Mapping[str, str], lock: int
    ) -> None:
        assert plan.job is not None
        self._plan, self._layout, self._lock = plan, layout, lock
        self._console = Terminal(environ)
        self._selector = selectors.DefaultSelector()
        self._values = {name: environ[name] for name in plan.environment.take}
        self._stopped_by = 0
        self._met = False
        self._deadline = float("inf")  # when all are let go
        self._failed: Node | None = None  # the first that ended otherwise than well
        self._ended: set[int] = set()
        self._nodes: list[Node] = []
        try:
            for number, (host, words) in enumerate(zip(plan.job.hosts, argv, strict=True)):
                self._nodes.append(Node(number, host, words))
        except OSError as error:
            self._let_go()
            what = f"ssh cannot be started: {(error.strerror or str(error)).lower()}"
            raise MachineError(what, hint="apt-get install openssh-client") from error
        for node in self._nodes:
            self._selector.register(node.process.stdout, selectors.EVENT_READ, (node, "out"))  # type: ignore[arg-type]
            self._selector.register(node.process.stderr, selectors.EVENT_READ, (node, "err"))  # type: ignore[arg-type]

    def run(self, begun: Callable[[], None]) -> int:
        """Start on all hosts or on none, and leave the run to its nodes: 0, or the exit code of one that has not begun.

        begun: called when it is left. Raises MachineError where no host starts.
        """
        over = threading.Event()
        try:
            with handled(STOP, self._on_signal):
                self._meet()
                for node in self._nodes:
                    node.send({"environ": self._values})
                self._met = True
                threading.Thread(target=self._beat, args=(over,), daemon=True).start()
                has_begun = self._follow()
                if has_begun:
                    os.close(self._lock)  # who ends the run from now on tells node 0, and has told this process before
                    has_begun = not self._stopped_by or self._follow()
                if has_begun:
                    self._leave()
                    begun()  # even where Ctrl-C has come meanwhile: it says how to end the run
        finally:
            over.set()
            self._let_go()
        return 0 if has_begun else self._settle()

    def _beat(self, over: threading.Event) -> None:
        """Apart from the loop, which may be held up by a terminal that takes no output."""
        while not over.wait(BEAT_SECONDS):
            for node in self._nodes:
                node.send({"beat": True})

    def _on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        """Each node is told, or node 0 alone, which tells the others, once they have met; before that none is met."""
        again, self._stopped_by = self._stopped_by, self._stopped_by or number
        if not again:
            self._console.abandon(LINGER_SECONDS)
            self._deadline = time.monotonic() + self._plan.grace_seconds + PATIENCE
        if self._met and (not again or number == signal.SIGINT):
            for node in self._nodes if not self._running() else self._nodes[:1]:
                node.send({"signal": number})

    def _running(self) -> bool:
        return (status := read_status(self._layout)) is not None and status.state in ("running", "ended")

    def _meet(self) -> None:
        """Wait until each node has said that it is there and sees the run directory."""
        until = time.monotonic() + READY_SECONDS
        while not all(node.ready for node in self._nodes):
            self._turn()
            failed = [each for each in self._nodes if each.refused or self._is_over(each)]
            if failed:
                raise MachineError(node.why_not for node in failed)
            if self._stopped_by:
                raise MachineError(f"{signal_name(self._stopped_by)} came before the run began")
            if time.monotonic() > until:
                silent = join_names([node.host for node in self._nodes if not node.ready])
                raise MachineError(f"{silent}: no trainkit answered in {READY_SECONDS:.0f} s", hint="try ssh by hand")

    def _follow(self) -> bool:
        """Show what they say until the run has begun on all of them; False where it has not, and is to end."""
        while len(self._ended) < len(self._nodes) and time.monotonic() <= self._deadline:
            self._turn()
            if all(node.begun for node in self._nodes) and not self._stopped_by:
                return True
            for node in [each for each in self._nodes if each.number not in self._ended and self._is_over(each)]:
                self._take_end(node, time.monotonic())
        return False

    def _take_end(self, node: Node, now: float) -> None:
        """What follows from the end of a node: of 0 the end of all, of another one what node 0 makes of it."""
        self._ended.add(node.number)
        code = node.process.poll()
        if code and self._failed is None:
            self._failed = node
        if code == UNREACHED and not (self._stopped_by or 0 in self._ended - {node.number}):
            self._console.say(f"{node.name}: the connection has ended")
        if node.number == 0:
            self._deadline = min(self._deadline, now + LINGER_SECONDS)
            if code == UNREACHED:  # the others notice it by themselves
                self._deadline = now + LOST_SECONDS + self._plan.grace_seconds + PATIENCE
        elif code and self._deadline == float("inf"):
            wait = LOST_SECONDS + self._plan.grace_seconds + PATIENCE if self._running() else EARLY_SECONDS
            self._deadline = now + wait

    def _is_over(self, node: Node) -> bool:
        """Whether its ssh has ended, and all that it said is read."""
        keys = self._selector.get_map()
        open_ends = any(stream in keys for stream in (node.process.stdout, node.process.stderr))
        return not open_ends and node.process.poll() is not None

    def _turn(self) -> None:
        for key, _ in self._selector.select(TURN_SECONDS):
            node, stream = key.data
            data = os.read(key.fd, CHUNK)
            if not data:
                self._selector.unregister(key.fileobj)
            for line in node.take(stream, data):
                # Node 0 speaks for all, and the others name themselves.
                named = node.number == 0 or line.startswith(f"node {node.number} (")
                self._console.say(line if named else f"{node.name}: {line}")
        if not self._selector.get_map():
            time.sleep(TURN_SECONDS)
        for node in self._nodes:
            node.flush()

    def _leave(self) -> None:
        """Leave each node to itself: from then on its run needs neither this process nor ssh."""
        for node in self._nodes:
            node.send({"leave": True})
        until = time.monotonic() + LEAVE_SECONDS
        while not all(node.left or self._is_over(node) for node in self._nodes) and time.monotonic() < until:
            self._turn()
        unclear = [each for each in self._nodes if not each.left and each.process.poll() in (None, UNREACHED)]
        if unclear:
            names = join_names([each.name for each in unclear])
            what = f"warning: {names}: the connection was lost when the run was left to its nodes"
            self._console.say(f"{what}\n  next: see with `trainkit status {self._layout.short_id}` whether it goes on")

    def _let_go(self) -> None:
        """Let go of every node, and wait a bounded time until its ssh has ended."""

        def release() -> None:
            for node in self._nodes:
                node.release()

        end_tree(
            lambda: [node.process.pid for node in self._nodes if node.process.poll() is None],
            ask=release,
            grace=LEAVE_SECONDS + (self._plan.grace_seconds + PATIENCE if self._met else 0),
            wait=lambda _: self._turn(),
        )
        for node in self._nodes:
            node.process.wait()

    def _settle(self) -> int:
        """Write down why the run has not begun, where node 0 could not; the exit code."""
        until = time.monotonic() + EARLY_SECONDS
        while (status := read_status(self._layout) or Status()).state != "ended":
            if self._failed is None or self._failed.process.poll() == UNREACHED or time.monotonic() > until:
                break
            time.sleep(TURN_SECONDS)  # NFS shows what is new late
        if status.state == "ended":
            if any(node.begun for node in self._nodes):  # then it has said so in its log alone
                self._console.say(f"the run has ended: {status.why or 'see its log'}\n{self._layout.root}")
            return status.exit_code or 0
        account = self._own_account()
        update_status(self._layout, **account, state="ended", ended=time.time())
        return int(account["exit_code"])

    def _own_account(self) -> dict[str, Any]:
        """How it has ended as far as this machine knows."""
        failed = self._failed or self._nodes[0]
        code = failed.process.poll() or 0
        if self._stopped_by:
            why = f"trainkit received {signal_name(self._stopped_by)}"
            return {"exit_code": 128 + self._stopped_by, "failure": "signal", "why": why}
        if code == UNREACHED:
            why = f"{failed.name} was lost"
            self._console.say(why)
            return {"exit_code": KILLED, "failure": "node", "why": why}
        return {"exit_code": code, "failure": "trainkit", "why": f"{failed.name} ended with exit code {code}"}


def start(
    plan: Plan,
    texts: tuple[str, str],
    environ: Mapping[str, str],
    reached_at: Sequence[str],
    begun: Callable[[RunLayout], None],
) -> tuple[RunLayout, int]:
    """Make the run directory, start the run on all hosts, and leave it to them; its exit code where it has not begun.

    texts: the recipe, and the plan as a script. reached_at: the hosts' addresses by ssh. begun: called once the run is
    left to them. Raises MachineError, and leaves nothing, where one cannot start.
    """
    job = plan.job
    assert job is not None
    require_env_from(plan.environment, environ)
    layout = create_run_dir(plan.output_root, plan.name)
    lock = hold_submitter(layout)  # first: until node 0 begins nothing else says that the run goes on
    try:
        write_plan(layout, plan, *texts)
        script = job.content.bind({Variable.RUN_DIR: shlex.quote(str(layout.root))})
        publish(layout.root / job.file, script, mode=0o777)
        write_json(layout.status, {"state": "starting", "run_id": layout.id, "attempt": 1})
        words = bind_words(job.submit, {})
        process = ProcessId.of(os.getpid())
        write_submission(layout, Submission(job.scheduler, str(os.getpid()), words, process=process))
        nodes = SshStart(plan, layout, [*_commands(plan, words, script, reached_at)], environ, lock)
        return layout, nodes.run(lambda: begun(layout))
    except MachineError:
        shutil.rmtree(layout.root, ignore_errors=True)
        raise


def _commands(plan: Plan, words: Sequence[str], script: str, addresses: Sequence[str]) -> Iterator[tuple[str, ...]]:
    assert plan.job is not None
    # Node 0 is met at its address; the others' names are for people.
    hosts = ",".join((addresses[0], *map(ssh.bare, plan.job.hosts[1:])))
    for number, host in enumerate(plan.job.hosts):
        yield ssh.node_argv(words, host, script, (str(number), hosts, os.getcwd()))  # noqa: PTH109
