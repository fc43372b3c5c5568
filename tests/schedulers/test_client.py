"""How a scheduler's commands are run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.schedulers.base import Job
from trainkit.schedulers.client import ask
from trainkit.schedulers.slurm import Slurm

pytestmark = pytest.mark.cli


def test_no_variable_changes_what_slurm_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SLURM_TIME_FORMAT times are no times, and the end of a job's time was taken for a preemption."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    stand_in = tmp_path / "scontrol"
    stand_in.write_text(
        "#!/bin/sh\nend=2026-11-22T21:57:40\n"
        '[ -z "$SLURM_TIME_FORMAT" ] || end=21:57\necho "JobId=1 JobState=RUNNING EndTime=$end"\n'
    )
    stand_in.chmod(0o755)
    assert ask(Slurm().state(Job("1"))).ends is not None
    assert ask(Slurm().state(Job("1")), dict(os.environ)).ends is not None
