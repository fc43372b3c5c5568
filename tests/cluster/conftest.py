"""A real Slurm of three nodes for these tests, on machines of their own network, host names and process numbers."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm, lacking

from tests.cluster.slurm_jobs import Cluster

NODES = 3
LEAVE_SECONDS = 30.0


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Three nodes tk1 to tk3 with four made-up GPUs each, and the login machine tk0."""
    if why := lacking():
        pytest.skip(f"a Slurm {why} (apt-get install slurmctld slurmd slurm-client munge iproute2)")
    with tempfile.TemporaryDirectory(prefix="trainkit-slurm-", dir="/tmp") as folder:
        started = Slurm(Path(folder) / "cluster")
        try:
            started.up(NODES, 4, tied=True)
            yield started
        finally:
            started.down()
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert not [line for line in listed.splitlines() if folder in line]


@pytest.fixture
def cluster(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, for one test, once the jobs of an earlier one have left the nodes."""
    until = time.monotonic() + LEAVE_SECONDS
    while slurm.idle() < NODES and time.monotonic() < until:
        time.sleep(0.1)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TRAINKIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Cluster(slurm, tmp_path)
