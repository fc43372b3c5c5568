"""The schedulers by their name in `cluster.kind`; `none` has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from trainkit.schedulers import kubernetes, slurm, ssh
from trainkit.schedulers.interface import Scheduler

SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": cast("Scheduler", slurm),
    "ssh": cast("Scheduler", ssh),
    "kubernetes": cast("Scheduler", kubernetes),
}
