"""Saving when something is wrong, and what a resumed run says."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import Case, write_settings

from tests.trainer.training import MakeSettings, lines_of, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.trainer import distributed
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.resuming import resume
from trainkit.trainer.metrics.predictions import write_result
from trainkit.trainer.randomness import generator_states
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import Parts

ROOT = Path(__file__).parents[2]
EVERY_STEP: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep": 0}}
WILD: dict[str, Any] = {  # the loss is soon no number
    "optimizer": {"name": "sgd", "lr": 1e12, "weight_decay": 1e12},
    "train": {"steps": 50, "max_grad_norm": 0.0},
}


def save(parts: Parts, *steps: int) -> None:
    for step in steps:
        parts.checkpoints.save(step, parts.strategy)
    parts.checkpoints.wait()


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def start_trainer(settings: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "trainkit.trainer", "--settings", str(settings)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            pytest.fail(f"the trainer did not get there: {process.communicate()}")
        time.sleep(0.005)


def test_weights_that_are_no_numbers_take_no_good_checkpoints_place(make_settings: MakeSettings) -> None:
    settings = make_settings(**WILD, **EVERY_STEP, logging={"every_steps": 1000})
    with pytest.raises(TrainingError, match=r"is (nan|inf) at step \d+") as caught:
        trained(settings)
    step = int(str(caught.value).rsplit(" ", 1)[1])
    assert saved(settings.run_dir) == [f"step-{number:08}" for number in range(1, step)]


def test_steps_that_fp16_skips_for_a_loss_that_is_no_number_take_no_good_checkpoints_place(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    short = {**WILD, "train": {**WILD["train"], "steps": 6}}
    settings = make_settings(**short, checkpoint={"every_steps": 1, "keep": 1}, precision={"dtype": "fp16"})
    sound = max(line["step"] for line in trained(settings).lines if line.get("loss") is not None)
    assert sound < 6
    assert saved(settings.run_dir) == [f"step-{sound:08}"]
    assert f"no checkpoint is saved after step {sound + 1}: its loss is nan" in caplog.text


def test_a_loss_that_is_no_number_ends_the_run_and_its_line_is_in_the_metrics(make_settings: MakeSettings) -> None:
    settings = make_settings(**WILD)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) at step \d+") as caught:
        trained(settings)
    last = lines_of(settings)[-1]
    assert str(caught.value).endswith(f"at step {last['step']}")
    assert None in (last["loss"], last["grad_norm"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on another process's files")
def test_a_checkpoint_that_does_not_fit_on_the_disk_ends_the_run_in_one_line_and_leaves_the_last_one_whole(
    corpus_folder: Path, tmp_path: Path
) -> None:
    import resource

    case = Case({"kind": "single"}, ranks=1).changed(**EVERY_STEP, train={"steps": 100_000})
    process = start_trainer(write_settings(tmp_path / "run", case, corpus_folder))
    wait_until((tmp_path / "run/checkpoints/step-00000002").exists, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = stderr.splitlines()
    step = int(line.removeprefix("error: the checkpoint of step ").split()[0])
    assert f"cannot be written to {tmp_path}/run/checkpoints (" in line
    assert "earlier checkpoints are intact" in line
    assert saved(tmp_path / "run") == [f"step-{number:08}" for number in range(1, step)]


def catches_usr1(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's signal mask from /proc")
def test_a_request_to_save_that_comes_while_the_trainer_starts_waits_for_the_first_step(
    corpus_folder: Path, tmp_path: Path
) -> None:
    case = Case({"kind": "single"}, ranks=1).changed(train={"steps": 2}, checkpoint={"at_end": False})
    process = start_trainer(write_settings(tmp_path / "run", case, corpus_folder))
    wait_until(lambda: catches_usr1(process.pid), process)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert saved(tmp_path / "run") == ["step-00000001"]


@pytest.fixture
def parts(make_settings: MakeSettings) -> Parts:
    """Of a run that saves after every step, while training waits."""
    return parts_of(make_settings(checkpoint={**EVERY_STEP["checkpoint"], "asynchronous": False}))


@pytest.fixture
def finished(make_settings: MakeSettings) -> Settings:
    """A finished run of two steps, and the settings of one that resumes from its end."""
    settings = make_settings(**EVERY_STEP, train={"steps": 2})
    trained(settings)
    return dataclasses.replace(settings, resume=settings.run_dir / "checkpoints/step-00000002")


def test_a_run_that_has_nothing_left_to_train_says_so(finished: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resume(parts_of(finished), restarted=False) == 2
    assert "nothing is left to train: the run has 2 steps, and the checkpoint is of step 2" in caplog.text


def test_a_checkpoint_of_other_training_settings_is_taken_with_a_warning(
    finished: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resume(parts_of(dataclasses.replace(finished, training_digest="another")), restarted=False) == 2
    assert "was saved with other training settings; training continues with this run's" in caplog.text


def test_a_result_that_finds_no_room_is_a_warning_and_not_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    write_result(tmp_path / "result.json", {"steps": 1})
    assert f"{tmp_path}/result.json cannot be written: No space left on device" in caplog.text
    assert not (tmp_path / "result.json").exists()


def test_a_manifest_of_something_else_is_refused(finished: Settings) -> None:
    assert finished.resume is not None
    (finished.resume / "manifest.json").write_text('{"step": 2}')
    with pytest.raises(TrainingError, match="is not a checkpoint of trainkit: its manifest"):
        resume(parts_of(finished), restarted=False)


def test_a_rank_whose_peer_is_gone_blames_no_disk_and_leaves_what_was_begun(parts: Parts) -> None:
    def put(folder: Path) -> None:
        (folder / "part").touch()
        raise RuntimeError("[pair.cc:537] Read error [127.0.0.1]:43667: Connection reset by peer")

    parts.strategy.save = put  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="step 1 is not finished: another rank ended"):
        save(parts, 1)
    assert saved(parts.settings.run_dir) == [".tmp-step-00000001"]


@pytest.mark.parametrize("still", [True, False])  # another rank may have made room by what it removed
def test_torchs_words_for_a_full_disk_are_replaced_by_the_systems(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, still: bool
) -> None:
    def put(folder: Path) -> None:
        refused = "[Errno 28] No space left on device" if still else None
        monkeypatch.setattr(saving, "refused_write", lambda folder: refused)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    parts.strategy.save = put  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="No space left on device"):
        save(parts, 1)
    assert saved(parts.settings.run_dir) == []


def test_nothing_is_removed_through_a_link_in_the_place_of_the_checkpoints(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(checkpoint={"every_steps": 1, "keep": 1})
    parts = parts_of(settings)
    (tmp_path / "other").mkdir()
    (settings.run_dir / "checkpoints").symlink_to(tmp_path / "other")
    save(parts, 1, 2)
    assert saved(settings.run_dir) == ["step-00000001", "step-00000002"]


def put_a_link(run_dir: Path, checkpoint: str = "") -> Path:
    """Another folder takes the place of a run directory, by a link; the checkpoints in it."""
    run_dir.rename(run_dir.with_name("moved"))
    other = run_dir.with_name("other") / "checkpoints"
    (other / checkpoint).mkdir(parents=True)
    run_dir.symlink_to(other.parent)
    return other


def test_no_checkpoint_goes_where_a_link_in_the_place_of_the_run_directory_leads(parts: Parts) -> None:
    other = put_a_link(parts.settings.run_dir)
    with pytest.raises(TrainingError, match="a link is in the place of a folder of the run"):
        save(parts, 1)
    assert list(other.iterdir()) == []


def test_a_link_that_comes_while_a_checkpoint_is_begun_is_not_written_through(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, others = parts.strategy.save, []

    def after_a_link(folder: Path) -> None:
        others.append(put_a_link(parts.settings.run_dir))
        honest(folder)

    monkeypatch.setattr(parts.strategy, "save", after_a_link)
    with pytest.raises(TrainingError, match="the checkpoint of step 1 cannot be written"):
        save(parts, 1)
    assert list(others[0].iterdir()) == []


def test_a_link_that_comes_while_the_ranks_wait_for_one_another_is_not_written_through(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, others = distributed.gather_from_ranks, []

    def after_a_link(value: Any, world: World) -> Any:
        others.append(put_a_link(parts.settings.run_dir, ".tmp-step-00000009"))
        return honest(value, world)

    monkeypatch.setattr(saving, "gather_from_ranks", after_a_link)
    with pytest.raises(TrainingError, match="a link is in the place of a folder of the run"):
        save(parts, 1)
    assert [path.name for path in others[0].iterdir()] == [".tmp-step-00000009"]


def test_the_folder_of_a_checkpoint_is_made_in_no_link(tmp_path: Path) -> None:
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        saving._make_scratch(tmp_path / "run" / "checkpoints" / ".tmp-step-00000001")
    assert list((tmp_path / "other" / "checkpoints").iterdir()) == []


def test_a_run_directory_that_was_removed_is_made_anew_for_a_checkpoint(parts: Parts) -> None:
    shutil.rmtree(parts.settings.run_dir)
    save(parts, 1)
    assert saved(parts.settings.run_dir) == ["step-00000001"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of open files from /proc")
def test_the_disk_has_a_checkpoint_before_its_name_and_its_name_before_an_old_one_goes(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(make_settings(checkpoint={"every_steps": 1, "keep": 1}))
    root = parts.settings.run_dir / "checkpoints"
    scratch, old = root / ".tmp-step-00000002", root / "step-00000001"
    save(parts, 1)
    done: list[tuple[str, Path]] = []
    honest_sync, honest_rename, honest_remove = os.fsync, Path.rename, shutil.rmtree

    def sync(descriptor: int) -> None:
        done.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink()))
        honest_sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        done.append(("rename", self))
        return honest_rename(self, target)

    def remove(path: Path, *args: Any, **options: Any) -> None:
        done.append(("remove", path))
        honest_remove(path, *args, **options)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", remove)
    save(parts, 2)
    before, after = done[: done.index(("rename", scratch))], done[done.index(("rename", scratch)) + 1 :]
    final = root / "step-00000002"
    every = {scratch, *(scratch / path.relative_to(final) for path in final.rglob("*"))}
    assert len(every) > 4
    assert every <= {path for what, path in before if what == "flush"}
    # It goes under another name, for half of it must not look like a checkpoint.
    assert after == [("flush", root), ("rename", old), ("remove", root / ".tmp-old-step-00000001")]


def test_as_many_of_the_newest_checkpoints_stay_as_the_recipe_says(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(checkpoint={"every_steps": 1, "keep": 2}))
    save(parts, 1, 2, 3, 4)
    assert saved(parts.settings.run_dir) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_that_is_there_is_not_written_again(parts: Parts) -> None:
    manifest = parts.settings.run_dir / "checkpoints/step-00000001/manifest.json"
    save(parts, 1)
    before = manifest.stat()
    save(parts, 1)
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_a_killed_attempt_has_begun_goes_with_the_next_checkpoint(parts: Parts) -> None:
    for name in (".tmp-step-00000007", ".tmp-old-step-00000003"):
        (parts.settings.run_dir / "checkpoints" / name / "state").mkdir(parents=True)
    save(parts, 8)
    assert saved(parts.settings.run_dir) == ["step-00000008"]


def _changed_file(folder: Path) -> None:
    file = next(folder.glob("state/*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _changed_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "step": 1}))


def _leads_out(folder: Path) -> None:
    (folder.parent / "secret").write_text("x")
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(b"x").hexdigest()
    files = {**manifest["files"], "../secret": {"size": 1, "sha256": digest}}
    manifest = {name: value for name, value in manifest.items() if name != "checksum"}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_changed_file, r"is damaged: state/\S+ does not match its manifest"),
        (_changed_manifest, "its manifest.json was changed after it was written"),
        (_leads_out, "is damaged: ../secret does not match its manifest"),
    ],
)
def test_a_checkpoint_that_is_not_as_it_was_written_is_refused(
    finished: Settings, harm: Callable[[Path], None], said: str
) -> None:
    assert finished.resume is not None
    harm(finished.resume)
    with pytest.raises(TrainingError, match=said):
        resume(parts_of(finished), restarted=False)


def test_a_restarted_run_goes_on_from_its_own_newest_whole_checkpoint(finished: Settings) -> None:
    root = finished.run_dir / "checkpoints"
    (root / "step-00000009").mkdir()
    parts = parts_of(dataclasses.replace(finished, resume=root / "step-00000001"))
    assert resume(parts, restarted=False) == 1
    assert resume(parts, restarted=True) == 2


def test_a_resumed_rank_draws_on_from_the_states_of_its_checkpoint(finished: Settings) -> None:
    assert finished.resume is not None
    parts = parts_of(finished)  # which seeds them
    torch.rand(7)
    resume(parts, restarted=False)
    assert generator_states() == (finished.resume / "generators-0.json").read_bytes()
