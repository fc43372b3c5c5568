"""When a run counts as hanging, and who holds it up: rules over made-up clocks and over dumps as torch wrote them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.decode import decode
from trainkit.files import publish, read_json
from trainkit.heartbeat import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    PACES,
    PAGE,
    PHASES,
    START,
    STEPS,
    Heartbeat,
    groups_of,
    read_heartbeat,
    read_paces,
    write_flight_record,
)
from trainkit.runner.nodes.control import Control, Neighbour
from trainkit.runner.rundir.records import RankRecord
from trainkit.runner.watch.activity import FEW, STEADY, FlightRecordPoll, JoinedCollectives, State
from trainkit.runner.watch.dumping import Dump, RankView, _Asked
from trainkit.runner.watch.hang_cause import DumpedRank, describe, hang_cause, innermost_own_frame
from trainkit.runner.watch.timing import BY_RANK, Limits, Pace, PhaseTiming, is_sure, stalled, stragglers
from trainkit.runner.watch.watch import Watch


def longest(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(name, 0.0) for name in PHASES)


AUTO, EIGHT = Limits(), Limits(8.0)
QUICK = (0.1,) * 20


@pytest.mark.parametrize(
    ("timing", "limits", "seconds"),
    [
        pytest.param(PhaseTiming(0, 0, DATA, longest(data=0.01), QUICK), AUTO, 120, id="two minutes at least"),
        pytest.param(PhaseTiming(0, 0, DATA, longest(data=0.01), (9.0,) * 20), AUTO, 180, id="twenty median steps"),
        pytest.param(PhaseTiming(0, 0, DATA, longest(data=70.0), QUICK), AUTO, 210, id="three times the longest phase"),
        pytest.param(PhaseTiming(0, 0, BACKWARD, longest(data=70.0), QUICK), AUTO, 1800, id="a phase that never ended"),
        pytest.param(PhaseTiming(0, 0, START, longest()), EIGHT, 1800, id="the start-up has its own"),
        pytest.param(PhaseTiming(0, 0, DATA, longest(data=70.0), QUICK), EIGHT, 8, id="the recipe's counts"),
        pytest.param(PhaseTiming(0, 0, CHECKPOINT, longest(), QUICK), EIGHT, 1800, id="a first checkpoint"),
        pytest.param(PhaseTiming(0, 0, CHECKPOINT, longest(checkpoint=30.0), QUICK), EIGHT, 90, id="a later one"),
        pytest.param(PhaseTiming(0, 0, START, longest(), pause=2.0), EIGHT, 8, id="collectives without an optimizer"),
        pytest.param(PhaseTiming(0, 0, START, longest(), pause=2.0), AUTO, 120, id="these by themselves"),
        pytest.param(PhaseTiming(0, 0, START, longest(), pause=70.0), AUTO, 210, id="three times their longest pause"),
        pytest.param(PhaseTiming(0, 0), AUTO, 1800, id="a program that says nothing"),
        pytest.param(PhaseTiming(0, 0), EIGHT, 8, id="a program that says nothing, by the recipe"),
    ],
)
def test_how_long_a_rank_may_stand_still(timing: PhaseTiming, limits: Limits, seconds: float) -> None:
    assert timing.limit(limits) == seconds


def test_a_run_hangs_only_when_no_rank_moves() -> None:
    still, moving = PhaseTiming(0, 10.0, DATA, longest(data=1)), PhaseTiming(1, 95.0, BACKWARD, longest(backward=1))
    assert not stalled([still, moving], EIGHT, 100.0)
    assert not stalled([still, moving], EIGHT, 103.0)
    assert stalled([still, moving], EIGHT, 103.1)
    assert not stalled([], EIGHT, 1e9)


def test_a_rank_that_saves_may_let_the_others_wait() -> None:
    saving = PhaseTiming(0, 0.0, CHECKPOINT, longest(checkpoint=60.0))
    waiting = PhaseTiming(1, 0.0, DATA, longest(data=0.1))
    assert not stalled([saving, waiting], EIGHT, 179.0)
    assert stalled([saving, waiting], EIGHT, 181.0)


def test_of_a_program_that_says_nothing_a_hang_is_never_sure() -> None:
    assert is_sure([PhaseTiming(0, 0.0, STEPS, longest(steps=0.1))])
    assert not is_sure([PhaseTiming(0, 0.0, STEPS, longest(steps=0.1)), PhaseTiming(1, 0.0)])
    assert not is_sure([PhaseTiming(0, 0.0, START, longest())])
    assert not is_sure([PhaseTiming(0, 0.0, START, longest(), pause=2.0)])
    assert is_sure([PhaseTiming(0, 0.0, START, longest(), pause=2.0, steady=True)])


def joins(*numbers: int) -> JoinedCollectives:
    """Of a rank that says these numbers, three seconds apart."""
    found = JoinedCollectives()
    for look, number in enumerate(numbers):
        found.see(number, 100.0 + 3 * look)
    return found


def test_collectives_count_once_there_are_more_than_a_start_up_has() -> None:
    assert [joins(0, 0).moved, joins(0, 2, 2, 2).moved, joins(0, 2, 2, 4).moved] == [0.0, 103.0, 109.0]
    assert [joins(number).pause(8.0) for number in (0, FEW, FEW + 1)] == [0, 0, 2]
    assert joins(3, 3, 3, 40).pause(8.0) == 9.0
    steady = joins(*range(1, STEADY + 1))
    assert (steady.is_steady, steady.pause(None)) == (True, 3.0)
    assert not joins(*range(1, STEADY), *[STEADY - 1] * 9).is_steady


def test_a_program_says_how_many_collectives_it_has_joined_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(*, includeCollectives: bool) -> bytes:
        assert not includeCollectives
        status = {"0": {"last_enqueued_collective": 41}, "1": {"last_enqueued_collective": -1}}
        return pickle.dumps({"pg_status": {**status, "2": {"last_enqueued_collective": 1}}})

    page = bytearray(PAGE)
    heartbeat = Heartbeat(page)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace=dump))
    heartbeat.note_collectives()
    seen = read_heartbeat(bytes(page))
    assert seen is not None
    assert seen.joined == 42
    assert seen.longest == (0.0,) * len(PHASES)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace=lambda: b""))
    heartbeat.note_collectives()  # of a torch whose recorder takes no such word
    assert read_heartbeat(bytes(page)) == seen


def rank(number: int, *, last: int, waits: str = "", place: str = "train.py:69", **other: object) -> DumpedRank:
    waiting = [[last, waits, 60.0, place]] if waits else []
    known = {"groups": {"default_pg (gloo)": {"last": last, "waiting": waiting}}}
    facts = {"host": f"tk{number + 1}", "pid": 580 + number, "seconds": 62.0, "phase": BACKWARD, "step": 13}
    found: DumpedRank = decode(DumpedRank, {"rank": number, **known, **facts, **other})
    assert decode(DumpedRank, json.loads(json.dumps(found.as_data()))) == found
    return found


def test_a_stopped_rank_is_named_with_what_it_has_not_joined() -> None:
    found, host = hang_cause(
        [rank(0, last=15, waits="all_reduce"), rank(1, last=0, groups={}, letter="T", waits_in="do_signal_stop")]
    )
    assert found == (
        "rank 1 (tk2, pid 581, state T stopped) has not joined all_reduce 15 of default_pg for 62 s; "
        "rank 0 waits there (train.py:69). Last seen in backward of step 14"
    )
    assert host == "tk2"


def test_a_rank_behind_is_named_with_its_place() -> None:
    behind = rank(2, last=14, place="", phase=DATA)._replace(place="data.py:12 in __getitem__")
    found, host = hang_cause([rank(0, last=15, waits="all_reduce"), rank(1, last=15, waits="all_reduce"), behind])
    assert found == (
        "rank 2 (tk3, pid 582) has not joined all_reduce 15 of default_pg for 62 s; ranks 0, 1 wait there (train.py:69)"
        ". It is at data.py:12 in __getitem__, last seen in data of step 14"
    )
    assert host == "tk3"


def test_who_waits_in_another_group_is_not_the_one() -> None:
    """0 waits for 1 in the group of all, 1 for 2 in a group of their own, and 2 sleeps."""

    def groups(every: int, pair: int, waits: str = "") -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {
            name: {"last": last, "waiting": []} for name, last in (("all (nccl)", every), ("pair (nccl)", pair))
        }
        if waits:
            found[waits]["waiting"] = [[found[waits]["last"], "all_gather", 60.0, "m.py:3"]]
        return found

    first = {"all (nccl)": {"last": 7, "waiting": [[7, "all_reduce", 60.0, ""]]}}
    second, third = groups(6, 3, "pair (nccl)"), groups(6, 2)
    ranks = [rank(number, last=0, groups=known) for number, known in enumerate((first, second, third))]
    assert hang_cause(ranks).text.startswith("rank 2 (tk3, pid 582) has not joined all_")


def test_different_collectives_under_the_same_number_are_a_mismatch() -> None:
    found, host = hang_cause(
        [rank(0, last=15, waits="all_reduce"), rank(1, last=15, waits="barrier", place="train.py:80")]
    )
    assert found == (
        "the ranks of default_pg have waited in different collectives for 62 s: rank 0 is in all_reduce 15 "
        "(train.py:69); rank 1 is in barrier 15 (train.py:80)"
    )
    assert not host


def test_where_every_rank_waits_it_is_none_of_them() -> None:
    found, host = hang_cause([rank(each, last=812, waits="all_reduce") for each in range(4)])
    assert found == (
        "every rank has been in all_reduce 812 of default_pg (train.py:69) for 62 s: the network or a device blocks it"
    )
    assert not host


def test_who_is_no_running_rank_is_named_where_no_other_explains_it() -> None:
    waits, sleeps = rank(0, last=15, waits="all_reduce"), rank(1, last=14)
    gone = DumpedRank(2, "tk3", 582, ended=True)
    launcher = DumpedRank(-1, "tk2", 9, 130.0, letter="S", launcher="torchrun")
    assert hang_cause([waits, gone, launcher]) == (
        (
            "rank 2 (tk3, pid 582, has ended) has not joined all_reduce 15 of default_pg for 62 s; rank 0 waits there "
            "(train.py:69)"
        ),
        "",
    )
    assert hang_cause([waits, sleeps, gone, launcher]).text.startswith(
        "rank 1 (tk2, pid 581) has not joined all_reduce 15"
    )
    assert hang_cause([rank(0, last=0), launcher]) == ("torchrun (tk2, pid 9) has had no rank running for 130 s", "tk2")
    stopped = launcher._replace(letter="T")
    assert hang_cause([waits, sleeps, gone, stopped]).text.startswith(
        "torchrun (tk2, pid 9, state T stopped) has had no "
    )
    assert hang_cause([gone]).text == "no rank has answered"


def test_without_a_flight_recorder_the_rank_with_fewer_steps_is_named() -> None:
    ranks = [DumpedRank(0, "a", 5, 30.0, STEPS, 8), DumpedRank(1, "b", 6, 30.0, STEPS, 7)]
    assert hang_cause(ranks).text == "rank 1 (b, pid 6) has not moved for 30 s. Last seen in step 8"
    assert hang_cause([DumpedRank(0, "a", 5, 30.0, DATA, 7, place="x.py:3 in f")]).text == (
        "rank 0 (a, pid 5) has not moved for 30 s. It is at x.py:3 in f, last seen in data of step 8"
    )
    alike = [DumpedRank(each, "a", 5 + each, 30.0, None, 0, waits_in="futex_wait") for each in (0, 1)]
    assert hang_cause(alike, ["node 1 (b)"]).text == (
        "no rank has moved for 30 s: rank 0 waits in futex_wait; rank 1 waits in futex_wait; node 1 (b) did not answer"
    )


def test_a_rank_is_described_in_a_line() -> None:
    assert describe(DumpedRank(1, "tk2", 9, 0.31, BACKWARD, 13, place="t.py:4 in f")) == (
        "rank 1 (tk2, pid 9): backward of step 14 for 0.3 s, it is at t.py:4 in f"
    )


@pytest.mark.parametrize(("program", "hangs"), [("while True: pass", False), ("import time; time.sleep(60)", True)])
def test_an_evaluation_that_computes_is_slow_and_one_that_does_not_hangs_after_the_step_that_is_done(
    program: str, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.runner.watch.watch.LOOK_SECONDS", 0.1)
    (heartbeat := Heartbeat(page := bytearray(PAGE))).begin_step(1)
    heartbeat.step_done(2)
    for _ in range(2):
        heartbeat.set_phase(EVALUATION)
    (tmp_path / "page").write_bytes(page)
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    with (
        (tmp_path / "page").open("rb") as file,
        subprocess.Popen([sys.executable, "-I", "-S", "-c", program]) as rank,
        selectors.DefaultSelector() as selector,
    ):
        records = {0: RankRecord(0, 0, "tk1", os.getpid(), pid=rank.pid, heartbeat=file.fileno())}
        watch = Watch(Limits(1.0), str(attempt), Control(0, {}, selector, 1.0), lambda *_: 0, 0, "torchrun")
        until = time.monotonic() + 1.8
        while time.monotonic() < until:
            watch.turn(records, [0], ())
            time.sleep(0.05)
        rank.kill()
    assert (attempt / "dumps").exists() is hangs
    assert describe(DumpedRank(0, "tk1", 9, 1.0, EVALUATION, 2)).endswith(": evaluation after step 2 for 1.0 s")


def test_node_0_writes_the_paces_of_all_nodes_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.runner.watch.watch.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trainkit.runner.watch.watch.SHARE_SECONDS", 0.0)
    attempt, pages = tmp_path / "attempts" / "1", [bytearray(PAGE) for _ in range(2)]
    attempt.mkdir(parents=True)
    for page in pages:
        heartbeat = Heartbeat(page)
        for step in range(12):
            heartbeat.begin_step(step)
            heartbeat.step_done(step + 1)
    near, far = socket.socketpair()
    with selectors.DefaultSelector() as one, selectors.DefaultSelector() as other, contextlib.ExitStack() as files:
        first = Control(0, {1: Neighbour(1, "tk1", near.detach())}, one, 1.0)
        controls = (first, Control(1, {0: Neighbour(0, "tk0", far.detach())}, other, 1.0))
        turns = []
        for node, (control, page) in enumerate(zip(controls, pages, strict=True)):
            (path := tmp_path / f"page-{node}").write_bytes(page)
            file = files.enter_context(path.open("rb"))
            record = RankRecord(node, 0, f"tk{node}", os.getpid(), pid=os.getpid(), heartbeat=file.fileno(), node=node)
            turns.append((Watch(AUTO, str(attempt), control, lambda *_: 0, 0, "torchrun"), control, {node: record}))
        until = time.monotonic() + 30
        while [*read_json(attempt / "paces.json")] != ["0", "1"]:
            assert time.monotonic() < until
            for watch, control, records in turns:
                control.turn()
                watch.turn(records, [*records], ())
        assert len(first.kept()) == 1  # the latest of each node
    assert decode(BY_RANK, read_json(attempt / "paces.json"))["1"].host == "tk1"


# As torch 2.13 wrote it on gloo, without the fields that nobody reads.
ENTRY = {
    "frames": [
        {"name": "all_reduce", "filename": "/v/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
        {"name": "wrapper", "filename": "/v/site-packages/torch/distributed/c10d_logger.py", "line": 83},
        {"name": "<module>", "filename": "/home/u/train.py", "line": 6},
    ],
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 3,
    "profiling_name": "gloo:all_reduce",
    "time_created_ns": 1,
    "state": "scheduled",
    "retired": True,
    "is_p2p": False,
}


def test_entries_of_the_flight_recorder_are_read_by_group() -> None:
    waits = {**ENTRY, "collective_seq_id": 4, "retired": False}
    sends = {**ENTRY, "collective_seq_id": 9, "is_p2p": True}
    done = {**ENTRY, "profiling_name": "nccl:broadcast", "retired": False, "state": "completed"}
    found = groups_of([ENTRY, waits, sends, done])
    assert found["default_pg (gloo)"]["last"] == 4
    ((number, operation, _, place),) = found["default_pg (gloo)"]["waiting"]
    assert (number, operation, place) == (4, "all_reduce", "train.py:6")
    assert found["default_pg (nccl)"] == {"last": 3, "waiting": []}


def test_an_answer_is_written_beside_what_has_its_place_and_never_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's own recorder has what any test of this process joined before.
    recorder = SimpleNamespace(_dump_fr_trace=lambda: pickle.dumps({"entries": [ENTRY]}))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    (tmp_path / "victim").write_text("precious")
    dumps = tmp_path / "attempts" / "1" / "dumps"
    dumps.mkdir(parents=True)
    for name in ("rank-0.flight.json", "rank-0.flight.json.part"):
        (dumps / name).symlink_to(tmp_path / "victim")
    write_flight_record(str(dumps / "rank-0.flight.json"), publish)
    assert read_json(dumps / "rank-0.flight.json") == {"groups": {"default_pg (gloo)": {"last": 3, "waiting": []}}}
    (tmp_path / "attempts" / "2").symlink_to("1")
    write_flight_record(str(tmp_path / "attempts" / "2" / ".flight-0.json"), publish)
    assert [path.name for path in (tmp_path / "attempts" / "1").iterdir()] == ["dumps"]
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    "groups",
    [
        5, [1], {"a": 1}, {"a": [[1]]}, {"a": {"waiting": 5}}, {"a": {"waiting": [[1]]}}, {"a": {"last": "x"}},
        {"a": {"waiting": [[1, "x", "y", "p"]]}}, {"a": {"waiting": [["x", "y", 1.0, "p"]]}},
    ],
)  # fmt: skip
def test_a_forged_answer_of_a_flight_recorder_is_as_none(tmp_path: Path, groups: object) -> None:
    path = tmp_path / "attempts" / "1" / ".flight-0.json"
    path.parent.mkdir(parents=True)
    question = FlightRecordPoll(str(path))
    assert question.waits("", 0.0, 1e9, 1e10) == 0.0
    path.write_text(json.dumps({"groups": groups}))
    assert question.waits("", 1.0, 1e12, 1e10) == 0.0
    path.write_text(json.dumps({"groups": {"a": {"last": 3, "waiting": [[3, "all_reduce", 60.0, "m.py:3"]]}}}))
    assert question.waits("", 1.0, 1e12, 1e10) == 60.0
    assert not path.exists()

    dump = Dump(str(path.parent / "dumps"), [], lambda *_: 0)
    (path.parent / "dumps" / "rank-0.flight.json").write_text(json.dumps({"groups": groups}))
    view = RankView(RankRecord(0, 0, "tk1", 580), alive=False)
    asked = _Asked(view, None, 0, State(), 0, f"{path.parent}/dumps/rank-0.flight.json", 0)
    assert dump._found(asked, 1.0).groups == {}


STACK = """Thread 0x00007fa4a37fe6c0 (most recent call first):
  File "/home/u/other.py", line 3 in thread

Current thread 0x00007fa4cb63ab80 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/home/u/train me.py", line 49 in backward
  File "/home/u/train me.py", line 95 in <module>
"""


def test_the_place_is_the_main_threads_innermost_frame_of_the_programs_own() -> None:
    assert innermost_own_frame(STACK) == "train me.py:49 in backward"
    assert innermost_own_frame(STACK.partition('  File "/home/u/train')[0]) == "graph.py:979 in _engine_run_backward"
    assert innermost_own_frame("") == ""


def test_what_is_stamped_is_read_again() -> None:
    page = bytearray(PAGE)
    heartbeat = Heartbeat(page)
    for step in range(PACES + 5):
        heartbeat.begin_step(step)
        heartbeat.set_phase(BACKWARD)
        heartbeat.step_done(step + 1)
    heartbeat.set_phase(CHECKPOINT)
    seen = read_heartbeat(bytes(page))
    assert seen is not None
    assert (seen.step, PHASES[seen.phase]) == (PACES + 5, "checkpoint")
    assert seen.longest[BACKWARD] > 0
    assert not seen.longest[CHECKPOINT]
    steps = read_paces(bytes(page))
    assert len(steps) == PACES
    assert all(0 < own <= whole for whole, own in steps)
    assert read_heartbeat(bytes(PAGE)) is None
    assert read_heartbeat(b"") is None


def test_a_rank_of_its_own_slowness_is_named_and_no_other() -> None:
    paces = {0: Pace("a", 0.5, 0.1), 1: Pace("a", 0.5, 0.11), 2: Pace("b", 0.5, 0.4), 3: Pace("b", 0.5, 0.12)}
    assert stragglers(paces) == [{"rank": 2, "host": "b", "own_seconds": 0.4, "median_seconds": 0.11}]
    assert stragglers({0: paces[0], 2: paces[2]})[0]["rank"] == 2
    assert stragglers({2: paces[2]}) == []
    # Three times as slow, and nobody would notice: it is a hundredth of the step.
    assert stragglers({0: Pace("a", 1.0, 0.001), 1: Pace("a", 1.0, 0.011)}) == []
