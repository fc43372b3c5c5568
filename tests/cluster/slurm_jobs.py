"""Jobs on the Slurm of these tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm import Slurm

from trainkit.files import read_json

# What a job takes here at most, on two cores that other tests share.
PATIENCE = 120.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}


def losses(run: Path) -> dict[int, float]:
    """The training loss of each logged step of a run directory."""
    file = run / "metrics.jsonl"
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {each["step"]: each["loss"] for each in lines if "loss" in each}


@dataclass(frozen=True)
class Job:
    """A job of the tests' Slurm. output: file that it writes to."""

    number: str
    output: Path
    cluster: Cluster

    def field(self, name: str) -> str:
        """What Slurm says of it now."""
        shown = self.cluster.slurm.run("scontrol", "show", "job", "-o", self.number).stdout
        found = re.search(rf"\b{name}=(\S*)", shown)
        return found[1] if found else ""

    @property
    def said(self) -> str:
        """Its output so far."""
        return self.output.read_text() if self.output.exists() else ""

    def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Wait for something; fails with the job's output where it does not come."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                heard = f"{self.said}\nSlurm:\n{self.cluster.slurm.log_of(self.number)}"
                pytest.fail(f"{what} did not come in {seconds:.0f} s; {self.field('JobState')}:\n{heard}")
            time.sleep(0.1)

    def says(self, text: str, seconds: float = PATIENCE) -> None:
        """Wait until its output has a text."""
        self.until(lambda: text in self.said, f"{text!r} in the output", seconds)

    def code(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; the exit code as a shell has it."""
        self.until(lambda: self.field("JobState") in ENDED, "its end", seconds)
        code, number = map(int, self.field("ExitCode").split(":"))
        return 128 + number if number else code


@dataclass(frozen=True)
class Submitted(Job):
    """A job of `trainkit submit`. folder: its run directory."""

    folder: Path

    def state(self, name: str) -> Any:
        """What `trainkit status` says of it now."""
        return json.loads(self.cluster.trainkit("status", str(self.folder), "--json").stdout)[name]

    def start_now(self) -> None:
        """Slurm lets a job that was queued again wait two minutes: nothing of its last start is taken for it then.

        Where its last start took that long to end (a node of it does not answer), it starts by itself.
        """

        def started() -> bool:
            return self.field("JobState") == "RUNNING" and self.field("Restarts") != "0"

        def ended() -> bool:  # sooner, Slurm may remove the script of the next start with that of the last one
            script = f"slurmstepd: [{self.number}.batch]"
            nodes = [name for name in self.cluster.slurm.machines.names if name != "tk0"]
            shown = [self.cluster.slurm.run("ps", "-eo", "args", on=name).stdout for name in nodes]
            return self.field("JobState") == "PENDING" and not any(script in each for each in shown)

        self.until(lambda: ended() or started(), "the end of the last start", 2 * PATIENCE)
        time.sleep(1.1)  # slurmd launches no job in the very second in which it has ended it: "credential revoked"
        self.cluster.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        self.until(lambda: self.field("JobState") != "PENDING", "the next start")

    def end(self) -> int:
        """Wait for the run's end; its exit code."""

        def over() -> bool:
            status = read_json(self.folder / "status.json")
            return status.get("state") == "ended" and status.get("outcome") is not None

        self.until(over, "the outcome")
        return int(read_json(self.folder / "status.json")["exit_code"])


@dataclass(frozen=True)
class Cluster:
    """The tests' Slurm, and a folder that all its nodes share."""

    slurm: Slurm
    folder: Path

    def submit(self, script: str, *words: str) -> Job:
        """Submit a batch script, from the folder; `trainkit` in it is the one that is tested."""
        path = self.folder / f"job-{time.monotonic_ns()}.sh"
        path.write_text(f'#!/bin/bash\ntrainkit() {{ {sys.executable} -P -m trainkit "$@"; }}\n{script}')
        output = path.with_suffix(".out")
        done = self.slurm.run("sbatch", "--parsable", f"--output={output}", *words, str(path), cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return Job(done.stdout.strip(), output, self)

    def _argv(self, words: Sequence[str]) -> list[str]:
        argv = [sys.executable, "-P", "-m", "trainkit", *words]
        return self.slurm.machines.argv("tk0", argv, self.folder)

    def trainkit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run trainkit on the login machine."""
        return subprocess.run(
            self._argv(words), env=self.slurm.environ(), capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start trainkit there; its standard output is a pipe."""
        return subprocess.Popen(self._argv(words), env=self.slurm.environ(), stdout=subprocess.PIPE, text=True)

    def trainkit_submit(self, *words: str) -> Submitted:
        """Submit a recipe."""
        done = self.trainkit("submit", *words)
        assert done.returncode == 0, done.stderr
        folder, number = (line.rpartition(" ")[2] for line in done.stdout.splitlines())
        return Submitted(number, Path(folder) / "job.out", self, Path(folder))

    def left_on_nodes(self) -> list[str]:
        """Processes of trainkit's on the nodes, but for what looks for them."""
        shown = [self.slurm.run("ps", "-eo", "args", on=name).stdout for name in ("tk1", "tk2", "tk3")]
        return [line for text in shown for line in text.splitlines() if "trainkit" in line and "slurm" not in line]

    def runs(self, name: str = "r") -> list[Path]:
        """The run directories of a name."""
        return sorted((self.folder / "runs" / name).glob("*"))

    def status(self, name: str = "r") -> dict[str, object]:
        """status.json of the newest run of a name; empty while there is none."""
        return read_json(self.runs(name)[-1] / "status.json") if self.runs(name) else {}
