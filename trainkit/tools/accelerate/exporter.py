"""`accelerate`: the config file for `accelerate launch --config_file`, with DeepSpeed's file beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from trainkit.launch_plan.context import Context, bare_context
from trainkit.launch_plan.provenance import Source
from trainkit.machine.selection import ORDER
from trainkit.tools.accelerate import launcher
from trainkit.tools.accelerate.launcher import CONFIG
from trainkit.tools.deepspeed.config import config_file
from trainkit.tools.deepspeed.fields import FILE as DEEPSPEED
from trainkit.tools.torch_xla import on_xla

CHIPS = (
    "On a TPU accelerate launch imports the script and calls its main() once for each chip, whatever num_processes is."
)


def unfit(context: Context) -> str:
    if context.recipe.program.kind == "deepspeed":
        return "accelerate's file speaks to Accelerator(), and a script on DeepSpeed's engine reads a file of its own"
    compiled = context.recipe.efficiency.compile.enabled and context.zero
    return "DeepSpeed and accelerate do not compile together" if compiled else ""


def started(context: Context) -> tuple[Context, ...]:
    """What would be started; on a TPU accelerate starts it in a way of its own, which the file names."""
    if on_xla(context):
        return ()
    nodes, device = context.topology.nodes, context.topology.device
    ranks, dtype = context.ranks, context.dtype
    return (bare_context(context.strategy, "accelerate", "accelerate", device, ranks, nodes=nodes, dtype=dtype),)


def files(context: Context, folder: str) -> dict[str, str]:
    """The files as for a script on Accelerator(), whatever the program of the recipe is."""
    recipe = context.recipe
    program = recipe.program.model_copy(update={"kind": "accelerate"})
    resolved = replace(context.resolved, recipe=recipe.model_copy(update={"program": program}))
    there = replace(context, resolved=resolved, launcher="accelerate")
    found = dict(launcher.entries(there))
    more: dict[str, object] = {}
    if isinstance(recipe.devices.select, list):
        more["gpu_ids"] = ",".join(map(str, recipe.devices.select))
    if context.topology.nodes > 1 and recipe.nodes.rendezvous != "auto":
        more["main_process_ip"], _, port = recipe.nodes.rendezvous.rpartition(":")
        more["main_process_port"] = int(port)
    if context.zero:
        more["deepspeed_config.deepspeed_config_file"] = f"{folder}/{DEEPSPEED}"
    text = launcher.yaml_text(found | {key: (value, Source()) for key, value in more.items()})
    head = "".join(f"# {line}\n" for line in _head(context, f"{folder}/{CONFIG}"))
    return {CONFIG: head + text} | ({DEEPSPEED: config_file(there, "accelerate").content} if context.zero else {})


def notes(context: Context) -> tuple[str, ...]:
    if _cpu_by_variable(context):
        return ("accelerate launch starts several processes on a CPU only with ACCELERATE_USE_CPU=true before it",)
    return ()


def _head(context: Context, path: str) -> Iterator[str]:
    """How the launcher is called, with what it takes from no config file, and what differs on each machine."""
    recipe, topology, by_variable = context.recipe, context.topology, _cpu_by_variable(context)
    if on_xla(context):
        yield CHIPS
    numbered = isinstance(recipe.devices.select, list) and any(isinstance(each, int) for each in recipe.devices.select)
    words = {
        "ACCELERATE_USE_CPU=true": by_variable,
        "DS_ACCELERATOR=cpu": topology.device == "cpu" and context.zero,
        f"CUDA_DEVICE_ORDER={ORDER[recipe.devices.order][0]}": numbered,
        "accelerate launch": True,
        f"--max_restarts {recipe.launcher.max_restarts}": recipe.launcher.max_restarts,
        "--main_process_port 0": topology.nodes == 1 and topology.world_size > 1,
        "--machine_rank RANK": topology.nodes > 1,
        "--main_process_ip HOST --main_process_port PORT": topology.nodes > 1 and recipe.nodes.rendezvous == "auto",
        f"--config_file {shlex.quote(path)}": True,
    }
    yield f"{recipe.name}, for: {' '.join(word for word, is_given in words.items() if is_given)} SCRIPT WORDS..."
    if by_variable:
        yield "Several processes read ACCELERATE_USE_CPU alone; use_cpu in this file does not reach them."


def _cpu_by_variable(context: Context) -> bool:
    """Whether only a variable puts the ranks on the CPU: there the file alone starts something else."""
    return context.topology.device == "cpu" and not context.zero and context.topology.world_size > 1
