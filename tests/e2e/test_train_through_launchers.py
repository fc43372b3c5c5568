"""The built-in trainer through `trainkit run`: bit-equal under every launcher, and resumed as if never interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unused_port import unused_port

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
RECIPE = """\
version: 1
devices: {type: cpu}
model: {layers: 2, heads: 2, hidden_size: 32}
data: {path: corpus.txt, sequence_length: 32, cache: cache}
batch: {global: 16, accumulation: 2}
optimizer: {lr: 1.0e-2}
schedule: {warmup_steps: 4}
train: {steps: 20, max_grad_norm: 0.5}
logging: {every_steps: 1}
"""
LAUNCHERS = {
    "single": ("python", "torchrun", "accelerate", "deepspeed"),
    "ddp": ("torchrun", "accelerate", "deepspeed"),
    "zero3": ("torchrun", "accelerate", "deepspeed"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a recipe and a corpus that can be learned."""
    lines = (f"line {n}: the {'quick' if n % 3 else 'slow'} fox jumps {n % 7} times\n" for n in range(2000))
    (tmp_path / "corpus.txt").write_text("".join(lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def losses(run_dir: Path) -> dict[int, float]:
    """The training loss of each logged step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def only_run(folder: Path, name: str) -> Path:
    """The one run directory of a name."""
    (run_dir,) = (folder / "runs" / name).iterdir()
    return run_dir


@pytest.mark.parametrize("strategy", LAUNCHERS)
def test_losses_are_bit_equal_under_every_launcher(trainkit: Trainkit, folder: Path, strategy: str) -> None:
    curves = {}
    for launcher in LAUNCHERS[strategy]:
        words = [f"name={launcher}", f"launcher.kind={launcher}", "--with", f"strategy/{strategy}"]
        done = trainkit("run", "recipe.yaml", *words, timeout=200)
        assert done.returncode == 0, done.stderr
        curves[launcher] = losses(only_run(folder, launcher))
    first = curves[LAUNCHERS[strategy][0]]
    assert len(first) == 20
    assert first[20] < first[1]
    for launcher, curve in curves.items():
        assert curve == first, launcher


@pytest.mark.parametrize(
    "strategy", ["single", "ddp", pytest.param("fsdp", marks=pytest.mark.needs("torch>=2.7")), "zero2"]
)
def test_an_interrupted_run_is_resumed_as_if_it_had_never_stopped(
    trainkit: Trainkit, clean_environment: dict[str, str], folder: Path, strategy: str
) -> None:
    words = ["run", "recipe.yaml", "--with", f"strategy/{strategy}", "--max_steps", "120", "--save_steps", "1000"]
    done = trainkit(*words, "name=whole", timeout=200)
    assert done.returncode == 0, done.stderr
    whole = losses(only_run(folder, "whole"))

    code, interrupted, said = interrupt_after(20, [*words, "name=cut"], folder, clean_environment)
    assert code == 128 + signal.SIGINT
    assert "the run was ended: trainkit received SIGINT" in said
    assert "--resume_from_checkpoint true" in said
    before = losses(interrupted)
    (checkpoint,) = (interrupted / "checkpoints").iterdir()
    step = json.loads((checkpoint / "manifest.json").read_text())["step"]
    assert 20 <= step < 120

    planned = trainkit("plan", *words[1:], "name=cut", "--resume_from_checkpoint", "true", "--json")
    assert json.loads(planned.stdout)["resume"]["path"] == str(checkpoint)
    done = trainkit(*words, "name=cut", "--resume_from_checkpoint", "true", timeout=200)
    assert done.returncode == 0, done.stderr
    (resumed,) = (path for path in (folder / "runs" / "cut").iterdir() if path != interrupted)
    after = losses(resumed)
    assert min(after) == step + 1
    assert {**before, **after} == whole


def interrupt_after(steps: int, words: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, Path, str]:
    """Start a run, press Ctrl-C once it has logged so many steps; exit code, run directory and what was said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainkit", *words],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            found = list((folder / "runs" / "cut").glob("*/metrics.jsonl"))
            if found and len(found[0].read_bytes().splitlines()) > steps:
                os.kill(process.pid, signal.SIGINT)
                break
            time.sleep(0.01)
        _, stderr = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert found, stderr.decode()
    return process.returncode, found[0].parent, stderr.decode()


def test_two_nodes_run_one_plan_and_meet(trainkit: Trainkit, clean_environment: dict[str, str], folder: Path) -> None:
    port = unused_port()
    words = ["run", "recipe.yaml", "name=two", "--with", "strategy/ddp", "nodes.count=2", "nodes.processes_per_node=1"]
    words += [f"nodes.rendezvous=127.0.0.1:{port}"]
    alone = trainkit(*words, timeout=60)
    assert alone.returncode == 4
    assert "--node-rank" in alone.stderr

    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainkit", *words, f"--node-rank={rank}"],
            cwd=folder,
            env=clean_environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        errors = [node.communicate(timeout=120)[1].decode() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], errors
    one_node = trainkit(
        "run", "recipe.yaml", "--with", "strategy/ddp", "name=one", "env.OMP_NUM_THREADS=2", timeout=200
    )
    assert one_node.returncode == 0, one_node.stderr
    together = losses(only_run(folder, "two"))  # one run directory
    assert together == pytest.approx(losses(only_run(folder, "one")), rel=1e-5)


def test_a_script_chooses_its_checkpoint_each_time_that_it_runs(
    trainkit: Trainkit, clean_environment: dict[str, str], folder: Path
) -> None:
    words = ("train.steps=4", "checkpoint.every_steps=2", "checkpoint.resume=auto", "nodes.processes_per_node=1")
    (folder / "again.sh").write_text(trainkit("plan", "recipe.yaml", "name=again", *words, "--shell").stdout)

    def run(**environ: str) -> subprocess.CompletedProcess[str]:
        environment = {**clean_environment, **environ}
        argv = ["sh", "again.sh"]
        return subprocess.run(
            argv, env=environment, cwd=folder, check=False, capture_output=True, text=True, timeout=200
        )

    first = run(RUN_ID="first")
    assert (first.returncode, "resumes: nothing" in first.stderr) == (0, True), first.stderr
    second = run(RUN_ID="second")
    assert "runs/again/first/checkpoints/step-00000004 after step 4" in second.stdout
    afresh = run(RUN_ID="third", RESUME="")
    assert (afresh.returncode, "resumed from" in afresh.stdout) == (0, False)
