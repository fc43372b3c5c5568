"""Machines on one computer: each has its own network, host name, process numbers and /dev/shm.

They share the file system and are joined by a bridge. Nothing has a name outside: when the first process of a machine
dies, all of it is gone. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOGIN = "tk0"
NETWORK = "10.77.0"
# As text 10.77.0.10 sorts before 10.77.0.9: what orders machines by the text of their addresses is found out.
FIRST = 9
PATIENCE = 20.0  # seconds
# The first process of a machine: it reaps, and all else on the machine dies with it.
INIT = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o size=1g tmpfs /dev/shm
ip link set lo up
trap 'exit 0' TERM
echo up >"$2/$1/ready"
while :; do sleep 3600 & wait $!; done
"""


def missing(*commands: str) -> str:
    """Why there can be no machines here; empty where there can. commands: further ones that are needed."""
    if os.geteuid() != 0:
        return "needs root"
    lacking = [each for each in ("ip", "unshare", "nsenter", "setpriv", *commands) if shutil.which(each) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


@dataclass(frozen=True)
class Machines:
    """tk0, the login machine, and tk1 to tkN. folder: of their files, which other processes find them by."""

    folder: Path

    @property
    def names(self) -> list[str]:
        """Those that were started, the login machine first."""
        return sorted((path.parent.name for path in self.folder.glob("tk*/init")), key=lambda name: int(name[2:]))

    def up(self, count: int, *, tied: bool = False) -> None:
        """Start them. tied: they die with the thread that calls. Raises RuntimeError when one does not come up."""
        if self.names:
            raise RuntimeError(f"{self.folder} has machines already")
        names = [LOGIN, *(f"tk{number}" for number in range(1, count + 1))]
        self.folder.mkdir(parents=True, exist_ok=True)
        hosts = ["127.0.0.1 localhost", *(f"{address(name)} {name}" for name in names)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        for name in names:
            self._start(name, tied=tied)
        for name in names:
            self._find_init(name)
        self.host("ip link add br0 type bridge", f"ip addr add {address(LOGIN)}/24 dev br0", "ip link set br0 up")
        for name in names[1:]:
            self.connect(name)

    def again(self, name: str, *, tied: bool = False) -> None:
        """Start one again whose plug was pulled, as new."""
        shutil.rmtree(self.folder / name)
        self._start(name, tied=tied)
        self._find_init(name)
        self.connect(name)

    def _start(self, name: str, *, tied: bool) -> None:
        place = self.folder / name
        place.mkdir()
        before = ["setpriv", "--pdeathsig", "KILL"] if tied else []
        apart = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["sh", "-ec", INIT, "init", name, str(self.folder)]
        with (place / "init.log").open("wb") as log:
            process = subprocess.Popen(
                [*before, *apart, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (place / "unshare").write_text(str(process.pid))

    def _find_init(self, name: str) -> None:
        place, until = self.folder / name, time.monotonic() + PATIENCE
        while not (place / "ready").exists():
            if time.monotonic() > until:
                raise RuntimeError(f"{name} did not start: {(place / 'init.log').read_text()}")
            time.sleep(0.01)
        outer = (place / "unshare").read_text()
        (place / "init").write_text(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def connect(self, name: str) -> None:
        """Join a machine to the bridge."""
        number = name.removeprefix("tk")
        self.host(
            f"ip link add p{number} type veth peer name eth0 netns {self.init(name)}",
            f"ip link set p{number} master br0 up",
        )
        self.host(f"ip addr add {address(name)}/24 dev eth0", "ip link set eth0 up", on=name)

    def disconnect(self, name: str) -> None:
        """Pull its cable; its processes go on."""
        self.host(f"ip link delete p{name.removeprefix('tk')}")

    def init(self, name: str) -> int:
        """Its first process, as it is numbered outside. Raises FileNotFoundError for a machine that is down."""
        return int((self.folder / name / "init").read_text())

    def host(self, *lines: str, on: str = LOGIN) -> None:
        """Run commands in its network alone, so that `ip` knows processes by their numbers outside."""
        for line in lines:
            enter = ["nsenter", "--target", str(self.init(on)), "--net", "--"]
            done = subprocess.run([*enter, *line.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{line}: {done.stderr.strip()}")

    def argv(self, name: str, words: Sequence[str], cwd: str | os.PathLike[str] = ".") -> list[str]:
        """What runs a command on a machine."""
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", "--target", str(self.init(name)), *spaces, f"--wd={os.path.abspath(cwd)}", "--", *words]  # noqa: PTH100

    def down(self, name: str = "") -> None:
        """Pull the plug of one, or of all and remove what is there: every process on them dies at once."""
        for each in [name] if name else self.names:
            place = self.folder / each
            for number in ("init", "unshare"):
                try:
                    os.kill(int((place / number).read_text()), signal.SIGKILL)
                except (FileNotFoundError, ProcessLookupError):
                    continue
            (place / "init").unlink(missing_ok=True)
        if not name:
            shutil.rmtree(self.folder, ignore_errors=True)


def address(name: str) -> str:
    """Of a machine, on the bridge."""
    number = int(name.removeprefix("tk"))
    return f"{NETWORK}.{FIRST - 1 + number if number else 1}"
