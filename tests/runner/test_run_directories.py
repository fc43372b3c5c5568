"""Run directories: listed, read, pruned; checkpoints found in them."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from trainkit.cli.commands import runs as runs_commands
from trainkit.errors import UsageError
from trainkit.runner.rundir import listing
from trainkit.runner.rundir.create import create_run_dir, remember_root, remembered_roots
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import (
    checksum,
    is_running,
    list_runs,
    lock_run,
    saved_checkpoints,
    trainer_checkpoints,
)
from trainkit.schedulers.jobs import run_state
from trainkit.schedulers.jobs.records import Submission, write_submission
from trainkit.schedulers.jobs.run_state import prunable, remove_run, state_of
from trainkit.schedulers.jobs.standing import standing_of


def make_run(root: Path, name: str, run_id: str, **status: Any) -> RunLayout:
    layout = RunLayout(root / name / run_id)
    layout.root.mkdir(parents=True)
    layout.plan.write_text("{}")
    layout.recipe.write_text("version: 1\n")
    if status:
        layout.status.write_text(json.dumps(status))
    return layout


def listed(table: str) -> list[dict[str, str]]:
    """The rows of `runs list` by the heads of their columns."""
    head, *rows = table.splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", head)]
    ends = [*starts[1:], None]
    return [{head[a:b].strip(): row[a:b].strip() for a, b in zip(starts, ends, strict=True)} for row in rows]


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
    assert [state_of(run.layout).exit_code for run in list_runs(str(tmp_path), "a")] == [0, 7]
    assert list_runs(str(tmp_path / "nowhere")) == []


def test_a_run_whose_end_nobody_saw_is_lost(tmp_path: Path) -> None:
    layout = make_run(tmp_path, "a", "1", state="running")
    assert state_of(layout).word == "lost"
    assert state_of(make_run(tmp_path, "a", "2")).word == "lost"


@pytest.mark.parametrize(
    "content",
    [
        '{"a": 1}', '{"wall_seconds": "x"}', '{"wall_seconds": 1e999}',
        '{"wall_seconds": 1, "strategy": 3, "launcher": 4, "world_size": 2, "memory": [3]}',
    ],
)  # fmt: skip
def test_a_summary_that_is_none_is_called_damaged(tmp_path: Path, trainkit: Trainkit, content: str) -> None:
    layout = make_run(tmp_path / "runs", "a", "1", state="ended", exit_code=0)
    layout.summary.write_text(content)
    shown = trainkit("runs", "show", str(layout.root))
    assert shown.returncode == 0
    assert f"{layout.summary} is damaged (" in shown.stdout


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"state": [], "exit_code": {}, "started": "noon", "why": 7}',
        b'{"state": "ended", "started": 1e300, "ended": NaN}',
    ],
)  # fmt: skip
def test_a_damaged_status_hides_no_other_run(tmp_path: Path, trainkit: Trainkit, content: bytes) -> None:
    for day in (1, 2, 3):
        make_run(tmp_path / "runs", "a", f"2026010{day}-000000-aa", state="ended", exit_code=0, started=1767225600.5)
    damaged = RunLayout(tmp_path / "runs/a/20260102-000000-aa")
    damaged.status.write_bytes(content)
    damaged.summary.write_bytes(content)
    done = trainkit("runs", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rpartition("/")[2][:8] for line in done.stdout.splitlines()[1:]] == [
        "20260101",
        "20260102",
        "20260103",
    ]
    listed = json.loads(trainkit("runs", "list", "--json").stdout)
    assert [run["state"] for run in listed] == ["done", "unknown", "done"]


def test_a_run_of_the_first_version_of_plans_is_listed(tmp_path: Path) -> None:
    layout = make_run(tmp_path, "a", "20260101-000000-aa", state="ended", exit_code=7, failure="program")
    layout.plan.write_text(json.dumps({"plan_version": 1, "name": "a"}))
    layout.summary.write_text(json.dumps({"exit_code": 7, "steps": 3, "final_loss": 1.5}))
    (run,) = list_runs(str(tmp_path))
    found = standing_of(run)
    assert (found.state.word, found.exit_code, found.step, run.started) == ("failed", 7, 3, None)


def test_a_run_is_listed_with_the_number_that_says_how_good_it_is(tmp_path: Path, trainkit: Trainkit) -> None:
    summaries: dict[str, dict[str, Any]] = {
        "01": {"eval_loss": 0.7, "metrics": {"accuracy": 0.5, "f1": 0.25}, "best_metric": "f1"},
        "02": {"eval_loss": 0.7, "metrics": {"accuracy": 0.5, "f1": 0.25}, "best_metric": "loss"},
        "03": {"eval_loss": 2.5, "metrics": {}, "best_metric": "loss"},
        "04": {"eval_loss": None, "metrics": 5},
    }
    for day, known in summaries.items():
        layout = make_run(tmp_path / "runs", "a", f"202601{day}-000000-aa", state="ended", exit_code=0)
        layout.summary.write_text(json.dumps({"exit_code": 0, "steps": 3, "final_loss": 1.5, **known}))
    running = make_run(tmp_path / "runs", "a", "20260105-000000-aa", state="ended", exit_code=1)
    records = ({"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 0.5, "eval_accuracy": 0.75, "eval_seconds": 1.0})
    running.metrics.write_text("".join(f"{json.dumps(each)}\n" for each in records) + '{"step": 3, "lo')
    shown = [row["EVALUATION"] for row in listed(trainkit("runs", "list").stdout)]
    assert shown == ["f1 0.2500", "accuracy 0.5000", "loss 2.5000", "-", "accuracy 0.7500"]
    assert "Evaluation  accuracy 0.7500\n" in trainkit("status").stdout
    (known,) = [json.loads(trainkit("status", "--json").stdout)["evaluation"]]
    assert known == {"metric": "accuracy", "value": 0.75}


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"exit_code": 0}, "\x1b[32mdone\x1b[0m, exit code 0"),
        ({"exit_code": 7, "failure": "program"}, "\x1b[1;31mfailed\x1b[0m, exit code 7"),
        ({"exit_code": 143, "outcome": "timed_out"}, "\x1b[35mtimed out\x1b[0m, exit code 143"),
        ({"exit_code": 1, "outcome": "\x1b[2Jan\nother"}, "\x1b[1m\ufffd[2Jan other\x1b[0m, exit code 1"),
    ],
)
def test_a_state_has_its_colour_on_a_terminal_alone_and_no_record_has_one(
    tmp_path: Path, trainkit: Trainkit, status: dict[str, Any], shown: str
) -> None:
    make_run(tmp_path / "runs", "a", "20260101-000000-aa", state="ended", **status)
    forced = {"FORCE_COLOR": "1"}
    assert trainkit("status", environ=forced).stdout.startswith(shown)
    assert "\x1b" not in trainkit("status").stdout + trainkit("status", "--json", environ=forced).stdout


def plan_of(program: str, *argv: Any) -> str:
    """As much of a plan as a list of runs reads."""
    choices = {"program": {"kind": program}, "strategy": {"kind": "ddp"}, "launcher": {"kind": "torchrun"}}
    command = {"argv": ["torchrun", "wrapper", "--", *argv], "wrapper": {"first": 1, "count": 2}}
    return json.dumps({"plan_version": 1, **choices, "commands": [command]})


def test_a_run_is_listed_with_who_ran_and_shown_with_its_words_and_the_end_of_its_logs(
    tmp_path: Path, trainkit: Trainkit
) -> None:
    python, root = "/usr/bin/python3.11", tmp_path / "runs"
    argv = (python, "my/train.py", "--lr", "two words", ["--out=", {"variable": "run_dir"}], "--token=abc")
    failed = make_run(root, "a", "20260103-000000-aa", state="ended", exit_code=3, rank=1, why="rank 1 failed")
    failed.plan.write_text(plan_of("torch", *argv))
    for day, words in (("01", (python, "-m", "pkg.main", "x")), ("02", ("./go.sh",))):
        make_run(root, "a", f"202601{day}-000000-aa", state="ended").plan.write_text(plan_of("torch", *words))
    make_run(root, "b", "20260100-000000-aa", state="ended").plan.write_text(plan_of("builtin", python, "-m", "x"))
    logs = failed.attempt(1)
    logs.logs.mkdir(parents=True)
    logs.log(0, "err").write_text("of another rank\n")
    logs.log(1, "err").write_text("".join(f"line {number}\n" for number in range(30)) + "\x1b[31mred\n")
    logs.log(1, "out").write_text("")

    rows = listed(trainkit("runs", "list").stdout)
    assert [row["PROGRAM"] for row in rows] == ["builtin", "-m pkg.main", "go.sh", "train.py"]
    assert (rows[-1]["STRATEGY"], rows[-1]["LAUNCHER"], rows[-1]["EXIT"]) == ("ddp", "torchrun", "3")
    shown = trainkit("runs", "show").stdout
    assert "program: my/train.py --lr 'two words' '--out=<run_dir>' '--token=***' (torch, ddp, torchrun)" in shown
    assert f"nothing in {logs.log(1, 'out')}\nlast lines of {logs.log(1, 'err')}:\n" in shown
    assert "| line 29" in shown
    assert "| line 20" not in shown
    assert "\x1b" not in shown
    assert "of another rank" not in shown

    done = list_runs(str(root), "b")[0].layout.attempt(1)
    done.logs.mkdir(parents=True)
    done.log(0, "out").write_text("one word\n")
    done.log(0, "err").write_text("")
    shown = trainkit("runs", "show", "b").stdout
    assert "one word" in shown
    assert "nothing in" not in shown  # where nothing has failed, that is no news


def test_the_newest_run_is_shown_and_without_one_it_is_said(tmp_path: Path, trainkit: Trainkit) -> None:
    done = trainkit("runs", "show")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no runs in runs" in done.stderr
    make_run(tmp_path / "runs", "a", "20260101-000000-aa", state="ended", exit_code=0)
    shown = trainkit("runs", "show").stdout.splitlines()
    assert (shown[0], shown[1].split(), shown[-2:]) == (
        "done, exit code 0",
        ["Run", "a", "aa"],
        ["program: -", "next: trainkit report aa"],
    )


def test_all_runs_of_a_user_are_listed_from_any_folder(
    tmp_path: Path, trainkit: Trainkit, clean_environment: dict[str, str]
) -> None:
    for name in ("one", "two", "one"):
        remember_root(str(tmp_path / name / "runs"), clean_environment)
    remember_root(str(tmp_path / "gone"), clean_environment)
    for day, name in enumerate(("one", "two"), 1):
        make_run(tmp_path / name / "runs", "a", f"2026010{day}-000000-aa", state="ended", exit_code=0)
    assert remembered_roots(clean_environment) == [str(tmp_path / name / "runs") for name in ("one", "two")]
    (elsewhere := tmp_path / "elsewhere").mkdir()
    listed = json.loads(trainkit("runs", "list", "--all", "--json", cwd=elsewhere).stdout)
    assert [Path(run["path"]).parts[-4] for run in listed] == ["one", "two"]
    assert json.loads(trainkit("runs", "list", "--json", cwd=elsewhere).stdout) == []


def test_the_runs_of_a_job_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots, asked = [str(tmp_path / each) for each in ("one", "two")], list[str]()
    for number, job in enumerate(("101", "4_10", "4_2", "101")):
        layout = make_run(Path(roots[number % 2]), "a", f"2026010{number + 1}-000000-aa", state="running")
        write_submission(layout, Submission("slurm", job))
    monkeypatch.setattr(runs_commands, "known_roots", lambda: roots)
    monkeypatch.setattr(run_state, "root_of_job", asked.append)
    here = str(tmp_path / "here")
    assert runs_commands.find_run("101", here).layout.id.startswith("20260104")  # the newest: numbers begin again
    assert runs_commands.find_run("4_2", here).layout.id.startswith("20260103")
    found, is_array = runs_commands.find_runs("4", here)
    assert ([each.layout.id[:8] for each in found], is_array) == (["20260103", "20260102"], True)
    with pytest.raises(UsageError, match="4 is an array job of 2 runs"):
        runs_commands.find_run("4", here)
    assert not asked
    with pytest.raises(UsageError, match="7 is neither"):
        runs_commands.find_run("7", here)
    assert asked == ["7"]
    monkeypatch.setattr(runs_commands, "known_roots", list)
    monkeypatch.setattr(run_state, "root_of_job", lambda _: Path(roots[0]))
    assert runs_commands.find_run("4_2", here).layout.id.startswith("20260103")


def test_pruning_keeps_the_newest_of_each_name_and_every_running_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for day in range(1, 4):
            make_run(tmp_path, name, f"2026010{day}-000000-aa", state="ended", exit_code=0)
    alive = make_run(tmp_path, "a", "20250101-000000-aa", state="running")
    lock = lock_run(alive)
    try:
        runs = list_runs(str(tmp_path))
        chosen = [(run.layout.name, run.layout.id[:8]) for run in prunable(runs, keep=1)]
        assert sorted(chosen) == [(name, f"2026010{day}") for name in ("a", "b") for day in (1, 2)]
        assert len(prunable(runs, keep=10)) == 0
        assert not remove_run(alive)
        assert alive.root.exists()
    finally:
        os.close(lock)
    assert not is_running(alive)
    assert remove_run(alive)
    assert not alive.root.exists()


def test_pruning_leaves_what_a_link_leads_to(tmp_path: Path, trainkit: Trainkit) -> None:
    elsewhere = make_run(tmp_path / "elsewhere", "a", "20260101-000000-aa", state="ended", exit_code=0)
    root = tmp_path / "runs"
    make_run(root, "mine", "20260102-000000-aa", state="ended", exit_code=0)
    (root / "theirs").symlink_to(elsewhere.root.parent)
    (root / "mine" / elsewhere.id).symlink_to(elsewhere.root)
    done = trainkit("runs", "prune", "--keep", "0", "--yes", "--root", str(root))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "removed 1 of 1 runs")
    assert "2 older runs stay: " in done.stdout
    assert list((root / "mine").iterdir()) == [root / "mine" / elsewhere.id]
    assert elsewhere.plan.exists()
    assert not remove_run(RunLayout(root / "mine" / elsewhere.id))  # also where the link was made after the question


def test_half_of_a_removed_run_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_run(tmp_path, "a", "20260101-000000-aa", state="ended", exit_code=0)

    def fails(*_: object, **__: object) -> None:
        raise OSError("the disk fails")

    monkeypatch.setattr(listing, "remove_tree", fails)
    with pytest.raises(OSError, match="the disk fails"):
        remove_run(layout)
    assert layout.recipe.exists()
    assert list_runs(str(tmp_path)) == []


def test_a_folder_without_a_recipe_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path, "a", "20260101-000000-aa").recipe.unlink()
    assert list_runs(str(tmp_path)) == []


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
    damage = {saved.step: saved.damage for saved in saved_checkpoints(str(tmp_path), "a", damaged=True) if saved.damage}
    assert damage == {
        40: "model.pt has 3 of 4 bytes",
        50: "manifest.json cannot be read",
        60: "it has no manifest.json",
        70: "model.pt is missing",
    }


@pytest.mark.parametrize("step", ["Infinity", "NaN", "1e999", "[]", '"x"'])
def test_a_manifest_without_a_sensible_step_cannot_be_read(tmp_path: Path, step: str) -> None:
    file = make_checkpoint(make_run(tmp_path, "a", "20260101-000000-aa"), 10) / "manifest.json"
    file.write_text(file.read_text().replace('"step": 10', f'"step": {step}'))
    (found,) = saved_checkpoints(str(tmp_path), "a", damaged=True)
    assert found.damage == "manifest.json cannot be read"


def test_a_manifest_that_was_changed_is_damaged_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "20260101-000000-aa")
    file = make_checkpoint(run, 10) / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
    assert [saved.damage for saved in saved_checkpoints(str(tmp_path), "a", damaged=True)] == [""]
    file.write_text(file.read_text().replace("digest", "dugest"))
    assert saved_checkpoints(str(tmp_path), "a") == []
    (found,) = saved_checkpoints(str(tmp_path), "a", damaged=True)
    assert found.damage == "manifest.json was changed after it was written"


def test_a_run_directory_that_is_there_is_left_alone_for_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
    made = [create_run_dir(str(tmp_path), "a").id for _ in range(2)]
    assert made == ["20260101-000000-aaaaaa", "20260101-000000-bbbbbb"]


def trainer_run(folder: Path, name: str, ranks: int = 1) -> Path:
    """A run directory with the part of a plan that is read."""
    root = folder / "runs" / "job" / name
    root.mkdir(parents=True)
    groups = [{"count": 1, "processes": ranks, "devices": ["cpu"] * ranks}]
    plan = {"topology": {"device": "cpu", "groups": groups}, "training_digest": "d", "strategy": {"kind": "ddp"}}
    (root / "plan.json").write_text(json.dumps(plan))
    return root


def trainer_checkpoint(root: Path, step: int, *files: str, state: str | None = None) -> Path:
    folder = root / "output" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}) if state is None else state)
    return folder


def steps_found(folder: Path) -> list[tuple[str, int]]:
    return [(saved.run, saved.step) for saved in trainer_checkpoints(str(folder / "runs"), "job")]


def test_checkpoints_of_a_script_on_trainer_are_found_newest_first(tmp_path: Path) -> None:
    old, new = trainer_run(tmp_path, "20260101-a"), trainer_run(tmp_path, "20260102-b")
    for root, step in ((old, 100), (new, 9), (new, 10)):
        trainer_checkpoint(root, step, "optimizer.pt", "rng_state.pth")
    assert steps_found(tmp_path) == [("20260102-b", 10), ("20260102-b", 9), ("20260101-a", 100)]
    (saved, *_) = trainer_checkpoints(str(tmp_path / "runs"), "job")
    assert (saved.path, saved.training_digest) == (str(new / "output" / "checkpoint-10"), "d")
    assert (saved.strategy, saved.world_size) == ("ddp", 1)


def test_a_checkpoint_that_a_rank_has_not_finished_is_left_alone(tmp_path: Path) -> None:
    root = trainer_run(tmp_path, "20260101-a", ranks=2)
    trainer_checkpoint(root, 2, "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth")
    trainer_checkpoint(root, 4, "optimizer.pt", "rng_state_0.pth")
    trainer_checkpoint(root, 6, "rng_state_0.pth", "rng_state_1.pth")  # weights alone
    trainer_checkpoint(root, 8, "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", state='{"global_')
    assert steps_found(tmp_path) == [("20260101-a", 2)]


def test_folders_that_are_no_runs_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "runs" / "job" / "notes").mkdir(parents=True)
    (trainer_run(tmp_path, "20260101-a") / "plan.json").write_text("{}")
    assert steps_found(tmp_path) == []
    assert trainer_checkpoints(str(tmp_path / "nowhere"), "job") == []
