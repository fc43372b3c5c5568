"""Checkpoints: a resumed run is bit-equal to an uninterrupted one, and no checkpoint is ever half there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from killed_runs import OPEN_END, every_line, lines_in, log_of, wait_for
from strategy_runs import CASES, finish, read_curve, write_corpus, write_settings

from tests.warm_ranks import run_case, start_ranks

# Dropout and loader processes on: what draws random numbers or reads ahead is what resuming gets wrong.
HARD: dict[str, dict[str, Any]] = {"model": {"dropout": 0.1}, "train": {"steps": 8}, "data": {"workers": 1}}
EVERY_4: dict[str, dict[str, Any]] = {"checkpoint": {"every_steps": 4, "keep": 0}}
KILLED_IN_A_WINDOW = Path(__file__).parent / "programs/killed_in_a_window.py"
LONG: dict[str, dict[str, Any]] = {"train": {"steps": 100_000}, "eval": {"every_steps": 0}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


def steps_logged(run_dir: Path) -> int:
    return lines_in(run_dir) - 1


# Six moments in all, over every strategy that differs in what it saves.
@pytest.mark.parametrize(("name", "moments"), [("single", 1), ("ddp", 2), ("fsdp", 1), ("zero2", 1), ("zero3", 1)])
def test_killed_in_an_accumulation_window_and_by_chance_a_run_goes_on_bit_equal_to_one_that_was_not(
    name: str, moments: int, corpus: Path, tmp_path: Path
) -> None:
    chance = random.Random(f"7 {name}")
    run_dir, ranks = tmp_path / "run", CASES[name].ranks
    case = CASES[name].changed(
        **{**HARD, **OPEN_END}, eval={"every_steps": 4}, checkpoint={"every_steps": 2, "keep": 2}
    )
    settings = write_settings(run_dir, case, corpus)
    codes = finish(start_ranks(settings, ranks, program=(str(KILLED_IN_A_WINDOW),)))
    assert codes == [-signal.SIGKILL] * ranks
    assert max(read_curve(run_dir).losses) == 5
    for attempt in range(moments):
        processes, seen = start_ranks(settings, ranks, TORCHELASTIC_RESTART_COUNT=str(attempt + 1)), lines_in(run_dir)
        wait_for(lambda seen=seen: lines_in(run_dir) > seen + 4, processes, 110.0)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.1))
        for process in processes:
            process.kill()
        assert finish(processes) == [-signal.SIGKILL] * ranks
        assert f"resumed from {run_dir}/checkpoints/step-" in log_of(run_dir)
        assert attempt or "step-00000004" in log_of(run_dir)  # the window that was lost is replayed
        assert all((path / "manifest.json").exists() for path in run_dir.glob("checkpoints/step-*"))
    processes, seen = start_ranks(settings, ranks, TORCHELASTIC_RESTART_COUNT="9"), lines_in(run_dir)
    wait_for(lambda: lines_in(run_dir) > seen + 4, processes, 110.0)
    processes[0].terminate()
    assert finish(processes) == [143] * ranks
    assert not list(run_dir.glob("checkpoints/.tmp-*"))
    assert len(list(run_dir.glob("checkpoints/step-*"))) == 2
    losses, norms = every_line(run_dir)
    last = max(losses)
    whole = run_case(tmp_path / "whole", case.changed(train={"steps": last}, checkpoint={}), corpus)
    assert losses == {step: {whole.losses[step]} for step in range(1, last + 1)}
    assert norms == {step: {whole.norms[step]} for step in range(1, last + 1)}
    evaluated = read_curve(run_dir).eval_losses
    assert evaluated == {step: whole.eval_losses[step] for step in range(4, max(evaluated) + 1, 4)}


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


def test_a_damaged_checkpoint_is_refused_in_one_line(corpus: Path, tmp_path: Path) -> None:
    alone = CASES["single"].changed(**HARD, **EVERY_4)
    run_case(tmp_path / "whole", alone, corpus)
    saved = tmp_path / "whole/checkpoints/step-00000004"
    file = next(saved.glob("state/*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert finish(start_ranks(write_settings(tmp_path / "damaged", alone, corpus), 1, resume=saved)) == [1]
    assert "is damaged: state/" in log_of(tmp_path / "damaged")


def test_the_bare_torchrun_command_runs_the_trainer(corpus: Path, tmp_path: Path) -> None:
    """With the same losses as ranks that were started by hand."""
    case = CASES["ddp"].changed(train={"steps": 3})
    by_hand = run_case(tmp_path / "hand", case, corpus)
    settings = write_settings(tmp_path / "torchrun", case, corpus)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--log-dir={tmp_path}",
        "--no-python",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, "-m", "trainkit.trainer", "--settings", str(settings)]
    subprocess.run([sys.executable, *command, *program], env=environment, check=True, timeout=120, capture_output=True)
    assert read_curve(tmp_path / "torchrun").losses == by_hand.losses
