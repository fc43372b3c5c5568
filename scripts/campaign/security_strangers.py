"""What stands around an attack by a run directory and must not be reached: processes, schedulers, other files.

All of it lives in a PID namespace whose first process is the campaign: what a forged number reaches ends there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SPACES = ("--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net")
OTHER_USER = 4242  # of files, of processes, and of some calls
TOOLS = ("sbatch", "scontrol", "squeue", "sacct", "scancel", "srun", "kubectl", "ssh", "words")
# A stand-in writes down how it is called, and answers from the files beside it.
STAND_IN = r"""#!/bin/sh
here=${0%/*}; name=${0##*/}
printf '%s\0' $(($# + 1)) "$name" "$@" >> "$here/calls"
[ -f "$here/$name.out" ] && cat "$here/$name.out"
[ -f "$here/$name.code" ] && exit "$(cat "$here/$name.code")"
exit 0
"""
# What a scheduler's command may be called with: words that are fixed, and words that are one number, name or host.
_JOB = r"[1-9]\d{0,9}(_\d{1,7})?"
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_HOST = r"[\w.:\[\]%]+(-[\w.:\[\]%]+)*"
_CLUSTER = r"(--clusters=[\w.-]+ )?"
_KINDS = r"[a-z0-9.,-]+"
SHAPES = {
    "scancel": rf"{_CLUSTER}(--batch |--full |--quiet |--signal=[A-Z0-9]+ )*{_CLUSTER}{_JOB}",
    "scontrol": rf"{_CLUSTER}(show job (-o |-d )*{_JOB}|show (-o )?(config|partition( -o)?( \w+)?)|requeue {_JOB}"
    rf"|update JobId={_JOB} ExcNodeList=[\w.,\[\]-]+)",
    "squeue": r"(--(steps|noheader|me|local|array)( |$)"
    r"|--(jobs?|name|user|states?|format|clusters)=\S+( |$)|-[hro]( |$))*",
    "sacct": rf"{_CLUSTER}--noheader --parsable2 --allocations --jobs={_JOB} --format=[A-Za-z,]+",
    "srun": rf"--jobid={_JOB} --overlap --nodes=1 --ntasks=1 --nodelist={_HOST} (--pty )?words( .*)?|--nodes=\d+ .*",
    "sbatch": r"(--\S+ )*/\S+/job\.sh",
    "ssh": rf"((?!--)\S+ )*-(tt|T|G)( -- |(?= ).* -- ){_HOST}(@{_HOST})?( words.*|( exec bash .*)?)|-V",
    "kubectl": rf"(get {_KINDS} -n {_NAME} -l trainkit/run={_NAME} -o json"
    rf"|delete {_KINDS} -n {_NAME} -l trainkit/run={_NAME} -o name --wait=false( --now)?"
    rf"|exec -i( -t)? -n {_NAME} {_NAME} -- (words.*|\S*python[\d.]* (-[A-Z] )*-c .*)"
    rf"|logs -n {_NAME} -l trainkit/run={_NAME}(,[\w./-]+=\d+)? .*|create .*|apply .*)",
    "words": ".*",
}
REFUSED = re.compile(r"PWNED|proxycommand|localcommand|knownhostscommand|match exec|/outside/", re.IGNORECASE)


class Strangers:
    """Processes that nothing may signal: each writes down the signals that it gets. folder: for that."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pids: dict[str, int] = {}
        self._own: list[int] = []
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        for name in ("of the same user", "of another user", "of another session", "of another trainkit"):
            self._start(name)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, lambda number, _: self._own.append(number))

    def _start(self, name: str) -> None:
        log, ready = self._folder / name, os.pipe()
        log.unlink(missing_ok=True)
        if (pid := os.fork()) == 0:
            try:
                if name == "of another session":
                    os.setsid()
                if name == "of another user":
                    become(OTHER_USER)
                if name == "of another trainkit":
                    argv = [sys.executable, "-I", "-S", "-c", _SENTINEL, str(log), str(ready[1])]
                    argv += ["trainkit", "run", "x"]
                    os.set_inheritable(ready[1], True)
                    os.execv(argv[0], argv)
                sys.argv = ["", str(log), str(ready[1])]
                exec(_SENTINEL, {})
            finally:
                os._exit(70)
        os.close(ready[1])
        os.read(ready[0], 1)
        os.close(ready[0])
        self.pids[name] = pid

    def harmed(self) -> str:
        """Which one was signalled, and how; empty for none. It is there again afterwards."""
        found = ""
        if self._own:
            found, self._own = f"signals the first process: {signal.Signals(self._own[0]).name}", []
        for name, pid in list(self.pids.items()):
            log = self._folder / name
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(pid, os.WNOHANG)
                how = signal.Signals(os.WTERMSIG(status)).name if ended and os.WIFSIGNALED(status) else ""
                if not ended and _letter(pid) in "Tt":
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    how = "SIGSTOP"
                elif not ended and log.exists() and log.stat().st_size:  # it makes the file, and then writes
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    how = signal.Signals(int(log.read_text().split()[0])).name
                if ended or how:
                    found = found or f"signals a process {name}: {how or 'which ended'}"
                    self._start(name)
        return found

    def sweep(self) -> None:
        """End whatever an attack has left behind. In the namespace alone: everything else there is the campaign's."""
        if os.getpid() != 1:
            raise RuntimeError("not in a namespace of its own")
        until = time.monotonic() + 5
        while time.monotonic() < until:
            rest = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
            rest = [pid for pid in rest if pid not in (1, *self.pids.values())]
            for pid in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not rest:
                return
            time.sleep(0.002)


_SENTINEL = """
import os, signal, sys, time
def note(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(f"{number}\\n")
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, note)
os.write(int(sys.argv[2]), b"x")
while True:
    time.sleep(1000)
"""


def _letter(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def started(pid: Any) -> str:
    """When a process has started, in the system's own units; empty where there is none (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError):
        return ""


def boot() -> str:
    """The id of the machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def become(user: int) -> None:
    """Go on as another user, for good."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def closed(path: Path) -> Path | None:
    """The outermost folder above a path that is not everybody's to look into."""
    return next((each for each in reversed(path.absolute().parents) if not each.stat().st_mode & 0o1), None)


def in_namespace(argv: Sequence[str]) -> None:
    """Begin again as the first process of namespaces of its own, with a private /dev/shm. Does not return.

    Where Python lies in a folder of root's alone, another user sees in its place one that has only that.
    """
    lines = ["mount -t tmpfs tmpfs /dev/shm", "{ ip link set lo up 2>/dev/null || true; }"]
    library = Path(os.__file__)
    above = closed(library)
    if above is not None and not any(each.is_relative_to(above) for each in (Path.cwd(), Path(__file__))):
        seen = above / library.relative_to(above).parts[0]
        lines += ["mkdir /dev/shm/seen", f"mount --bind {seen} /dev/shm/seen", f"mount -t tmpfs -o mode=755 x {above}"]
        lines += [f"mkdir {seen}", f"mount --move /dev/shm/seen {seen}", "rmdir /dev/shm/seen"]
    script = " && ".join([*lines, 'exec "$@"'])
    os.execvp("unshare", ["unshare", *SPACES, "sh", "-c", script, "sh", sys.executable, *argv])


def why_no_namespace() -> str:
    """Why this process cannot have namespaces of its own; empty where it can."""
    if os.geteuid():
        return "it needs root, for namespaces and for files of another user"
    if shutil.which("unshare") is None:
        return "it needs `unshare` (util-linux)"
    tried = ("unshare", *SPACES, "mount", "-t", "tmpfs", "x", "/dev/shm")
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """A disk in memory in a folder's place; outside of a namespace the folder itself."""
    folder.chmod(0o755)
    if os.getpid() != 1:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "scratch", folder], check=True)
    try:
        yield
    finally:
        os.chdir("/")
        subprocess.run(["umount", "--lazy", folder], check=True)


def hold(paths: Iterable[Path]) -> int:
    """A process that holds the locks of files until it is killed; its number."""
    ready = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for path in paths:
                with contextlib.suppress(OSError):
                    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK), fcntl.LOCK_EX)
            os.write(ready[1], b"x")
            time.sleep(1000)
        finally:
            os._exit(0)
    os.close(ready[1])
    os.read(ready[0], 1)
    os.close(ready[0])
    return pid


def put_stand_ins(folder: Path, answers: Mapping[str, tuple[str, int]]) -> None:
    """Every scheduler's commands in a folder. answers: what a command prints, and its exit code."""
    folder.mkdir()
    (folder / "tool").write_text(STAND_IN)
    (folder / "tool").chmod(0o755)
    (folder / "calls").touch()
    (folder / "calls").chmod(0o666)
    for name in TOOLS:
        (folder / name).symlink_to("tool")
    for name, (said, code) in answers.items():
        (folder / f"{name}.out").write_text(said)
        (folder / f"{name}.code").write_text(str(code))


def calls_in(folder: Path) -> Iterator[list[str]]:
    """How the stand-ins of a folder were called."""
    words = (folder / "calls").read_bytes().decode("utf-8", "replace").split("\0")
    while len(words) > 1:
        count = int(words[0])
        yield words[1 : 1 + count]
        words = words[1 + count :]


def unfit_call(folder: Path, strange: Iterable[str] = ()) -> str:
    """The first call of a stand-in that is none of trainkit's own; empty for none.

    strange: jobs of others, which are asked about at most.
    """
    for name, *words in calls_in(folder):
        line = " ".join(words)
        ends = name == "scancel" or line.startswith(("requeue", "update", "delete"))
        if REFUSED.search(line) or not re.fullmatch(SHAPES[name], line, re.DOTALL):
            return f"calls {name} {line}"[:160]
        if ends and set(words) & set(strange):
            return f"ends the job of somebody else: {name} {line}"[:160]
    return ""
