"""In which micro steps gradients travel, by strategy and recipe: seen in the trace of a run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from strategy_runs import CASES, GLOBAL_BATCH, MICRO, write_corpus

from tests.warm_ranks import run_case

WATCHED = 2  # optimizer steps
REDUCING = ("c10d::allreduce_", "c10d::_reduce_scatter_base_")


def backward_passes_that_reduce(trace: Path) -> list[bool]:
    """For each backward pass in the order of time, whether a reduction was started while it lasted."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    reductions = [event["ts"] for event in events if event.get("name") in REDUCING]
    passes = sorted((event["ts"], event["dur"]) for event in events if event.get("name") == "trainkit: backward")
    return [any(start <= moment <= start + length for moment in reductions) for start, length in passes]


@pytest.mark.parametrize(
    ("name", "strategy", "inner"),
    [
        ("ddp", {}, False),
        ("fsdp", {}, True),
        ("fsdp", {"reduce_gradients": "once"}, False),
        ("zero1", {}, False),
        ("zero2", {}, True),  # so DeepSpeed works
    ],
)
def test_the_inner_micro_steps_reduce_gradients_where_the_plan_says_so(
    name: str, strategy: dict[str, str], inner: bool, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    changes = {"train": {"steps": 4}, "eval": {"every_steps": 0}, "profile": {"steps": WATCHED, "after": 2}}
    run_case(tmp_path / "run", CASES[name].changed(**changes, strategy=strategy), tmp_path / "corpus")
    accumulation = GLOBAL_BATCH // MICRO // CASES[name].ranks
    assert accumulation == 4
    seen = backward_passes_that_reduce(tmp_path / "run" / "profile" / "trace.json.gz")
    assert seen == [*[inner] * (accumulation - 1), True] * WATCHED
