"""A run whose ranks do something else than the plan says fails, and says what they do."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).resolve().parent / "programs"


def launch(
    trainkit: Any, folder: Path, script: str, strategy: str, *words: str, restarts: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Run a script that trainkit tells nothing; the process and its summary."""
    done = trainkit(
        "run",
        "program.kind=torch",
        f"program.script={PROGRAMS / script}",
        "program.verify=true",
        f"output.root={folder / 'runs'}",
        f"launcher.max_restarts={restarts}",
        *(f"--with={preset}" for preset in (f"strategy/{strategy}", "devices/cpu")),
        "--",
        *words,
        timeout=240,
    )
    (summary,) = (folder / "runs").glob("*/*/summary.json")
    return done, json.loads(summary.read_text())


@pytest.mark.parametrize(("strategy", "wrapping"), [("ddp", "ddp"), ("fsdp", "fsdp2")])
def test_ranks_that_do_what_was_planned_run_to_their_end(
    trainkit: Any, tmp_path: Path, strategy: str, wrapping: str
) -> None:
    done, summary = launch(trainkit, tmp_path, "wrapped_as.py", strategy, wrapping)

    assert done.returncode == 0, done.stderr
    assert "took its steps" in done.stdout
    assert f"as planned, seen in 2 ranks: {strategy}, cpu" in done.stderr
    assert [summary["in_force"][rank]["strategy"] for rank in ("0", "1")] == [strategy, strategy]


@pytest.mark.parametrize(
    ("strategy", "wrapping", "says"),
    [
        ("ddp", "nothing", "no wrapper synchronises this rank's model"),  # as accelerate does with FSDP on CPU
        ("ddp", "uneven", "rank 1 does not run what was planned"),  # while rank 0 waits for it in a collective
        ("fsdp", "ddp", "strategy fsdp was planned, and ddp is in force"),  # as Trainer does on CPU
        ("ddp", "fsdp1", "strategy ddp was planned, and fsdp is in force"),
    ],
)
def test_ranks_that_do_something_else_end_the_run(
    trainkit: Any, tmp_path: Path, strategy: str, wrapping: str, says: str
) -> None:
    done, summary = launch(trainkit, tmp_path, "wrapped_as.py", strategy, wrapping)

    assert done.returncode == 1
    assert "took its steps" not in done.stdout
    assert "does not run what was planned" in done.stderr
    assert says in done.stderr
    assert summary["failure"] == "plan"


def test_a_launcher_that_may_restart_ranks_does_not_run_again_what_is_not_as_planned(
    trainkit: Any, tmp_path: Path
) -> None:
    done, summary = launch(trainkit, tmp_path, "wrapped_as.py", "ddp", "nothing", restarts=3)

    assert (done.returncode, summary["failure"]) == (1, "plan")
    (logs,) = tmp_path.glob("runs/*/*/attempts/1/logs")
    said = "".join(log.read_text() for log in logs.glob("rank-*.err"))
    assert 1 <= said.count("what runs is not what was planned") <= 2  # once on each rank, or before the other's end


def test_the_silent_fall_back_of_trainer_from_fsdp_to_ddp_is_caught(trainkit: Any, tmp_path: Path) -> None:
    words = ("--fsdp", "full_shard", "--use_cpu", "--output_dir", str(tmp_path / "out"), "--max_steps", "2")
    done, summary = launch(trainkit, tmp_path, "hf_classification.py", "fsdp", *words)

    assert done.returncode == 1
    assert "strategy fsdp was planned, and ddp is in force" in done.stderr
    assert summary["failure"] == "plan"


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 2", "accelerate launch --cpu --num_processes 2"])
def test_a_plain_script_gets_the_same_warning_under_every_launcher(
    launcher: str, trainkit: Any, tmp_path: Path
) -> None:
    words = [*shlex.split(launcher), str(PROGRAMS / "plain_loop.py")]
    done = trainkit("run", "devices.type=cpu", f"output.root={tmp_path / 'runs'}", *words, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "there is no process group" in done.stderr


def test_one_process_where_several_were_planned_is_caught(trainkit: Any, tmp_path: Path) -> None:
    alone = tmp_path / "alone.sh"  # as accelerate launch --cpu --num_processes 2 starts its one process
    ranks = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    program = shlex.join([sys.executable, str(PROGRAMS / "accelerate_loop.py")])
    alone.write_text(f"#!/bin/sh\nunset {ranks}\nACCELERATE_USE_CPU=true exec {program}\n")
    alone.chmod(0o755)
    done, summary = launch(trainkit, tmp_path, str(alone), "ddp")

    assert done.returncode == 1
    assert "world size 2 was planned, and it is 1" in done.stderr
    assert summary["failure"] == "plan"


def test_what_the_script_s_own_word_makes_of_a_strategy_is_named_as_the_cause(trainkit: Any, tmp_path: Path) -> None:
    script = str(PROGRAMS / "accelerate_loop.py")
    done = trainkit(
        "run", "--with=strategy/zero2", "--with=devices/cpu", script, "--backend", "gloo", "--cpu", timeout=240
    )
    assert done.returncode == 1
    assert done.stderr.count("strategy zero2 was planned, and ddp is in force") == 1
    assert "most likely: Accelerator(cpu=True) by --cpu disables DeepSpeed and FSDP" in done.stderr
