"""Runs of a tiny model, as the campaigns `kill` and `faults` start, watch and compare them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import checkpoints_of

MARK = "TRAINKIT_CAMPAIGN_MARK"
NAME = "tiny"
STEPS, EVERY, GRACE = 10, 2, 3.0
PATIENCE = 150.0  # seconds for anything that must happen
LAUNCHER = {"single": "python", "ddp": "torchrun", "fsdp": "torchrun"}  # deepspeed for the others


class Run:
    """One `trainkit run` that writes below a folder. before: words in front of the command, as `prlimit` is."""

    def __init__(
        self,
        root: Path,
        scratch: Path,
        strategy: str,
        *,
        environ: Mapping[str, str | None] | None = None,
        before: Sequence[str] = (),
        words: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> None:
        self.root, self._mark, self.console = root, uuid.uuid4().hex, scratch / f"console-{time.monotonic_ns()}.txt"
        (scratch / "tmp").mkdir(parents=True, exist_ok=True)
        own = {MARK: self._mark, "TMPDIR": str(scratch / "tmp"), "OMP_NUM_THREADS": "1", **(environ or {})}
        merged = {**os.environ, **own}
        self.before = set(_runs(root))
        self._directory: Path | None = None
        argv = command or (sys.executable, "-m", "trainkit", "run", "quickstart", *settings(root, strategy), *words)
        with self.console.open("ab") as console:
            self.process = subprocess.Popen(
                [*before, *argv],
                cwd=scratch,
                env={name: value for name, value in merged.items() if value is not None},
                stdout=console,
                stderr=console,
                stdin=subprocess.DEVNULL,
            )

    def directory(self) -> Path | None:
        """Its run directory, once there is one."""
        self._directory = self._directory or next(iter(set(_runs(self.root)) - self.before), None)
        return self._directory

    def status(self) -> dict[str, Any]:
        """status.json as it is now."""
        return read_object(self.directory(), "status.json")

    def rank(self) -> dict[str, Any]:
        """The record of the last rank that has registered."""
        folder = self.directory()
        found = sorted(folder.glob("attempts/1/ranks/rank-*.json")) if folder else []
        return read_object(found[-1].parent, found[-1].name) if found else {}

    def steps(self) -> int:
        """Steps that the metrics show."""
        return max(losses(self.directory()), default=0)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, or was."""
        folder = self.directory()
        return bool(folder and [*folder.glob("checkpoints/.tmp-step-*"), *folder.glob("checkpoints/step-*")])

    def reaches(self, moment: str) -> bool:
        """Wait until its moment has come; False where it ended before."""
        wait_for(lambda: MOMENTS[moment](self) or self.process.poll() is not None)
        return self.process.poll() is None

    def text(self) -> str:
        """What a person has read of it."""
        return self.console.read_text(errors="replace")

    def living(self) -> list[str]:
        """What of it still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        """Kill what is left."""
        for line in self.living():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(PATIENCE)


# When something is done to a run: what is there by then.
MOMENTS: Mapping[str, Callable[[Run], Any]] = {
    "starting": lambda run: run.status().get("pids", {}).get("launcher"),
    "first step": lambda run: run.steps() >= 1,
    "saving": Run.is_saving,
    "between steps": lambda run: run.steps() >= EVERY + 1,
    "near the end": lambda run: run.steps() >= STEPS - 1,
}


class References:
    """The losses of runs that were left alone, by what they are started with."""

    def __init__(self, start: Callable[..., Run]) -> None:
        self._start, self._lock = start, threading.Lock()
        self._known: dict[tuple[str, ...], dict[int, float]] = {}

    def of(self, *how: str) -> dict[int, float]:
        """Of one of them, which is started in a folder of its own unless it is known."""
        with self._lock:
            if how not in self._known:
                with tempfile.TemporaryDirectory(prefix="trainkit-reference-") as folder:
                    run = self._start(Path(folder), *how)
                    if run.process.wait(PATIENCE) or len(losses(run.directory())) != STEPS:
                        raise RuntimeError(f"a run that was left alone failed: {run.text()}")
                    self._known[how] = losses(run.directory())
            return self._known[how]


def differing(known: Mapping[int, float], reference: Mapping[int, float]) -> list[str]:
    """The losses that are not, bit for bit, those of a run that was left alone."""
    return [
        f"step {step}: {loss} in place of {reference[step]}" for step, loss in known.items() if loss != reference[step]
    ]


def settings(root: Path, strategy: str) -> list[str]:
    """The overrides of a tiny run."""
    launcher = LAUNCHER.get(strategy, "deepspeed")
    return [
        f"strategy.kind={strategy}", f"launcher.kind={launcher}", f"train.steps={STEPS}", "devices.type=cpu",
        f"nodes.processes_per_node={1 if strategy == 'single' else 2}", f"checkpoint.every_steps={EVERY}",
        "checkpoint.keep=0", "checkpoint.resume=auto", "eval.every_steps=0", f"launcher.grace_seconds={GRACE}",
        "model.layers=1", "model.hidden_size=16", "model.heads=2", "model.dropout=0.1", "batch.global=4",
        "batch.micro=1", "data.sequence_length=16", "data.workers=1", "logging.every_steps=1",
        "schedule={name: constant_with_warmup, warmup_steps: 2}", f"name={NAME}", f"output.root={root}",
    ]  # fmt: skip


def _runs(root: Path) -> list[Path]:
    return [path for path in (root / NAME).glob("2*-*") if path.is_dir()]


def read_object(folder: Path | None, name: str) -> dict[str, Any]:
    """A JSON object; empty where it cannot be read."""
    try:
        return dict(json.loads((folder / name).read_text())) if folder else {}
    except (OSError, ValueError):
        return {}


def losses(folder: Path | None) -> dict[int, float]:
    """The loss of each step, as the metrics have it; lines that a fault has torn are left out."""
    found = {}
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines() if folder else []
    except OSError:
        return {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "loss" in record and "step" in record:
            found[record["step"]] = record["loss"]
    return found


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true value; None where there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    return None


def digests(folder: Path) -> dict[str, str]:
    """A checksum of every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def whole_checkpoints(folder: Path | None) -> dict[Path, dict[str, str]]:
    """The files of each checkpoint that is complete by now."""
    found = checkpoints_of(RunLayout(folder)) if folder else []
    return {Path(saved.path): digests(Path(saved.path)) for saved in found}


def damaged_checkpoints(folder: Path | None) -> list[str]:
    """What is wrong with the folders that have the name of a checkpoint."""
    found = checkpoints_of(RunLayout(folder), damaged=True) if folder else []
    return [f"{each.path}: {each.damage}" for each in found if each.damage]
