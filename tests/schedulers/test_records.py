"""What a start of a run writes down before it begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.errors import MachineError
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.jobs.records import Attempt, make_attempt, read_attempts, require_own, write_attempt


def test_a_start_has_the_next_number_past_whatever_is_there(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert make_attempt(layout) == 1  # it ended before it wrote attempt.json
    assert make_attempt(layout) == 2
    (tmp_path / "attempts" / "3").write_text("a file")
    (tmp_path / "attempts" / "4").symlink_to("nowhere")
    assert make_attempt(layout) == 5
    assert make_attempt(layout, 9) == 9
    write_attempt(layout, Attempt(9, "17", 0, "tk1", 0.0, 0, asked="preemption"))
    assert [(each.number, each.asked) for each in read_attempts(layout)] == [(9, "preemption")]


@pytest.mark.parametrize("what", ["a file", "a link"])
def test_no_start_is_made_elsewhere(tmp_path: Path, what: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    if what == "a file":
        (run / "attempts").write_text("")
    else:
        (run / "attempts").symlink_to(elsewhere)
    with pytest.raises(MachineError, match="takes no folder for this start"):
        make_attempt(RunLayout(run))
    assert not [*elsewhere.iterdir()]


def test_nothing_is_done_to_a_run_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    for user in (0, owner):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert require_own(RunLayout(tmp_path)) is None
    monkeypatch.setattr(os, "geteuid", lambda: owner + 4711)
    with pytest.raises(MachineError, match="is a run of"):
        require_own(RunLayout(tmp_path))
