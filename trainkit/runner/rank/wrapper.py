"""The wrapper of one rank: it writes the logs and the exit record, passes signals on, and leaves no process behind.

Standard library only, because every rank's start waits for this module to load.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.decode import DecodeError, decode
from trainkit.files import make_folder, open_regular, read_record, remove_file
from trainkit.heartbeat import PAGE, VARIABLE
from trainkit.machine.cpu_affinity import keep_to
from trainkit.runner.rank.streams import Copier, copy_window_size, open_channel
from trainkit.runner.rundir.records import (
    NOT_OBSERVED,
    SAYS,
    UNSEEN,
    Name,
    Observation,
    RankRecord,
    Status,
    last_of,
    log_path,
    observation_path,
    record_path,
    records_path,
    run_of,
    status_path,
    write_record,
)
from trainkit.runner.supervisor.cleanup import kill_descendants, kill_group
from trainkit.runner.supervisor.processes import (
    PASSED_ON,
    STOP,
    ProcessId,
    become_subreaper,
    descends_from,
    exit_of_child,
    spawn,
    started,
    wakeup,
)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HOOK = os.path.join(_PACKAGE, "verify", "hook")
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell exits
NOT_AS_PLANNED = 1  # as trainkit/verify/observe.py ends a program
NOT_REGISTERED = 1  # nothing was started, because the guardian could not have supervised it
DRAIN_SECONDS = 2.0  # limit for output of background children after the program's end …
SILENT_SECONDS = 0.5  # … which ends earlier after so long without output
LINGER_SECONDS = 0.5  # signals within this time count as one: a stop may reach program and wrapper one after the other
LOOK_SECONDS = 1.0  # between checks that trainkit or its guardian still runs
CLEAN_UP_SECONDS = 2.0  # after a terminal's Ctrl-C, before TERM


class Options(NamedTuple):
    """The wrapper's command line."""

    attempt_dir: str
    grace: float  # seconds between TERM and KILL
    program: tuple[str, ...]
    each_node: bool = True  # whether the first rank of each node counts as a main rank
    replica_env: tuple[tuple[str, str], ...] = ()  # variables of all ranks but the main ones
    expected: str = ""  # file with the facts that the program is verified against
    node: int = 0
    cores: str = ""  # of each local rank, as machine/cpu_affinity.py reads them
    heartbeat: bool = False  # whether the program has a heartbeat
    prove: bool = False  # whether the program fails if nothing of it can be verified


class Wrapper:
    """One rank, from its registration to the last line of its record."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ
        self._selector = selectors.DefaultSelector()
        self._copiers: list[Copier] = []
        self._watchers: list[ProcessId] = []  # trainkit and its guardian, which end this rank
        self._kill_at = self._term_at = float("inf")
        self._alone = False  # whether both are gone
        self._exit: int | None = None  # minus the signal that killed it
        self._unwritable = ""  # why nothing could be written
        self._before = ""  # how this rank differed from the plan before the launcher's restart
        self._shares_terminal = os.isatty(0)
        hang_up = signal.getsignal(signal.SIGHUP)
        self._ignored = (signal.SIGHUP,) if hang_up == signal.SIG_IGN else ()  # nohup's
        # torchrun, accelerate and deepspeed set these for each worker; the plan does where there is no launcher.
        rank, local_rank, restart = (
            int(value) if (value := environ.get(name, "")).isdecimal() else 0
            for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        )
        self._shown = observation_path(options.attempt_dir, rank)
        self._record = RankRecord(
            rank,
            local_rank,
            host=os.uname().nodename,
            wrapper_pid=os.getpid(),
            wrapper_started=started(os.getpid()),
            restart=restart,
            started=time.time(),
            node=options.node,
            rendezvous=_rendezvous(environ),
        )

    def run(self) -> int:
        """Start the program, follow it, record its end; the exit code for the launcher."""
        numbers = (*STOP, *PASSED_ON, signal.SIGCHLD, signal.SIGWINCH)
        received = wakeup(number for number in numbers if number not in self._ignored)
        self._selector.register(received, selectors.EVENT_READ)
        try:
            channels = self._register()
        except OSError as error:
            self._say_unwritable(error)
            return self._end(ended=time.time(), exit_code=NOT_REGISTERED, message=self._unwritable)
        # If trainkit and its guardian are killed together, neither can end this rank. They are watched if they run, or
        # if they were killed before this rank started; otherwise they cannot be seen from here.
        processes, launcher = watchers(self._options.attempt_dir, self._record.node)
        if _any_runs(processes) or descends_from(launcher, os.getpid()):
            self._watchers = processes
        if self._before:  # a launcher restarts every failed rank, and this one would differ again
            return self._end(ended=time.time(), exit_code=NOT_AS_PLANNED, not_as_planned=self._before)
        try:
            self._start(channels)
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            message = f"cannot start {self._options.program[0]}: {error.strerror}"
            self._copiers[1].write(f"{SAYS}{message}\n".encode("utf-8", "surrogateescape"))
            return self._end(ended=time.time(), exit_code=NOT_FOUND if missing else NOT_EXECUTABLE, message=message)
        finally:
            for fd in channels:
                os.close(fd)
        self._follow(received)
        return self._finish()

    def _register(self) -> list[int]:
        attempt = self._options.attempt_dir
        ranks, run = os.path.join(attempt, "ranks"), run_of(attempt)
        with contextlib.suppress(FileExistsError):
            os.makedirs(attempt)  # started by hand
        for folder in dict.fromkeys((os.path.join(attempt, "logs"), ranks, records_path(attempt, self._options.node))):
            make_folder(folder, below=run)
        old = read_record(record_path(attempt, self._record), RankRecord, below=run)
        self._before = differences(self._shown) or (old.not_as_planned if old else "") if self._options.expected else ""
        if not self._before:
            with contextlib.suppress(OSError):  # of this rank, before the launcher's restart
                remove_file(self._shown, below=run)
        if self._options.heartbeat and hasattr(
            os, "memfd_create"
        ):  # without a heartbeat the watch sees only processor time and output
            # The heartbeat's page and a pipe for requests, neither with a name that could be left behind.
            memory = os.memfd_create("trainkit-heartbeat")
            os.write(memory, bytes(PAGE))
            reader, writer = os.pipe()
            self._record = self._record._replace(heartbeat=memory, orders=writer)
            paths = map(self._record.opened, (memory, reader))
            self._environ = {**self._environ, VARIABLE: os.pathsep.join(paths)}
        write_record(attempt, self._record)
        return [self._open(name, fd) for name, fd in (("out", 1), ("err", 2))]

    def _open(self, name: str, own: int) -> int:
        """Open one of the rank's logs; the descriptor for the program. own: our descriptor of the same stream."""
        attempt = self._options.attempt_dir
        path = log_path(attempt, self._record.rank, name)
        log = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, below=run_of(attempt))
        console = own if self._record.rank == 0 else None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(os.path.join(attempt, "logs", "launcher.log")), os.fstat(own)):
                console = None  # so that the launcher's log does not repeat the rank's
        reader, writer = open_channel(console)
        os.set_blocking(reader, False)
        copier = Copier(reader, log, console)
        self._copiers.append(copier)
        self._selector.register(reader, selectors.EVENT_READ, copier)
        return writer

    def _start(self, channels: Sequence[int]) -> None:
        # A group of its own, so that a launcher's signal to the wrapper's group reaches the program once, through us;
        # but a program that reads from the terminal must stay in the terminal's foreground group.
        group = None if self._shares_terminal else 0
        keep_to(self._options.cores, self._record.local_rank)
        is_main = not (self._record.local_rank if self._options.each_node else self._record.rank)
        environ = {**self._environ, **({} if is_main else dict(self._options.replica_env))}
        if self._options.expected:
            environ = observed(environ, self._options.expected, self._shown)
        streams = (0, *channels)
        ignore = (
            *self._ignored,
            *PASSED_ON,
        )  # ignored from the start, so that they do not kill a program without a handler
        pid = spawn(self._options.program, environ, streams, group=group, dies_with_parent=True, ignore=ignore)
        self._record = self._record._replace(pid=pid)
        with contextlib.suppress(OSError):  # a full disk: the program runs, and its end is recorded again later
            write_record(self._options.attempt_dir, self._record)

    def _follow(self, received: int) -> None:
        self._look_for_end()
        while self._exit is None:
            self._step(received)
        drain_until = time.monotonic() + DRAIN_SECONDS
        while (now := time.monotonic()) < drain_until and len(self._selector.get_map()) > 1:
            if not self._step(received, min(now + SILENT_SECONDS, drain_until)):
                break
        if self._exit in (-signal.SIGTERM, -signal.SIGINT):
            until = time.monotonic() + LINGER_SECONDS
            while not self._record.told_to_stop and time.monotonic() < until:
                self._step(received, until)

    def _step(self, received: int, until: float = float("inf")) -> bool:
        """Wait for the next event and handle it; whether any came."""
        wait = min(until, self._kill_at, self._term_at) - time.monotonic()
        if self._watchers:
            wait = min(wait, LOOK_SECONDS)
        events = self._selector.select(None if wait == float("inf") else max(0.0, wait))
        for key, _ in events:
            if key.fd == received:
                # The kernel runs the handlers of pending signals in reverse order: INT must not come after TERM,
                # and neither after the CHLD that it caused.
                for number in sorted(os.read(received, 512)):
                    self._on_signal(number)
            elif not key.data.copy():
                self._selector.unregister(key.fd)
        if self._watchers and not _any_runs(self._watchers):
            self._watchers, self._alone = [], True
            self._on_signal(signal.SIGTERM)
        now = time.monotonic()
        if now >= self._term_at:
            self._term_at = float("inf")
            self._send(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._send(signal.SIGKILL)
        return bool(events)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._look_for_end()
        elif number == signal.SIGWINCH:
            for own, copier in enumerate(self._copiers, start=1):
                copy_window_size(own, copier.source)
        elif number not in STOP:
            self._send(number)
        else:
            again = self._record.told_to_stop  # a launcher may send TERM both to the program's group and to each rank
            self._record = self._record._replace(told_to_stop=True)
            become_subreaper()  # orphans become our children: the sender of the signal may be gone before they end
            if number == signal.SIGINT and self._shares_terminal:
                # The terminal has sent it to the program too: KeyboardInterrupt's clean-up gets a moment before TERM.
                self._term_at = time.monotonic() + min(CLEAN_UP_SECONDS, self._options.grace)
            elif not again:
                self._send(number)
            if not again:
                self._kill_at = time.monotonic() + self._options.grace

    def _send(self, number: int) -> None:
        if self._exit is None and self._record.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._record.pid, number)

    def _look_for_end(self) -> None:
        if self._exit is None and (code := exit_of_child(self._record.pid)) is not None:
            self._exit = code
            self._record = self._record._replace(ended=time.time(), clock=time.monotonic())

    def _finish(self) -> int:
        assert self._exit is not None
        if not self._shares_terminal:
            kill_group(self._record.pid)  # children that the program has left
        # Reaped only now: while the zombie exists, the group's number cannot be reused.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._record.pid, 0)
        if self._alone or (self._watchers and not _any_runs(self._watchers)):
            kill_descendants()
        lost = sum(copier.lost for copier in self._copiers)
        refusal = next((copier.refusal for copier in self._copiers if copier.lost), "")
        proven = self._options.prove and self._exit == 0
        seen = differences(self._shown, proven=proven) if self._options.expected else ""
        if seen.startswith(NOT_OBSERVED):
            self._copiers[1].write(f"{SAYS}what this rank runs is {seen}\n".encode("utf-8", "surrogateescape"))
        if seen and self._exit == 0:  # a shell script may continue after a command in it that failed
            self._exit = NOT_AS_PLANNED
        return self._end(
            exit_code=self._exit if self._exit >= 0 else None,
            signal=-self._exit if self._exit < 0 else None,
            message=f"{lost} bytes of output could not be written to the log: {refusal}" if lost else "",
            unlogged=last_of(self._copiers[1].lost_end),
            not_as_planned=seen,
        )

    def _end(self, **known: Any) -> int:
        self._record = self._record._replace(clock=self._record.clock or time.monotonic())._replace(**known)
        try:
            write_record(self._options.attempt_dir, self._record)
        except OSError as error:  # this must not change the program's exit code
            self._say_unwritable(error)
        return self._record.code

    def _say_unwritable(self, error: OSError) -> None:
        # For a record only the folder is named: it is written under a temporary name.
        named, folder = str(error.filename or ""), self._options.attempt_dir
        why = f"{named if named.startswith(f'{folder}/logs/') else folder} cannot be written: {error.strerror}"
        if why != self._unwritable:
            self._unwritable = why
            with contextlib.suppress(OSError):
                os.write(2, f"{SAYS}{why}\n".encode("utf-8", "surrogateescape"))


def _any_runs(processes: Sequence[ProcessId]) -> bool:
    return any(each.runs for each in processes)


def _rendezvous(environ: Mapping[str, str]) -> str:
    """MASTER_ADDR_MASTER_PORT, part of the names of DeepSpeed's buffers; empty if it is not a valid name."""
    name = "_".join(environ[each] for each in ("MASTER_ADDR", "MASTER_PORT") if each in environ)
    try:
        return str(decode(Name, name, "rendezvous"))
    except DecodeError:
        return ""


def watchers(attempt_dir: str, node: int = 0) -> tuple[list[ProcessId], int]:
    """Trainkit and its guardian, and the launcher's pid, from status.json; none if they are on another host."""
    run = run_of(attempt_dir)
    status = read_record(status_path(run, attempt_dir, node), Status, below=run)
    if status is None or status.host != os.uname().nodename or status.ended:
        return [], 0
    found = [each for each in (status.pids.process("trainkit"), status.pids.process("guardian")) if each]
    return found, status.pids.launcher or 0


def observed(environ: Mapping[str, str], expected: str, shown: str) -> dict[str, str]:
    """The environment in which Python observes the program. expected: file to compare with; shown: file to write."""
    path = os.pathsep.join([HOOK, *filter(None, [environ.get("PYTHONPATH", "")])])
    return {**environ, "PYTHONPATH": path, "TRAINKIT_EXPECTED": expected, "TRAINKIT_SHOWN": shown}


def differences(shown: str, *, proven: bool = False) -> str:
    """How the program differed from the plan; empty if it did not, or if no optimizer has stepped.

    shown: in an attempt's folder of that name. proven: a program in which nothing was seen differs, too.
    """
    found = read_record(shown, Observation, below=run_of(os.path.dirname(os.path.dirname(shown))))
    if proven and (found is None or found.error):
        return f"{NOT_OBSERVED}{found.error if found else UNSEEN}"
    return "; ".join(found.differences) if found is not None else ""
