"""What a plan has to say besides itself: what this machine lacks, and settings that do less here than they seem to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainkit.frameworks.registry import PROGRAMS
from trainkit.frameworks.torch_xla import notices as xla_notices
from trainkit.machine.versions import at_least
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.planner.advice.compile_backends import compile_notices
from trainkit.planner.advice.memory import room_advice
from trainkit.planner.advice.optimizer import optimizer_notices
from trainkit.planner.advice.padding import padding_notices
from trainkit.planner.advice.tensor_cores import advice
from trainkit.planner.dtype import precision_notices
from trainkit.planner.env import order_notices
from trainkit.planner.numa import core_notices
from trainkit.planner.requirements import missing_packages
from trainkit.recipe.schema.fields import tagged_sections
from trainkit.text import counted


def remarks(context: Context) -> tuple[Notice, ...]:
    """Every remark, in the order of REMARKS."""
    return tuple(notice for remark in REMARKS for notice in remark(context))


def _precision(context: Context) -> Iterator[Notice]:
    yield from precision_notices(context.recipe, context.topology.device, context.dtype, context.cards)


def _program(context: Context) -> Iterator[Notice]:
    yield from PROGRAMS[context.recipe.program.kind].notices(context)


def _rendezvous(context: Context) -> Iterator[Notice]:
    nodes = context.topology.nodes
    if nodes > 1 and context.recipe.nodes.rendezvous == "auto":
        what = f"{nodes} nodes need a place to meet, and nodes.rendezvous does not name one."
        yield Notice("blocker", what, "Set nodes.rendezvous to host:port of node 0.")


def _elsewhere(context: Context) -> Iterator[Notice]:
    facts = context.facts
    if facts.origin:
        yield Notice("note", f"Planned for another machine ({facts.origin}), with torch {facts.packages.get('torch')}.")
        keys = ("data.path", "model.path", "peft.path")
        absent = [path for key in keys for path in context.resolved.absent.get(key, ())]
        if absent:
            yield Notice("note", f"Whether that machine has {', '.join(absent)} is not known.")


def _script(context: Context) -> Iterator[Notice]:
    for path in context.resolved.absent.get("program.script", ()):
        hint = "Put your copy into the working folder, or name it: program.script=PATH."
        yield Notice("blocker", f"Not on this machine: there is no file {path}, which is to be run.", hint)


def _data(context: Context) -> Iterator[Notice]:
    if context.facts.origin:
        return
    for path in context.resolved.absent.get("data.path", ()):
        hint = "Check data.path; it starts from the working folder."
        yield Notice("blocker", f"Not on this machine: there is nothing at {path}, where the data should be.", hint)


def _tokenizer(context: Context) -> Iterator[Notice]:
    for path in context.resolved.absent.get("data.tokenizer", ()):
        hint = "Check data.tokenizer: a folder as save_pretrained writes it; nothing is downloaded."
        yield Notice(
            "blocker", f"Not on this machine: there is nothing at {path}, where the tokenizer should be.", hint
        )


def _model(context: Context) -> Iterator[Notice]:
    if context.facts.origin:
        return
    for path in context.resolved.absent.get("model.path", ()):
        hint = "Check model.path: a folder as save_pretrained writes it; nothing is downloaded."
        yield Notice("blocker", f"Not on this machine: there is nothing at {path}, where the model should be.", hint)
    for path in context.resolved.absent.get("peft.path", ()):
        hint = "Check peft.path: a folder as peft or trainkit export --adapter writes it."
        yield Notice("blocker", f"Not on this machine: there is nothing at {path}, where adapters should be.", hint)


def _dropped(context: Context) -> Iterator[Notice]:
    """Settings of a kind that a stronger layer changed: they were meant for something, and now do nothing."""
    keys_by_note: dict[str, list[str]] = {}
    for key, entries in context.resolved.history.items():
        if entries[-1].dropped and key.partition(".")[0] in tagged_sections():
            keys_by_note.setdefault(entries[-1].note, []).append(key)
    for note, keys in keys_by_note.items():
        yield Notice("note", f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} {note}.")


def _batch(context: Context) -> Iterator[Notice]:
    batch = context.batch
    if batch.note:
        yield Notice("note", f"{batch.note}.")
    if batch.search:
        asked = context.recipe.batch.memory_mib
        bound = f"{asked} MiB (batch.memory_mib)" if asked else "what it has and nine tenths of what is free"
        what = (
            f"batch.micro is auto: before the first step the trainer tries sizes from {batch.search[0]} to "
            f"{batch.search[-1]} on a copy of the model, by doubling, then bisection, and takes the largest with which "
            f"no rank takes more memory than {bound}. Only sizes that divide a rank's {batch.search[-1]} samples come "
            "into question, so that the global batch stays."
        )
        hint = "This machine remembers it for the same settings; metrics.jsonl and summary.json say what it was."
        yield Notice("note", what, hint)


def _mps(context: Context) -> Iterator[Notice]:
    """bf16 on MPS came with macOS 14 (https://pytorch.org/docs/stable/amp.html)."""
    system, _, version = context.facts.system.partition(" ")
    if (
        context.topology.device == "mps"
        and context.dtype == "bf16"
        and system == "macOS"
        and not at_least(version, "14")
    ):
        what = f"bf16 on MPS needs macOS 14; this is {context.facts.system}."
        yield Notice("blocker", what, "Set precision to fp32.")


def _cores(context: Context) -> Iterator[Notice]:
    cores = context.facts.cpu_cores
    if context.topology.device == "cpu" and context.processes > cores:
        what = f"{context.processes} ranks share {counted(cores, 'CPU core')}."
        yield Notice("warning", what, "Set nodes.processes_per_node to the number of cores or less.")


def _loaders(context: Context) -> Iterator[Notice]:
    workers, cores = context.recipe.data.workers * context.processes, context.facts.cpu_cores
    if context.recipe.program.kind == "builtin" and workers > cores:
        ranks = counted(context.processes, "rank")
        what = f"{ranks} with {workers} loader processes in all share {counted(cores, 'CPU core')}."
        yield Notice("warning", what, "Set data.workers lower.")


def _unseen_cards(context: Context) -> Iterator[Notice]:
    failure = context.facts.notes.get("gpus")
    if failure and context.topology.device != "mps":
        yield Notice("warning", f"The NVIDIA driver could not be asked for cards ({failure}).", "Check `nvidia-smi`.")


def _offload(context: Context) -> Iterator[Notice]:
    if context.topology.device == "cpu" and getattr(context.recipe.strategy, "offload", False):
        yield Notice("note", "strategy.offload moves nothing on a CPU: the shards are in its memory already.")


def _visible_slots(context: Context) -> Iterator[Notice]:
    if context.launcher == "deepspeed" and context.topology.device == "cpu" and context.facts.gpus:
        what = "The deepspeed launcher shows cards to the ranks of a CPU run; the program must leave them alone."
        yield Notice("warning", what, "launcher.kind: torchrun hides them.")


REMARKS: tuple[Callable[[Context], Iterator[Notice] | tuple[Notice, ...]], ...] = (
    _elsewhere,
    missing_packages,
    _script,
    _data,
    _tokenizer,
    _model,
    _rendezvous,
    _precision,
    optimizer_notices,
    compile_notices,
    padding_notices,
    advice,
    room_advice,
    _unseen_cards,
    order_notices,
    _mps,
    xla_notices,
    core_notices,
    _cores,
    _loaders,
    _visible_slots,
    _offload,
    _dropped,
    _batch,
    _program,
)
