"""Run directories: listed, read, pruned; checkpoints found in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from trainkit.runner.rundir.checkpoints import saved_checkpoints
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import hold, is_running, list_runs, prunable, read_run, remove


def make_run(root: Path, name: str, run_id: str, **status: Any) -> RunLayout:
    layout = RunLayout(root / name / run_id)
    layout.root.mkdir(parents=True)
    layout.plan.write_text("{}")
    layout.recipe.write_text("version: 1\n")
    if status:
        layout.status.write_text(json.dumps(status))
    return layout


def make_checkpoint(layout: RunLayout, step: int, *, name: str = "", size: int = 3) -> Path:
    folder = layout.checkpoints / (name or f"step-{step:08d}")
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"abc")
    files = {"model.pt": {"size": size, "sha256": ""}}
    manifest = {"step": step, "training_digest": "digest", "strategy": "ddp", "world_size": 2, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_runs_are_listed_oldest_first_over_all_names(tmp_path: Path) -> None:
    make_run(tmp_path, "b", "20260102-000000-aa", state="ended", exit_code=0)
    make_run(tmp_path, "a", "20260103-000000-aa", state="ended", exit_code=7, why="rank 0 exited with code 7")
    make_run(tmp_path, "a", "20260101-000000-aa", state="ended", exit_code=0)
    (tmp_path / "a" / "no-run").mkdir()
    assert [run.layout.id[:8] for run in list_runs(str(tmp_path))] == ["20260101", "20260102", "20260103"]
    assert [run.exit_code for run in list_runs(str(tmp_path), "a")] == [0, 7]
    assert list_runs(str(tmp_path / "nowhere")) == []


def test_a_run_whose_end_nobody_saw_is_lost(tmp_path: Path) -> None:
    layout = make_run(tmp_path, "a", "1", state="running")
    assert read_run(layout.root).state == "lost"
    assert read_run(make_run(tmp_path, "a", "2").root).state == "lost"


def test_pruning_keeps_the_newest_of_each_name_and_every_running_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for day in range(1, 4):
            make_run(tmp_path, name, f"2026010{day}-000000-aa", state="ended", exit_code=0)
    alive = make_run(tmp_path, "a", "20250101-000000-aa", state="running")
    lock = hold(alive)
    try:
        runs = list_runs(str(tmp_path))
        chosen = [(run.layout.name, run.layout.id[:8]) for run in prunable(runs, keep=1)]
        assert sorted(chosen) == [(name, f"2026010{day}") for name in ("a", "b") for day in (1, 2)]
        assert len(prunable(runs, keep=10)) == 0
        assert not remove(read_run(alive.root))
        assert alive.root.exists()
    finally:
        os.close(lock)
    assert not is_running(alive)
    assert remove(read_run(alive.root))
    assert not alive.root.exists()


def test_only_complete_checkpoints_are_found_newest_first(tmp_path: Path) -> None:
    old = make_run(tmp_path, "a", "20260101-000000-aa")
    new = make_run(tmp_path, "a", "20260102-000000-aa")
    make_checkpoint(old, 300)
    make_checkpoint(new, 10)
    make_checkpoint(new, 20)
    make_checkpoint(new, 30, name=".tmp-step-00000030")
    make_checkpoint(new, 40, size=4)  # a file is shorter than the manifest says
    (make_checkpoint(new, 50) / "manifest.json").write_text("{")
    (make_checkpoint(new, 60) / "manifest.json").unlink()
    (make_checkpoint(new, 70) / "model.pt").unlink()
    make_checkpoint(make_run(tmp_path, "other", "20260103-000000-aa"), 80)
    found = saved_checkpoints(str(tmp_path), "a")
    assert [(saved.step, saved.run[:8]) for saved in found] == [(20, "20260102"), (10, "20260102"), (300, "20260101")]
    assert found[0].path == str(new.checkpoints / "step-00000020")
    assert found[0].saved_by == "saved by ddp on 2 ranks"
    assert saved_checkpoints(str(tmp_path), "nothing") == []
