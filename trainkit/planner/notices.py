"""Advice on sizes that tensor cores like, from NVIDIA's table by number format and card.

Table and tile sizes: NVIDIA, Matrix Multiplication Background User's Guide, sections 2.2 (Tensor Core Requirements) and
3.1 (Tile Quantization). Its section 3.2 (Wave Quantization) asks for the number of tiles to fill a card's
multiprocessors: that depends on the kernel, which the library chooses as it runs, so there is no advice on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Gpu, at_least
from trainkit.optimizers import MOMENTS
from trainkit.optimizers import optimizer as known
from trainkit.planner.architectures import architecture_notices
from trainkit.planner.compile_backends import compile_notices
from trainkit.planner.container import mapped
from trainkit.planner.container import notices as container_notices
from trainkit.planner.dtype import (
    AMPERE,
    VOLTA,
    has_flash_attention,
    has_tensor_cores,
    kernel_notices,
    precision_notices,
)
from trainkit.planner.env import order_notices
from trainkit.planner.hub import notices as hub_notices
from trainkit.planner.hub import push_notices
from trainkit.planner.memory import memory_advice
from trainkit.planner.placement import core_notices
from trainkit.planner.requirements import doubtful_releases, missing_packages
from trainkit.planner.rules import kept_inputs
from trainkit.planner.streaming import streaming_notices
from trainkit.recipe.paths import absolute
from trainkit.recipe.repository import meant
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData, Slurm, TextData
from trainkit.recipe.schema.fields import tagged_sections
from trainkit.schedulers.registry import cores_of_node
from trainkit.text import counted
from trainkit.tools.base.own_scripts import several_cards
from trainkit.tools.deepspeed.config import removed_notices
from trainkit.tools.registry import PROGRAMS
from trainkit.tools.torch_xla import notices as xla_notices

SOURCE = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"
REQUIREMENTS, QUANTIZATION = f"{SOURCE}#requirements-tc", f"{SOURCE}#dim-quantization"

# format -> multiple for which products are most efficient, and the one on an A100
MULTIPLES: Mapping[str, tuple[int, int]] = {
    "fp16": (8, 64),  # REQUIREMENTS, table 1
    "bf16": (8, 64),  # not in the table, whose multiples are 16 bytes, and 128 on an A100: as wide as fp16
    "tf32": (4, 32),  # REQUIREMENTS, table 1
}
A100 = (8, 0)  # the A30 has the A100's chip
FIRST: Mapping[str, tuple[int, int]] = {"fp16": VOLTA, "bf16": AMPERE, "tf32": AMPERE}

# The sides of products in configurations of transformers, by the names that its architectures give them.
SIDES = (
    *("hidden_size", "n_embd", "d_model", "dim"),
    *("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim"),
    "vocab_size",
)
HEADS = ("heads", "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")

TILE = 128  # a usual side of the tiles that a product is cut into (QUANTIZATION)
WASTE = 0.25  # idle share of the tiles, above which a notice is worth it


def tensor_core_advice(context: Context) -> Iterator[Notice]:
    """Sizes that leave tensor cores idle, where the built-in trainer computes on them."""
    used = "tf32" if context.dtype == "fp32" and context.recipe.precision.tf32 else context.dtype
    if context.recipe.program.kind != "builtin" or used not in MULTIPLES or not context.cards:
        return
    # All ranks wait for a card without tensor cores for the format, and no size makes it faster.
    if any(gpu.compute_capability < FIRST[used] or not has_tensor_cores(gpu) for gpu in context.cards):
        return
    # The most demanding card decides: all ranks wait for each other.
    card = max(context.cards, key=lambda gpu: _multiple(used, gpu))
    # The feed-forward width of `gpt` is 4 hidden sizes, and fits if one does.
    sizes = dict(_settings(context, SIDES))
    if context.batch.micro and not context.batch.search:
        length = getattr(context.recipe.data, "sequence_length", 1)
        key = f"batch.micro {context.batch.micro} of {length} tokens:"
        sizes = {key: context.batch.micro * length, **sizes}
    multiple = _multiple(used, card)
    missed = [f"{key} {size} (next {_up(size, multiple)})" for key, size in sizes.items() if size % multiple]
    missed += _heads(context, MULTIPLES[used][0])
    if missed:
        what = f"{card.name} multiplies {used} fastest in multiples of {multiple}; not so: {', '.join(missed)}"
        yield Notice("warning", what, f"use sizes that fit, which are faster at the same cost: {REQUIREMENTS}")
    wasteful = [f"{key} {size}" for key, size in sizes.items() if size > TILE and 1 - size / _up(size, TILE) > WASTE]
    if wasteful:
        what = (
            f"products are cut into tiles of {TILE}, of which a quarter or more stays idle with {', '.join(wasteful)}"
        )
        yield Notice("note", what, f"use a multiple of {TILE}, which costs no more time: {QUANTIZATION}")


def _multiple(used: str, gpu: Gpu) -> int:
    usual, on_a100 = MULTIPLES[used]
    return on_a100 if gpu.compute_capability == A100 else usual


def _settings(context: Context, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Those of the model's settings that the recipe gives, by their keys."""
    model = context.recipe.model
    config = getattr(model, "config", None)
    for name in names:
        size = getattr(model, name, None)
        if isinstance(size, int):
            yield f"model.{name}", size
        elif isinstance(config, Mapping) and isinstance(config.get(name), int):
            yield f"model.config.{name}", config[name]


def _heads(context: Context, multiple: int) -> list[str]:
    """The width of a head is a side of attention's products. It is small, so only the least multiple is asked of it."""
    expected = f"(expected a multiple of {multiple})"
    if given := list(_settings(context, ("head_dim",))):
        return [f"{key} {size} {expected}" for key, size in given if size % multiple]
    width, heads = next(_settings(context, SIDES[:4]), None), next(_settings(context, HEADS), None)
    if not width or not heads or heads[1] < 1 or (wide := width[1] // heads[1]) % multiple == 0:
        return []
    return [f"{heads[0]} {heads[1]}, which makes heads {wide} wide {expected}"]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
