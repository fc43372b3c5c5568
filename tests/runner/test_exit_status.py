"""Which exit code a run gets, from what was recorded of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.files import read_json
from trainkit.runner.report.exit_status import TRAINKIT_KILLED, Evidence, Stop, Verdict, decide_verdict, write_status
from trainkit.runner.rundir.records import Pids, RankRecord
from trainkit.runner.supervisor.channel import Spec


def rank(number: int, ended: float | None = 1.0, exit_code: int | None = 0, **known: Any) -> RankRecord:
    times: dict[str, Any] = {"ended": ended, "clock": ended or 0.0}
    return RankRecord(number, number, "host", 100 + number, 200 + number, exit_code=exit_code, **times, **known)


def seen(*records: RankRecord, launcher_exit: int | None = 0, **known: Any) -> Evidence:
    return Evidence("torchrun", launcher_exit, records, expected_ranks=len(records), **known)


KILLED = rank(1, exit_code=None, signal=9)
REMOVED = "the run directory was removed during the run"
TOLD = rank(0, ended=2.0, exit_code=None, signal=15, told_to_stop=True)

CASES: dict[str, tuple[Evidence, int, str | None, int | None]] = {
    "everything went well": (seen(rank(0), rank(1)), 0, None, None),
    "one failed, the launcher ended the other": (seen(TOLD, rank(1, exit_code=7), launcher_exit=1), 7, "program", 1),
    "one was stopped from outside, and the other failed without it": (
        seen(TOLD, rank(1, ended=2.5, exit_code=1), launcher_exit=1), 137, "rank", 0,
    ),
    "one was stopped before the launcher's restart, and in that again before it had registered": (
        seen(TOLD, rank(1, ended=2.5, exit_code=1, restart=1, not_as_planned="ddp"), launcher_exit=1), 1, "plan", 1,
    ),
    "another node's launcher stopped one before the other failed": (
        seen(TOLD, rank(1, ended=2.5, exit_code=1), launcher_exit=1, nodes=2), 1, "program", 1,
    ),
    "two ranks failed, the earlier one counts": (
        seen(rank(0, ended=5.0, exit_code=3), rank(1, ended=4.0, exit_code=8), launcher_exit=1), 8, "program", 1,
    ),
    "a program died of a signal": (seen(rank(0, exit_code=None, signal=11), launcher_exit=1), 139, "program", 0),
    "a program was told to end from outside": (
        seen(rank(0, exit_code=None, signal=15), launcher_exit=1), 137, "program", 0,
    ),
    "a program that was told to end from outside says so by its code": (
        seen(rank(0, exit_code=143), launcher_exit=1), 137, "program", 0,
    ),
    "a signal to all processes of a job reached the rank first": (
        seen(rank(0, ended=0.9, exit_code=143), launcher_exit=1, stop=Stop(1.0, "TERM", 15)), 143, "signal", None,
    ),
    "a program was killed": (seen(rank(0), KILLED, launcher_exit=1), 137, "program", 1),
    "a wrapper was killed": (seen(TOLD, rank(1, ended=None), launcher_exit=1, vanished={1: 1.0}), 137, "rank", 1),
    "its submitter is gone": (
        seen(TOLD, launcher_exit=1, stop=Stop(1.0, "trainkit on tk0 is gone", 15, "submitter")), 143, "submitter", None,
    ),
    "trainkit received INT": (seen(TOLD, launcher_exit=1, stop=Stop(1.0, "INT", 2)), 130, "signal", None),
    "a rank failed before the signal": (
        seen(TOLD, rank(1, ended=0.5, exit_code=7), launcher_exit=1, stop=Stop(1.0, "TERM", 15)), 7, "program", 1,
    ),
    "a rank fell while the run was being ended": (
        seen(rank(0, ended=1.5, exit_code=7), launcher_exit=1, stop=Stop(1.0, "TERM", 15)), 143, "signal", None,
    ),
    "the run hung": (
        seen(TOLD, launcher_exit=1, stop=Stop(1.0, "hang: rank 0 (a, pid 5) …", None, "hang", "a")), 124, "hang", None,
    ),
    "trainkit was killed": (seen(TOLD, launcher_exit=1, stop=Stop(1.0, "trainkit was killed")), 137, "trainkit", None),
    "the launcher was killed": (
        seen(TOLD, launcher_exit=-9, abandoned=[0], stop=Stop(1.0, "ended before its ranks")), 137, "launcher", None,
    ),
    "the launcher lost a part of itself and claims success": (
        seen(TOLD, launcher_exit=0, abandoned=[0], stop=Stop(1.0, "ended before its ranks")), 137, "launcher", None,
    ),
    "the launcher was told to stop": (seen(TOLD, launcher_exit=1), 137, "rank", 0),
    "the launcher failed by itself": (seen(launcher_exit=2), 2, "launcher", None),
    "the launcher was told to stop, or another node failed": (seen(TOLD, launcher_exit=1, nodes=2), 137, "launcher", 0),
    "a rank was told to stop and finished well": (seen(rank(0, told_to_stop=True)), 0, None, None),
    "the run directory was removed, and python tells": (
        seen(rank(0, ended=None), launcher_exit=7, vanished={0: 1.0}, records_lost=REMOVED)._replace(launcher="python"),
        7, "program", 0,
    ),
    "it was removed, and all ended well": (
        seen(rank(0, ended=None), vanished={0: 1.0}, records_lost=REMOVED), 0, None, None,
    ),
    "it was removed before any rank was seen, and all ended well": (
        Evidence("python", 0, records_lost=REMOVED), 0, None, None,
    ),
    "it was removed before any rank was seen, and deepspeed may have lost one": (
        Evidence("deepspeed", 0, records_lost=REMOVED), 1, "launcher", None,
    ),
    "it was removed, and only the launcher's code is left": (
        seen(rank(0, ended=None), launcher_exit=1, vanished={0: 1.0}, records_lost=REMOVED), 1, "rank", None,
    ),
    "it was removed, and the launcher was killed": (
        seen(rank(0, ended=None), launcher_exit=-9, vanished={0: 1.0}, records_lost=REMOVED), 137, "rank", 0,
    ),
    "the disk failed before any rank had registered": (
        Evidence("torchrun", 1, records_lost="it cannot be written"), 1, "launcher", None,
    ),
    "a rank could not register, and the launcher ended the other": (
        Evidence("torchrun", 1, [rank(0, exit_code=143, told_to_stop=True)], expected_ranks=2, records_lost="full"),
        1, "launcher", None,
    ),
    "the time of day jumps back, and the first cause stays the first": (
        seen(rank(0, exit_code=7)._replace(ended=900.0), launcher_exit=1, stop=Stop(1.5, "stuck")), 7, "program", 0,
    ),
    "only the record of the one rank could not be written": (
        seen(rank(0, ended=None), launcher_exit=7, vanished={0: 1.0})._replace(launcher="python"), 7, "program", 0,
    ),
    "the kernel ended a rank": (seen(rank(0, exit_code=None, signal=9), memory_kills=1), 137, "program", 0),
    "the records could not be written, and the launcher says that all went well": (
        seen(rank(0, ended=None), rank(1, ended=None), launcher_exit=0, vanished={0: 1.0, 1: 1.1}), 0, None, None,
    ),
    "deepspeed's launcher may have lost the rank": (
        seen(rank(0, ended=None), vanished={0: 1.0})._replace(launcher="deepspeed"), 137, "rank", 0,
    ),
    "a preparation failed": (Evidence("torchrun", None, preparation=("build ops", 4)), 4, "preparation", None),
    "fewer ranks ran than planned": (Evidence("accelerate", 0, [rank(0)], expected_ranks=2), 1, "launcher", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_decides(name: str) -> None:
    observed, code, failure, culprit = CASES[name]
    verdict = decide_verdict(observed)
    assert (verdict.exit_code, verdict.failure, verdict.rank) == (code, failure, culprit)
    assert bool(verdict.why) == (code != 0)


@pytest.mark.parametrize("kills", [0, 1])
def test_a_trainkit_that_the_kernel_ended_is_said_with_the_reason(kills: int) -> None:
    killed = seen(TOLD, launcher_exit=1, stop=Stop(1.0, TRAINKIT_KILLED), memory_kills=kills)
    assert decide_verdict(killed).why.startswith("trainkit was killed")
    assert ("memory ran out" in decide_verdict(killed).why) is bool(kills)
    stuck = seen(TOLD, launcher_exit=1, stop=Stop(1.0, "torchrun did not end the run"), memory_kills=kills)
    assert "memory" not in decide_verdict(stuck).why


@pytest.mark.parametrize("code", [125, 126, 127])
def test_a_container_that_does_not_start_is_what_the_machine_lacks(code: int) -> None:
    for seen in (Evidence("torchrun", code, container="podman"), Evidence("python", None, preparation=("look", code))):
        verdict = decide_verdict(seen._replace(container="podman"))
        assert verdict.exit_code == 4 and "podman could not start the container" in verdict.why
    assert decide_verdict(Evidence("torchrun", code)).exit_code == code


def test_only_the_end_of_a_run_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    spec = Spec(str(tmp_path), {}, str(tmp_path), 1, (), (), "python", 1.0, 1, 1, 0, False, None, ())
    write_status(spec, "running", Pids())
    assert (read_json(tmp_path / "status.json")["state"], len(flushed)) == ("running", 0)
    write_status(spec, "ended", Pids(), Verdict(7, "program", "rank 0 exited with code 7"))
    assert (read_json(tmp_path / "status.json")["exit_code"], len(flushed)) == (7, 1)
