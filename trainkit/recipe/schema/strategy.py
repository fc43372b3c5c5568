"""The strategy section: a tagged union on `kind`, one class per way to spread a model over ranks."""

from typing import Annotated, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Count, Section, setting
from trainkit.recipe.schema.launching import Scalar

StrategyKind = Literal["single", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]


class Single(Section):
    """One process, one device."""

    kind: Literal["single"] = setting("single", "One process, one device.")


class Ddp(Section):
    """Replicated model, gradients averaged (DistributedDataParallel)."""

    kind: Literal["ddp"] = setting("ddp", "A full replica on each rank; gradients are averaged.")
    bucket_mb: float = setting(25.0, "Size of a gradient bucket.", unit="MiB", gt=0)
    find_unused_parameters: bool = setting(
        False, "Search each step for parameters without a gradient; slower.", flag="ddp_find_unused_parameters"
    )
    reduce_dtype: Literal["fp32", "same"] = setting(
        "fp32",
        "Format in which the ranks' gradients are summed; `same` is that of the computation: with 16 bits half the "
        "traffic, and rounded sums.",
    )


class Fsdp(Section):
    """Sharded parameters, gradients and optimizer state (FSDP2, `fully_shard`)."""

    kind: Literal["fsdp"] = setting("fsdp", "Parameters, gradients and optimizer state sharded over ranks (FSDP2).")
    version: Literal[1, 2] = setting(
        2, "`2` is `fully_shard`, which the built-in trainer uses; `1` is the older wrapper, for your own scripts."
    )
    sharding: Literal["full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"] = setting(
        "full_shard",
        "`full_shard` frees gathered parameters after forward (ZeRO-3-like); "
        "`shard_grad_op` keeps them until backward. `hybrid_shard` and `hybrid_shard_zero2` do the same inside each "
        "node and keep copies on the others (own scripts: in version 1); `no_shard`, in version 1, shards nothing.",
    )
    replicate: Count | None = setting(
        None,
        "How many copies of the model `hybrid_shard` keeps, each sharded over its part of the ranks; null is one on "
        "each node.",
    )
    tensor: Count = setting(
        1,
        "Tensor parallelism: over how many neighbouring ranks, which compute the same samples, the matrices of each "
        "block are divided; the rest of the ranks shard what each has. For gpt, and models of transformers that "
        "bring a plan for it.",
    )
    context: Count = setting(
        1,
        "Context parallelism: into how many parts each sample is divided, one on each of as many neighbouring ranks. "
        "They gather keys and values for attention. For gpt, and models of transformers whose attention has no window.",
    )
    offload: bool = setting(False, "Keep shards in CPU memory; slower, frees device memory.")
    auto_wrap: Literal["transformer", "size", "none"] = setting(
        "transformer",
        "Which modules are sharded as units. `transformer` is each transformer block, by the model's own class; `size` "
        "is modules of `min_params` parameters or more; `none` is the whole model at once.",
    )
    wrap_classes: list[str] = setting(
        [], "Class names of the modules to wrap; empty means the model's own block class."
    )
    min_params: int = setting(100_000_000, "Smallest unit for `auto_wrap: size`.", unit="parameters", ge=1)
    prefetch: int = setting(
        1,
        "How many units are gathered ahead of the one that computes, forward and backward; 1 is FSDP2's default. "
        "More hides slow connections, and keeps as many more full units in memory.",
        unit="units",
        ge=1,
    )
    reduce_dtype: Literal["fp32", "same"] = setting(
        "fp32",
        "Format in which the ranks' gradients are summed; `same` is that of the computation: with 16 bits half the "
        "traffic, and rounded sums.",
    )
    reduce_gradients: Literal["each_micro_step", "once"] = setting(
        "each_micro_step",
        "When gradients are reduced and scattered over the ranks: after each micro step, so that no rank ever "
        "holds all of them, or `once` per optimizer step: with accumulation less traffic, and full fp32 "
        "gradients on every rank until then.",
    )
    backward_prefetch: Literal["backward_pre", "backward_post", "no_prefetch"] | None = setting(
        None, "When the next unit is gathered in backward, in version 1; version 2 always does so before."
    )
    forward_prefetch: bool | None = setting(None, "Gather the next unit during forward, in version 1.")
    limit_all_gathers: bool | None = setting(
        None, "Limit the number of gathers in flight, in version 1; version 2 always does."
    )
    use_orig_params: bool | None = setting(
        None, "Keep the original parameters beside the flat ones, in version 1; version 2 has no flat ones."
    )
    sync_module_states: bool | None = setting(None, "Send rank 0's weights to all ranks at the start, in version 1.")
    cpu_ram_efficient_loading: bool | None = setting(
        None, "Load weights only on rank 0 and broadcast them; for scripts on transformers."
    )
    state_dict_type: Literal["full", "sharded"] | None = setting(
        None, "How checkpoints are written: gathered on rank 0, or each rank its shards; null leaves it to the program."
    )
    xla_settings: dict[str, Scalar] = setting(
        {},
        "Further settings of torch_xla's first FSDP (`version: 1` on `devices.type: xla`), as `compute_dtype: "
        "bfloat16`; for scripts on transformers.",
    )


class _OnDeepSpeed(Section):
    """What every strategy on DeepSpeed's engine has."""

    config: str | None = setting(
        None,
        "A DeepSpeed JSON file as base; the recipe adds its settings, and a contradiction is an error. For "
        "your own programs, "
        "settings that the recipe leaves out keep the value of the file, or DeepSpeed's default.",
        flag="deepspeed",
        reads="content",
    )


class Zero0(_OnDeepSpeed):
    """Nothing partitioned (DeepSpeed's engine at stage 0, or with a file that says nothing of ZeRO)."""

    kind: Literal["zero0"] = setting(
        "zero0",
        "DeepSpeed's engine without partitioning: stage 0, or a file without zero_optimization, as for 1-bit "
        "optimizers; for your own programs.",
    )


class _Zero(_OnDeepSpeed):
    """Settings that every stage of ZeRO that partitions has."""

    bucket_mb: float = setting(50.0, "Size of reduce and all-gather buckets.", unit="MiB", gt=0)
    overlap_comm: bool = setting(False, "Overlap gradient reduction with the backward pass.")


class Zero1(_Zero):
    """Optimizer state partitioned (DeepSpeed ZeRO-1)."""

    kind: Literal["zero1"] = setting("zero1", "Optimizer state partitioned over ranks.")
    offload_optimizer: Literal["none", "cpu"] = setting("none", "Where optimizer state is kept.")


class Zero2(_Zero):
    """Optimizer state and gradients partitioned (DeepSpeed ZeRO-2)."""

    kind: Literal["zero2"] = setting("zero2", "Optimizer state and gradients partitioned over ranks.")
    offload_optimizer: Literal["none", "cpu"] = setting("none", "Where optimizer state is kept.")


class Zero3(_Zero):
    """Optimizer state, gradients and parameters partitioned (DeepSpeed ZeRO-3)."""

    kind: Literal["zero3"] = setting("zero3", "Optimizer state, gradients and parameters partitioned over ranks.")
    offload_optimizer: Literal["none", "cpu", "nvme"] = setting(
        "none", "Where optimizer state is kept; `nvme` is files below `nvme_path`."
    )
    offload_param: Literal["none", "cpu", "nvme"] = setting(
        "none", "Where parameters are kept between uses; `nvme` is files below `nvme_path`."
    )
    nvme_path: str | None = setting(
        None,
        "Folder on a fast local disk for offloading to `nvme`. A run swaps to its own subfolder, "
        "and removes it at its end.",
        reads="output",
        min_length=1,
    )
    gather_16bit: bool = setting(
        False,
        "Let the program gather full weights (in 16 bits, if it computes in these) when it saves its model; "
        "otherwise it can only save shards.",
    )


class Auto(Section):
    """The quickest strategy that fits, by the estimates of `trainkit estimate`; the same numbers are trained."""

    kind: Literal["auto"] = setting(
        "auto",
        "The plan chooses: the quickest strategy that fits on these devices, the simpler where two are alike, with "
        "checkpointing and a micro batch where the recipe leaves these open.",
    )


Strategy = Annotated[Auto | Single | Ddp | Fsdp | Zero0 | Zero1 | Zero2 | Zero3, Field(discriminator="kind")]
