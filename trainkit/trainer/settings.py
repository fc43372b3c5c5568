"""The inputs of one rank of the trainer: the planned settings file, and its place among the ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit.errors import TrainingError
from trainkit.files import parse_json, read_whole
from trainkit.hub.cache import cache_root, located
from trainkit.launch_plan.model import SolvedBatch
from trainkit.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class World:
    """This rank among the ranks, as launchers set it in the environment."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    group: Any = None  # the process group in which they meet; None is the default one
    grid: Any = None  # where they are in several dimensions (trainer/parallel/grid.py)

    @property
    def data(self) -> World:
        """This rank among those with samples of their own; those that share out matrices or samples have the same."""
        if self.grid is None or self.grid.data is None:
            return self
        alike = self.grid.sizes.alike
        return World(self.rank // alike, self.local_rank, self.size // alike, self.grid.data)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> World:
        """RANK, LOCAL_RANK and WORLD_SIZE; without them, a single process."""
        return cls(
            rank=int(environ.get("RANK", "0")),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            size=int(environ.get("WORLD_SIZE", "1")),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything in ``trainer.json``, typed, plus the run directory, which is the folder that holds the file."""

    recipe: Recipe
    batch: SolvedBatch
    device: str  # cpu | cuda | mps
    dtype: str  # fp32 | bf16 | fp16
    training_digest: str
    resume: Path | None
    deepspeed: Path | None
    run_dir: Path

    @property
    def eval_dtype(self) -> str:
        """Number format of evaluation."""
        chosen = self.recipe.precision.eval
        return self.dtype if chosen == "same" else chosen


def read_settings(path: Path, resume: Path | None = None) -> Settings:
    """Read ``trainer.json``. resume: the checkpoint to go on from.

    TrainingError when it cannot be read or is not what planning writes.
    """
    # Path.resolve raises RuntimeError for links in a circle, before Python 3.13.
    run_dir, known = Path(os.path.realpath(path.parent)), {field.name for field in fields(SolvedBatch)}
    try:
        data = parse_json(read_whole(path))
        deepspeed = data.get("deepspeed")
        batch = {key: value for key, value in data["batch"].items() if key in known}
        # JSON mode: what the file format cannot express (tuples, int against float) is not held against it
        recipe = Recipe.model_validate_json(json.dumps(data["recipe"]))
        if repositories := data.get("repositories"):  # of the Hub: folders of this process's cache take their place
            recipe = located(recipe, repositories, cache_root(os.environ, str(Path.home())))
        return Settings(
            recipe=recipe,
            batch=SolvedBatch(**{**batch, "search": tuple(batch.get("search", ()))}),
            device=data["device"],
            dtype=data["dtype"],
            training_digest=data["training_digest"],
            resume=resume,
            deepspeed=run_dir / deepspeed if deepspeed else None,
            run_dir=run_dir,
        )
    except OSError as error:
        raise TrainingError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
        raise TrainingError(f"the settings file {path} is not a trainer.json as trainkit writes it: {error}") from error
