"""Weights in 4 or 8 bits: what they do not go with, and what they do less than it seems (bitsandbytes 0.50)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from trainkit.errors import Diagnostic
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import BatchArithmetic, Notice, Topology
from trainkit.launch_plan.support import SHARED, Amount, Combination, Refusal
from trainkit.lora import NO_LORA, SAME, differing
from trainkit.machine.facts import Gpu
from trainkit.optimizers import ON_DEEPSPEED, OPTIMIZERS, ZERO, Unsupported
from trainkit.planner.compile_backends import records_graphs
from trainkit.planner.placement import Placement, kind_of_cards
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe, StrategyKind
from trainkit.recipe.schema.model import quantized_bits
from trainkit.text import counted
from trainkit.tools.registry import LAUNCHERS

QUANTIZED = ("4", "8")
QUANTIZED_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "adapters": ("none",)},
        "model.quantize",
        "quantised weights have no gradient and cannot train: adapters beside them do",
        "peft.kind: lora, or leave model.quantize out",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": ("8",), "strategy": ("fsdp", "zero3")},
        "strategy.kind",
        "an 8-bit layer of bitsandbytes keeps its weights and their scales whole beside the parameter that is sharded",
        "model.quantize.bits: 4, or strategy.kind: ddp",
    ),
    Refusal(
        # peft 0.21, utils/integrations.py: dequantize_module_weight
        {"program": ("builtin",), "quantized": ("8",), "adapters": ("dora",), "device": ("cpu",)},
        "peft.dora",
        "on a CPU peft loses the scales of 8-bit layers while it computes DoRA's norms",
        "model.quantize.bits: 4, or peft.dora: false",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "device": ("mps",)},
        "model.quantize",
        "bitsandbytes brings no kernels of its own for MPS: it imitates them, or loads some from the Hub while it runs",
        "leave model.quantize out, or devices.type: cpu",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "weights": ("bf16",)},
        "precision.weights",
        "quantised weights have their own format, and what is not quantised (adapters, embeddings, norms, the output "
        "layer) is kept in fp32 beside them",
        "precision.weights: fp32",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": ("4",), "eval_dtype": ("other",)},
        "precision.eval",
        "4-bit layers compute in one format, precision.dtype, for training and evaluation alike",
        "precision.eval: same",
    ),
    Refusal(
        {"program": ("builtin",), "quantized": QUANTIZED, "recompute": ("selective",)},
        "efficiency.gradient_checkpointing.selective",
        "products with quantised weights are operators of bitsandbytes', which would be done again all the same",
        "efficiency.gradient_checkpointing.selective: false",
    ),
)


def kept_inputs(context: Context) -> Iterator[Notice]:
    """A warning where recomputing spares less than it seems to: what an autograd node holds itself stays."""
    recipe = context.recipe
    if (
        recipe.program.kind == "builtin"
        and quantized_bits(recipe) == 8
        and recipe.efficiency.gradient_checkpointing.every
    ):
        what = (
            "8-bit layers of bitsandbytes keep their inputs by themselves until backward, also in blocks that are "
            "recomputed: efficiency.gradient_checkpointing spares the other activations alone"
        )
        yield Notice("warning", what, "set model.quantize.bits to 4, whose layers keep no input")


def chat_problems(resolved: Resolved) -> Iterator[Diagnostic]:
    """An error where the recipe's data are chats, and its tokenizer is known to have no template."""
    data = resolved.recipe.data
    if getattr(data, "messages_field", None) and resolved.described.chats is False:
        what = f"data.messages_field: the tokenizer {getattr(data, 'tokenizer', '')} has no chat template"
        hint = "name the tokenizer of a chat model, or put a template beside its files, as chat_template.jinja"
        yield resolved.error("data.messages_field", what, hint, why="it says how a chat is written as one text")


def adapter_problems(resolved: Resolved) -> Iterator[Diagnostic]:
    """An error where the folder of adapters is known to be none, or to hold others."""
    asked, found = resolved.recipe.peft, resolved.described
    if found.misfit is not None:
        what, hint = found.misfit
        yield resolved.error("peft.path", f"peft.path: {what}", hint)
    elif found.adapters and found.adapters.get("peft_type") != "LORA":
        yield resolved.error("peft.path", f"peft.path: what lies in {asked.path} are no LoRA adapters", NO_LORA)
    elif found.adapters:
        own = {"r": asked.rank, "lora_alpha": asked.alpha, "use_rslora": asked.rslora, "use_dora": asked.dora}
        if others := differing(found.adapters, own):
            what = f"peft.path: the adapters in {asked.path} are others than the recipe's: {'; '.join(others)}"
            yield resolved.error("peft.path", what, SAME)


XLA = ("xla",)
WITHOUT_GRAPHS = (
    "efficiency.compile.backend: inductor with mode: default, or max-autotune-no-cudagraphs, which record no graphs"
)


def _optimizer(name: str, found: Unsupported) -> Refusal:
    when: dict[str, tuple[str, ...]] = {"program": found.programs, "optimizer": (name,)}
    when |= {"strategy": found.strategies} if found.strategies else {}
    when |= {"device": found.devices} if found.devices else {}
    return Refusal(when, "optimizer.name", found.reason, found.instead)


REFUSALS: tuple[Refusal, ...] = (
    # Which strategies and programs can run on which devices, and with how many processes.
    Refusal(
        {"program": ("deepspeed",), "strategy": ("fsdp",)},
        "strategy.kind",
        "a program on DeepSpeed's engine trains with ZeRO, or with what its own code configures",
        "strategy.kind: zero3, which shards too; ddp or single for a script that configures the engine in its code",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("zero0",)},
        "strategy.kind",
        "without partitioning, DeepSpeed's engine is plain data parallelism, which the built-in trainer has by itself",
        "strategy.kind: ddp, or name a program of your own",
    ),
    Refusal(
        {"strategy": ("single",), "ranks": ("several",)},
        "strategy.kind",
        "`single` is one process on one device: several would train separate copies that never talk to one another",
        "strategy.kind: ddp for several processes, or nodes.processes_per_node: 1",
    ),
    Refusal(
        {"device": ("mps",), "ranks": ("several",)},
        "nodes.processes_per_node",
        "MPS takes one process: neither gloo nor nccl can exchange its tensors",
        "nodes.processes_per_node: 1 with strategy.kind: single, or devices.type: cpu",
    ),
    Refusal(
        {"device": ("mps",), "strategy": SHARED},
        "strategy.kind",
        "this strategy needs a process group, and neither gloo nor nccl can exchange MPS tensors",
        "strategy.kind: single, or devices.type: cpu",
    ),
    Refusal(
        # CUDA shows a process one MIG device, the first that it is given (NVIDIA MIG user guide).
        {"cards": ("mig",), "ranks": ("several",)},
        "devices.select",
        "NCCL takes two parts of a card for one device, and a process sees only the first part that it is shown",
        "one part with nodes.processes_per_node: 1, or whole cards",
    ),
    Refusal(
        {"cards": ("mig",), "seen": ("several",)},
        "devices.select",
        "a process sees only the first part of a card that it is shown",
        "one part, or whole cards",
    ),
    # Where one process sees several cards.
    Refusal(
        {"launcher": ("deepspeed",), "seen": ("several",)},
        "devices.select",
        "the deepspeed launcher starts a process for each card that it is given",
        "as many cards as nodes.processes_per_node, or launcher.kind: torchrun",
    ),
    Refusal(
        {"program": ("hf",), "launcher": ("python",), "seen": ("several",), "total": ("given",)},
        "batch.global",
        "in one process that sees several cards Trainer multiplies the batch by their number, unless the script has "
        "laid the model over them (device_map): the sum cannot be promised",
        "batch.micro and batch.accumulation instead, strategy.kind: ddp, or devices.select: 1",
    ),
    Refusal(
        {"cards": ("mig",), "strategy": ON_DEEPSPEED},
        "strategy.kind",
        "DeepSpeed reads CUDA_VISIBLE_DEVICES as numbers, and parts of a card have none",
        "strategy.kind: single",
    ),
    # A TPU runs through torch_xla, as one process of the user's own script.
    Refusal(
        {"device": XLA, "program": ("builtin",)},
        "devices.type",
        "the built-in trainer computes on CUDA, MPS and CPU",
        "program.kind: hf with a script on transformers' Trainer, or kind accelerate or torch",
    ),
    Refusal(
        {"device": XLA, "program": ("deepspeed",)},
        "devices.type",
        "DeepSpeed does not run through torch_xla",
        "program.kind: hf with strategy.kind: fsdp, which shards over the chips",
    ),
    Refusal(
        {"device": XLA, "ranks": ("several",)},
        "nodes.processes_per_node",
        "torch_xla makes the processes of a TPU itself, inside the script's interpreter (xmp.spawn), so no launcher "
        "can give each its rank",
        "nodes.count: 1 and nodes.processes_per_node: 1, with strategy.kind: fsdp for every chip of the machine; a "
        "script of kind torch that calls xmp.spawn itself is one process too, with strategy.kind: single",
    ),
    Refusal(
        {"device": XLA, "strategy": ("ddp", *ON_DEEPSPEED)},
        "strategy.kind",
        "this strategy is a process for each chip, and a run on XLA is one process",
        "strategy.kind: fsdp with program.kind: hf, or single for one chip",
    ),
    Refusal(
        {"device": XLA, "strategy": ("fsdp",), "program": ("accelerate",)},
        "strategy.kind",
        "under XLA accelerate takes its FSDP settings and silently shards nothing",
        "strategy.kind: single, or program.kind: hf, whose Trainer shards with torch_xla",
    ),
    Refusal(
        {"device": XLA, "program": ("hf", "accelerate"), "dtype": ("fp16",)},
        "precision.dtype",
        "accelerate ends with an error at fp16 on a TPU",
        "precision.dtype: bf16 or fp32",
    ),
    Refusal(
        {"device": ("cpu", "cuda", "mps"), "xla_settings": ("given",)},
        "strategy.xla_settings",
        "only torch_xla's FSDP has these settings",
        "devices.type: xla with strategy.version: 1, or leave strategy.xla_settings out",
    ),
    # Where the largest micro batch cannot be looked for.
    Refusal(
        {"program": ("torch", "hf", "accelerate", "deepspeed"), "micro": ("searched",)},
        "batch.micro",
        "only the built-in trainer looks for the largest micro batch that fits",
        "batch.micro: a number, or left out",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "strategy": ZERO},
        "batch.micro",
        "DeepSpeed reads the micro batch from its file, which is written before anything is tried",
        "batch.micro: a number, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "strategy": ("fsdp",)},
        "batch.micro",
        "a rank that runs out of memory between two gathers of weights would leave the others waiting for it",
        "batch.micro: a number, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "compiled": ("auto", "model", "blocks")},
        "batch.micro",
        "each size that is tried would be compiled again, and what is compiled after several sizes is not what one "
        "size gives",
        "batch.micro: a number, or efficiency.compile: false",
    ),
    Refusal(
        {"program": ("builtin",), "micro": ("searched",), "device": ("mps",)},
        "batch.micro",
        "MPS does not tell the peak of the memory that was used",
        "batch.micro: a number, or devices.type: cpu",
    ),
    # What models, their attention and adapters do not go with.
    Refusal(
        {"program": ("builtin",), "adapters": ("lora", "dora"), "swapping": ("nvme",)},
        "strategy.nvme_path",
        "DeepSpeed swaps what trains, which with adapters is next to nothing, and checkpoints of such a run would not "
        "hold the frozen weights",
        "strategy.offload_optimizer: none with strategy.offload_param: cpu, or peft.kind: none",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp", "zero3"), "adapters": ("dora",)},
        "peft.dora",
        "DoRA takes the norms of whole weights, and this strategy shards them",
        "peft.dora: false, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("target",), "attention": ("sdpa", "eager", "flash_attention_2")},
        "efficiency.attention",
        "the attention of a model of your own is the model's own",
        "efficiency.attention: auto, and an argument of the model in model.args",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("gpt",), "attention": ("flash_attention_2",)},
        "efficiency.attention",
        "the native model has sdpa, which takes the flash kernel by itself, and eager",
        "efficiency.attention: sdpa, or model.kind: hf",
    ),
    Refusal(
        # https://github.com/Dao-AILab/flash-attention: fp16 and bf16, on CUDA and ROCm
        {"program": ("builtin",), "model": ("hf",), "attention": ("flash_attention_2",), "dtype": ("fp32",)},
        "efficiency.attention",
        "FlashAttention-2 computes in 16 bits only",
        "precision.dtype: bf16, or efficiency.attention: sdpa",
    ),
    Refusal(
        {
            "program": ("builtin",),
            "model": ("hf",),
            "attention": ("flash_attention_2",),
            "dtype": ("bf16", "fp16"),
            "evaluates": ("fp32",),
        },
        "precision.eval",
        "FlashAttention-2 computes in 16 bits only, and evaluation is to be in fp32",
        "precision.eval: same, or efficiency.attention: sdpa",
    ),
    Refusal(
        {"program": ("builtin",), "model": ("hf",), "attention": ("flash_attention_2",), "device": ("cpu", "mps")},
        "efficiency.attention",
        "FlashAttention-2 runs on CUDA only",
        "efficiency.attention: sdpa",
    ),
    *QUANTIZED_REFUSALS,
    # Which number formats a strategy or a device does not take.
    Refusal(
        # accelerator/cpu_accelerator.py: is_fp16_supported
        {"strategy": ON_DEEPSPEED, "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "DeepSpeed trains fp16 on a CPU only where oneDNN has fp16 kernels for it",
        "precision.dtype: bf16 or fp32",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp", *ZERO), "eval_dtype": ("other",)},
        "precision.eval",
        "this strategy casts the weights once, to precision.dtype, for training and evaluation alike",
        "precision.eval: same, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("builtin",), "weights": ("bf16",), "dtype": ("fp32", "fp16")},
        "precision.weights",
        "weights that are kept in bf16 are computed with in bf16",
        "precision.dtype: bf16, or precision.weights: fp32",
    ),
    Refusal(
        {"program": ("builtin",), "weights": ("bf16",), "eval_dtype": ("other",)},
        "precision.eval",
        "weights that are kept in bf16 are evaluated in bf16",
        "precision.eval: same",
    ),
    Refusal(
        {"program": ("builtin",), "weights": ("bf16",), "strategy": ZERO},
        "precision.weights",
        "DeepSpeed keeps an fp32 copy of the weights with the optimizer, so nothing would be saved",
        "strategy.kind: fsdp, or precision.weights: fp32",
    ),
    # Where recomputing, compiling and saving in the background do not work.
    Refusal(
        {"program": ("builtin",), "strategy": ZERO, "saving": ("asynchronous",)},
        "checkpoint.asynchronous",
        "DeepSpeed writes its own files from the tensors that it trains, so training must wait",
        "checkpoint.asynchronous: false, or strategy.kind: fsdp",
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("fsdp", "zero3"), "compiled": ("model",)},
        "efficiency.compile.scope",
        "this strategy gathers the weights of each block in hooks around it, where a graph of the whole model breaks",
        "efficiency.compile.scope: blocks",
    ),
    Refusal(
        # https://github.com/pytorch/pytorch/issues/169545 ends with an error, issues/96693 with a wrong sum
        {"program": ("builtin",), "graphs": ("recorded",), "passes": ("several",)},
        "efficiency.compile",
        "a CUDA graph writes its gradients to the same places in each pass, over those that are being accumulated",
        f"{WITHOUT_GRAPHS}, or batch.accumulation: 1",
    ),
    Refusal(
        {"program": ("builtin",), "graphs": ("recorded",), "strategy": ("fsdp", "zero3")},
        "efficiency.compile",
        "a CUDA graph reads the weights from where they were when it was recorded, and this strategy gathers them "
        "anew for each use",
        WITHOUT_GRAPHS,
    ),
    Refusal(
        {"program": ("builtin",), "strategy": ("zero3",), "recompute": ("selective",)},
        "efficiency.gradient_checkpointing.selective",
        "under ZeRO-3 DeepSpeed's linear layers add their bias onto the product that was to be kept: gradients come "
        "out wrong",
        "efficiency.gradient_checkpointing.selective: false, or strategy.kind: fsdp",
    ),
    # What transformers' Trainer and scripts on `Accelerator()` would silently do otherwise than asked.
    Refusal(
        {"program": ("hf",), "strategy": ("fsdp",), "device": ("cpu",)},
        "strategy.kind",
        "on a CPU Trainer takes --fsdp and silently trains with DDP",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    Refusal(
        {"program": ("hf",), "strategy": ("single", "ddp", "fsdp"), "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "on a CPU Trainer takes --fp16 and silently computes in fp32",
        "precision.dtype: bf16 or fp32",
    ),
    Refusal(
        {"program": ("hf",), "strategy": ON_DEEPSPEED, "eval_dtype": ("other",)},
        "precision.eval",
        "DeepSpeed has one format for training and evaluation",
        "precision.eval: same",
    ),
    Refusal(
        {"program": ("accelerate",), "strategy": ("fsdp",), "device": ("cpu",)},
        "strategy.kind",
        "on a CPU accelerate silently trains with DDP, or with copies that never talk to one another",
        "strategy.kind: ddp, or zero3, which shards on a CPU too",
    ),
    Refusal(
        {"program": ("accelerate",), "strategy": ("single", "ddp"), "device": ("cpu",), "dtype": ("fp16",)},
        "precision.dtype",
        "on a CPU accelerate takes fp16 and silently computes in fp32",
        "precision.dtype: bf16 or fp32",
    ),
    # Which optimizers a strategy or a device cannot run.
    *(_optimizer(name, found) for name, each in OPTIMIZERS.items() for found in each.unsupported),
)


STRATEGIES: tuple[str, ...] = get_args(StrategyKind)
OF_BUILTIN = tuple(each for each in STRATEGIES if each != "zero0")  # the others are for programs of the user's own
DEVICES = ("cpu", "cuda", "mps")  # of the built-in trainer


def refusals(combination: Combination) -> tuple[Refusal, ...]:
    """Every refusal that a combination meets, those of its launcher included; none means that it can run."""
    rows = (*REFUSALS, *LAUNCHERS[combination.launcher].UNSUPPORTED)
    return tuple(refusal for refusal in rows if refusal.matches(combination))


def unsupported(
    resolved: Resolved, placement: Placement, launcher: str, dtype: str, batch: BatchArithmetic | None
) -> list[Diagnostic]:
    """An error for each reason why the recipe's choices cannot run together. batch: None where it has no solution."""
    topology = placement.topology
    passes: Amount = "several" if batch and (batch.accumulation or 1) > 1 else "one"
    combination = replace(_combination(resolved.recipe, topology, placement.cards, launcher, dtype), passes=passes)
    ranks = counted(topology.world_size, "process", "es")
    what = f"strategy {combination.strategy} with launcher {launcher}, {ranks} on {topology.device}, {dtype}"
    return [
        resolved.error(
            refusal.key,
            f"unsupported combination: {what}",
            f"closest supported choice: {refusal.instead}",
            why=refusal.reason,
        )
        for refusal in refusals(combination)
    ]


def _combination(recipe: Recipe, topology: Topology, cards: Sequence[Gpu], launcher: str, dtype: str) -> Combination:
    """What the table of refusals is asked about."""
    indices = [gpu.index for gpu in cards]
    return Combination(
        strategy=recipe.strategy.kind,
        launcher=launcher,
        program=recipe.program.kind,
        device=topology.device,
        ranks="one" if topology.world_size == 1 else "several",
        nodes="one" if topology.nodes == 1 else "several",
        dtype=dtype,
        eval_dtype="same" if recipe.precision.eval in ("same", dtype) else "other",
        evaluates=dtype if recipe.precision.eval == "same" else recipe.precision.eval,
        recompute="selective" if recipe.efficiency.gradient_checkpointing.selective else "whole",
        restarts="yes" if recipe.launcher.max_restarts else "no",
        order="ascending" if indices == sorted(indices) else "other",
        cards=kind_of_cards(cards),
        seen="one" if len(topology.groups[0].devices) == topology.groups[0].processes else "several",
        total="open" if recipe.batch.global_ == "auto" else "given",
        saving="asynchronous" if recipe.checkpoint.asynchronous else "waited for",
        optimizer=recipe.optimizer.name,
        weights=recipe.precision.weights,
        compiled=recipe.efficiency.compile.scope if recipe.efficiency.compile.enabled else "no",
        graphs="recorded" if topology.device == "cuda" and records_graphs(recipe.efficiency.compile) else "none",
        adapters="dora" if recipe.peft.dora else recipe.peft.kind,
        quantized=str(quantized_bits(recipe)),
        swapping="nvme" if getattr(recipe.strategy, "nvme_path", None) else "no",
        attention=recipe.efficiency.attention,
        model=recipe.model.kind,
        # with `accumulation` given, `micro: auto` follows from the triangle
        micro="searched" if recipe.batch.micro == recipe.batch.accumulation == "auto" else "given",
        xla_settings="given" if getattr(recipe.strategy, "xla_settings", None) else "none",
    )


def table_cells() -> dict[tuple[str, str], dict[str, str]]:
    """The table for people: by strategy and launcher what the built-in trainer can do on each device of one node."""
    answers = {(): "no", ("one",): "one process", ("several",): "several processes", ("one", "several"): "yes"}
    amounts: tuple[Amount, ...] = get_args(Amount)

    def cell(strategy: str, launcher: str, device: str) -> str:
        asked = {amount: Combination(strategy, launcher, "builtin", device, amount) for amount in amounts}
        return answers[tuple(amount for amount, combination in asked.items() if not refusals(combination))]

    return {
        (strategy, launcher): {device: cell(strategy, launcher, device) for device in DEVICES}
        for strategy in OF_BUILTIN
        for launcher in LAUNCHERS
    }
