"""The progress line, and the files that it is made from."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.heartbeat import EVALUATION, FORWARD, OPTIMIZER, HeartbeatState
from trainkit.runner.report.console import Terminal
from trainkit.runner.report.progress import Progress, Relay, Tail, last_lines, live_line, plain_line, read_progress
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.watch.heartbeats import RankBeat
from trainkit.text import format_duration, format_memory, format_rate

START: dict[str, Any] = {"event": "start", "steps": 300}
LINES: list[dict[str, Any]] = [
    {"step": 10, "loss": 5.5, "seconds": 4.0, "tokens_per_second": 20480.0, "memory_bytes": 512 * 2**20},
    {"step": 20, "loss": 4.25, "seconds": 2.0, "tokens_per_second": 40960.0, "memory_bytes": 512 * 2**20},
]


def progressed() -> Progress:
    progress = Progress()
    for record in [START, *LINES]:
        progress = progress.take(record, now=100.0)
    return progress


def test_the_line_says_step_loss_speed_memory_and_time_left() -> None:
    line = live_line(progressed(), 100.0, 120)
    assert line == "[............] step 20/300  loss 4.2500  56 s left  41.0k tokens/s  512 MiB"


def test_the_line_moves_with_each_step_of_the_heartbeat_and_says_what_is_next() -> None:
    start = {**START, "evaluates_every": 25, "saves_every": 50}
    progress = Progress()
    for record in [start, *LINES]:
        progress = progress.take(record, now=100.0)
    assert live_line(progress, 100.0, 120).endswith("512 MiB  evaluation at step 25")
    assert live_line(beaten(progress, 23, OPTIMIZER), 101.0, 120).startswith("[............] step 23/300  loss 4.25")
    assert live_line(beaten(progress, 25, EVALUATION), 101.0, 120).endswith("evaluating")
    assert live_line(beaten(progress, 26, FORWARD), 101.0, 120).endswith("evaluation and checkpoint at step 50")
    assert live_line(beaten(progress, 299, FORWARD), 101.0, 120).endswith("evaluation and checkpoint at step 300")


def test_the_time_left_counts_the_evaluations_that_will_come() -> None:
    progress = Progress().take({**START, "evaluates_every": 100}, 100.0)
    for record in [*LINES, {"step": 20, "eval_loss": 4.0, "eval_seconds": 7.0}]:
        progress = progress.take(record, now=100.0)
    assert progress.remaining(100.0) == pytest.approx(280 * 0.2 + 3 * 7.0)


def beaten(progress: Progress, step: int, phase: int) -> Progress:
    state = HeartbeatState(1, step, phase, 100.0, ())
    return progress.beat(RankBeat(0, "here", state, [(0.2, 0.2)] * 3), now=101.0)


def test_the_time_left_follows_the_latest_pace_and_the_clock() -> None:
    assert progressed().remaining(100.0) == pytest.approx(280 * 0.2)
    assert progressed().remaining(110.0) == pytest.approx(280 * 0.2 - 10)


def test_one_slow_step_does_not_throw_the_time_left_about() -> None:
    progress = progressed()
    for step in range(21, 60):
        progress = progress.take({"step": step, "loss": 4.0, "seconds": 0.2}, now=100.0)
    steady = progress.remaining(100.0)
    shaken = progress.take({"step": 60, "loss": 4.0, "seconds": 2.0}, now=100.0).remaining(100.0)
    assert steady == pytest.approx(241 * 0.2)
    assert shaken == pytest.approx(240 * (0.2 + 0.1 * 1.8))


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 200])
def test_no_row_of_the_line_reaches_the_last_column(width: int) -> None:
    assert all(len(row) < width for row in live_line(progressed(), 100.0, width).split("\n"))


def test_a_narrow_terminal_wraps_the_line_between_its_parts() -> None:
    assert live_line(progressed(), 100.0, 40) == "step 20/300  loss 4.2500  56 s left\n41.0k tokens/s  512 MiB"


def test_records_that_are_no_steps_do_not_move_the_progress() -> None:
    progress = progressed()
    measured = progress.take({"step": 20, "eval_loss": 4.0}, 101.0)
    assert replace(measured, evaluation={}) == progress
    assert measured.evaluation == {"loss": 4.0}
    assert progress.take({"note": "x"}, 101.0) == progress


def test_steps_that_a_restart_takes_back_are_no_progress(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    records = [START, *({"step": step, "loss": 1.0} for step in range(1, 61)), {**START, "first_step": 40}]
    metrics.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    progress = read_progress(metrics)
    assert (progress.step, progress.logged, progress.latest) == (40, 40, {"step": 60, "loss": 1.0})
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 41, "loss": 0.5}))
    assert (read_progress(metrics).step, read_progress(metrics).latest) == (41, {"step": 41, "loss": 0.5})


def test_a_line_without_an_end_is_not_read_as_a_whole(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    with metrics.open("r+b") as file:
        file.truncate(1 << 40)
    tail = Tail(metrics)
    assert list(tail.records()) == [{"step": 1}]
    assert "more than 4 MiB" in tail.refusal


def test_of_long_metrics_the_latest_evaluation_and_steps_are_found(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 1.0, "seconds": 0.5} for step in range(1, 2001)]
    records = [{**START, "steps": 3000}, {"step": 5, "eval_loss": 3.0}, *steps]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records) + '{"step": 20')
    progress = read_progress(tmp_path / "metrics.jsonl")
    assert (progress.total, progress.step, progress.evaluation) == (3000, 2000, {"loss": 3.0})
    assert progress.seconds_per_step == pytest.approx(0.5)
    assert read_progress(tmp_path / "none") == Progress()
    with (tmp_path / "metrics.jsonl").open("r+b") as file:
        file.seek(0, 2)
        file.write(b"\n")
        file.truncate(1 << 40)  # one line of zeros, as nobody's trainkit writes it
    assert read_progress(tmp_path / "metrics.jsonl").step == 2000


def test_plain_lines_show_steps_and_evaluations_and_nothing_else() -> None:
    progress = progressed()
    assert plain_line(progress, LINES[1]) == "step 20/300  loss 4.2500  41.0k tokens/s  512 MiB"
    assert plain_line(progress, {"step": 20, "eval_loss": 4.0}) == "step 20/300  evaluation loss 4.0000"
    measured = {"step": 20, "eval_loss": 4.0, "eval_accuracy": 0.5, "eval_seconds": 1.0}
    assert plain_line(progress, measured) == "step 20/300  evaluation loss 4.0000  accuracy 0.5000"
    assert plain_line(progress, START) == ""


def test_a_measure_that_has_exploded_is_shown_without_its_many_digits() -> None:
    assert plain_line(Progress(40), {"step": 2, "loss": 1e308}) == "step 2/40  loss 1e+308"
    evaluated = {"step": 2, "eval_loss": 50.0, "eval_perplexity": math.exp(50)}
    assert plain_line(Progress(40), evaluated) == "step 2/40  evaluation loss 50.0000  perplexity 5.185e+21"


def test_a_torn_last_line_waits_for_its_rest_and_a_broken_one_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.records()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(tail.records()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n{"step": {"step": 3}\n{"step": 4}\n')
    assert list(tail.records()) == [{"step": 2}, {"step": 4}]
    tail.close()


def test_a_tail_finds_a_file_that_appears_later(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.read() == b""
    (tmp_path / "log").write_bytes(b"abc")
    assert tail.read() == b"abc"
    assert tail.read() == b""
    tail.close()


def test_the_last_lines_of_a_file_are_whole_lines_of_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(f"line {i}" for i in range(50_000)) + "\n\n")
    assert last_lines(path, 2) == ["line 49998", "line 49999"]
    assert last_lines(tmp_path / "none", 2) == []


def test_a_line_that_was_painted_over_counts_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\n\r 50%|##  |\r100%|####|\r\nsecond\r\n\r   \r\n")
    assert last_lines(tmp_path / "log") == ["first", "100%|####|", "second"]


def test_figures_have_a_sensible_number_of_digits() -> None:
    assert [format_rate(v) for v in (7.123, 431.2, 52_345.0, 2_500_000.0)] == ["7.12", "431", "52.3k", "2.50M"]
    assert [format_duration(v) for v in (42.4, 187, 3750)] == ["42 s", "3:07", "1:02:30"]
    assert [format_memory(v) for v in (512 * 2**20, 24 * 2**30)] == ["512 MiB", "24.0 GiB"]


@pytest.mark.parametrize("planted", ["link", "fifo", "folder"])
def test_metrics_that_cannot_be_read_are_said_and_end_nothing(tmp_path: Path, planted: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if planted == "link":
        (tmp_path / "elsewhere").write_text('{"step": 1}\n')
        metrics.symlink_to("elsewhere")
    elif planted == "fifo":
        os.mkfifo(metrics)
    else:
        metrics.mkdir()
    tail = Tail(metrics)
    assert list(tail.records()) == []
    assert tail.refusal.startswith(f"{metrics} cannot be read: ")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="this system has no file that gives EIO")
def test_a_disk_that_fails_while_metrics_are_read_is_said_and_ends_nothing() -> None:
    tail = Tail(Path("/proc/self/mem"))  # nothing is mapped at its beginning
    assert tail.read() == b""
    assert tail.refusal == "/proc/self/mem cannot be read: Input/output error"
    tail.close()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_line_says_how_long_the_built_in_trainer_has_been_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_ours: bool
) -> None:
    leader, follower = os.openpty()
    metrics, console = tmp_path / "metrics.jsonl", Terminal({"TERM": "xterm"}, follower, follower)
    relay = Relay(metrics, RunLayout(tmp_path).attempt(1), console, is_ours=is_ours)
    begun = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: begun + 12)
    relay.turn()
    metrics.write_text('{"event": "start", "steps": 9}\n{"step": 1, "loss": 2.0, "seconds": 1.0}\n')
    relay.turn()
    relay.finish()
    shown = os.read(leader, 4096).decode()
    os.close(leader)
    os.close(follower)
    assert ("starting, 12 s" in shown) is is_ours
    assert "step 1/9" in shown
    assert shown.rfind("starting") < shown.find("step 1/9")
