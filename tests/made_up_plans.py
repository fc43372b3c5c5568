"""What tests build plans from: layers of a recipe, and machines that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unused_port import unused_port
from trainkit.errors import Origin
from trainkit.launch_plan.model import Plan, Text, Variable, bind_words
from trainkit.machine.facts import Facts, Gpu
from trainkit.recipe.resolved import Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds
from trainkit.runner.binding import child_environment

PACKAGES = {"torch": "2.13.0", "numpy": "2.4.0", "safetensors": "0.8.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"}
GIGABYTE = 1024**3
# A card's name -> its compute capability; others have that of a V100.
CAPABILITIES = {
    "Tesla K80": (3, 7),
    "Tesla P100": (6, 0),
    "NVIDIA GeForce GTX 1660": (7, 5),
    "Tesla T4": (7, 5),
    "NVIDIA A100": (8, 0),
    "NVIDIA H100": (9, 0),
    "NVIDIA GeForce RTX 5090": (12, 0),
}


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return merged


def _resolve(*layers: Mapping[str, Any]) -> Resolved:
    """Layers, weakest first; layer i is file ``layer<i>.yaml``, and each of its keys stands on a line of its own."""
    tree: dict[str, Any] = {}
    history: dict[str, tuple[Entry, ...]] = {}
    for strength, layer in enumerate(layers):
        name = f"layer{strength}.yaml"
        tree = _merge(tree, layer)
        for line, (key, value) in enumerate(_leaves(layer), start=1):
            entry = Entry(value, Origin(f"file {name}", strength, name, line, 3))
            history[key] = (*history.get(key, ()), entry)
    return Resolved(Recipe.model_validate(with_kinds(tree)), tree, history)


@pytest.fixture
def layered() -> Callable[..., Resolved]:
    """Resolve recipes from mappings, weakest layer first."""
    return _resolve


def _gpus(count: int, *names: str) -> tuple[Gpu, ...]:
    kinds = names or ("NVIDIA A100",)
    return tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index:x}{index:07x}-1111-2222-3333-444444444444",
            name=kinds[index % len(kinds)],
            memory_total=(80 if "A100" in kinds[index % len(kinds)] else 16) * GIGABYTE,
            memory_free=(80 if "A100" in kinds[index % len(kinds)] else 16) * GIGABYTE,
            compute_capability=CAPABILITIES.get(kinds[index % len(kinds)], (7, 0)),
        )
        for index in range(count)
    )


@pytest.fixture
def machine() -> Callable[..., Facts]:
    """A machine that does not exist: `machine(8)` has eight cards, `machine(2, cores=4, visible="1")` …"""

    def build(gpus: int = 0, *names: str, cores: int = 16, executable: str = "/opt/python", **more: Any) -> Facts:
        return Facts(
            platform="linux",
            machine="x86_64",
            hostname="somewhere",
            python="3.11.7",
            executable=executable,
            cpu_cores=cores,
            memory_total=64 * GIGABYTE,
            gpus=_gpus(gpus, *names),
            packages=more.pop("packages", PACKAGES),
            visible_devices=more.pop("visible", None),
            **more,
        )

    return build


@pytest.fixture
def here(machine: Callable[..., Facts]) -> Facts:
    """This interpreter on a machine of two cores and no card, so that real launchers can be started from the plan."""
    return machine(0, cores=2, executable=sys.executable)


Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_bare(tmp_path: Path) -> Runner:
    """Execute a plan's bare command as it stands: files written, variables filled in, environment applied."""

    def run(
        plan: Plan, environ: Mapping[str, str], node_rank: int = 0, port: int = 0
    ) -> subprocess.CompletedProcess[str]:
        run_dir = tmp_path / f"run-{node_rank}"
        (run_dir / "attempts" / "1").mkdir(parents=True, exist_ok=True)
        values = {
            Variable.RUN_ID: "test-run",
            Variable.RUN_DIR: str(run_dir),
            Variable.RESUME: plan.resume.path or "",
            Variable.ATTEMPT_DIR: str(run_dir / "attempts" / "1"),
            Variable.PORT: str(port or unused_port()),
            Variable.NODE_RANK: str(node_rank),
            Variable.MASTER_ADDR: "127.0.0.1",
            Variable.LOCAL_ADDR: "127.0.0.1",
            Variable.IS_HOST: "true" if node_rank == 0 else "false",
        }
        for file in plan.files:
            (run_dir / file.path).write_text(file.content)
        child = child_environment(plan.environment, values, {**os.environ, **environ})
        argv = bind_words(plan.commands[0].bare, values)
        return subprocess.run(argv, env=child, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)

    return run


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on just now."""
    return unused_port()


@pytest.fixture
def spelled() -> Callable[[tuple[Text, ...]], list[str]]:
    """Words of a plan as strings, with `<variable>` for what is known at run time only."""
    return lambda words: [str(word) for word in words]
