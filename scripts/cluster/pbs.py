"""A real OpenPBS on the machines of `machines`: no systemd, no cgroups, its database in a folder; 20 seconds to start.

Needs root, iproute2, PostgreSQL (Debian's postgresql) and OpenPBS, which no distribution has: its INSTALL says how it
is built (23.06 was used). TRAINKIT_PBS names another folder than /opt/pbs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import LOGIN, Machines, missing

EXEC = Path(os.environ.get("TRAINKIT_PBS", "/opt/pbs"))
MOUNT = Path("/mnt")  # where the cluster's folder is on each machine, too
PATIENCE = 60.0  # seconds
CONFIG = """\
PBS_EXEC={exec}
PBS_HOME={home}
PBS_SERVER={login}
PBS_START_SERVER={login_only}
PBS_START_SCHED={login_only}
PBS_START_COMM={login_only}
PBS_START_MOM={nodes_only}
PBS_CORE_LIMIT=0
PBS_RCP=/bin/false
PBS_SCP=/bin/false
"""
OF_SERVER = (
    *((0o755, f"{name}_logs") for name in ("server", "sched", "comm")),
    *((0o1777, name) for name in ("spool", "undelivered")),
    *((0o750, f"server_priv/{name}") for name in ("", "accounting", "jobs", "users", "hooks", "hooks/tmp")),
    (0o750, "sched_priv"),
)
OF_NODE = (
    *((0o755, name) for name in ("aux", "mom_logs")),
    *((0o1777, name) for name in ("spool", "undelivered")),
    *((0o751, f"mom_priv/{name}") for name in ("", "jobs", "hooks", "hooks/tmp")),
    (0o700, "checkpoint"),
)
# PBS takes no home below a folder that others may write to, as /tmp, and sees no processes of root's: jobs are those of
# a user that is known here alone. $2 is a folder that is root's alone, with the interpreter in its folder $3.
PREPARE = """
mount --bind "$1" /mnt
mount --bind "$1/etc/passwd" /etc/passwd
mount --bind "$1/etc/group" /etc/group
[ $# -eq 1 ] && exit
mount --bind "$2/$3" /media
mount -t tmpfs -o mode=755,size=1m tmpfs "$2"
mkdir "$2/$3"
mount --move /media "$2/$3"
"""
USER, NUMBER = "tk", 4242
# Jobs run one after the other in tests: nothing waits for the next cycle.
SETTINGS = """\
set server flatuid = True
set server job_history_enable = True
set server scheduler_iteration = 5
set server node_fail_requeue = 5
set server resources_default.walltime = 00:10:00
set server log_events = 511
create resource ngpus type=long,flag=hn
create queue high queue_type=execution,priority=200,enabled=True,started=True
set queue workq kill_delay = 10
set queue workq resources_max.walltime = 01:00:00
set sched preempt_order = R
"""


def _closed() -> list[str]:
    """The folder on the way to this interpreter that is root's alone, and the name of the next one; empty for none."""
    real = Path(sys.executable).resolve()
    for folder in reversed(real.parents):
        if not folder.stat().st_mode & 0o001:
            return [str(folder), real.relative_to(folder).parts[0]]
    return []


def lacking() -> str:
    """Why there can be no OpenPBS here; empty where there can."""
    if not (EXEC / "sbin" / "pbs_server.bin").exists():
        return f"needs OpenPBS in {EXEC}"
    if not (EXEC / "sbin" / "pbs_iff").stat().st_mode & 0o4000:
        return f"needs a setuid {EXEC}/sbin/pbs_iff, by which users are known"
    return missing("psql")


@dataclass(frozen=True)
class Pbs:
    """One cluster. folder: of all its files; the machines' lie in it."""

    folder: Path

    @property
    def machines(self) -> Machines:
        """The login machine and the nodes."""
        return Machines(self.folder / "machines")

    @property
    def home(self) -> Path:
        """Of the user that submits."""
        return self.folder / "home"

    def up(self, nodes: int, gpus: int = 4, *, tied: bool = False) -> None:
        """Start it, and wait until all nodes are free. gpus: made-up ones on each node."""
        self.machines.up(nodes, tied=tied)
        self.folder.chmod(0o755)  # the database has a user of its own
        for name in ("etc", "log"):
            (self.folder / name).mkdir(mode=0o755)
        for file, line in (("passwd", f"{NUMBER}::{self.home}:/bin/bash"), ("group", "")):
            text = Path("/etc", file).read_text() + f"{USER}:x:{NUMBER}:{line}\n"
            (self.folder / "etc" / file).write_text(text)
        self.home.mkdir()
        os.chown(self.home, NUMBER, NUMBER)
        for name in self.machines.names:
            self._configure(name)
        self._on(LOGIN, str(EXEC / "libexec" / "pbs_habitat"))
        for number in range(1, nodes + 1):
            self.start_node(f"tk{number}")
        for daemon in ("pbs_comm", "pbs_sched", "pbs_server"):
            self._on(LOGIN, str(EXEC / "sbin" / daemon))
        added = [f"create node tk{number} resources_available.ncpus=4" for number in range(1, nodes + 1)]
        added += [f"set node tk{number} resources_available.ngpus={gpus}" for number in range(1, nodes + 1)]
        self._until(lambda: self.run("qstat", "-B").returncode == 0, "the server did not start")
        done = self.run("sh", "-c", 'printf %s "$1" | qmgr', "sh", "\n".join((*SETTINGS.splitlines(), *added, "")))
        if done.returncode:
            raise RuntimeError(done.stderr)
        self._until(lambda: self.free() == nodes, "the nodes did not become free")

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > until:
                raise RuntimeError(f"{failure}; see {self.folder}")
            time.sleep(0.1)

    def _configure(self, name: str) -> None:
        """What its installer would make for a machine (pbs_postinstall)."""
        home, login = self.folder / f"home.{name}", name == LOGIN
        self._mount(name)
        roles = {"login_only": int(login), "nodes_only": int(not login)}
        text = CONFIG.format(exec=EXEC, home=MOUNT / home.name, login=LOGIN, **roles)
        (self.folder / "etc" / f"{name}.conf").write_text(text)
        for mode, folder in OF_SERVER if login else OF_NODE:
            (home / folder).mkdir(parents=True, exist_ok=True)
            (home / folder).chmod(mode)
        path = f"PATH={EXEC}/bin:/usr/local/bin:/usr/bin:/bin"
        (home / "pbs_environment").write_text(f"{path}\nPBS_CONF_FILE={self.folder}/etc/{name}.conf\n")
        if not login:
            return
        (home / "server_priv" / "db_user").write_text("postgres")
        for file in ("dedicated", "holidays", "resource_group", "sched_config"):
            known = {"dedicated": "dedicated_time"}.get(file, file)
            text = (EXEC / "etc" / f"pbs_{file}").read_text()
            (home / "sched_priv" / known).write_text(re.sub(r'^(resources: "[^"]*)"', r'\1, ngpus"', text, flags=re.M))

    def _mount(self, name: str) -> None:
        words = ["sh", "-ec", PREPARE, "sh", str(self.folder), *_closed()]
        subprocess.run(self.machines.argv(name, words), check=True)

    def again(self, name: str, *, tied: bool = False) -> None:
        """Start a node again whose plug was pulled."""
        self.machines.again(name, tied=tied)
        self._mount(name)
        self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        (self.folder / f"home.{name}" / "mom_priv" / "config").write_text(f"$clienthost {LOGIN}\n$usecp *:/ /\n")
        self._on(name, str(EXEC / "sbin" / "pbs_mom"))

    def stop_server(self) -> None:
        """Kill the daemon that knows the jobs, as a failing machine would."""
        self.run("pkill", "-KILL", "-f", str(EXEC / "sbin" / "pbs_server.bin"))

    def free(self) -> int:
        """How many nodes are free."""
        return self.run("pbsnodes", "-a", "-F", "dsv").stdout.count("|state=free|")

    def environ(self, name: str = LOGIN) -> dict[str, str]:
        """The caller's variables with the cluster's, without those of a job."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PBS_")}
        path = f"{EXEC}/bin{os.pathsep}{kept['PATH']}"
        return {**kept, "PATH": path, "PBS_CONF_FILE": str(self.folder / "etc" / f"{name}.conf")}

    def argv(self, *words: str, on: str = LOGIN, cwd: str | os.PathLike[str] = ".") -> list[str]:
        """What runs a command on a machine as the user that submits."""
        who = ["setpriv", f"--reuid={NUMBER}", f"--regid={NUMBER}", "--clear-groups"]
        return self.machines.argv(on, [*who, "env", f"HOME={self.home}", f"USER={USER}", *words], cwd)

    def run(
        self, *words: str, on: str = LOGIN, cwd: str | os.PathLike[str] = "/", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end, as root."""
        argv, environ = self.machines.argv(on, words, cwd), self.environ(on)
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=timeout, check=False)

    def _on(self, name: str, *words: str) -> None:
        with (self.folder / "log" / f"{Path(words[0]).name}.{name}.out").open("ab") as log:  # daemons keep it
            argv: Sequence[str] = self.machines.argv(name, words)
            environ = self.environ(name)
            subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)

    def down(self) -> None:
        """End every job, daemon and machine, and remove what was made."""
        self.machines.down()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.folder.rmdir()
