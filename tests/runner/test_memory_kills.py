"""Kills by the kernel for want of memory are counted, so that a rank that it ended is not blamed on somebody else.

That they are said is shown by the campaign `faults`: a kill here would stand in what other tests of this machine see.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.runner.supervisor.processes import memory_kills


@pytest.mark.parametrize(
    ("content", "count"),
    [("nr_free_pages 12\noom_kill 3\noom_kill_other 9\n", 3), ("nr_free_pages 12\n", 0), ("", 0)],
)
def test_the_count_is_that_of_the_kernel(tmp_path: Path, content: str, count: int) -> None:
    (tmp_path / "vmstat").write_text(content)
    assert memory_kills(str(tmp_path / "vmstat")) == count


def test_a_system_without_counters_has_none(tmp_path: Path) -> None:
    assert memory_kills(str(tmp_path / "nowhere")) == 0


@pytest.mark.skipif(not Path("/proc/vmstat").exists(), reason="this system has no /proc/vmstat")
def test_the_counters_of_this_kernel_can_be_read() -> None:
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert memory_kills() >= int(counters.get("oom_kill", 0))
