"""Rules about the built-in trainer: what it cannot do, or not together, and what is good to know before it starts.

None of them asks which kind of program runs: the planner asks them where the built-in trainer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainkit.data.formats import is_packed_stream, packing_of
from trainkit.distribution import install
from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.rules import PlanRule, incompatible, unsupported_optimizers
from trainkit.lazy import load
from trainkit.machine.capability import AMPERE, VOLTA, fast_format, has_flash_attention, has_tensor_cores, named
from trainkit.machine.facts import Gpu
from trainkit.metrics import METRICS, metrics_of
from trainkit.optimizers import MOMENTS, OPTIMIZERS, ZERO, optimizer
from trainkit.recipe.grid import HYBRID, grid_sizes
from trainkit.recipe.schema import DatasetData, Fsdp, GptModel, HfModel, Moe
from trainkit.recipe.schema.model import quantized_bits
from trainkit.schedulers.registry import SCHEDULERS, cores_of_node
from trainkit.tasks import CAUSAL
from trainkit.text import join_names, pluralize
from trainkit.tools.builtin.inputs import architecture_notices, tokenizer_notices
from trainkit.tools.compile_backends import compile_remarks, records_graphs

WITHOUT_GRAPHS = (
    "efficiency.compile.backend: inductor with mode: default, or max-autotune-no-cudagraphs, which record no graphs"
)


def _wants_flash_attention(c: Context) -> bool:
    """Whether attention is computed with the package flash-attn."""
    return isinstance(c.recipe.model, HfModel) and c.recipe.efficiency.attention == "flash_attention_2"


def _compiled_as(c: Context) -> str:
    """The scope of what is compiled; empty where nothing is."""
    settings = c.recipe.efficiency.compile
    return settings.scope if settings.enabled else ""


def _records_graphs(c: Context) -> bool:
    return c.device == "cuda" and records_graphs(c.recipe.efficiency.compile)


def _bits(c: Context) -> int:
    """Of the frozen weights; 0 where they are not quantised."""
    return quantized_bits(c.recipe)


# Architectures of transformers, by `model_type`, whose own plan (`base_model_tp_plan`) divides linear layers alone, and
# which a test trains on two ranks.
DIVISIBLE = frozenset(
    (
        *("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo", "phi", "qwen2", "qwen3", "smollm3"),
        "starcoder2",
    )
)
ELEMENTWISE = tuple(name for name, each in OPTIMIZERS.items() if each.elementwise)
WINDOWED = ("gemma2", "gemma3_text")  # whose layers have windows by turns
DIVIDED = ("heads", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def _tensor(c: Context) -> int:
    """Over how many ranks each matrix is divided."""
    return grid_sizes(c.recipe).tensor


def _experts(c: Context) -> int:
    """Over how many ranks a block's experts are shared out."""
    return c.recipe.model.moe.parallel if isinstance(c.recipe.model, GptModel) else 1


def _context(c: Context) -> int:
    """Into how many parts each sample is divided."""
    return grid_sizes(c.recipe).context


def _divided(c: Context) -> bool:
    """Whether ranks have parts of the weights of blocks, also while these compute."""
    return _tensor(c) > 1 or _experts(c) > 1


def _hybrid(c: Context) -> bool:
    return getattr(c.recipe.strategy, "sharding", "") in HYBRID


def _model_settings(c: Context) -> Mapping[str, Any]:
    """What is known of the model's configuration."""
    given = {**c.resolved.described.model, **getattr(c.recipe.model, "config", {})}
    usual: Mapping[str, Mapping[str, Any]] = load("trainkit.foresight.architectures:DEFAULTS")  # few plans need it
    return {**usual.get(c.model_type, {}), **given, **dict(c.recipe.model)}


def _draws(c: Context) -> bool:
    """Whether training draws dropout masks, as far as is known."""
    chances = {name: each for name, each in _model_settings(c).items() if "drop" in name}
    return any(isinstance(each, float) and each > 0 for each in chances.values()) or c.recipe.peft.dropout > 0


def _drawing(name: str) -> Callable[[Context], bool]:
    """Asks whether a setting of the strategy divides what dropout masks are drawn for."""

    def asks(c: Context) -> bool:
        return getattr(c.recipe.strategy, name, 1) > 1 and _draws(c)

    return asks


def _uneven(name: str) -> Callable[[Context], bool]:
    """Asks whether a setting of the strategy is one of those that do not divide the ranks together."""

    def asks(c: Context) -> bool:
        sizes = grid_sizes(c.recipe)
        return getattr(c.recipe.strategy, name, 1) not in (None, 1) and c.ranks % (sizes.copies * sizes.alike) > 0

    return asks


def _has_window(c: Context) -> bool:
    """Whether attention looks at some tokens alone."""
    settings = _model_settings(c)
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    return bool(window) or c.model_type in WINDOWED or bool({*(settings.get("layer_types") or ())} - {"full_attention"})


def _undivided_size(c: Context) -> str:
    """A size of the model that the parts of its matrices do not divide; empty if there is none that is known."""
    sizes = _model_settings(c)
    found = ((name, sizes.get(name)) for name in DIVIDED)
    return next((name for name, size in found if isinstance(size, int) and size % _tensor(c)), "")


GRID: tuple[PlanRule, ...] = (
    incompatible(
        "strategy.replicate",
        lambda c: c.strategy == "fsdp" and getattr(c.recipe.strategy, "replicate", None) and not _hybrid(c),
        "full_shard and shard_grad_op keep one copy of the model, over all ranks",
        "strategy.sharding: hybrid_shard, or leave strategy.replicate out",
    ),
    *(
        incompatible(
            f"strategy.{name}",
            _uneven(name),
            "copies of the model, and parts of its matrices and of samples, have as many ranks each",
            "strategy.replicate, tensor and context whose product divides the number of processes",
        )
        for name in ("replicate", "tensor", "context")
    ),
    incompatible(
        "model.moe.parallel",
        lambda c: _experts(c) > 1 and c.strategy != "fsdp",
        "only under fsdp do ranks have different experts",
        "strategy.kind: fsdp, or model.moe.parallel: 1",
    ),
    incompatible(
        "model.moe.parallel",
        lambda c: c.strategy == "fsdp" and c.ranks // (grid_sizes(c.recipe).copies * _tensor(c)) % _experts(c),
        "the ranks of a copy share out the experts in groups of that size",
        "model.moe.parallel that divides the ranks of a copy",
    ),
    incompatible(
        "strategy.tensor",
        lambda c: _tensor(c) > 1 and c.recipe.model.kind == "target",
        "how a model of your own can be divided is not known",
        "strategy.tensor: 1, or model.kind: hf",
    ),
    incompatible(
        "strategy.tensor",
        lambda c: _tensor(c) > 1 and c.model_type and c.model_type not in DIVISIBLE,
        "transformers has no plan for this architecture that divides linear layers alone, or none that was tried",
        f"strategy.tensor: 1, or one of {', '.join(sorted(DIVISIBLE))}",
    ),
    incompatible(
        "strategy.tensor",
        lambda c: _tensor(c) > 1 and _undivided_size(c),
        "each rank has as many heads, and as much of the feed-forward layer, as the others",
        f"strategy.tensor that divides {', '.join(DIVIDED)}",
    ),
    *(
        incompatible(
            f"strategy.{name}",
            _drawing(name),
            "ranks that have some heads, or some tokens, each would draw other masks than one that has all",
            f"dropout of 0 (of the model, its config and peft), or strategy.{name}: 1",
        )
        for name in ("tensor", "context")
    ),
    incompatible(
        "strategy.context",
        lambda c: (
            _context(c) > 1 and (c.recipe.model.kind == "target" or getattr(c.recipe.model, "task", CAUSAL) != CAUSAL)
        ),
        "only of texts whose tokens are predicted one after the other is it known how a part is computed",
        "strategy.context: 1, or model.task: causal_lm",
    ),
    incompatible(
        "strategy.context",
        lambda c: _context(c) > 1 and c.model_type and (c.model_type not in DIVISIBLE or _has_window(c)),
        "keys and values are gathered for attention without windows alone, of architectures that were tried",
        f"strategy.context: 1, or one of {', '.join(sorted(DIVISIBLE - {*WINDOWED}))} without sliding_window",
    ),
    incompatible(
        "strategy.context",
        lambda c: _context(c) > 1 and c.recipe.efficiency.attention not in ("auto", "sdpa"),
        "a part of a sample needs a mask, which attention through sdpa takes",
        "efficiency.attention: sdpa",
    ),
    incompatible(
        "strategy.context",
        lambda c: _context(c) > 1 and (c.recipe.train.loss or getattr(c.recipe.model, "moe", Moe()).experts),
        "the losses of routers, and a loss of your own, are of whole samples",
        "strategy.context: 1",
    ),
    incompatible(
        "peft.kind",
        lambda c: _divided(c) and c.recipe.peft.kind != "none",
        "adapters, and weights in few bits, are not divided beside the matrices that they adapt",
        "strategy.tensor: 1 and model.moe.parallel: 1, with which fsdp shards them",
    ),
    incompatible(
        "optimizer.name",
        lambda c: _tensor(c) > 1 and c.recipe.optimizer.name not in ELEMENTWISE,
        "it looks at whole matrices, or keeps state of another shape, and a rank has parts of them",
        f"one of {', '.join(ELEMENTWISE)}, or strategy.tensor: 1",
    ),
    incompatible(
        "optimizer.name",
        lambda c: _experts(c) > 1 and c.recipe.optimizer.name not in (*ELEMENTWISE, "muon"),
        "it may look at whole stacks of experts, or keep state of another shape, and a rank has parts of them",
        f"one of {', '.join((*ELEMENTWISE, 'muon'))}, or model.moe.parallel: 1",
    ),
    incompatible(
        "precision.dtype",
        lambda c: _divided(c) and c.dtype == "fp16",
        "ranks with different parts of the model would scale their losses differently",
        "precision.dtype: bf16, or fp32",
    ),
    incompatible(
        "strategy.offload",
        lambda c: _divided(c) and getattr(c.recipe.strategy, "offload", False),
        "gradients of parts of matrices and of experts are exchanged where they are computed",
        "strategy.offload: false",
    ),
    incompatible(
        "efficiency.compile",
        lambda c: grid_sizes(c.recipe).divides_blocks and c.recipe.efficiency.compile.enabled,
        "a block exchanges sums, tokens or keys with other ranks in its middle, where a graph would break",
        "efficiency.compile: false",
    ),
)


INCOMPATIBLE: tuple[PlanRule, ...] = (
    *GRID,
    incompatible(
        "strategy.kind",
        lambda c: c.strategy == "zero0",
        "without partitioning, DeepSpeed's engine is plain data parallelism, which the built-in trainer has by itself",
        "strategy.kind: ddp, or name a program of your own",
    ),
    incompatible(
        "devices.type",
        lambda c: c.device == "xla",
        "the built-in trainer computes on CUDA, MPS and CPU",
        "program.kind: hf with a script on transformers' Trainer, or kind accelerate or torch",
    ),
    incompatible(
        "batch.micro",
        lambda c: c.searches_micro and c.strategy in ZERO,
        "DeepSpeed reads the micro batch from its file, which is written before anything is tried",
        "batch.micro: a number, or strategy.kind: ddp",
    ),
    incompatible(
        "batch.micro",
        lambda c: c.searches_micro and c.strategy == "fsdp",
        "a rank that runs out of memory between two gathers of weights would leave the others waiting for it",
        "batch.micro: a number, or strategy.kind: ddp",
    ),
    incompatible(
        "batch.micro",
        lambda c: c.searches_micro and _compiled_as(c),
        "each size that is tried would be compiled again, and what is compiled after several sizes is not what "
        "one size gives",
        "batch.micro: a number, or efficiency.compile: false",
    ),
    incompatible(
        "batch.micro",
        lambda c: c.searches_micro and c.device == "mps",
        "MPS does not tell the peak of the memory that was used",
        "batch.micro: a number, or devices.type: cpu",
    ),
    incompatible(
        "strategy.nvme_path",
        lambda c: c.recipe.peft.kind != "none" and getattr(c.recipe.strategy, "nvme_path", None),
        "DeepSpeed swaps what trains, which with adapters is next to nothing, and checkpoints of such a run would"
        " not hold the frozen weights",
        "strategy.offload_optimizer: none with strategy.offload_param: cpu, or peft.kind: none",
    ),
    incompatible(
        "peft.dora",
        lambda c: c.strategy in ("fsdp", "zero3") and c.recipe.peft.dora,
        "DoRA takes the norms of whole weights, and this strategy shards them",
        "peft.dora: false, or strategy.kind: ddp",
    ),
    incompatible(
        "efficiency.attention",
        lambda c: c.recipe.model.kind == "target" and c.recipe.efficiency.attention != "auto",
        "the attention of a model of your own is the model's own",
        "efficiency.attention: auto, and an argument of the model in model.args",
    ),
    incompatible(
        "efficiency.attention",
        lambda c: c.recipe.model.kind == "gpt" and c.recipe.efficiency.attention == "flash_attention_2",
        "the native model has sdpa, which takes the flash kernel by itself, and eager",
        "efficiency.attention: sdpa, or model.kind: hf",
    ),
    incompatible(
        "efficiency.attention",
        lambda c: _wants_flash_attention(c) and c.dtype == "fp32",
        "FlashAttention-2 computes in 16 bits only",
        "precision.dtype: bf16, or efficiency.attention: sdpa",
    ),
    incompatible(
        "precision.eval",
        lambda c: _wants_flash_attention(c) and c.dtype in ("bf16", "fp16") and c.eval_dtype == "fp32",
        "FlashAttention-2 computes in 16 bits only, and evaluation is to be in fp32",
        "precision.eval: same, or efficiency.attention: sdpa",
    ),
    incompatible(
        "efficiency.attention",
        lambda c: _wants_flash_attention(c) and c.device in ("cpu", "mps"),
        "FlashAttention-2 runs on CUDA only",
        "efficiency.attention: sdpa",
    ),
    incompatible(
        "model.quantize",
        lambda c: _bits(c) and c.recipe.peft.kind == "none",
        "quantised weights have no gradient and cannot train: adapters beside them do",
        "peft.kind: lora, or leave model.quantize out",
    ),
    incompatible(
        "strategy.kind",
        lambda c: _bits(c) == 8 and c.strategy in ("fsdp", "zero3"),
        "an 8-bit layer of bitsandbytes keeps its weights and their scales whole beside the parameter that is sharded",
        "model.quantize.bits: 4, or strategy.kind: ddp",
    ),
    incompatible(
        "peft.dora",
        lambda c: _bits(c) == 8 and c.recipe.peft.dora and c.device == "cpu",
        "on a CPU peft loses the scales of 8-bit layers while it computes DoRA's norms",
        "model.quantize.bits: 4, or peft.dora: false",
    ),
    incompatible(
        "model.quantize",
        lambda c: _bits(c) and c.device == "mps",
        "bitsandbytes brings no kernels of its own for MPS: it imitates them, or loads some from the Hub while it runs",
        "leave model.quantize out, or devices.type: cpu",
    ),
    incompatible(
        "precision.weights",
        lambda c: _bits(c) and c.recipe.precision.weights == "bf16",
        "quantised weights have their own format, and what is not quantised (adapters, embeddings, norms, the "
        "output layer) is kept in fp32 beside them",
        "precision.weights: fp32",
    ),
    incompatible(
        "precision.eval",
        lambda c: _bits(c) == 4 and c.eval_dtype != c.dtype,
        "4-bit layers compute in one format, precision.dtype, for training and evaluation alike",
        "precision.eval: same",
    ),
    incompatible(
        "efficiency.gradient_checkpointing.selective",
        lambda c: _bits(c) and c.recipe.efficiency.gradient_checkpointing.selective,
        "products with quantised weights are operators of bitsandbytes', which would be done again all the same",
        "efficiency.gradient_checkpointing.selective: false",
    ),
    incompatible(
        "precision.eval",
        lambda c: c.strategy in ("fsdp", *ZERO) and c.eval_dtype != c.dtype,
        "this strategy casts the weights once, to precision.dtype, for training and evaluation alike",
        "precision.eval: same, or strategy.kind: ddp",
    ),
    incompatible(
        "precision.weights",
        lambda c: c.recipe.precision.weights == "bf16" and c.dtype in ("fp32", "fp16"),
        "weights that are kept in bf16 are computed with in bf16",
        "precision.dtype: bf16, or precision.weights: fp32",
    ),
    incompatible(
        "precision.eval",
        lambda c: c.recipe.precision.weights == "bf16" and c.eval_dtype != c.dtype,
        "weights that are kept in bf16 are evaluated in bf16",
        "precision.eval: same",
    ),
    incompatible(
        "precision.weights",
        lambda c: c.recipe.precision.weights == "bf16" and c.strategy in ZERO,
        "DeepSpeed keeps an fp32 copy of the weights with the optimizer, so nothing would be saved",
        "strategy.kind: fsdp, or precision.weights: fp32",
    ),
    incompatible(
        "efficiency.compile.scope",
        lambda c: c.strategy in ("fsdp", "zero3") and _compiled_as(c) == "model",
        "this strategy gathers the weights of each block in hooks around it, where a graph of the whole model breaks",
        "efficiency.compile.scope: blocks",
    ),
    incompatible(
        "efficiency.offload_activations",
        lambda c: c.device != "cuda" and c.recipe.efficiency.offload_activations,
        "activations are in the machine's memory already, or cannot be copied there beside the computation",
        "efficiency.offload_activations: false, or efficiency.gradient_checkpointing",
    ),
    incompatible(
        "efficiency.offload_activations",
        lambda c: c.recipe.efficiency.offload_activations and c.recipe.efficiency.compile.enabled,
        "a compiled block decides for itself what it keeps, and breaks where Python is called for each saved tensor",
        "efficiency.compile: false, or efficiency.gradient_checkpointing",
    ),
    incompatible(
        "efficiency.compile",
        lambda c: _records_graphs(c) and (c.batch.accumulation or 1) > 1,
        "a CUDA graph writes its gradients to the same places in each pass, over those that are being accumulated",
        f"{WITHOUT_GRAPHS}, or batch.accumulation: 1",
    ),
    incompatible(
        "efficiency.compile",
        lambda c: _records_graphs(c) and c.strategy in ("fsdp", "zero3"),
        "a CUDA graph reads the weights from where they were when it was recorded, and this strategy gathers them"
        " anew for each use",
        WITHOUT_GRAPHS,
    ),
    incompatible(
        "efficiency.gradient_checkpointing.selective",
        lambda c: c.strategy == "zero3" and c.recipe.efficiency.gradient_checkpointing.selective,
        "under ZeRO-3 DeepSpeed's linear layers add their bias onto the product that was to be kept: gradients "
        "come out wrong",
        "efficiency.gradient_checkpointing.selective: false, or strategy.kind: fsdp",
    ),
    *unsupported_optimizers("builtin"),
)


def idle_optimizer_settings(c: Context) -> Iterator[Diagnostic]:
    """Settings that the optimizer does not take. A default is no wish: a run's own recipe.yaml has every setting."""
    given, name = c.recipe.optimizer, c.recipe.optimizer.name
    ignored = [each for each in MOMENTS if each not in optimizer(name).takes]
    wished = (each for each in ignored if getattr(given, each) != type(given).model_fields[each].default)
    idle = [key for each in wished if c.resolved.given(key := f"optimizer.{each}")]
    if idle:
        hint = "leave it out, or give the class what it takes under optimizer.args"
        yield warning(f"{' and '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing with {name}", hint, idle[0])


def optimizer_remarks(c: Context) -> Iterator[Diagnostic]:
    """What a reader of the recipe may not expect of the optimizer that it names."""
    name = c.recipe.optimizer.name
    if found := optimizer(name).warning:
        yield warning(*found)
    if ":" in name and c.strategy not in ("single", "ddp"):
        what = f"{c.strategy} hands {name} shards of the parameters, not whole matrices"
        yield warning(what, "set strategy.kind to ddp for an optimizer that looks at whole matrices")


def resumed_runs_round_otherwise(c: Context) -> Iterator[Diagnostic]:
    """A run that goes on from a checkpoint on CUDA does not repeat itself bit by bit."""
    recipe = c.recipe
    scheduler = SCHEDULERS.get(recipe.cluster.kind)
    queued = scheduler is not None and scheduler.restarts_after(recipe.cluster)
    goes_on = recipe.checkpoint.resume == "auto" or recipe.launcher.max_restarts or queued
    saves = recipe.checkpoint.every_steps or queued
    if c.device == "cuda" and not recipe.train.deterministic and goes_on and saves:
        what = "on CUDA a run that goes on from a checkpoint has the losses of an unbroken one up to rounding"
        yield note(what, "set train.deterministic to true for the same bits, which is slower")


def eight_bit_layers_keep_inputs(c: Context) -> Iterator[Diagnostic]:
    """Recomputing spares less than it seems to: what an autograd node holds itself stays."""
    if _bits(c) == 8 and c.recipe.efficiency.gradient_checkpointing.every:
        what = (
            "8-bit layers of bitsandbytes keep their inputs by themselves until backward, also in blocks that are "
            "recomputed: efficiency.gradient_checkpointing spares the other activations alone"
        )
        yield warning(what, "set model.quantize.bits to 4, whose layers keep no input")


def masks_keep_flash_away(c: Context) -> Iterator[Diagnostic]:
    """Batches that come with an attention mask on CUDA. Texts that are predicted one by one need none.

    Nor do encoder-decoders get one: what t5 adds to its attention keeps that kernel away in any case. torch's flash
    kernel takes no mask, so that scaled_dot_product_attention falls back to another one
    (torch.nn.functional.scaled_dot_product_attention); it computes in 16 bits only, on the same GPUs as the package's
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    model, data, attention = c.recipe.model, c.recipe.data, c.recipe.efficiency.attention
    flash = c.device == "cuda" and c.dtype in ("bf16", "fp16") and has_flash_attention(c.cards)
    if not flash or attention not in ("auto", "sdpa"):
        return
    if not isinstance(model, HfModel) or not isinstance(data, DatasetData):
        return
    labelled = model.task == "sequence_classification"
    if model.task in ("causal_lm", "seq2seq_lm") or packing_of(c.recipe) != "none":
        return
    what = (
        f"texts shorter than data.sequence_length {data.sequence_length} are filled up, which takes an attention mask, "
        "and with a mask sdpa does not use its flash kernel"
    )
    remedy = "set efficiency.attention: flash_attention_2, which leaves padding out"
    yield warning(what, remedy if labelled else f"{remedy}, or data.packing: dense")


def flash_attention_needs_ampere(c: Context) -> Iterator[Diagnostic]:
    """The package flash-attn has no kernels for older GPUs."""
    cards = [gpu for gpu in c.cards if gpu.vendor == "nvidia"]
    if cards and _wants_flash_attention(c) and not has_flash_attention(cards):
        oldest = min(cards, key=lambda gpu: gpu.compute_capability)
        what = f"FlashAttention-2 requires compute capability 8.0; {named(oldest)}"
        yield blocker(what, "set efficiency.attention to sdpa", "efficiency.attention")


def slow_format(c: Context) -> Iterator[Diagnostic]:
    """Nobody asked for a format, and the GPUs compute another one several times as fast."""
    faster, precision = fast_format(c.cards), c.recipe.precision
    asked = c.resolved.given("precision.dtype") is not None or precision.tf32 is not None
    if c.dtype == "fp32" != faster and not asked:
        what = (
            f"no number format is set, so {c.cards[0].name} computes in fp32; it is several times as fast in {faster}"
        )
        yield note(what, "set precision to auto, or to fp32 where that is meant")


def rounded_updates(c: Context) -> Iterator[Diagnostic]:
    """bf16 has 8 bits of mantissa: an update below 1/512 of a weight leaves it as it is."""
    name = c.recipe.optimizer.name
    if c.recipe.precision.weights == "bf16" and not optimizer(name).keeps_rounding:
        what = f"precision.weights bf16 rounds small updates of {name} away: training may not progress"
        yield warning(what, "set optimizer.name to adamw_anyprecision, which keeps what rounding loses")


def loader_processes_share_cores(c: Context) -> Iterator[Diagnostic]:
    """More processes of loaders than cores."""
    cores, workers = cores_of_node(c)[0], c.recipe.data.workers * c.processes
    if workers > cores:
        what = f"{pluralize(c.processes, 'rank')} with {workers} loader processes in all share "
        f"{pluralize(cores, 'CPU core')}"
        yield warning(what, "set data.workers lower")


def streams(c: Context) -> Iterator[Diagnostic]:
    """The sources of a stream with their shares; and that packing has every process read all of it."""
    data = c.recipe.data
    if not isinstance(data, DatasetData) or not data.streaming:
        return
    if data.mix:
        mix = [each for each in data.mix if each.weight]
        total = sum(each.weight for each in mix)
        names = ((each.weight / total, each.path if isinstance(each.path, str) else each.path[0]) for each in mix)
        yield note(f"samples are drawn from {join_names([f'{path} ({share:.1%})' for share, path in names])}")
    processes = c.processes * max(1, data.workers)
    if processes > 1 and is_packed_stream(c.recipe):
        what = (
            "where a packed sample begins depends on all texts before, so that each of the "
            f"{processes} processes that read turns the whole stream into tokens"
        )
        hint = "set data.workers to 1 at most; data.packing: none, or data.kind: tokens, spares the others' share"
        yield note(what, hint)


def metrics_that_are_not_installed(c: Context) -> Iterator[Diagnostic]:
    """Metrics that the task has by itself, and that nothing here computes. Those that a layer names are required."""
    if not c.recipe.eval.every_steps or c.recipe.eval.metrics is not None:
        return
    lacking = [name for name in metrics_of(c.recipe) if (METRICS[name].package or "torch") not in c.facts.packages]
    if lacking and c.facts.packages:
        packages = sorted({METRICS[name].package for name in lacking})
        what = f"the evaluation leaves {join_names(lacking)} out: {join_names(packages)} is not installed"
        yield warning(what, install(c.facts.executable, *packages))


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


def tensor_core_advice(context: Context) -> Iterator[Diagnostic]:
    """Sizes that leave tensor cores idle, where the built-in trainer computes on them."""
    used = "tf32" if context.dtype == "fp32" and context.recipe.precision.tf32 else context.dtype
    if used not in MULTIPLES or not context.cards:
        return
    # All ranks wait for a GPU without tensor cores for the format, and no size makes it faster.
    if any(gpu.compute_capability < FIRST[used] or not has_tensor_cores(gpu) for gpu in context.cards):
        return
    # The most demanding GPU decides: all ranks wait for each other.
    card = max(context.cards, key=lambda gpu: _multiple(used, gpu))
    # The feed-forward width of `gpt` is 4 hidden sizes, and fits if one does.
    sizes = dict(_settings(context, SIDES))
    length = getattr(context.recipe.data, "sequence_length", 1)
    if context.batch.micro and not context.batch.search and length != "auto":  # which is a multiple of 64
        key = f"batch.micro {context.batch.micro} of {length} tokens:"
        sizes = {key: context.batch.micro * length, **sizes}
    multiple = _multiple(used, card)
    missed = [f"{key} {size} (next {_up(size, multiple)})" for key, size in sizes.items() if size % multiple]
    missed += _heads(context, MULTIPLES[used][0])
    if missed:
        what = f"{card.name} multiplies {used} fastest in multiples of {multiple}; not so: {', '.join(missed)}"
        yield warning(what, f"use sizes that fit, which are faster at the same cost: {REQUIREMENTS}")
    wasteful = [f"{key} {size}" for key, size in sizes.items() if size > TILE and 1 - size / _up(size, TILE) > WASTE]
    if wasteful:
        what = (
            f"products are cut into tiles of {TILE}, of which a quarter or more stays idle with {', '.join(wasteful)}"
        )
        yield note(what, f"use a multiple of {TILE}, which costs no more time: {QUANTIZATION}")


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


def one_copy(c: Context) -> Iterator[Diagnostic]:
    """Hybrid sharding where there is one node, as in a recipe for several."""
    asked = c.recipe.strategy
    if isinstance(asked, Fsdp) and asked.sharding in HYBRID and asked.replicate == c.topology.nodes == 1:
        plain = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}[asked.sharding]
        what = f"strategy.sharding: {asked.sharding} keeps one copy of the model on one node, as {plain} does"
        yield note(what, "set strategy.replicate for copies inside a node")


def parts_of_matrices_on_several_nodes(c: Context) -> Iterator[Diagnostic]:
    """They exchange sums in each layer, which is for the links inside a node."""
    if _tensor(c) > 1 and c.processes % _tensor(c):
        processes = pluralize(c.processes, "process", "es")
        what = f"the {_tensor(c)} parts of each matrix are spread over nodes of {processes}"
        yield warning(what, "set strategy.tensor to a number that divides nodes.processes_per_node")


RULES: tuple[PlanRule, ...] = (
    slow_format,
    one_copy,
    parts_of_matrices_on_several_nodes,
    rounded_updates,
    flash_attention_needs_ampere,
    resumed_runs_round_otherwise,
    idle_optimizer_settings,
    optimizer_remarks,
    compile_remarks,
    eight_bit_layers_keep_inputs,
    masks_keep_flash_away,
    streams,
    architecture_notices,
    tokenizer_notices,
    tensor_core_advice,
    loader_processes_share_cores,
    metrics_that_are_not_installed,
)
