"""Plans made by hand, in the form that the planner gives them, for tests that start real processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.launch_plan.model import (
    PLAN_VERSION,
    BatchArithmetic,
    Choice,
    Command,
    EnvironmentDiff,
    NodeGroup,
    Plan,
    PlannedFile,
    Preparation,
    Resume,
    Text,
    Topology,
    Variable,
    text,
)

# ruff: noqa: E501
REPOSITORY = Path(__file__).resolve().parents[2]
RUN_HANDMADE = Path(__file__).with_name("run_handmade.py")
ACCELERATE_YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: {ranks}
same_network: false
use_cpu: true
"""


def command(folder: Path, *program: str, **plan: Any) -> list[str]:
    """The command that runs a program by a plan made by hand, with its runs in a folder."""
    request = {"program": program, "output_root": str(folder / "runs"), **plan}
    return [sys.executable, str(RUN_HANDMADE), json.dumps(request)]


def environment(**extra: str) -> dict[str, str]:
    """The environment of that command."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **extra}


def python(code: str) -> tuple[str, ...]:
    """A program in Python."""
    return (sys.executable, "-u", "-c", code)


def words(*parts: str | Text) -> tuple[Text, ...]:
    """Plain words as the plan holds them."""
    return tuple(part if isinstance(part, Text) else text(part) for part in parts)


def launcher_words(kind: str, ranks: int, grace: float, max_restarts: int) -> tuple[Text, ...]:
    """The launcher's own part of the command."""
    shutdown = str(max(1, int(grace)))
    table: Mapping[str, tuple[Text, ...]] = {
        "python": (),
        "broken": words("sh", "-c", "echo no rendezvous today >&2; exit 9"),
        "torchrun": words(
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--nnodes=1",
            "--rdzv-backend=c10d", text("--rdzv-endpoint=127.0.0.1:", Variable.PORT), text("--rdzv-id=", Variable.RUN_ID),
            "--rdzv-conf=is_host=true", "--local-addr=127.0.0.1", f"--max-restarts={max_restarts}",
            f"--shutdown-timeout={shutdown}", text("--log-dir=", Variable.ATTEMPT_DIR, "/torchrun"), "--no-python", "--",
        ),
        "accelerate": words(
            sys.executable, "-m", "accelerate.commands.launch", text("--config_file=", Variable.RUN_DIR, "/accelerate.yaml"),
            "--multi_gpu", f"--num_processes={ranks}", "--num_machines=1", "--main_process_port=0", "--rdzv_backend=static",
            f"--max_restarts={max_restarts}", text("--log_dir=", Variable.ATTEMPT_DIR, "/torchrun"), "--no_python", "--",
        ),
        "deepspeed": words(
            sys.executable, "-m", "deepspeed.launcher.runner", f"--num_gpus={ranks}", "--master_addr=127.0.0.1",
            text("--master_port=", Variable.PORT), "--no_local_rank", "--no_python",
        ),
    }  # fmt: skip
    return table[kind]


def launcher_environment(kind: str, ranks: int, grace: float) -> dict[str, Text]:
    """The launcher's own part of the environment."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    table: Mapping[str, dict[str, Text]] = {
        "python": {**{name: text(value) for name, value in alone.items()}, "MASTER_PORT": text(Variable.PORT)},
        "broken": {},
        "torchrun": {},
        "accelerate": {
            "ACCELERATE_USE_CPU": text("true"),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": text(str(max(1, int(grace)))),
        },
        "deepspeed": {"DS_ACCELERATOR": text("cpu")},
    }
    return table[kind]


def of_nodes(plan: Plan, nodes: int, rendezvous: str) -> Plan:
    """The same plan on so many nodes of one rank each."""
    topology = Topology("cpu", (NodeGroup(nodes, 1, ("cpu",)),))
    return replace(plan, topology=topology, rendezvous=rendezvous)


def make_plan(
    program: Sequence[str | Text],
    output_root: str,
    *,
    launcher: str = "python",
    ranks: int = 1,
    grace: float = 3.0,
    max_restarts: int = 0,
    variables: Mapping[str, str] | None = None,
    unset: Sequence[str] = (),
    take: Sequence[str] = (),
    preparations: Sequence[Preparation] = (),
    files: Sequence[PlannedFile] = (),
    heartbeat: bool = False,
) -> Plan:
    """A plan on one node of CPU ranks."""
    told = ("--grace", str(grace), "--heartbeat", "yes" if heartbeat else "no", "--")
    own = ("-m", "trainkit.runner.rank", "--attempt", text(Variable.ATTEMPT_DIR), *told)
    argv = Command(launcher_words(launcher, ranks, grace, max_restarts), words(sys.executable, *own), words(*program))
    values = {"OMP_NUM_THREADS": text("1"), "PYTHONUNBUFFERED": text("1")}
    values |= launcher_environment(launcher, ranks, grace)
    values |= {name: text(value) for name, value in (variables or {}).items()}
    own_files = (
        [PlannedFile("accelerate.yaml", ACCELERATE_YAML.format(ranks=ranks))] if launcher == "accelerate" else []
    )
    return Plan(
        plan_version=PLAN_VERSION,
        name="handmade",
        recipe_digest="recipe",
        training_digest="training",
        strategy=Choice("single" if ranks == 1 else "ddp", "made by hand"),
        launcher=Choice(launcher, "made by hand"),
        program=Choice("torch", "made by hand"),
        device=Choice("cpu", "made by hand"),
        topology=Topology("cpu", (NodeGroup(1, ranks, ("cpu",) * ranks),)),
        batch=BatchArithmetic(ranks, 1, 1, ranks, 1),
        commands=(argv,),
        preparations=tuple(preparations),
        environment=EnvironmentDiff(tuple(sorted(values.items())), tuple(unset), tuple(take)),
        files=(*own_files, *files),
        resume=Resume(None, 0, "never"),
        output_root=output_root,
        max_restarts=max_restarts,
        grace_seconds=grace,
        notices=(),
    )
