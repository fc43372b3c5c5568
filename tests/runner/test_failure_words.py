"""What a user reads when a run has failed or was ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.failure import describe_failure, remarks
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.records import REMOVED, RankRecord, write_record

FAILED = Verdict(7, "program", "rank 1 exited with code 7", 1)
ENDED = Verdict(130, "signal", "trainkit received SIGINT", signal=2)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptLayout:
    """An attempt whose rank 1 has said something on each stream."""
    made = RunLayout(tmp_path / "runs/name/20260101-000000-abc").attempt(1)
    made.logs.mkdir(parents=True)
    made.log(1, "out").write_text("step one\n")
    made.log(1, "err").write_text("Traceback\nValueError: no\n")
    return made


def save_checkpoint(attempt: AttemptLayout, step: int) -> None:
    folder = RunLayout(attempt.root.parent.parent).checkpoints / f"step-{step:08}"
    folder.mkdir(parents=True)
    content = {"step": step, "training_digest": "x", "world_size": 1, "strategy": "single", "files": {}}
    (folder / "manifest.json").write_text(json.dumps(content))


def test_the_errors_of_a_rank_that_was_not_shown_are_quoted(attempt: AttemptLayout) -> None:
    lines = describe_failure(FAILED, attempt, 0).splitlines()
    assert lines[:2] == ["the run failed: rank 1 exited with code 7", f"the last lines of {attempt.log(1, 'err')}:"]
    assert lines[-1] == "  | ValueError: no"
    assert describe_failure(FAILED, attempt, 1).splitlines()[1] == f"its log: {attempt.log(1, 'err')}"


def test_a_rank_without_errors_is_quoted_from_its_output_and_one_that_was_silent_not_at_all(
    attempt: AttemptLayout,
) -> None:
    attempt.log(1, "err").write_text("")
    assert describe_failure(FAILED, attempt, 0).splitlines()[-1] == "  | step one"
    attempt.log(1, "out").write_text("")
    assert describe_failure(FAILED, attempt, 0) == "the run failed: rank 1 exited with code 7"


def test_only_what_was_killed_is_said_to_have_been_killed(attempt: AttemptLayout) -> None:
    killed, told = (Verdict(137, "program", "rank 1 was ended by a signal", 1, number) for number in (9, 15))
    assert "sent KILL" in describe_failure(killed, attempt, None)
    assert "KILL" not in describe_failure(told, attempt, None)


def fail(attempt: AttemptLayout, rank: int, errors: str, *, stopped: bool = False) -> None:
    attempt.ranks.mkdir(exist_ok=True)
    attempt.log(rank, "err").write_text(errors)
    record = RankRecord(rank, rank, "host", 1, pid=2, ended=1.0, exit_code=1, told_to_stop=stopped)
    write_record(str(attempt.root), record)


def traceback(rank: int, line: str, warning: str = "") -> str:
    """As torch writes it of each rank."""
    lines = ["Traceback (most recent call last):", f'  File "t.py", line 5, in <module> # {rank}', "    train()", line]
    return "".join(f"[rank{rank}]: {each}\n" for each in lines) + warning


def test_ranks_that_failed_alike_are_counted_and_the_output_that_was_shown_is_not_repeated(
    attempt: AttemptLayout,
) -> None:
    fail(attempt, 0, traceback(0, "ValueError: rank 0 has none", "[W1122] destroy_process_group() was not called\n"))
    fail(attempt, 1, "a warning of this rank's own\n" + traceback(1, "ValueError: rank 1 has none"))
    fail(attempt, 2, traceback(2, "RuntimeError: Connection closed by peer 1"))
    fail(attempt, 3, "", stopped=True)
    assert describe_failure(FAILED, attempt, 0).splitlines() == [
        "the run failed: rank 1 exited with code 7",
        "2 ranks failed in the same way: 0, 1",
        "1 rank failed after it, in another way: 2",
        f"its log: {attempt.log(1, 'err')}",
    ]
    quoted = describe_failure(FAILED, attempt, 2)
    assert "failed after it, in another way: 2 (the output above is that of rank 2)" in quoted
    assert quoted.count("rank 1 has none") == 1
    assert "rank 0 has none" not in quoted


def test_a_run_that_was_ended_has_not_failed_and_names_what_it_can_go_on_from(attempt: AttemptLayout) -> None:
    assert describe_failure(ENDED, attempt, 0) == "the run was ended: trainkit received SIGINT"
    for step in (5, 12):
        save_checkpoint(attempt, step)
    assert describe_failure(ENDED, attempt, 0).splitlines() == [
        "the run was ended: trainkit received SIGINT",
        "next: to continue after step 12, run the same command with --resume_from_checkpoint true",
    ]


def test_an_abort_of_gloo_s_threads_at_the_end_is_told_from_other_aborts(attempt: AttemptLayout) -> None:
    aborted = Verdict(134, "program", "rank 1 was ended by SIGABRT", 1)
    assert "its message is above" in describe_failure(aborted, attempt, 0).splitlines()[-1]
    attempt.log(1, "err").write_text("terminate called without an active exception\n")
    assert "gloo's threads and the interpreter" in describe_failure(aborted, attempt, 0).splitlines()[-1]


def test_a_launcher_fails_of_what_it_met_first_and_not_of_its_own_clean_up(attempt: AttemptLayout) -> None:
    failed = Verdict(1, "launcher", "torchrun exited with code 1 and no rank failed")
    attempt.launcher_log.write_text(
        traceback(0, "RuntimeError: can't start new thread") + traceback(0, "RuntimeError: cannot join thread")
    )
    *_, first, hint = describe_failure(failed, attempt, None).splitlines()
    assert first.startswith("first error in launcher.log: no more threads may be started")
    assert hint.startswith("next: raise the number of processes") and "memory" in hint


def test_a_known_trace_has_the_hint_where_a_connection_was_reset_before(attempt: AttemptLayout) -> None:
    failed = Verdict(1, "launcher", "torchrun exited with code 1 and no rank failed")
    attempt.launcher_log.write_text(
        "[W socket.cpp:464] retrying: Connection reset by peer\n"
        + traceback(0, "torch.distributed.DistNetworkError: The server socket has failed to listen. EADDRINUSE")
    )
    assert "the rendezvous port was taken" in describe_failure(failed, attempt, None).splitlines()[-1]


def test_a_run_directory_that_is_gone_is_said_once(attempt: AttemptLayout) -> None:
    attempt.ranks.mkdir()
    assert remarks(attempt, Verdict(0)) == []
    shutil.rmtree(attempt.root)
    assert remarks(attempt, Verdict(0)) == [f"warning: {REMOVED}: what was written there is gone"]
    assert remarks(attempt, Verdict(7, "program", f"rank 0 exited with code 7; {REMOVED}", 0)) == []
