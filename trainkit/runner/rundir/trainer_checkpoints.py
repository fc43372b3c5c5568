"""Complete checkpoints that scripts on transformers' Trainer left in earlier runs: `<run>/output/checkpoint-<step>`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trainkit.planner.resume import SavedCheckpoint
from trainkit.runner.rundir.layout import RunLayout

FOLDER = re.compile(r"^checkpoint-(\d+)$")
STATE = "trainer_state.json"  # which rank 0 writes after weights and optimizer
# Optimizer state as Trainer, FSDP and DeepSpeed write it; without it (save_only_model) nothing can go on.
OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step{step}")


def trainer_checkpoints(output_root: str, name: str) -> list[SavedCheckpoint]:
    """Every complete one under <output_root>/<name>: newest run first, within a run latest step first."""
    parent = Path(output_root).absolute() / name
    runs = sorted((path for path in parent.glob("*") if path.is_dir()), reverse=True)
    return [saved for run in runs for saved in _of_run(RunLayout(run))]


def _of_run(layout: RunLayout) -> list[SavedCheckpoint]:
    try:
        plan = json.loads(layout.plan.read_text(encoding="utf-8"))
        ranks = sum(group["count"] * group["processes"] for group in plan["topology"]["groups"])
        digest, strategy = str(plan["training_digest"]), str(plan["strategy"]["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no run of ours
    found = {
        int(match[1]): path
        for path in (layout.root / "output").glob("checkpoint-*")
        if (match := FOLDER.match(path.name)) and _is_whole(path, int(match[1]), ranks)
    }
    return [
        SavedCheckpoint(str(path), step, digest, layout.id, strategy, ranks)
        for step, path in sorted(found.items(), reverse=True)
    ]


def _is_whole(folder: Path, step: int, ranks: int) -> bool:
    """Whether every rank has written its part; the state of the generators is the last that a rank writes."""
    generators = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    has_optimizer = any((folder / name.format(step=step)).exists() for name in OPTIMIZER)
    return has_optimizer and all((folder / name).exists() for name in generators) and _step(folder) == step


def _step(folder: Path) -> Any:
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or half of it
        return None
