"""What `trainkit export` refuses before it looks for a checkpoint."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("size", ["5", "GB", "-1GB", "1.GB", "0GB", "nan MB", "5GiB", "1e3KB"])
def test_a_size_that_is_none_is_refused_with_an_example(size: str, trainkit: Trainkit) -> None:
    done = trainkit("export", "run", f"--shard-size={size}")
    assert done.returncode == 2
    assert f"--shard-size {size} is no size" in done.stderr
    assert "200MB, 5GB" in done.stderr


def test_adapters_are_not_divided(trainkit: Trainkit) -> None:
    done = trainkit("export", "run", "--adapter", "--shard-size", "5GB")
    assert done.returncode == 2
    assert "leave one of them out" in done.stderr
