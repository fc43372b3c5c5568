"""Judges what something hostile brings about, in a process of its own: by audit hook, canaries, limits and output.

Attacks stand in the tables of their surfaces, which the modules of attacks fill: each is made by a random generator on
copies of real things, or has a number.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import FINE, Ended, in_child

from trainkit.cli.boundary import run_command_line
from trainkit.convert.shell.evaluating import TOOLS
from trainkit.errors import TrainkitError, one_line_each

SECONDS, BYTES = 10, 1_000_000_000  # processor time and memory of one attack, above what this process has
WALL = 60  # seconds: what waits uses no processor
SECRET = "canary-5f1d0c27-of-the-environment"  # the value of a variable that is named as a secret
OUTSIDE = "canary-93ab77e1-of-another-file"  # what stands in a file that nothing names
FORBIDDEN, PAYLOAD, WROTE = 91, "payload", "PWNED"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# What reading never does. sys.addaudithook: https://docs.python.org/3/library/audit_events.html
EVENTS = frozenset((
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen", "os.fork", "os.forkpty",
    "pty.spawn", "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "os.kill", "os.killpg",
    "signal.pthread_kill", "ctypes.call_function", "ctypes.string_at", "ctypes.cdata", "urllib.Request",
))  # fmt: skip
CAST: int = importlib.import_module("_ctypes")._cast_addr  # ctypes.cast, which is a call from Python 3.14 on
# Event -> place of the open folder that its name is seen from, among its arguments; -1: it has none.
CHANGES = {
    "os.mkdir": 2, "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.chmod": 2, "os.chown": 3, "os.link": 2,
    "os.symlink": 2, "os.truncate": -1, "os.utime": 3, "os.setxattr": -1,
}  # fmt: skip
# A module that no data names; torch's and numpy's own are judged by what they bring about.
_HARMFUL = re.compile(
    r"(os|posix|nt|subprocess|sys|shutil|socket|builtins|__builtin__|importlib|runpy|pty|ctypes)(\..*)?"
)
_ESCAPE = re.compile("\x1b(?!\\[[0-9;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass
class Attack:
    """folder: made before; call: in a child, in folder/work, its exit code. title: what was done, for people.

    starts: whether it may start processes (a run); raw: whether its output is another program's. named: whether
    a file that is named may be a link to another. acts: whether it may ask schedulers (their stand-ins) and start
    trainkit's own processes, and signal its children. codes: exit codes that are fine besides. wall: seconds.
    after: what else is wrong, once it has ended.
    """

    surface: str
    title: str
    prepare: Callable[[Path], None]
    call: Callable[[Path], int]
    environ: dict[str, str] = field(default_factory=dict)
    starts: bool = False
    raw: bool = False
    named: bool = False
    acts: bool = False
    codes: tuple[int, ...] = ()
    wall: float = 0
    after: Callable[[Path], str] = lambda _: ""


def outcome_of(attack: Attack, folder: Path) -> tuple[str, str]:
    """`held`, or what is wrong, with what was said. folder: an empty one, with `work` and `outside` to be made."""
    work, outside, tmp = (folder / name for name in ("work", "outside", "tmp"))
    for each in (work, outside, tmp):
        each.mkdir(parents=True)
    (outside / "secret.txt").write_text(OUTSIDE)
    (outside / "linked.txt").write_text("hello\n")  # a hard link is the file itself: it may be read, and not written
    attack.prepare(folder)
    before = _state_of(outside)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp), "TMPDIR": str(tmp), "COLUMNS": "100"}
    environ |= {"AWS_SECRET_ACCESS_KEY": SECRET, "HF_TOKEN": SECRET}
    environ |= {name: value.replace("{folder}", str(folder)) for name, value in attack.environ.items()}

    def watched() -> int:
        sys.addaudithook(Hook(folder, attack))
        return attack.call(folder)

    ended = in_child(watched, folder, environ, seconds=SECONDS, wall=attack.wall or WALL, data=4 * BYTES)
    found = _found(ended, ended.said.replace(str(folder), ""), attack)
    wrong = attack.after(folder)
    if any(folder.rglob(f"{WROTE}*")):
        found = "the payload ran"
    elif wrong:
        found = wrong if found == "held" else f"{found}; {wrong}"[:160]
    elif _state_of(outside) != before:
        found = "changed what lies outside" + (f"; {found}" if found != "held" else "")
    return found, ended.said


def _found(ended: Ended, said: str, attack: Attack) -> str:
    """What is wrong by exit code, limits and output."""
    code = ended.code
    if code == FORBIDDEN:
        return next((line for line in said.splitlines() if line.startswith("forbidden: ")), "forbidden")[:160]
    if over := ended.over(BYTES):
        return over
    killed = attack.starts and code in (137, 143)  # a run whose records are gone is ended
    if not (code in (*FINE, *attack.codes) or killed) or "Traceback" in said or "bug in trainkit" in said:
        bug = next((line for line in said.splitlines() if "bug in trainkit" in line), "")
        last = said.strip().rpartition("\n")[2] if "Traceback" in said else ""
        return f"exit code {code} {bug or last}"[:160]
    if SECRET in said:
        return "reveals the environment"
    if OUTSIDE in said and not attack.named:
        return "reveals another file"
    if not attack.raw and (odd := _ESCAPE.search(said)):
        return f"prints U+{ord(odd.group()[0]):04X}"
    return "held"


def _state_of(folder: Path) -> list[tuple[str, Any, bytes]]:
    """Names, kinds, times and contents of what lies in a folder."""
    paths = sorted(folder.rglob("*"))
    stats = [path.lstat() for path in paths]
    contents = [path.read_bytes() if path.is_file() and not path.is_symlink() else b"" for path in paths]
    kept = [(found.st_mode, found.st_ino, found.st_mtime_ns, found.st_size) for found in stats]
    return [(str(path), each, content) for path, each, content in zip(paths, kept, contents, strict=True)]


@dataclass
class Lab:
    """Real things, made once: run directories with a checkpoint each, by strategy; folders in transformers' form."""

    runs: Mapping[str, Path] = field(default_factory=dict)
    model: Path = Path()
    adapters: Path = Path()


LAB = Lab()  # which the campaign fills at its start
SURFACES: dict[str, Callable[[random.Random], Attack]] = {}
GRIDS: dict[str, Callable[[], Iterator[Attack]]] = {}  # numbered cases, in order


def attack_of(seed: int, surfaces: tuple[str, ...]) -> Attack:
    """The attack of a seed."""
    draw = random.Random(seed)
    name = draw.choice(surfaces)
    attack = SURFACES[name](draw)
    attack.surface = name
    return attack


def command(*words: str) -> Callable[[Path], int]:
    """A call of trainkit's command line."""
    return lambda _: run_command_line(list(words))


def answered(call: Callable[[Path], object]) -> Callable[[Path], int]:
    """What fails with an error of trainkit's own has answered."""

    def outcome(folder: Path) -> int:
        try:
            call(folder)
        except TrainkitError as error:
            sys.stderr.write(one_line_each(error))
            return int(error.exit_code)
        return 0

    return outcome


def _kills(_: str, args: tuple[Any, ...]) -> str:
    """A signal to what is neither this process nor a child of it. 0 only asks whether it is there."""
    pid, number = args[:2]
    if not number or pid == os.getpid():
        return ""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        parent = 0
    return "" if pid > 1 and parent == os.getpid() else f"signals {pid}: {number}"


def _starts(folder: str, args: tuple[Any, ...]) -> str:
    """A program that is neither a scheduler's (its stand-in), nor Python, nor git, on PATH."""
    words = [os.fsdecode(each) for each in (args[1] or [args[0]])]
    program = os.fsdecode(args[0])
    known = program == sys.executable or "/" not in program or program.startswith(f"{folder}/bin/")
    known = known or (os.path.dirname(program) in ("/bin", "/usr/bin", "/usr/local/bin"))  # noqa: PTH120
    name = os.path.basename(program)  # noqa: PTH119
    fine = program == sys.executable or (known and (os.path.lexists(f"{folder}/bin/{name}") or name in QUIET))
    return "" if fine else f"starts {shown(words)}"


def _reads_shell(words: list[str]) -> bool:
    """Whether a command is one of those that scripts are read with, of which none runs what a script names."""
    name = os.path.basename(words[0])  # noqa: PTH119
    if name == "bash":
        return words[1:3] == ["--norc", "--noprofile"]
    return name == "shfmt" or words[0] in TOOLS


def shown(words: list[str]) -> str:
    """The beginning of a command."""
    return " ".join(words)[:80]


QUIET = ("git", "nvidia-smi", "ldconfig", "lscpu", "gcc", "uname")  # that facts about this machine come from
ACTING: dict[str, Callable[[str, tuple[Any, ...]], str]] = {
    "os.kill": _kills,
    "os.killpg": _kills,
    "subprocess.Popen": _starts,
    "os.exec": _starts,
    "os.posix_spawn": _starts,
}


class Hook:
    """Ends the process when it does what reading never does. folder: the attack's; only `work` and `tmp` may change."""

    def __init__(self, folder: Path, attack: Attack) -> None:
        self.folder, self.outside = str(folder), f"{folder}/outside"
        own = tuple(f"{folder}/{name}" for name in ("work", "tmp", "said"))
        self.mine = (*own, "/dev/null", "/dev/tty", "/proc/self", "/dev/shm/")
        self.events = frozenset() if attack.starts else EVENTS
        self.busy, self.named, self.acts = False, attack.named, attack.acts

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            if wrong := self._wrong(event, args):
                os.write(2, f"\nforbidden: {wrong}\n".encode("utf-8", "replace"))
                os._exit(FORBIDDEN)
        finally:
            self.busy = False

    def _wrong(self, event: str, args: tuple[Any, ...]) -> str:
        if event == "ctypes.call_function" and args[0] == CAST:
            return ""
        if self.acts and event in ACTING:
            return ACTING[event](self.folder, args)
        if event == "subprocess.Popen" and _reads_shell([os.fsdecode(args[0]), *map(os.fsdecode, args[1][1:])]):
            return ""
        if event in ("os.kill", "os.killpg") and not _kills(event, args):  # what has read a script
            return ""
        if event in self.events and not (self.acts and event.startswith(("socket.", "ctypes.", "os.fork", "signal."))):
            return f"{event} {args!r}"[:120]
        if event == "open" and isinstance(args[0], str | bytes):
            flags = args[2] if isinstance(args[2], int) else 0
            return self._of_path(
                "opens", os.fsdecode(args[0]), writes=bool(flags & _WRITING), last=not flags & os.O_NOFOLLOW
            )
        if event in CHANGES and isinstance(args[0], str | bytes):
            place = CHANGES[event]
            above = Path(f"/proc/self/fd/{args[place]}").readlink() if place > 0 and args[place] >= 0 else Path()
            name = args[1] if event in ("os.symlink", "os.link") else args[0]  # what is made, not where it leads
            return self._of_path(event, str(above / os.fsdecode(name)), writes=True, last=False)
        if event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(self.folder):
            return f"runs {args[0].co_filename}"
        if event == "pickle.find_class" and _HARMFUL.fullmatch(str(args[0])):
            return f"unpickles {args[0]}.{args[1]}"
        if event == "os.putenv" and b"CANARY" in os.fsencode(args[0]):
            return "changes the environment"
        return ""

    def _of_path(self, event: str, path: str, *, writes: bool, last: bool = True) -> str:
        """last: whether a link in the last part is followed."""
        try:
            whole = Path.cwd() / path
            real = str(whole.resolve() if last else whole.parent.resolve() / whole.name)
        except (ValueError, OSError, RuntimeError):  # a link to itself
            return ""
        linked = real.startswith(f"{self.outside}/runs")  # a user may keep runs elsewhere: they are read, not changed
        if real.startswith(self.outside) and (writes or not (linked or self.named)):
            return f"{event} {real.removeprefix(self.folder)}"
        return f"{event} {real}" if writes and not real.startswith(self.mine) else ""
