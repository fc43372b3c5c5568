"""`trainkit logs` over the files of more ranks than a process may have files open, and over what cannot be read."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import RankRecord, read_records, write_record
from trainkit.schedulers.jobs import following
from trainkit.schedulers.jobs.following import Logs, Wanted, show_logs

RANKS = 200


@pytest.fixture
def few_files() -> Iterator[None]:
    """This process may open some dozens of files more, and not one for each log."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 60, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """A run of two ranks on each node, with a line in every log."""
    layout = RunLayout(tmp_path / "r" / "1")
    attempt = layout.attempt(1)
    attempt.logs.mkdir(parents=True)
    attempt.ranks.mkdir()
    for rank in range(RANKS):
        if rank > 1 and rank % 2 == 0:
            (attempt.ranks / f"node-{rank // 2}").mkdir()
        write_record(str(attempt.root), RankRecord(rank, rank % 2, f"tk{rank // 2}", 1, node=rank // 2))
        attempt.log(rank, "out").write_text(f"out of {rank}\n")
        attempt.log(rank, "err").write_text(f"err of {rank}")
    return layout


@pytest.mark.usefixtures("few_files")
def test_every_line_of_every_rank_is_shown_with_its_rank_and_host(
    layout: RunLayout, capfd: pytest.CaptureFixture[str]
) -> None:
    assert show_logs(layout, Wanted(every=True), follow=False) == 0
    lines = capfd.readouterr().out.splitlines()
    wanted = {f"[{rank} tk{rank // 2}] {stream} of {rank}" for rank in range(RANKS) for stream in ("out", "err")}
    assert sorted(lines) == sorted(wanted)


def test_the_progress_of_the_built_in_trainer_is_in_the_log_and_that_of_an_earlier_attempt_is_not(
    layout: RunLayout, capfd: pytest.CaptureFixture[str]
) -> None:
    start = '{"event": "start", "steps": 4, "first_step": %d}\n'
    layout.metrics.write_text(start % 0 + '{"step": 1, "loss": 9.0}\n' + start % 1 + '{"step": 2, "loss": 2.5}\n')
    logs = Logs(layout, Wanted())
    logs.show()
    assert capfd.readouterr().out == "out of 0\nerr of 0step 2/4  loss 2.5000\n"
    with layout.metrics.open("a") as file:
        file.write('{"step": 3, "loss": null}\n{"step": 3, "eval_loss": 2.0}\n' + start % 3)
        file.write('{"step": 4, "loss": 1.5}\n')
    logs.show()
    shown = "step 3/4  loss not finite\nstep 3/4  evaluation loss 2.0000\nstep 4/4  loss 1.5000\n"
    assert capfd.readouterr().out == shown


@pytest.mark.usefixtures("few_files")
def test_what_is_appended_later_is_shown_once(layout: RunLayout, capfd: pytest.CaptureFixture[str]) -> None:
    logs = Logs(layout, Wanted(every=True))
    logs.show()
    capfd.readouterr()
    with layout.attempt(1).log(7, "err").open("a") as file:
        file.write(", its end\nmore")
    logs.show()
    assert capfd.readouterr().out == "[7 tk3] err of 7, its end\n"
    logs.finish()
    assert "[7 tk3] more\n" in capfd.readouterr().out


def test_a_rank_without_a_record_makes_records_be_read_once_a_look(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def counted(attempt_dir: str) -> Iterator[RankRecord]:
        nonlocal looks
        looks += 1
        return read_records(attempt_dir)

    monkeypatch.setattr(following, "read_records", counted)
    for rank in range(RANKS, RANKS + 3):
        layout.attempt(1).log(rank, "out").write_text("early\n")
    Logs(layout, Wanted(every=True)).show()
    assert looks == 1
    assert capfd.readouterr().out.count("?] early\n") == 3


def test_a_log_that_cannot_be_read_is_said(layout: RunLayout, capfd: pytest.CaptureFixture[str]) -> None:
    log = layout.attempt(1).log(3, "out")
    log.unlink()
    log.symlink_to("rank-2.out")
    show_logs(layout, Wanted(every=True), follow=False)
    assert capfd.readouterr().err == f"{log} cannot be read: not a regular file\n"
