"""`deepspeed`: DeepSpeed's own launcher, on one node."""

from __future__ import annotations

from trainkit.frameworks.torchrun import END_OF_FLAGS
from trainkit.machine.versions import has
from trainkit.plan.context import Context
from trainkit.plan.interpreter import OWN_INTERPRETER, module
from trainkit.plan.model import Variable
from trainkit.plan.provenance import (
    AddedVariable,
    SourcedFile,
    SourcedVariable,
    Token,
    added_variable,
    token,
    variable,
)

OF_RANK = "the deepspeed launcher tells each rank its place"
ITS_OWN = "the deepspeed launcher sets it for every rank"


def argv(context: Context) -> tuple[Token, ...]:
    """The runner's words."""
    return (
        *module(context, "deepspeed.launcher.runner", keys=("launcher.kind",)),
        token(
            "--hostfile=/dev/null",
            rule="without it a file at /job/hostfile would turn this into a run on several nodes",
        ),
        _ranks(context),
        token("--master_port=", Variable.PORT, rule="a free port of this machine; the default is 29500"),
        token("--no_local_rank", rule="DeepSpeed would add --local_rank to the program's arguments"),
        token("--no_python", rule=OWN_INTERPRETER),
        # The runner eats the first, and hands the second on to the launcher that it starts, which has flags of its own.
        token("--", rule=END_OF_FLAGS),
        token("--", rule=END_OF_FLAGS),
    )


def files(context: Context) -> tuple[SourcedFile, ...]:
    """None."""
    return ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """What torchrun would set and DeepSpeed does not."""
    return (
        variable(
            "LOCAL_WORLD_SIZE",
            str(context.processes),
            keys=("nodes.processes_per_node",),
            rule="DeepSpeed's launcher does not set it; torchrun does",
        ),
    )


def added(context: Context) -> tuple[AddedVariable, ...]:
    """What the launcher on the node sets (deepspeed/launcher/launch.py)."""
    here = context.devices if context.topology.device == "cuda" else tuple(map(str, range(context.processes)))
    known: dict[str, tuple[str | Variable, ...]] = {
        "WORLD_SIZE": (str(context.processes),),
        "LOCAL_SIZE": (str(context.processes),),
        "CROSS_RANK": ("0",),
        "CROSS_SIZE": ("1",),
        "MASTER_ADDR": ("127.0.0.1",),
        "MASTER_PORT": (Variable.PORT,),
        "CUDA_VISIBLE_DEVICES": (",".join(here),),  # on a CPU too, where they are its slots
    }
    rank = tuple(added_variable(name, rule=OF_RANK) for name in ("RANK", "LOCAL_RANK"))
    return (*rank, *(added_variable(name, *value, rule=ITS_OWN) for name, value in known.items()), *by_import(context))


def by_import(context: Context) -> tuple[AddedVariable, ...]:
    """What any process has that imports DeepSpeed."""
    if not has(context.facts, "deepspeed sets PYTORCH_NVML_BASED_CUDA_CHECK"):
        return ()
    rule = "DeepSpeed sets it where it is imported"
    return (added_variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1", rule=rule, yields=True),)


def escape(word: str, context: Context) -> str:
    """Words reach the program as they are."""
    return word


def local_rank(context: Context) -> str:
    """None: the deepspeed launcher says it only to scripts that it starts through no wrapper."""
    return ""


def _ranks(context: Context) -> Token:
    keys = ("nodes.processes_per_node", "devices.select", "strategy.kind")
    if context.topology.device == "cuda":
        rule = "DeepSpeed ignores CUDA_VISIBLE_DEVICES beside a count and would start on card 0"
        return token(f"--include=localhost:{','.join(context.devices)}", keys=keys, rule=rule)
    return token(f"--num_accelerators={context.processes}", keys=keys, rule="DeepSpeed would count NUMA domains")
