"""Kills by the kernel for want of memory are seen, so that a rank that it ended is not blamed on somebody else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.runner.supervisor.processes import memory_kills

LIMIT = 64 * 2**20  # bytes
# Enters the cgroup, then fills memory without end.
GREEDY = """
import sys
open(sys.argv[1], "w").write("0")
held = []
while True:
    held.append(bytearray(2**20))
"""


def _own_cgroup() -> tuple[Path, str] | None:
    """This process's memory cgroup of either version, and the name of its limit; None without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if "memory" in names.split(","):
            return Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
        if not names:
            place = Path("/sys/fs/cgroup", path.lstrip("/"))
            with contextlib.suppress(OSError):
                if "memory" in (place / "cgroup.controllers").read_text().split():
                    return place, "memory.max"
    return None


@pytest.fixture
def narrow() -> Iterator[Path]:
    """A cgroup of little memory and no swap."""
    found = _own_cgroup() if Path("/proc/self/cgroup").exists() else None
    if found is None:
        pytest.skip("this system has no memory cgroup")
    above, limit = found
    made = above / f"trainkit-test-{uuid.uuid4().hex}"
    try:
        made.mkdir()
        (made / limit).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no memory cgroup may be made here: {error}")
    for name in ("memory.swap.max", "memory.swappiness"):
        with contextlib.suppress(OSError):  # of the other version, or without swap
            (made / name).write_text("0")
    yield made
    made.rmdir()


def test_a_process_that_the_kernel_ends_for_want_of_memory_is_counted(narrow: Path) -> None:
    before = memory_kills()
    done = subprocess.run([sys.executable, "-c", GREEDY, str(narrow / "cgroup.procs")], timeout=60, check=False)
    assert done.returncode == -9
    assert memory_kills() > before


@pytest.mark.skipif(not Path("/proc/vmstat").exists(), reason="this system has no /proc/vmstat")
def test_the_count_is_the_kernels() -> None:
    counted = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert 0 <= int(counted["oom_kill"]) <= memory_kills()
