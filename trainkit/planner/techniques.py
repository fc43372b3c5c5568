"""The techniques of the guides: how a recipe asks for each, what it does, and which of them a plan has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainkit.data.formats import packing_of
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import TechniqueInForce
from trainkit.optimizers import OPTIMIZERS, optimizer
from trainkit.recipe.grid import grid_sizes
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.schema.model import quantized_bits

# A plan has a line for its strategy and its optimizer whatever they are, so no row of theirs adds another.
LISTED_ANYWAY = ("strategy.kind", "optimizer.name")


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique.

    choice: how a recipe asks for it, from the key on. when: to use it. other_flag: how a command line asks for it,
    where that is not the flag of the key. device: the only one on which it does anything. also: another value that
    means it. in_force: whether a plan has it, where the choice alone does not tell. A key may have several rows.
    """

    choice: str
    speed: str
    memory: str
    when: str
    other_flag: str = ""
    device: str = ""
    also: str = ""
    in_force: Callable[[Context], bool] | None = None

    @property
    def key(self) -> str:
        return self.choice.partition(":")[0]

    @property
    def flag(self) -> str:
        """How a command line asks for it; empty where it has no way."""
        setting, value = schema().settings[self.key][0], self.choice.partition(": ")[2]
        if value.startswith("zero") or setting.variant.startswith("zero"):
            return "--deepspeed FILE"
        own = f"--{setting.flag}{'' if value == 'true' else f' {value}'}" if setting.flag else ""
        return self.other_flag or own

    def is_in_force(self, context: Context) -> bool:
        key, _, asked = self.choice.partition(": ")
        if key in LISTED_ANYWAY or self.device not in ("", context.topology.device):
            return False
        if key.startswith("efficiency.compile.") and not context.recipe.efficiency.compile.enabled:
            return False
        if self.in_force:
            return self.in_force(context)
        chosen = value_of(context, key)
        return bool(chosen) if asked in ("true", "n") else chosen in (asked, self.also or asked)


def packing(context: Context) -> str:
    """How the recipe's rows fill samples; empty where it has none."""
    if context.recipe.program.kind != "builtin" or context.recipe.data.kind != "dataset":
        return ""
    return packing_of(context.recipe, context.model_type)


def value_of(context: Context, key: str) -> object:
    """The value at a dotted key, the plan's own where the recipe leaves it open; None for no such setting."""
    found: object = context.recipe
    for name in key.split("."):
        found = getattr(found, name, None)
    if key == "data.packing":
        return packing(context)
    return {"batch.accumulation": context.batch.accumulation, "precision.dtype": context.dtype}.get(key, found)


TECHNIQUES: tuple[Technique, ...] = (
    # The computation on one device.
    Technique(
        "batch.micro: auto",
        "the largest products that fit; some seconds of trial steps at the first start",
        "fills what is free, or batch.memory_mib",
        "the global batch is fixed and you do not know the GPU's limit",
        in_force=lambda context: bool(context.batch.search),
    ),
    Technique(
        "batch.accumulation: n",
        "slower than the same batch at once: smaller products, a little more work",
        "activations of one micro batch instead of the whole",
        "the wanted batch does not fit; fill the GPU with the micro batch first",
        in_force=lambda context: (context.batch.accumulation or 1) > 1 and not context.batch.search,
    ),
    Technique(
        "efficiency.gradient_checkpointing.every: true",
        "about a quarter more time: the forward pass is done twice",
        "activations of one block instead of all",
        "activations are what does not fit",
        other_flag="--gradient_checkpointing",
    ),
    Technique(
        "efficiency.gradient_checkpointing.selective: true",
        "less of the extra time: matrix products are not done twice",
        "more than with whole blocks, less than without",
        "whole blocks cost too much time",
    ),
    Technique(
        "efficiency.offload_activations: true",
        "waits where the bus is slower than the computation; copies run beside it",
        "activations of some operators instead of all; the rest in the machine's memory",
        "activations do not fit, and the bus is quick; with gradient checkpointing it moves the blocks' inputs alone",
        device="cuda",
    ),
    Technique(
        "precision.dtype: bf16",
        "faster where the GPU has units for it (Ampere and later)",
        "half the activations; a 16-bit copy of the weights besides",
        "the GPU has it; it needs no loss scaling",
        other_flag="--bf16",
    ),
    Technique(
        "precision.dtype: fp16",
        "faster on GPUs with tensor cores (Volta and later)",
        "half the activations; a 16-bit copy of the weights besides",
        "the GPU has no bf16; losses may overflow at 65504, and such steps are skipped",
        other_flag="--fp16",
    ),
    Technique(
        "precision.weights: bf16",
        "no copies between formats, and half the traffic between ranks",
        "2 bytes per parameter each for weights, gradients and both moments",
        "weights and state do not fit; with adamw_anyprecision, which keeps what rounding would lose",
    ),
    Technique(
        "precision.tf32: true",
        "fp32 matrix products on tensor cores, up to 3 times as fast",
        "none",
        "Ampere and later, beside any format; products have 10 bits of mantissa",
        device="cuda",
    ),
    Technique(
        "precision.eval: bf16",
        "evaluation alone is faster",
        "none in training",
        "the weights are trained in fp32 and judged often",
        in_force=lambda context: context.dtype == "fp32" and context.recipe.precision.eval in ("bf16", "fp16"),
    ),
    *(
        Technique(f"optimizer.name: {name}", each.speed, each.state, each.when)
        for name, each in OPTIMIZERS.items()
        if each.when
    ),
    Technique(
        "efficiency.attention: sdpa",
        "one fused kernel",
        "no matrix of scores per head",
        "always; it is what auto means",
        also="auto",
    ),
    Technique(
        "efficiency.attention: flash_attention_2",
        "one fused kernel, which leaves padding out",
        "no matrix of scores per head",
        "models of transformers on CUDA, in 16 bits, with texts of uneven length",
    ),
    Technique(
        "efficiency.attention: eager",
        "slower: written out",
        "a score for each pair of places, per head",
        "to look inside",
    ),
    Technique(
        "efficiency.compile.enabled: true",
        "faster steps after a first one of seconds to minutes",
        "fused operations keep fewer activations",
        "runs long enough to pay for the first step",
    ),
    Technique(
        "efficiency.compile.scope: model",
        "a first step that is longer the deeper the model is; fuses across blocks, and compiles embeddings and head",
        "as block by block",
        "the model is shallow; not with fsdp or zero3",
    ),
    Technique(
        "efficiency.compile.mode: reduce-overhead",
        "no time between kernels: CUDA graphs start them all at once",
        "what the graphs work in stays taken",
        "steps are short, with small models or batches; not with accumulation, fsdp or zero3",
    ),
    Technique(
        "efficiency.compile.mode: max-autotune",
        "faster kernels, chosen by trial in a first step of minutes",
        "copies of the inputs where CUDA graphs are recorded",
        "runs of hours on one kind of GPU; as max-autotune-no-cudagraphs with accumulation, fsdp or zero3",
        also="max-autotune-no-cudagraphs",
    ),
    Technique(
        "peft.kind: lora",
        "a little faster: frozen weights need no gradient; adapters are extra products",
        "gradients and optimizer state of the adapters alone",
        "a trained model is to learn something more",
    ),
    Technique(
        "peft.dora: true",
        "slower than LoRA: the norms of whole weights are computed again in each pass",
        "a vector, and for a moment a copy, of each adapted matrix",
        "LoRA of the same rank learns too little",
    ),
    Technique(
        "model.quantize.bits: 4",
        "slower: weights are unpacked for each product",
        "some 0.52 bytes per weight of the blocks, in place of 4; embeddings and the output layer stay whole",
        "LoRA on a GPU that the weights do not fit on in 16 bits (QLoRA), under any strategy",
        in_force=lambda context: quantized_bits(context.recipe) == 4,
    ),
    Technique(
        "model.quantize.bits: 8",
        "slower: weights and activations are quantised for each product",
        "one byte per weight of the blocks, in place of 4",
        "LoRA where 4 bits lose too much (LLM.int8()); not with fsdp or zero3",
        in_force=lambda context: quantized_bits(context.recipe) == 8,
    ),
    Technique(
        "model.moe.experts: n",
        "the work of top_k feed-forward layers, and of choosing them",
        "weights, gradients and optimizer state of all experts",
        "more weights are wanted than every token can afford",
    ),
    Technique(
        "train.deterministic: true",
        "slower: no kernel that adds in any order, no search for the fastest one",
        "some MiB of cuBLAS workspace",
        "two runs are to be compared bit by bit; on the same machine and versions only",
    ),
    Technique(
        "profile.steps: n",
        "the watched steps are slower, the others as they are",
        "records of the watched steps' operators in the memory of rank 0",
        "you want to know what to make faster",
        other_flag="--profile n",
    ),
    Technique(
        "data.workers: n",
        "batches are made while the device computes",
        "a process of host memory for each worker",
        "steps wait for data",
    ),
    Technique(
        "data.prefetch_factor: n",
        "evens out batches that take uneven time",
        "n optimizer steps of samples for each worker, in host memory",
        "steps wait for data now and then, though workers are enough",
    ),
    Technique(
        "data.pin_memory: true",
        "copies to the GPU run beside the computation",
        "page-locked host memory",
        "always on CUDA",
        device="cuda",
    ),
    Technique(
        "data.packing: isolated",
        "hardly anything is computed for padding, and texts do not see one another",
        "hardly any activations of padding; a mask of data.sequence_length squared for each sample",
        "always for chats and other rows",
    ),
    Technique(
        "data.packing: dense",
        "nothing is computed for padding; attention covers earlier texts of a sample",
        "no activations of padding",
        "pretraining",
    ),
    Technique(
        "data.streaming: true",
        "starts at once; rows become tokens while the device computes, with data.packing in each process",
        "data.shuffle_buffer samples of each source instead of all tokens",
        "data is larger than memory, or takes long to read",
    ),
    # Strategies, their settings, and saving what they spread.
    Technique(
        "strategy.kind: ddp",
        "each rank computes its share of the batch; gradients are summed once a step",
        "a whole copy of everything on each rank",
        "the model with its optimizer state fits on one GPU",
    ),
    Technique(
        "strategy.kind: fsdp",
        "weights are gathered before each use, beside the computation",
        "weights, gradients and optimizer state divided by the ranks",
        "the model with its optimizer state does not fit on one GPU",
        other_flag='--fsdp "full_shard auto_wrap"',
    ),
    Technique(
        "strategy.kind: zero1",
        "as ddp, and the update is shared",
        "optimizer state divided by the ranks",
        "the optimizer state is what does not fit",
    ),
    Technique(
        "strategy.kind: zero2",
        "gradients are reduced in each micro step",
        "optimizer state and gradients divided by the ranks",
        "gradients do not fit besides",
    ),
    Technique(
        "strategy.kind: zero3",
        "weights are gathered before each use",
        "weights, gradients and optimizer state divided by the ranks",
        "weights do not fit either, or are to live on the CPU or on NVMe",
    ),
    Technique(
        "strategy.sharding: shard_grad_op",
        "weights are gathered once a pass and not again in backward",
        "all weights whole between forward and backward",
        "weights fit, gradients and optimizer state do not",
        other_flag='--fsdp "shard_grad_op"',
    ),
    Technique(
        "strategy.sharding: hybrid_shard",
        "weights are gathered inside a node alone; between copies only gradients are added up",
        "a copy of the model's shards on each node, in place of one over all",
        "the model fits on the GPUs of a node, and links between nodes are slow",
        also="hybrid_shard_zero2",
    ),
    Technique(
        "strategy.tensor: n",
        "waits for two sums over n ranks in each block, forward and backward; n GPUs compute one sample",
        "an n-th of the blocks' whole weights and of what is inside attention and feed-forward layers",
        "a block, or one sample's activations, are too large for a GPU; inside a node",
        in_force=lambda context: grid_sizes(context.recipe).tensor > 1,
    ),
    Technique(
        "strategy.context: n",
        "waits for keys and values of n ranks in each block, and for the rank of the last part, which sees all of them",
        "activations of an n-th of each sample; keys and values of all of it in one block at a time",
        "samples are too long for a GPU, with gradient checkpointing already",
        in_force=lambda context: grid_sizes(context.recipe).context > 1,
    ),
    Technique(
        "model.moe.parallel: n",
        "tokens go to the ranks of their experts and back, in place of the experts' weights",
        "an n-th of the experts' whole weights while a block computes",
        "experts are most of a model",
        in_force=lambda context: grid_sizes(context.recipe).experts > 1,
    ),
    Technique(
        "strategy.auto_wrap: none",
        "slower: all weights are gathered at once, before anything is computed",
        "all weights whole while a pass lasts",
        "the model has no list of blocks",
        other_flag="--fsdp full_shard",
    ),
    Technique(
        "strategy.prefetch: n",
        "waits less for slow connections: n units are on their way at a time",
        "n whole units besides the one that computes",
        "the profile shows waiting for all-gather",
        in_force=lambda context: getattr(context.recipe.strategy, "prefetch", 1) > 1,
    ),
    Technique(
        "strategy.reduce_gradients: once",
        "under accumulation gradients are sent once a step and not in each micro step",
        "whole fp32 gradients on each rank until then: 4 bytes per parameter",
        "fsdp with accumulation waits for reduce-scatter, and there is room",
        in_force=lambda context: (
            (context.batch.accumulation or 1) > 1 and value_of(context, "strategy.reduce_gradients") == "once"
        ),
    ),
    Technique(
        "strategy.reduce_dtype: same",
        "half the traffic of gradients in 16 bits",
        "half the gradients while they are reduced",
        "connections are slow, and losses stay as they are in a trial run",
        in_force=lambda context: context.dtype != "fp32" and value_of(context, "strategy.reduce_dtype") == "same",
    ),
    Technique(
        "strategy.offload: true",
        "slower: shards travel over the bus in each step",
        "weights, gradients and optimizer state leave the GPU",
        "shards on all GPUs do not fit",
        other_flag='--fsdp "full_shard offload"',
        device="cuda",
    ),
    Technique(
        "strategy.offload_optimizer: cpu",
        "slower: the update is done on the CPU",
        "optimizer state leaves the GPU",
        "the optimizer state does not fit on all GPUs",
        device="cuda",
    ),
    Technique(
        "strategy.offload_optimizer: nvme",
        "slower still: the state is read from files and written back in each update",
        "of the optimizer state, only some buffers are in memory",
        "the optimizer state does not fit in main memory either",
    ),
    Technique(
        "strategy.offload_param: cpu",
        "slowest: weights travel to the GPU for each use",
        "weights leave the GPU between uses",
        "one layer after another is all that fits",
        device="cuda",
    ),
    Technique(
        "strategy.offload_param: nvme",
        "slowest of all: weights are read from files for each use",
        "matrices of a mebibyte and more are in memory only while they are used",
        "the weights do not fit in main memory either",
    ),
    Technique(
        "checkpoint.asynchronous: true",
        "a checkpoint holds training up for a copy, not for the disk",
        "a copy of this rank's weights and optimizer state in host memory while it is written",
        "checkpoints are large or the disk is slow",
    ),
)


def techniques(context: Context) -> tuple[TechniqueInForce, ...]:
    """What the plan lists. A program of the user's own has none that are known of."""
    if context.program != "builtin":
        return ()
    kind = optimizer(context.recipe.optimizer.name)
    found = [TechniqueInForce("optimizer.name", context.recipe.optimizer.name, kind.speed, kind.state)]
    for row in TECHNIQUES:
        if row.is_in_force(context):
            key = row.key
            value = value_of(context, key)
            shown = str(value).lower() if isinstance(value, bool) else str(value)  # as a recipe writes it
            found.append(TechniqueInForce(key, shown, row.speed, row.memory))
    return tuple(found)
