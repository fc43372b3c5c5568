"""The schedulers by their name in `cluster.kind`; `none` has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from trainkit.launch_plan.context import Context
from trainkit.schedulers import kubernetes, slurm, ssh
from trainkit.schedulers.base import Scheduler

SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": cast("Scheduler", slurm),
    "ssh": cast("Scheduler", ssh),
    "kubernetes": cast("Scheduler", kubernetes),
}


def cores_of_node(context: Context) -> tuple[int, tuple[str, ...]]:
    """Processors that the ranks of a node share, and the keys that decide them: those of its job, or all."""
    kind = context.recipe.cluster.kind
    asked = SCHEDULERS[kind].cores(context) if kind in SCHEDULERS else None
    return asked or (context.facts.cpu_cores, ())
