"""Checkpoints: a resumed run is bit-equal to an uninterrupted one, and no checkpoint is ever half there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import CASES, finish, read_curve, run_case, start_ranks, write_corpus, write_settings

pytestmark = pytest.mark.e2e

# Dropout and loader processes on: what draws random numbers or reads ahead is what resuming gets wrong.
HARD: dict[str, dict[str, Any]] = {"model": {"dropout": 0.1}, "train": {"steps": 8}, "data": {"workers": 1}}
EVERY_4: dict[str, dict[str, Any]] = {"checkpoint": {"every_steps": 4, "keep": 0}}
LONG: dict[str, dict[str, Any]] = {"train": {"steps": 100_000}, "eval": {"every_steps": 0}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


def wait_for(condition: Callable[[], bool], processes: list[subprocess.Popen[str]], seconds: float = 60.0) -> None:
    """Poll; ends everything and fails when the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            for process in processes:
                process.kill()
                process.wait()
            pytest.fail("the run did not get there: " + " ".join(str(process.args) for process in processes))
        time.sleep(0.01)


def steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def log_of(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(run_dir.glob("rank-*.log")))


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_losses_after_resuming_are_bit_equal_to_those_of_an_uninterrupted_run(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    case = CASES[name].changed(**HARD, **EVERY_4)
    whole = run_case(tmp_path / "whole", case, corpus)
    resumed = run_case(tmp_path / "resumed", case, corpus, resume=tmp_path / "whole/checkpoints/step-00000004")
    assert sorted(resumed.losses) == [5, 6, 7, 8]
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert resumed.norms == {step: norm for step, norm in whole.norms.items() if step > 4}


@pytest.mark.parametrize(
    ("name", "sent"), [("single", signal.SIGTERM), ("ddp", signal.SIGTERM), ("ddp", signal.SIGINT)]
)
def test_a_run_that_is_told_to_stop_saves_at_a_step_that_all_ranks_agree_on(
    name: str, sent: signal.Signals, corpus: Path, tmp_path: Path
) -> None:
    case = CASES[name].changed(**LONG, checkpoint={"every_steps": 1_000_000})
    processes = start_ranks(write_settings(tmp_path / "run", case, corpus), case.ranks)
    wait_for(lambda: steps_logged(tmp_path / "run") >= 3, processes)
    processes[-1].send_signal(sent)  # one rank alone: the others learn of it
    assert finish(processes) == [128 + sent] * case.ranks
    outcome = json.loads((tmp_path / "run/result.json").read_text())
    assert outcome["stopped_by"] == sent.name
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{outcome['steps']:08}"]


def test_an_interrupted_run_goes_on_bit_equal_from_where_it_stopped(corpus: Path, tmp_path: Path) -> None:
    case = CASES["ddp"].changed(train={"steps": 300}, eval={"every_steps": 0}, checkpoint={"every_steps": 1000})
    whole = run_case(tmp_path / "whole", case, corpus)
    processes = start_ranks(write_settings(tmp_path / "stopped", case, corpus), case.ranks)
    wait_for(lambda: steps_logged(tmp_path / "stopped") >= 3, processes)
    for process in processes:
        process.terminate()
    assert finish(processes) == [143, 143]
    first = read_curve(tmp_path / "stopped").losses
    (saved,) = (tmp_path / "stopped/checkpoints").iterdir()
    second = run_case(tmp_path / "resumed", case, corpus, resume=saved).losses
    assert len(first) < 300
    assert {**first, **second} == whole.losses
    assert not first.keys() & second.keys()


def test_usr1_saves_at_the_next_step_and_the_run_goes_on(corpus: Path, tmp_path: Path) -> None:
    processes = start_ranks(write_settings(tmp_path / "run", CASES["ddp"].changed(**LONG), corpus), 2)
    run_dir = tmp_path / "run"
    wait_for(lambda: steps_logged(run_dir) >= 3, processes)
    processes[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: bool(list(run_dir.glob("checkpoints/step-*"))), processes)
    saved_after = steps_logged(run_dir)
    wait_for(lambda: steps_logged(run_dir) > saved_after + 2, processes)
    processes[1].terminate()
    assert finish(processes) == [143, 143]
    assert len(list(run_dir.glob("checkpoints/step-*"))) == 1  # checkpoint.every_steps is 0: stopping saves nothing


def test_a_restarted_run_goes_on_from_its_own_newest_checkpoint(corpus: Path, tmp_path: Path) -> None:
    case = CASES["ddp"].changed(**LONG, checkpoint={"every_steps": 2, "keep": 0})
    settings, run_dir = write_settings(tmp_path / "run", case, corpus), tmp_path / "run"
    processes = start_ranks(settings, 2)
    wait_for((run_dir / "checkpoints/step-00000004").exists, processes)
    for process in processes:
        process.kill()
    finish(processes)
    newest = max(path.name for path in run_dir.glob("checkpoints/step-*"))
    before = steps_logged(run_dir)
    processes = start_ranks(settings, 2, TORCHELASTIC_RESTART_COUNT="1")
    wait_for(lambda: steps_logged(run_dir) > before + 2, processes)
    processes[0].terminate()
    assert finish(processes) == [143, 143]
    assert f"resumed from {run_dir}/checkpoints/{newest}" in log_of(run_dir)


def test_killed_at_any_moment_the_newest_complete_checkpoint_can_be_used(corpus: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    case = CASES["ddp"].changed(**LONG, checkpoint={"every_steps": 1, "keep": 2})
    run_dir = tmp_path / "run"
    settings = write_settings(run_dir, case, corpus)
    processes = start_ranks(settings, 2)
    for attempt in range(4):
        seen = steps_logged(run_dir)
        wait_for(lambda seen=seen: steps_logged(run_dir) > seen + 3, processes)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.1))
        for process in processes:
            process.kill()
        finish(processes)
        assert all((path / "manifest.json").exists() for path in run_dir.glob("checkpoints/step-*"))
        processes = start_ranks(settings, 2, TORCHELASTIC_RESTART_COUNT=str(attempt + 1))
    seen = steps_logged(run_dir)
    wait_for(lambda: steps_logged(run_dir) > seen + 3, processes)
    processes[0].terminate()
    assert finish(processes) == [143, 143]
    assert "resumed from" in log_of(run_dir)
    assert not list(run_dir.glob("checkpoints/.tmp-*"))
    assert len(list(run_dir.glob("checkpoints/step-*"))) == 2


def test_a_damaged_checkpoint_is_refused_in_one_line(corpus: Path, tmp_path: Path) -> None:
    alone = CASES["single"].changed(**HARD, **EVERY_4)
    run_case(tmp_path / "whole", alone, corpus)
    saved = tmp_path / "whole/checkpoints/step-00000004"
    file = next(saved.glob("state/*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert finish(start_ranks(write_settings(tmp_path / "damaged", alone, corpus, resume=saved), 1)) == [1]
    assert "is damaged: state/" in log_of(tmp_path / "damaged")


def test_the_bare_torchrun_command_runs_the_trainer(corpus: Path, tmp_path: Path) -> None:
    """With the same losses as ranks that were started by hand."""
    case = CASES["ddp"].changed(train={"steps": 3})
    by_hand = run_case(tmp_path / "hand", case, corpus)
    settings = write_settings(tmp_path / "torchrun", case, corpus)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, "-m", "trainkit.train", "--settings", str(settings)]
    subprocess.run([sys.executable, *command, *program], env=environment, check=True, timeout=120, capture_output=True)
    assert read_curve(tmp_path / "torchrun").losses == by_hand.losses
