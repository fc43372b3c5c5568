"""Every notice of a plan: what this machine lacks, and settings that do less here than they seem to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from trainkit.frameworks.base.own_scripts import several_cards
from trainkit.frameworks.deepspeed.removed import removed_notices
from trainkit.frameworks.registry import PROGRAMS
from trainkit.frameworks.torch_xla import notices as xla_notices
from trainkit.machine.versions import at_least
from trainkit.optimizers import MOMENTS
from trainkit.optimizers import optimizer as known
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.planner.advice.card_kernels import has_flash_attention, kernel_notices
from trainkit.planner.advice.compile_backends import compile_notices
from trainkit.planner.advice.memory import memory_advice
from trainkit.planner.advice.streaming import streaming_notices
from trainkit.planner.advice.tensor_cores import tensor_core_advice
from trainkit.planner.architectures import architecture_notices
from trainkit.planner.container import mapped
from trainkit.planner.container import notices as container_notices
from trainkit.planner.dtype import precision_notices
from trainkit.planner.env import order_notices
from trainkit.planner.hub import notices as hub_notices
from trainkit.planner.numa import core_notices
from trainkit.planner.pushing import notices as push_notices
from trainkit.planner.quantized import kept_inputs
from trainkit.planner.requirements import doubtful_releases, missing_packages
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.repository import meant
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData, Slurm, TextData
from trainkit.recipe.schema.fields import tagged_sections
from trainkit.schedulers.registry import cores_of_node
from trainkit.text import counted

# Key of a path that the run reads -> the hint where nothing is there, and whether another machine may have it.
PATHS: dict[str, tuple[str, bool]] = {
    "program.script": ("put your copy into the working folder, or name it: program.script=PATH", False),
    "program.folder": ("check the path; it starts from the working folder", True),
    "program.args.config": ("check the path behind --config; it starts from the working folder", True),
    "data.path": ("check data.path, from the working folder; names of the Hub are for data.kind: dataset", True),
    "data.include": ("name the files in data.include, as '**/*.txt'", True),
    "data.mix": (
        "check its paths, from the working folder; names of the Hub are for data.kind: dataset, one in each path",
        True,
    ),
    "data.tokenizer": ("give a folder as save_pretrained writes it, or a name of the Hub", False),
    "model.path": ("give a folder as save_pretrained writes it, or a name of the Hub", True),
    "peft.path": ("give a folder as peft or trainkit export --adapter writes it, or a name of the Hub", True),
}

NAMED = ("data.path", "data.mix", "data.tokenizer", "model.path", "peft.path")  # which may name repositories of the Hub

# torch's flash kernel takes no mask, so that scaled_dot_product_attention falls back to another one
# (torch.nn.functional.scaled_dot_product_attention); it computes in 16 bits only, and other formats have none to lose.
_FLASH_FORMATS = ("bf16", "fp16")


def plan_notices(context: Context) -> tuple[Notice, ...]:
    """Every notice, in the order of SOURCES."""
    return tuple(notice for source in SOURCES for notice in source(context))


def _other_machine(context: Context) -> Iterator[Notice]:
    facts = context.facts
    if facts.origin:
        yield Notice("note", f"planned for another machine ({facts.origin}), with torch {facts.packages.get('torch')}")
        keys = [key for key, (_, elsewhere) in PATHS.items() if elsewhere]
        absent = [path for key in keys for path in context.resolved.absent.get(key, ())]
        if absent:
            yield Notice("note", f"whether that machine has {', '.join(absent)} is not known")


def _absent_paths(context: Context) -> Iterator[Notice]:
    for key, (hint, elsewhere) in PATHS.items():
        if not (elsewhere and context.facts.origin):
            for path in context.resolved.absent.get(key, ()):
                if mapped(context, path):
                    continue
                what, where = f"{key} {path} does not exist on this machine", absolute(path, context.resolved.folder)
                remedy = hint if where == path else f"it would be {where}; {hint}"
                if key == "data.include" and isinstance(context.recipe.data, TextData):
                    what, remedy = f"data.path {path} holds no file that {context.recipe.data.include!r} matches", hint
                elif named := meant(path) if key in NAMED else "":
                    remedy = f"for the repository of the Hub write {named}; a revision has a setting of its own"
                yield Notice("blocker", what, remedy)


def _rendezvous(context: Context) -> Iterator[Notice]:
    nodes = context.topology.nodes
    if nodes > 1 and context.recipe.nodes.rendezvous == "auto":
        what = f"the {nodes} nodes meet at the first one of the scheduler's list, where they are started by one"
        yield Notice("note", what, "elsewhere set nodes.rendezvous to host:port of node 0")


def _length(context: Context) -> Iterator[Notice]:
    steps, epochs = context.recipe.train.steps, context.recipe.train.epochs
    if steps is not None and epochs is not None:
        what = f"train.epochs {epochs:g} does nothing beside train.steps {steps}"
        yield Notice("note", what, "set train.steps=null for passes over the data")


def _dropped(context: Context) -> Iterator[Notice]:
    """Settings of a kind that a stronger layer changed: they were meant for something, and now do nothing."""
    keys_by_note: dict[str, list[str]] = {}
    for key, entries in context.resolved.history.items():
        if entries[-1].dropped and key.partition(".")[0] in tagged_sections():
            keys_by_note.setdefault(entries[-1].note, []).append(key)
    for note, keys in keys_by_note.items():
        yield Notice("note", f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} {note}")


def _batch(context: Context) -> Iterator[Notice]:
    batch = context.batch
    if batch.note:
        yield Notice("note", batch.note)
    made = context.zero and "strategy.config" not in context.resolved.attachments
    if context.recipe.program.kind == "deepspeed" and made and batch.global_ is None:
        # runtime/config.py: _batch_assertion
        what = "nobody gives DeepSpeed's engine a size of the batch: it ends with an error unless the script adds one"
        yield Notice("warning", what, "set batch.micro, or batch.global")
    if batch.search:
        limit = context.recipe.batch.memory_mib
        bound = f"{limit} MiB (batch.memory_mib)" if limit else "what it has and nine tenths of what is free"
        what = (
            f"batch.micro is auto: before the first step the trainer tries sizes from {batch.search[0]} to "
            f"{batch.search[-1]} on a copy of the model, by doubling, then bisection, and takes the largest with which "
            f"no rank takes more memory than {bound}. Only sizes that divide a rank's {batch.search[-1]} samples come "
            "into question, so that the global batch stays"
        )
        hint = "see metrics.jsonl and summary.json for what it was; this machine remembers it for the same settings"
        yield Notice("note", what, hint)


def _device(context: Context) -> Iterator[Notice]:
    """What the device lacks, or could not be asked."""
    facts, device, recipe = context.facts, context.topology.device, context.recipe
    if device != "mps" and (failure := facts.notes.get("gpus")):
        yield Notice("warning", f"the NVIDIA driver could not be asked for cards ({failure})", "check `nvidia-smi`")
    system, _, version = facts.system.partition(" ")
    # bf16 on MPS came with macOS 14 (https://pytorch.org/docs/stable/amp.html)
    if device == "mps" and context.dtype == "bf16" and system == "macOS" and not at_least(version, "14"):
        yield Notice("blocker", f"bf16 on MPS requires macOS 14; this is {facts.system}", "set precision to fp32")
    if device == "cpu" and getattr(recipe.strategy, "offload", False):
        yield Notice("note", "strategy.offload moves nothing on a CPU: the shards are in its memory already")
    if device == "cpu" and context.launcher == "deepspeed" and facts.gpus:
        what = "the deepspeed launcher shows cards to the ranks of a CPU run; the program must leave them alone"
        yield Notice("warning", what, "set launcher.kind to torchrun, which hides them")


def _cores(context: Context) -> Iterator[Notice]:
    recipe, processes, cores = context.recipe, context.processes, cores_of_node(context)[0]
    share = f"share {counted(cores, 'CPU core')}"
    if context.topology.device == "cpu" and processes > cores:
        hint = "set nodes.processes_per_node to the number of cores or less"
        yield Notice("warning", f"{processes} ranks {share}", hint)
    workers = recipe.data.workers * processes
    if recipe.program.kind == "builtin" and workers > cores:
        what = f"{counted(processes, 'rank')} with {workers} loader processes in all {share}"
        yield Notice("warning", what, "set data.workers lower")


def _rounding(context: Context) -> Iterator[Notice]:
    """A note where a run is to go on from checkpoints on cards, which alone does not make it repeat itself."""
    recipe = context.recipe
    queued = recipe.cluster.requeue.after if isinstance(recipe.cluster, Slurm) else recipe.cluster.kind == "kubernetes"
    goes_on = recipe.checkpoint.resume == "auto" or recipe.launcher.max_restarts or queued
    if recipe.program.kind != "builtin" or context.topology.device != "cuda" or recipe.train.deterministic:
        return
    if goes_on and (recipe.checkpoint.every_steps or queued):
        what = "on CUDA a run that goes on from a checkpoint has the losses of an unbroken one up to rounding"
        yield Notice("note", what, "set train.deterministic to true for the same bits, which is slower")


def _optimizer(context: Context) -> Iterator[Notice]:
    """What a reader of the recipe may not expect of the optimizer that it names."""
    optimizer = context.recipe.optimizer
    if context.recipe.program.kind != "builtin":
        return
    ignored = [name for name in MOMENTS if name not in known(optimizer.name).takes]
    # A default is no wish: a run's own recipe.yaml has every setting.
    wished = (name for name in ignored if getattr(optimizer, name) != type(optimizer).model_fields[name].default)
    idle = [key for name in wished if context.resolved.given(key := f"optimizer.{name}")]
    if idle:
        verb = "does" if len(idle) == 1 else "do"
        hint = "leave it out, or give the class what it takes under optimizer.args"
        yield Notice("warning", f"{' and '.join(idle)} {verb} nothing with {optimizer.name}", hint)
    if warning := known(optimizer.name).warning:
        yield Notice("warning", *warning)
    if ":" in optimizer.name and context.recipe.strategy.kind not in ("single", "ddp"):
        what = f"{context.recipe.strategy.kind} hands {optimizer.name} shards of the parameters, not whole matrices"
        yield Notice("warning", what, "set strategy.kind to ddp for an optimizer that looks at whole matrices")


def _padding(context: Context) -> Iterator[Notice]:
    """A warning where batches come with an attention mask on CUDA. Texts that are predicted one by one need none.

    Nor do encoder-decoders get one: what t5 adds to its attention keeps that kernel away in any case.
    """
    recipe = context.recipe
    model, data = recipe.model, recipe.data
    if recipe.program.kind != "builtin" or context.topology.device != "cuda" or context.dtype not in _FLASH_FORMATS:
        return
    if not isinstance(model, HfModel) or not isinstance(data, JsonlData | DatasetData):
        return
    labelled = model.task == "sequence_classification"
    if model.task in ("causal_lm", "seq2seq_lm") or (data.packing and not labelled):
        return
    # torch's flash kernel needs the same cards as the package's (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
    if recipe.efficiency.attention not in ("auto", "sdpa") or not has_flash_attention(context.cards):
        return
    what = (
        f"texts shorter than data.sequence_length {data.sequence_length} are filled up, which takes an attention mask, "
        "and with a mask sdpa does not use its flash kernel"
    )
    remedy = "set efficiency.attention: flash_attention_2, which leaves padding out"
    yield Notice("warning", what, remedy if labelled else f"{remedy}, or data.packing: true")


SOURCES: tuple[Callable[[Context], Iterable[Notice]], ...] = (
    _other_machine,
    missing_packages,
    removed_notices,
    _absent_paths,
    hub_notices,
    container_notices,
    _rendezvous,
    _length,
    precision_notices,
    kernel_notices,
    doubtful_releases,
    _rounding,
    _optimizer,
    compile_notices,
    kept_inputs,
    _padding,
    streaming_notices,
    architecture_notices,
    tensor_core_advice,
    memory_advice,
    _device,
    order_notices,
    xla_notices,
    several_cards,
    core_notices,
    _cores,
    _dropped,
    _batch,
    push_notices,
    lambda context: PROGRAMS[context.recipe.program.kind].notices(context),
)
