"""The surroundings of this very process."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from trainkit.doctor.surroundings import Run, Space, Surroundings
from trainkit.machine.facts import Facts

CEILINGS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}


def surroundings_here(facts: Facts, run: Run, folder: Path, environ: Mapping[str, str]) -> Surroundings:
    """What this process sees. folder: the working folder. environ: the environment of what the checks start."""
    return Surroundings(
        facts=facts,
        environ=environ,
        root=Path("/"),
        folder=folder,
        # The ranks start with -P: what `python -m` or a script puts first is not theirs.
        packages=tuple(folder or "." for folder in sys.path[0 if sys.flags.safe_path else 1 :]),
        headers=Path(sysconfig.get_path("include")),
        ceilings=ceilings(),
        run=run,
        space=space,
    )


def space(path: Path) -> Space:
    """As statvfs tells it."""
    found = os.statvfs(path)
    return Space(
        found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail, found.f_favail if found.f_files else None
    )


def ceilings() -> Mapping[str, tuple[int, int]]:
    """Soft and hard limits, as far as the system has them."""
    import resource

    wanted = {name: getattr(resource, constant, None) for name, constant in CEILINGS.items()}
    return {name: resource.getrlimit(constant) for name, constant in wanted.items() if constant is not None}
