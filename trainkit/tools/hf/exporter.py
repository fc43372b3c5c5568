"""`hf`: the command line that one would type without trainkit, and the files that it names."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable, bind_words, text
from trainkit.machine.selection import ORDER
from trainkit.text import pluralize, script_word
from trainkit.tools import torch_xla
from trainkit.tools.base.interface import chosen_cards, nothing
from trainkit.tools.base.own_scripts import is_executable
from trainkit.tools.hf import fsdp_config, program
from trainkit.tools.hf.fields import OUTPUT
from trainkit.tools.registry import LAUNCHERS

notes = started = nothing
COMMAND = "command.sh"
_PLACE = text(Variable.RUN_DIR, f"/{OUTPUT}")


def unfit(context: Context) -> str:
    kind = context.recipe.program.kind
    if kind != "hf":
        return f"it is for programs of kind hf, and program.kind is {kind}"
    if context.topology.nodes > 1 and context.recipe.nodes.rendezvous == "auto":
        return "the command names host and port of node 0, and nodes.rendezvous is auto"
    return ""


def files(context: Context, folder: str) -> dict[str, str]:
    """The command as a script, and the files. folder: from the working folder, in which the command is to be run."""
    alone = context.launcher == "python" and is_executable(context)
    launcher = () if alone else LAUNCHERS[context.launcher].shell_words(context, folder)
    words = [*launcher, *map(script_word, _program(context, folder))]
    ranks = pluralize(context.topology.world_size, "rank")
    head = f"# {context.recipe.name}: strategy {context.recipe.strategy.kind}, {ranks}. Run it where it was exported."
    parts = [*_variables(context), *words]  # each flag on a line with what follows it
    line = "".join(f" \\\n    {part}" if part.startswith("--") else f" {part}" for part in parts).lstrip(" ")
    made = {each.path: each.content for tool in (program, LAUNCHERS[context.launcher]) for each in tool.files(context)}
    return {COMMAND: f"#!/bin/sh\n{head}\n{line}\n", **made}


def _variables(context: Context) -> Iterator[str]:
    """Assignments in front of the command, as the shell reads them."""
    # DeepSpeed's launcher ignores CUDA_VISIBLE_DEVICES beside --include and --num_gpus (launcher/runner.py).
    planned = {name: each for name, each in _devices(context) if context.launcher != "deepspeed" or "CUDA" not in name}
    of_xla = torch_xla.environment(context) if torch_xla.on_xla(context) else ()
    planned |= {each.name: str(each.value) for each in (*fsdp_config.environment(context), *of_xla)}
    own = {name: str(value) for name, value in context.recipe.env.items()}
    for name, value in ({name: each for name, each in planned.items() if name not in own} | own).items():
        yield f"{name}={script_word(value) if value else ''}"


def _devices(context: Context) -> Iterator[tuple[str, str]]:
    """Which GPUs, where the tools by themselves would take others."""
    devices, there = context.recipe.devices, context.facts.gpus
    amd = any(gpu.vendor == "amd" for gpu in there)
    shows = "HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES"
    if context.topology.device == "cpu":
        if there or devices.select == "none":
            yield shows, ""
        if context.zero or context.launcher == "deepspeed":
            yield "DS_ACCELERATOR", "cpu"
    elif context.topology.device == "mps":
        yield "PYTORCH_ENABLE_MPS_FALLBACK", "1"
    elif context.topology.device == "cuda" and (isinstance(devices.select, list) or context.processes < len(there)):
        yield shows, ",".join(map(str, chosen_cards(context)))
        if not amd:
            yield "CUDA_DEVICE_ORDER", ORDER[devices.order if isinstance(devices.select, list) else "pci"][0]


def _program(context: Context, folder: str) -> Iterator[str]:
    """Script or module and its arguments. Places in the run directory become places in the folder."""
    words = [token.text for token in program.argv(context)]
    if is_executable(context):
        words = [text("--no_python"), *words] if context.launcher != "python" else words
    else:
        words = words[1:]  # the interpreter, which launchers add by themselves
    if context.launcher == "deepspeed" and str(words[0]) == "-m":
        words[0] = text("--module")
    placed = (text(context.recipe.output.root) if word == _PLACE else word for word in words)
    yield from bind_words(placed, {Variable.RUN_DIR: folder})
