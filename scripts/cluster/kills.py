"""A run on several machines of `machines`, under Slurm or by hand; what is killed of it, and what is left then."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm import Slurm

MARK = "KILLED_RUN_MARK"
PATIENCE = 120.0  # seconds for what must happen, on cores that others share
# Trains nothing and imports nothing of torch; holds shared memory, as the workers of a data loader do.
PROGRAM = """
import os, signal, sys, time
from multiprocessing import shared_memory
rank = os.environ["RANK"]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # between the file and who removes it
held = shared_memory.SharedMemory(create=True, size=64)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
open(f"here-{rank}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.1)
held.close()
held.unlink()
"""
RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py}
strategy: {kind: ddp}
devices: {type: cpu}
nodes: {count: NODES, processes_per_node: 1}
launcher: {grace_seconds: 2}
"""
TRAINKIT = (sys.executable, "-P", "-m", "trainkit")

# Run on a machine: the processes there that have the mark, without zombies.
LOOK = f"""
import os, sys
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{{pid}}/environ", "rb") as environ, open(f"/proc/{{pid}}/cmdline", "rb") as words:
            with open(f"/proc/{{pid}}/stat") as stat:
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
                if b"{MARK}=" + sys.argv[1].encode() in environ.read() and rest.split()[0] not in "ZX":
                    print(pid, name, words.read().replace(b"\\0", b" ").decode("utf-8", "replace")[:100])
    except OSError:
        pass
"""


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true value; None where there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    return None


class NodesRun:
    """One run, in a folder that all machines share. Node k is on tk(k+1)."""

    def __init__(self, slurm: Slurm, folder: Path, nodes: int = 3) -> None:
        self.slurm, self.folder, self.nodes = slurm, folder, nodes
        self.job, self.processes = "", dict[int, subprocess.Popen[bytes]]()
        self._mark = uuid.uuid4().hex
        folder.mkdir(parents=True)
        (folder / "r.yaml").write_text(RECIPE.replace("NODES", str(nodes)))
        (folder / "program.py").write_text(PROGRAM)

    def submit(self, *words: str, command: Sequence[str] = ("run", "r.yaml")) -> None:
        """Start it by a batch script. words: for sbatch; command: for trainkit."""
        script = self.folder / "job.sh"
        line = " ".join([*TRAINKIT, *command])
        script.write_text(f"#!/bin/bash\nexport {MARK}={self._mark} HOME={self.folder}\n{line}\n")
        options = ("--parsable", "--no-requeue", f"--nodes={self.nodes}", "--cpus-per-task=1", "--output=console-0")
        done = self.slurm.run("sbatch", *options, *words, str(script), cwd=self.folder)
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.job = done.stdout.strip()

    def start(self, node: int, port: int, *words: str, number: int | None = None) -> None:
        """Start a node by hand. port: at which they meet on tk1; number: it says to have, if it is not its own."""
        rank = node if number is None else number
        self.start_as(node, "run", "r.yaml", f"--node-rank={rank}", f"nodes.rendezvous=tk1:{port}", *words)

    def start_as(self, node: int, *command: str) -> None:
        """Start trainkit on the machine of a node by hand."""
        argv = self.slurm.machines.argv(f"tk{node + 1}", [*TRAINKIT, *command], self.folder)
        environ = {**self.slurm.environ(), MARK: self._mark, "HOME": str(self.folder)}
        with (self.folder / f"console-{node}").open("wb") as console:
            self.processes[node] = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )

    def said(self, node: int = 0) -> str:
        """What people have read of it, on one node; under Slurm all of it is node 0's."""
        path = self.folder / f"console-{node}"
        return path.read_text() if path.exists() else ""

    def runs(self) -> bool:
        """Wait until every rank is at its work."""
        here = [self.folder / f"here-{rank}" for rank in range(self.nodes)]
        return bool(wait_for(lambda: all(path.exists() for path in here)))

    @property
    def directory(self) -> Path:
        """The run directory. ValueError where there is not one."""
        (found,) = (self.folder / "runs" / "r").glob("*")
        return found

    def status(self, node: int = 0) -> dict[str, Any]:
        """The state of the run as a node has written it."""
        place = f"attempts/1/nodes/{node}.json" if node else "status.json"
        return dict(json.loads((self.directory / place).read_text()))

    def pids(self, target: str, node: int) -> list[int]:
        """Processes of a node by what they are, as the node numbers them."""
        if target in ("rank", "wrapper"):
            ranks = self.directory / "attempts" / "1" / "ranks"
            (record,) = ranks.glob(f"**/rank-{node}.json")
            return [int(json.loads(record.read_text())["pid" if target == "rank" else "wrapper_pid"])]
        known = self.status(node)["pids"]
        return [int(known[each]) for each in target.split("+")]

    def strike(self, target: str, node: int, name: str = "KILL") -> None:
        """Send a signal. target: rank, wrapper, launcher, guardian, trainkit, or several with + between them."""
        self.kill(self.pids(target, node), f"tk{node + 1}", name)

    def kill(self, pids: list[int], machine: str, name: str = "KILL") -> None:
        """Send a signal to processes by their numbers on a machine."""
        done = self.slurm.run("kill", f"-{name}", *map(str, pids), on=machine)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def living(self, *names: str) -> list[str]:
        """Its processes, on the machines that are up: machine, number there, name and words. names: only those."""
        found = []
        for machine in self.slurm.machines.names:
            lines = self.slurm.run(sys.executable, "-I", "-S", "-c", LOOK, self._mark, on=machine).stdout.splitlines()
            found += [f"{machine} {line}" for line in lines if not names or line.split()[1] in names]
        return found

    def is_over(self) -> bool:
        """Whether nothing of it lives, and who started it knows."""
        if self.job and self.job_field("JobState") in ("RUNNING", "COMPLETING", "PENDING", ""):
            return False
        return all(each.poll() is not None for each in self.processes.values()) and not self.living()

    def job_field(self, name: str) -> str:
        """What Slurm says of its job."""
        shown = self.slurm.run("scontrol", "show", "job", "-o", self.job).stdout.split()
        return next((word.partition("=")[2] for word in shown if word.startswith(f"{name}=")), "")

    def code(self) -> int:
        """The exit code of the job, as a shell has it."""
        code, number = map(int, self.job_field("ExitCode").split(":"))
        return 128 + number if number else code

    def is_locked(self) -> bool:
        """Whether anybody still holds the run directory."""
        with (self.directory / ".lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def end(self) -> None:
        """Kill what is left of it."""
        if self.job:
            self.slurm.run("scancel", "--signal=KILL", "--full", self.job)
            self.slurm.run("scancel", self.job)
        for each in self.processes.values():
            each.kill()
            each.wait()
        for line in self.living():
            machine, pid = line.split()[:2]
            self.slurm.run("kill", "-KILL", pid, on=machine)


def shared_memory(slurm: Slurm) -> dict[str, list[str]]:
    """The files in the shared memory of each machine that is up and has any."""
    found = {}
    for name in slurm.machines.names:
        found[name] = [path.name for path in Path(f"/proc/{slurm.machines.init(name)}/root/dev/shm").iterdir()]
    return {name: files for name, files in found.items() if files}
