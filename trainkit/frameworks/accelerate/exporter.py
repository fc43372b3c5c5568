"""`accelerate`: the config file for `accelerate launch --config_file`, with DeepSpeed's file beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from trainkit.frameworks.accelerate import deepspeed, launcher
from trainkit.frameworks.torch_xla import on_xla
from trainkit.machine.selection import ORDER
from trainkit.plan.context import Context
from trainkit.planner.rules.compatibility import Combination, refusals

CHIPS = (
    "On a TPU accelerate launch imports the script and calls its main() once for each chip, "
    "whatever num_processes it is told."
)
_SECTION = "deepspeed_config:\n"
_ALL_CARDS = "gpu_ids: all\n"


def unfit(context: Context) -> str:
    """Why there is no such file."""
    if context.recipe.efficiency.compile.enabled and context.zero:
        return "DeepSpeed and accelerate do not compile together"
    topology = context.topology
    if on_xla(context):
        return ""  # accelerate runs this in a way of its own, which the file names
    asked = Combination(
        strategy=context.recipe.strategy.kind,
        launcher="accelerate",
        program="accelerate",
        device=topology.device,
        ranks="one" if topology.world_size == 1 else "several",
        nodes="one" if topology.nodes == 1 else "several",
        dtype=context.dtype,
    )
    return next((refusal.reason for refusal in refusals(asked)), "")


def files(context: Context, folder: str) -> dict[str, str]:
    """The files as for a script on Accelerator(), whatever the program of the recipe is."""
    recipe = context.recipe
    program = recipe.program.model_copy(update={"kind": "accelerate"})
    asked = replace(context.resolved, recipe=recipe.model_copy(update={"program": program}))
    there = replace(context, resolved=asked, launcher="accelerate")
    (config,) = launcher.files(there)
    content = config.content
    if isinstance(recipe.devices.select, list):
        content = content.replace(_ALL_CARDS, f"gpu_ids: '{','.join(map(str, recipe.devices.select))}'\n")
    if context.topology.nodes > 1 and recipe.nodes.rendezvous != "auto":
        host, _, port = recipe.nodes.rendezvous.rpartition(":")
        content = content.replace("main_training_function", f"main_process_ip: '{host}'\nmain_process_port: {port}\n"
                                                            "main_training_function")  # fmt: skip
    head = "".join(f"# {line}\n" for line in _head(context, f"{folder}/{config.path}"))
    if not context.zero:
        return {config.path: head + content}
    path = f"{folder}/{deepspeed.CONFIG}".replace("'", "''")
    named = content.replace(_SECTION, f"{_SECTION}  deepspeed_config_file: '{path}'\n")
    return {config.path: head + named, deepspeed.CONFIG: deepspeed.file(there).content}


def notes(context: Context) -> tuple[str, ...]:
    """What no config file can tell accelerate launch."""
    if untold(context):
        return ("accelerate launch starts several processes on a CPU only with ACCELERATE_USE_CPU=true before it",)
    return ()


def _head(context: Context, path: str) -> Iterator[str]:
    """How the launcher is called, with what no config file can tell it."""
    if on_xla(context):
        yield CHIPS
    named = f"--config_file {shlex.quote(path)}"
    words = " ".join((*_variables(context), "accelerate launch", *_flags(context), named))
    yield f"{context.recipe.name}, for: {words} SCRIPT WORDS..."
    if untold(context):
        yield "Several processes are told of the CPU by ACCELERATE_USE_CPU alone; use_cpu does not reach them."


def untold(context: Context) -> bool:
    """Whether the ranks learn of the CPU from a variable only: there the file alone starts something else."""
    return context.topology.device == "cpu" and not context.zero and context.topology.world_size > 1


def _variables(context: Context) -> Iterator[str]:
    devices = context.recipe.devices
    if untold(context):
        yield "ACCELERATE_USE_CPU=true"
    if context.topology.device == "cpu" and context.zero:
        yield "DS_ACCELERATOR=cpu"
    if isinstance(devices.select, list) and any(isinstance(each, int) for each in devices.select):
        yield f"CUDA_DEVICE_ORDER={ORDER[devices.order][0]}"


def _flags(context: Context) -> Iterator[str]:
    """What accelerate takes from flags only, and what differs on each machine."""
    if context.recipe.launcher.max_restarts:
        yield f"--max_restarts {context.recipe.launcher.max_restarts}"
    if context.topology.nodes == 1 and context.topology.world_size > 1:
        yield "--main_process_port 0"
    elif context.topology.nodes > 1:
        yield "--machine_rank RANK"
        if context.recipe.nodes.rendezvous == "auto":
            yield "--main_process_ip HOST --main_process_port PORT"
