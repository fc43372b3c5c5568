"""Which checkpoints of a script on Trainer a later run may go on from."""

from __future__ import annotations

import json
from pathlib import Path

from trainkit.runner.rundir.listing import trainer_checkpoints


def run(folder: Path, name: str, ranks: int = 1) -> Path:
    """A run directory with the part of a plan that is read."""
    root = folder / "runs" / "job" / name
    root.mkdir(parents=True)
    groups = [{"count": 1, "processes": ranks, "devices": ["cpu"] * ranks}]
    plan = {"topology": {"device": "cpu", "groups": groups}, "training_digest": "d", "strategy": {"kind": "ddp"}}
    (root / "plan.json").write_text(json.dumps(plan))
    return root


def checkpoint(root: Path, step: int, *files: str, state: str | None = None) -> Path:
    folder = root / "output" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}) if state is None else state)
    return folder


def found(folder: Path) -> list[tuple[str, int]]:
    return [(saved.run, saved.step) for saved in trainer_checkpoints(str(folder / "runs"), "job")]


def test_the_newest_run_and_its_latest_step_come_first(tmp_path: Path) -> None:
    old, new = run(tmp_path, "20260101-a"), run(tmp_path, "20260102-b")
    for root, step in ((old, 100), (new, 9), (new, 10)):
        checkpoint(root, step, "optimizer.pt", "rng_state.pth")
    assert found(tmp_path) == [("20260102-b", 10), ("20260102-b", 9), ("20260101-a", 100)]
    (saved, *_) = trainer_checkpoints(str(tmp_path / "runs"), "job")
    assert (saved.path, saved.training_digest) == (str(new / "output" / "checkpoint-10"), "d")
    assert (saved.strategy, saved.world_size) == ("ddp", 1)


def test_a_checkpoint_that_a_rank_has_not_finished_is_left_alone(tmp_path: Path) -> None:
    root = run(tmp_path, "20260101-a", ranks=2)
    checkpoint(root, 2, "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth")
    checkpoint(root, 4, "optimizer.pt", "rng_state_0.pth")
    checkpoint(root, 6, "rng_state_0.pth", "rng_state_1.pth")  # weights alone
    checkpoint(root, 8, "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", state='{"global_')
    assert found(tmp_path) == [("20260101-a", 2)]


def test_folders_that_are_no_runs_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "runs" / "job" / "notes").mkdir(parents=True)
    (run(tmp_path, "20260101-a") / "plan.json").write_text("{}")
    assert found(tmp_path) == []
    assert trainer_checkpoints(str(tmp_path / "nowhere"), "job") == []
