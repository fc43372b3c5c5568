"""The summary of a run of thousands of ranks stays short, and loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainkit.runner.report.summary import by_ranks, render_summary

ACCOUNT = {"strategy": "fsdp", "world_size": 8000, "device": "cuda", "dtype": "bf16", "differences": []}


def ranks_of(name: str) -> list[int]:
    """The ranks that a name like 0-3,7 stands for."""
    ends = [part.split("-") for part in name.split(",")]
    return [rank for each in ends for rank in range(int(each[0]), int(each[-1]) + 1)]


@given(st.dictionaries(st.integers(0, 40).map(str), st.sampled_from([{"a": 1}, {"a": 2}, {}]), min_size=1))
def test_accounts_that_are_equal_stand_once_under_all_their_ranks(accounts: dict[str, Any]) -> None:
    found = by_ranks(accounts)
    assert {str(rank): account for name, account in found.items() for rank in ranks_of(name)} == accounts
    assert len(found) <= 3


def shown(**more: object) -> str:
    summary = {"wall_seconds": 9.0, "strategy": "fsdp", "launcher": "torchrun", "world_size": 8000, "global_batch": 1}
    return render_summary({**summary, **more}, Path("runs/r/1"))


def test_all_ranks_are_counted_where_their_accounts_are_one() -> None:
    accounts = by_ranks({str(rank): ACCOUNT for rank in range(8000)})
    assert [*accounts] == ["0-7999"]
    assert "as planned, seen in 8000 ranks: fsdp, cuda, bf16" in shown(in_force=accounts)
    some = by_ranks({str(rank): ACCOUNT for rank in range(8000) if rank != 5})
    assert "as planned, seen in 7999 of 8000 ranks" in shown(in_force=some)
    assert "as planned, seen in 2 of 8000 ranks" in shown(in_force={"0": ACCOUNT, "1": ACCOUNT})


def test_of_many_ranks_the_highest_and_the_lowest_peak_are_shown() -> None:
    memory = [{"rank": rank, "rss": (100 if rank % 7 else 90) << 20} for rank in range(8000)]
    memory[4321]["rss"] = 200 << 20
    lines = [line for line in shown(memory=memory).splitlines() if "memory" in line]
    assert [line.split("  ")[0] for line in lines] == ["Peak memory, rank 4321 of 8000", "Peak memory, rank 0 of 8000"]
    few = shown(memory=memory[:8])
    assert all(f"Peak memory, rank {rank} " in few for rank in range(8))
