"""One supervised run as a test sees it: its processes, its beats, its files, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
MARK = "TRAINKIT_TEST_MARK"
PATIENCE = 60.0  # seconds for anything that must happen


def wait_for(what: str, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true value of the condition."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def _beats(path: Path) -> int:
    return int(path.read_text().split()[0]) if path.exists() else 0


class SupervisedRun:
    """A run started in a process of its own."""

    def __init__(
        self,
        folder: Path,
        program: str,
        *arguments: str,
        launcher: str = "python",
        ranks: int = 1,
        grace: float = 2.0,
        max_restarts: int = 0,
        nodes: dict[str, Any] | None = None,
        words: tuple[str, ...] = (),
        shared: Path | None = None,
    ) -> None:
        """words: further words for `trainkit run`. shared: where the nodes of one run have its directory."""
        self.folder = folder
        self._shared = shared or folder
        self.ranks = ranks
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._mark = uuid.uuid4().hex
        self._output = (folder / "console.txt").open("wb")
        several = ranks > 1 or nodes is not None
        recipe = {
            "version": 1,
            "name": "killed",
            "program": {"kind": "torch", "script": str(PROGRAMS / program), "args": [str(self._shared), *arguments]},
            "devices": {"type": "cpu"},
            "strategy": {"kind": "ddp" if several else "single"},
            "nodes": {"processes_per_node": ranks, **(nodes or {})},
            "launcher": {"kind": launcher, "grace_seconds": grace, "max_restarts": max_restarts},
            "output": {"root": str(self._shared / "runs")},
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainkit", "run", str(folder / "recipe.yaml"), *words],
            cwd=folder,
            env={
                **os.environ,
                MARK: self._mark,
                "TMPDIR": str(self.temporary),
                "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    @property
    def run_dir(self) -> Path:
        """The run directory, as soon as there is one."""
        return Path(wait_for("a run directory", lambda: next((self._shared / "runs").glob("*/*"), None)))

    def status(self) -> dict[str, Any]:
        """status.json, as soon as there is one."""
        path = self.run_dir / "status.json"
        wait_for("status.json", path.exists)
        return dict(json.loads(path.read_text()))

    def records(self) -> list[dict[str, Any]]:
        """The ranks' exit records that exist by now."""
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("attempts/1/ranks/**/rank-*.json"))]

    def launcher(self) -> int:
        """Pid of the launcher, as soon as it runs."""
        return int(wait_for("a launcher", lambda: self.status()["pids"]["launcher"]))

    def wrapper(self, rank: int) -> int:
        """Pid of a rank's wrapper, as soon as its program runs."""
        return int(self.record(rank)["wrapper_pid"])

    def record(self, rank: int) -> dict[str, Any]:
        """A rank's record, as soon as its program runs."""
        return dict(
            wait_for(f"rank {rank}", lambda: next((r for r in self.records() if r["rank"] == rank and r["pid"]), None))
        )

    def wait_for_beats(self) -> None:
        """Until every rank is in the middle of its steps."""
        for rank in range(self.ranks):
            wait_for(f"beat of rank {rank}", partial(self._has_beaten, rank))

    def _has_beaten(self, rank: int) -> bool:
        return _beats(self.folder / f"beat-{rank}") >= 2

    def console(self) -> str:
        """Everything that the user has seen so far."""
        return (self.folder / "console.txt").read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code, as Popen gives it."""
        return self.process.wait(seconds)

    def living(self) -> list[str]:
        """Processes of the run that still live: everything that inherited its mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return found

    def leftovers(self) -> list[str]:
        """Files of the run outside its directory."""
        names = [path.read_text() for path in self.folder.glob("shared-memory-*")]
        shared = [name for name in names if (Path("/dev/shm") / name).exists()]
        meetings = [record["rendezvous"] for record in self.records() if record["rendezvous"]]
        shared += [str(path) for each in meetings for path in Path("/dev/shm").glob(f"*{each}*")]
        return shared + [str(path) for path in self.temporary.iterdir()]

    def end(self) -> None:
        """Kill whatever a failed test has left."""
        for line in self.living():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self._output.close()
