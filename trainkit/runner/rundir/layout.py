"""Every path in a run directory.

Ranks and the guardian take theirs from records.py, which loads faster than pathlib.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.runner.rundir.records import launcher_log, log_path

MANIFEST = "manifest.json"


def subfolders(parent: Path) -> Iterator[Path]:
    """The folders in a folder, without hidden ones, in no order; none if it cannot be read."""
    with contextlib.suppress(OSError):
        yield from (path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


class PathInRun:
    """A path in the root folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunLayout | AttemptLayout, _owner: type) -> Path:
        return folder.root / self._name


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """The folder of one start within a run. node: selects the launcher's files."""

    root: Path
    node: int = 0

    logs = PathInRun("logs")  # output of the ranks and of the launcher
    ranks = PathInRun("ranks")  # the ranks' exit records; each node but the first has its own subfolder
    nodes = PathInRun("nodes")  # the state of the run on each node but the first
    shown = PathInRun("shown")  # what the proof saw in each rank at its first optimizer step

    @property
    def launcher_log(self) -> Path:
        return Path(launcher_log(str(self.root), self.node))

    @property
    def preparation_log(self) -> Path:
        """Errors of the commands before the launcher."""
        return self.logs / (f"node-{self.node}.prepare.err" if self.node else "prepare.err")

    @property
    def preparation_output(self) -> Path:
        """Their progress."""
        return self.preparation_log.with_suffix(".out")

    def log(self, rank: int, stream: str) -> Path:
        """Output of a global rank; stream is ``out`` or ``err``."""
        return Path(log_path(str(self.root), rank, stream))


@dataclass(frozen=True, slots=True)
class RunLayout:
    """A run directory: <output.root>/<name>/<timestamp>-<id>."""

    root: Path

    recipe = PathInRun("recipe.yaml")  # the resolved recipe
    plan = PathInRun("plan.json")  # what was executed; `trainkit plan --json` has the same form
    code = PathInRun("code.json")  # the commit, the script's digest, the names of uncommitted files
    diff = PathInRun("code.diff")  # the uncommitted changes, secrets masked
    command = PathInRun("command.sh")  # the plan as a shell script
    environment = PathInRun("env.txt")  # how the ranks' environment differs from the caller's, secrets masked
    metrics = PathInRun("metrics.jsonl")  # one object per logged step; append-only
    cards = PathInRun("cards.jsonl")  # one object per sample of the run's GPUs; append-only
    checkpoints = PathInRun("checkpoints")  # a folder `step-<8 digits>` for each complete one
    pushes = PathInRun("pushes")  # hard links to checkpoints that are being uploaded, and files prepared for the upload
    copies = PathInRun("copies")  # hard links to checkpoints that are being copied to storage
    result = PathInRun("result.json")  # the built-in trainer's measurements
    summary = PathInRun("summary.json")  # the summary of the whole run
    status = PathInRun("status.json")  # the state: starting, running, or who ended it and why
    job_output = PathInRun("job.out")  # of a job's script, with all that trainkit has shown
    lock = PathInRun(".lock")  # locked while trainkit or the guardian lives

    @classmethod
    def of(cls, path: str) -> RunLayout:
        return cls(Path(path))

    @property
    def id(self) -> str:
        """``<timestamp>-<id>``."""
        return self.root.name

    @property
    def short_id(self) -> str:
        """The id without its timestamp, which every command takes: ``1ceb19``, of an array's task ``1ceb19-0``."""
        return re.sub("^[0-9]{8}-[0-9]{6}-", "", self.id)

    @property
    def name(self) -> str:
        """As in the recipe."""
        return self.root.parent.name

    @property
    def attempts(self) -> list[AttemptLayout]:
        """The starts so far, in order."""
        attempts = self.root / "attempts"
        names = () if attempts.is_symlink() else [*subfolders(attempts)]  # a link would lead out of the run
        folders = [each for each in names if re.fullmatch("[0-9]{1,9}", each.name) and not each.is_symlink()]
        return [AttemptLayout(folder) for folder in sorted(folders, key=lambda folder: int(folder.name))]

    def attempt(self, number: int, node: int = 0) -> AttemptLayout:
        return AttemptLayout(self.root / "attempts" / str(number), node)
