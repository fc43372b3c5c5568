"""Every path of a run, in one class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHECKPOINT_PREFIX = "step-"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """What one start within a run leaves."""

    root: Path

    @property
    def logs(self) -> Path:
        """Folder of the ranks' and the launcher's output."""
        return self.root / "logs"

    @property
    def ranks(self) -> Path:
        """Folder of the ranks' exit records."""
        return self.root / "ranks"

    @property
    def shown(self) -> Path:
        """Folder of what was seen in each rank at its first optimizer step."""
        return self.root / "shown"

    @property
    def launcher_log(self) -> Path:
        """What the launcher itself said."""
        return self.logs / "launcher.log"

    @property
    def preparation_log(self) -> Path:
        """What the preparations said on standard error."""
        return self.logs / "prepare.err"

    def log(self, rank: int, stream: str) -> Path:
        """Output of a global rank; stream is ``out`` or ``err``."""
        return self.logs / f"rank-{rank}.{stream}"


@dataclass(frozen=True, slots=True)
class RunLayout:
    """A run directory: <output.root>/<name>/<timestamp>-<id>."""

    root: Path

    @property
    def id(self) -> str:
        """``<timestamp>-<id>``."""
        return self.root.name

    @property
    def name(self) -> str:
        """The run's name in the recipe."""
        return self.root.parent.name

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.root / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """The plan as JSON."""
        return self.root / "plan.json"

    @property
    def command(self) -> Path:
        """The plan as a shell script."""
        return self.root / "command.sh"

    @property
    def environment(self) -> Path:
        """How the ranks' environment differs from the caller's, secrets masked."""
        return self.root / "env.txt"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step; append-only."""
        return self.root / "metrics.jsonl"

    @property
    def cards(self) -> Path:
        """One JSON object per sample of the run's cards; append-only."""
        return self.root / "cards.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        """What the built-in trainer measured."""
        return self.root / "result.json"

    @property
    def summary(self) -> Path:
        """trainkit's account of the run."""
        return self.root / "summary.json"

    @property
    def status(self) -> Path:
        """How the run stands."""
        return self.root / "status.json"

    @property
    def lock(self) -> Path:
        """Locked as long as trainkit or the guardian lives."""
        return self.root / ".lock"

    @property
    def attempts(self) -> list[AttemptLayout]:
        """The starts so far, in order."""
        folders = [folder for folder in (self.root / "attempts").glob("*") if folder.name.isdigit()]
        return [AttemptLayout(folder) for folder in sorted(folders, key=lambda folder: int(folder.name))]

    def attempt(self, number: int) -> AttemptLayout:
        """Where one start within the run leaves its files."""
        return AttemptLayout(self.root / "attempts" / str(number))
