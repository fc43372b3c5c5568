"""What strategies, their settings and the saving of what they spread do to speed and memory."""

from __future__ import annotations

from trainkit.planner.techniques.technique import Technique, has

ROWS: tuple[Technique, ...] = (
    Technique(
        "strategy.kind: ddp",
        "each rank computes its share of the batch; gradients are summed once a step",
        "a whole copy of everything on each rank",
        "the model with its optimizer state fits on one card",
    ),
    Technique(
        "strategy.kind: fsdp",
        "weights are gathered before each use, beside the computation",
        "weights, gradients and optimizer state divided by the ranks",
        "the model with its optimizer state does not fit on one card",
        flag='--fsdp "full_shard auto_wrap"',
    ),
    Technique(
        "strategy.kind: zero1",
        "as ddp, and the update is shared",
        "optimizer state divided by the ranks",
        "the optimizer state is what does not fit",
        flag="--deepspeed FILE",
    ),
    Technique(
        "strategy.kind: zero2",
        "gradients are reduced in each micro step",
        "optimizer state and gradients divided by the ranks",
        "gradients do not fit besides",
        flag="--deepspeed FILE",
    ),
    Technique(
        "strategy.kind: zero3",
        "weights are gathered before each use",
        "weights, gradients and optimizer state divided by the ranks",
        "weights do not fit either, or are to live on the CPU or on NVMe",
        flag="--deepspeed FILE",
    ),
    Technique(
        "strategy.sharding: shard_grad_op",
        "weights are gathered once a pass and not again in backward",
        "all weights whole between forward and backward",
        "weights fit, gradients and optimizer state do not",
        flag='--fsdp "shard_grad_op"',
    ),
    Technique(
        "strategy.auto_wrap: none",
        "slower: all weights are gathered at once, before anything is computed",
        "all weights whole while a pass lasts",
        "the model has no list of blocks",
        flag="--fsdp full_shard",
    ),
    Technique(
        "strategy.prefetch: n",
        "waits less for slow connections: n units are on their way at a time",
        "n whole units besides the one that computes",
        "the profile shows waiting for all-gather",
        in_force=lambda context: getattr(context.recipe.strategy, "prefetch", 1) > 1,
    ),
    Technique(
        "strategy.reduce_dtype: same",
        "half the traffic of gradients in 16 bits",
        "half the gradients while they are reduced",
        "connections are slow, and losses stay as they are in a trial run",
        in_force=lambda context: context.dtype != "fp32" and has("strategy.reduce_dtype", "same")(context),
    ),
    Technique(
        "strategy.offload: true",
        "slower: shards travel over the bus in each step",
        "weights, gradients and optimizer state leave the card",
        "shards on all cards do not fit",
        flag='--fsdp "full_shard offload"',
        device="cuda",
    ),
    Technique(
        "strategy.offload_optimizer: cpu",
        "slower: the update is done on the CPU",
        "optimizer state leaves the card",
        "the optimizer state does not fit on all cards",
        flag="--deepspeed FILE",
        device="cuda",
    ),
    Technique(
        "strategy.offload_optimizer: nvme",
        "slower still: the state is read from files and written back in each update",
        "of the optimizer state, only some buffers are in memory",
        "the optimizer state does not fit in main memory either",
        flag="--deepspeed FILE",
    ),
    Technique(
        "strategy.offload_param: cpu",
        "slowest: weights travel to the card for each use",
        "weights leave the card between uses",
        "one layer after another is all that fits",
        flag="--deepspeed FILE",
        device="cuda",
    ),
    Technique(
        "strategy.offload_param: nvme",
        "slowest of all: weights are read from files for each use",
        "matrices of a mebibyte and more are in memory only while they are used",
        "the weights do not fit in main memory either",
        flag="--deepspeed FILE",
    ),
    Technique(
        "checkpoint.asynchronous: true",
        "a checkpoint holds training up for a copy, not for the disk",
        "a copy of this rank's weights and optimizer state in host memory while it is written",
        "checkpoints are large or the disk is slow; not with ZeRO",
    ),
)
