"""One small recipe under every strategy: settings, ranks and the comparison of losses, for `parity` and the tests."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import BatchArithmetic, NodeGroup, Resume, Topology
from trainkit.machine.facts import Facts
from trainkit.recipe.grid import grid_sizes
from trainkit.recipe.resolved import Attachment, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds
from trainkit.tools.deepspeed.config import deepspeed_config

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("def", "return", "self", "import", "class", "for", "in", "range", "x", "y", "(", ")", ":", "\n    ")
GLOBAL_BATCH, MICRO = 16, 2

RECIPE: dict[str, Any] = {
    "model": {"layers": 2, "heads": 2, "hidden_size": 32},
    "data": {"sequence_length": 32, "include": "*.txt"},
    "train": {"steps": 20, "max_grad_norm": 0.5},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "eval": {"every_steps": 10, "batches": 5},
    "logging": {"every_steps": 1},
    "checkpoint": {"at_end": False},
}


@dataclass(frozen=True)
class Case:
    """A strategy on a number of ranks, with changes to the recipe by section."""

    strategy: Mapping[str, Any]
    ranks: int = 2
    changes: Mapping[str, Mapping[str, Any]] | None = None

    def changed(self, **sections: Mapping[str, Any]) -> Case:
        """The same case with further changes."""
        return replace(self, changes={**(self.changes or {}), **sections})


CASES: Mapping[str, Case] = {
    "single": Case({"kind": "single"}, ranks=1),
    "ddp": Case({"kind": "ddp"}),
    "fsdp": Case({"kind": "fsdp"}),
    "zero1": Case({"kind": "zero1"}),
    "zero2": Case({"kind": "zero2"}),
    "zero3": Case({"kind": "zero3"}),
    "zero3 + offload": Case({"kind": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}),
}


@dataclass(frozen=True)
class Curve:
    """What one run measured, by step."""

    losses: Mapping[int, float]
    norms: Mapping[int, float]
    eval_losses: Mapping[int, float]


def write_corpus(folder: Path) -> None:
    """Many short files of very different lengths, so that ranks predict different numbers of tokens."""
    folder.mkdir(parents=True)
    chance = random.Random(0)
    for number in range(600):
        words = (chance.choice(WORDS) for _ in range(chance.randint(1, 40)))
        (folder / f"{number:04}.txt").write_text(" ".join(words))


def write_settings(
    run_dir: Path, case: Case, corpus: Path, global_batch: int = GLOBAL_BATCH, micro: int = MICRO
) -> Path:
    """The run directory's trainer.json, and deepspeed.json where the strategy wants it, as a plan would write them."""
    return write_planned(run_dir, decided(case, corpus, global_batch, micro))


def write_planned(run_dir: Path, context: Context) -> Path:
    """The same of a plan."""
    run_dir.mkdir(parents=True)
    recipe, batch = context.recipe, context.batch
    zero = recipe.strategy.kind.startswith("zero")
    settings = {
        "recipe": recipe.model_dump(mode="json", by_alias=True),
        "batch": {name: getattr(batch, name) for name in ("global_", "micro", "accumulation", "ranks", "eval_micro")},
        "device": "cpu",
        "dtype": context.dtype,
        "training_digest": "parity",
        "deepspeed": "deepspeed.json" if zero else None,
    }
    if zero:
        content, _ = deepspeed_config(context, "builtin")
        (run_dir / "deepspeed.json").write_text(json.dumps(content))
    path = run_dir / "trainer.json"
    path.write_text(json.dumps(settings))
    return path


def decided(case: Case, corpus: Path, global_batch: int = GLOBAL_BATCH, micro: int = MICRO) -> Context:
    """As much of a plan's decisions as the trainer's and DeepSpeed's files follow from."""
    sections = {**RECIPE, "strategy": dict(case.strategy)}
    for name, changes in (case.changes or {}).items():
        sections[name] = dict(changes) if "kind" in changes else {**sections.get(name, {}), **changes}
    if "kind" not in sections["data"]:
        sections["data"] = {"path": str(corpus), "cache": str(corpus.parent / "cache"), **sections["data"]}
    elif sections["data"]["kind"] == "dataset":
        sections["data"] = {"cache": str(corpus.parent / "cache"), **sections["data"]}
    recipe = Recipe.model_validate(with_kinds(sections))
    ranks = case.ranks // grid_sizes(recipe).alike  # with samples of their own
    batch = BatchArithmetic(global_batch, micro, global_batch // micro // ranks, ranks, eval_micro=4)
    base = _without_persistence(recipe)
    resolved = Resolved(recipe, {}, {}, {} if base is None else {"strategy.config": base})
    facts = Facts(sys.platform, "", "", "", sys.executable, case.ranks, 0)
    topology = Topology("cpu", (NodeGroup(1, case.ranks, ("cpu",) * case.ranks),))
    dtype = "fp32" if recipe.precision.dtype == "auto" else recipe.precision.dtype
    return Context(resolved, facts, topology, "torchrun", (), batch, dtype, "parity", Resume(None, 0, ""))


def _without_persistence(recipe: Recipe) -> Attachment | None:
    """Small parameters would stay whole on every rank, and in a small model that is all of them: partition them too."""
    if recipe.strategy.kind != "zero3":
        return None
    return Attachment("", {"zero_optimization": {"stage3_param_persistence_threshold": 0}}, {})


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank, on a CPU with one thread each."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


class Rank(Protocol):
    """A process of a run: as much of `subprocess.Popen` as is needed here."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


# Starts a rank: its command line but for the interpreter, its environment, and the file of its output.
Start = Callable[[Sequence[str], Mapping[str, str], Path], Rank]


def start_process(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Rank:
    """A rank as a process of its own."""
    with log.open("w") as output:
        return subprocess.Popen([sys.executable, *command], env=environ, stdout=output, stderr=subprocess.STDOUT)


def start_ranks(
    settings: Path,
    ranks: int,
    *,
    resume: Path | None = None,
    program: Sequence[str] = ("-m", "trainkit.trainer"),
    start: Start = start_process,
    **extra: str,
) -> list[Rank]:
    """Start the ranks of a run; the output of each goes to `rank-N.log` beside the settings.

    resume: the checkpoint that they go on from.
    """
    port = free_port()
    command = (*program, "--settings", str(settings), *((f"--resume={resume}",) if resume else ()))
    return [
        start(command, {**rank_environment(rank, ranks, port), **extra}, settings.parent / f"rank-{rank}.log")
        for rank in range(ranks)
    ]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(ranks: Sequence[Rank], timeout: float = 120.0) -> list[int]:
    """Exit codes of all ranks. Once one fails the others are ended, as a launcher would; none outlives the timeout."""
    deadline = time.monotonic() + timeout
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + 5.0)  # the others may be about to end by themselves
        time.sleep(0.01)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    return [rank.wait() for rank in ranks]


def run_case(
    run_dir: Path,
    case: Case,
    corpus: Path,
    *,
    resume: Path | None = None,
    program: Sequence[str] = ("-m", "trainkit.trainer"),
    start: Start = start_process,
) -> Curve:
    """Run one case to its end. RuntimeError with the logs if a rank fails."""
    settings = write_settings(run_dir, case, corpus)
    codes = finish(start_ranks(settings, case.ranks, resume=resume, program=program, start=start))
    if any(codes):
        logs = "\n".join(path.read_text() for path in sorted(run_dir.glob("rank-*.log")))
        raise RuntimeError(f"exit codes {codes}\n{logs}")
    return read_curve(run_dir)


def read_curve(run_dir: Path) -> Curve:
    """The curves that a run has written so far."""
    losses, norms, eval_losses = {}, {}, {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "eval_loss" in record:
            eval_losses[record["step"]] = record["eval_loss"]
        elif "loss" in record:
            losses[record["step"]], norms[record["step"]] = record["loss"], record["grad_norm"]
    return Curve(losses, norms, eval_losses)


def largest_difference(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Largest relative difference over the steps of both; ValueError if they are not the same steps."""
    if first.keys() != second.keys() or not first:
        raise ValueError(f"steps {sorted(first)} against {sorted(second)}")
    return max(abs(first[step] - second[step]) / abs(first[step]) for step in first)
