"""A real Slurm on the machines of `machines`: no systemd, no cgroups, no accounting; a second to start.

Needs root and Debian's slurmctld, slurmd, slurm-client, munge and iproute2 (22.05 was used).
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machines import LOGIN, Machines, address, missing

FOLDER = Path(os.environ.get("TRAINKIT_CLUSTER", "/tmp/trainkit-cluster"))  # of the cluster that is started by hand
PATIENCE = 60.0  # seconds
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged")
# Short times, so that what takes minutes on a cluster takes seconds here. The nodes of the partition gpu are as large
# as a DGX H100 and never start: they are there for `sbatch --test-only`, which says whether they would take a job.
CONFIG = """\
ClusterName=tk
SlurmctldHost={login}({login_address})
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=600
SlurmdTimeout=12
InactiveLimit=0
UnkillableStepTimeout=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=4 RealMemory=8000 {gres} State=UNKNOWN
{nodes}
NodeName=big[1-8] NodeAddr=127.0.0.[11-18] CPUs=224 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=DEFAULT Nodes=tk[1-{count}] DefMemPerCPU=1000 MaxTime=60 DefaultTime=10 State=UP
PartitionName=main Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=10
PartitionName=high PriorityTier=100 PreemptMode=OFF
PartitionName=gpu Nodes=big[1-8] MaxTime=INFINITE PreemptMode=OFF
"""


def lacking() -> str:
    """Why there can be no Slurm here; empty where there can."""
    return missing(*COMMANDS)


@dataclass(frozen=True)
class Slurm:
    """One cluster. folder: of all its files; the machines' lie in it."""

    folder: Path

    @property
    def machines(self) -> Machines:
        """The login machine and the nodes."""
        return Machines(self.folder / "machines")

    @property
    def config(self) -> Path:
        """Its slurm.conf, which commands know by SLURM_CONF."""
        return self.folder / "etc" / "slurm.conf"

    def up(self, nodes: int, gpus: int = 4, *, tied: bool = False) -> None:
        """Start it, and wait until all nodes are idle. gpus: made-up ones on each node."""
        self.machines.up(nodes, tied=tied)
        for name in ("etc", "log", "munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        self._configure(nodes, gpus)
        self._start_munge()
        self.start_controller()
        for number in range(1, nodes + 1):
            self.start_node(f"tk{number}")
        until = time.monotonic() + PATIENCE
        while self.idle() != nodes:
            if time.monotonic() > until:
                raise RuntimeError(f"the nodes did not become idle; see {self.folder}/log")
            time.sleep(0.05)

    def _configure(self, nodes: int, gpus: int) -> None:
        places = "\n".join(f"NodeName=tk{each} NodeAddr={address(f'tk{each}')}" for each in range(1, nodes + 1))
        gres = f"Gres=gpu:{gpus}" if gpus else ""
        named = {"login": LOGIN, "login_address": address(LOGIN), "nodes": places, "count": nodes}
        text = CONFIG.format(folder=self.folder, gres=gres, **named)
        self.config.write_text(text)
        devices = f"NodeName=tk[1-{nodes}] Name=gpu File={self.folder}/gpu[0-{gpus - 1}]\n" if gpus else ""
        (self.folder / "etc" / "gres.conf").write_text(devices)
        (self.folder / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # nothing here uses cgroups
        for number in range(gpus):  # with plain files CUDA_VISIBLE_DEVICES stays empty
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))

    def _start_munge(self) -> None:
        place, key = self.folder / "munge", self.folder / "munge.key"
        key.touch(mode=0o400)
        key.chmod(0o600)
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # all machines reach it by the socket's path
        files = [f"--{name}={place}/{file}" for name, file in (("socket", "socket"), ("pid-file", "pid"))]
        files += [f"--log-file={place}/log", f"--seed-file={place}/seed", f"--key-file={key}"]
        self._on(LOGIN, "munged", "--force", "--num-threads=2", *files)

    def start_controller(self) -> None:
        """Start the daemon that knows the jobs; it goes on from what it knew."""
        self._on(LOGIN, "slurmctld")

    def stop_controller(self) -> None:
        """Kill it, as a failing machine would."""
        number = (self.folder / "slurmctld.pid").read_text().strip()
        self.run("kill", "-KILL", number)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._on(name, "slurmd", "-N", name)

    def idle(self) -> int:
        """How many nodes are idle."""
        done = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T")
        return done.stdout.split().count("idle")

    def log_of(self, job: str) -> str:
        """What its daemons have written down of a job, line by line."""
        names = re.compile(rf"\b(?:JobId=|[Jj]ob ){job}\b|\[{job}\.")
        files = sorted((self.folder / "log").glob("slurm*.log"))
        lines = [(each.name, line) for each in files for line in each.read_text().splitlines() if names.search(line)]
        return "\n".join(f"{name}: {line}" for name, line in lines)

    def environ(self) -> dict[str, str]:
        """The caller's variables with the cluster's, without those of a job."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**kept, "SLURM_CONF": str(self.config)}

    def run(
        self, *words: str, on: str = LOGIN, cwd: str | os.PathLike[str] = ".", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end."""
        argv = self.machines.argv(on, words, cwd)
        return subprocess.run(argv, env=self.environ(), capture_output=True, text=True, timeout=timeout, check=False)

    def _on(self, name: str, *words: str) -> None:
        with (self.folder / "log" / f"{words[0]}.{name}.out").open("ab") as log:  # daemons keep it
            argv: Sequence[str] = self.machines.argv(name, words)
            subprocess.run(argv, env=self.environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)

    def down(self) -> None:
        """End every job, daemon and machine, and remove what was made."""
        self.machines.down()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.folder.rmdir()
