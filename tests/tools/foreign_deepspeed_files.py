"""DeepSpeed files as projects write them, made up piece by piece: key order, ages of names, words and numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

AUTO = "auto"


def maybe(draw: st.DrawFn, tree: dict[str, Any], name: str, values: list[Any], *, auto: bool) -> None:
    """Say a key in about half of the files."""
    if draw(st.booleans()):
        tree[name] = draw(st.sampled_from([*values, *([AUTO] if auto else [])]))


@st.composite
def files(draw: st.DrawFn, *, auto: bool, batch: bool = True) -> dict[str, Any]:
    """A file that DeepSpeed reads. auto: whether words are left to a library; batch: whether sizes are numbers."""
    tree: dict[str, Any] = {}
    numbers = [4] if batch and not auto else [AUTO] if auto else []
    if numbers:
        tree["train_micro_batch_size_per_gpu"] = draw(st.sampled_from(numbers))
    maybe(draw, tree, "gradient_accumulation_steps", [] if auto else [2], auto=auto)
    maybe(draw, tree, "gradient_clipping", [0.5, 1.0, 0], auto=auto)
    maybe(draw, tree, "steps_per_print", [2000, 1e5, 100], auto=False)
    maybe(draw, tree, "wall_clock_breakdown", [False, True], auto=False)
    maybe(draw, tree, "zero_allow_untested_optimizer", [True, False], auto=False)
    maybe(draw, tree, "zero_force_ds_cpu_optimizer", [True, False], auto=False)
    maybe(draw, tree, "prescale_gradients", [False], auto=False)
    maybe(draw, tree, "communication_data_type", ["fp32"], auto=False)
    maybe(draw, tree, "data_types", [{"grad_accum_dtype": "bf16"}], auto=False)
    maybe(draw, tree, "activation_checkpointing", [{"partition_activations": True}], auto=False)
    chosen = draw(st.sampled_from(["bf16", "fp16", ""]))
    if chosen:
        tree[chosen] = {"enabled": draw(st.sampled_from([True, AUTO] if auto else [True]))}
        if chosen == "fp16":
            tree[chosen] |= {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
    if draw(st.booleans()):
        tree["optimizer"] = draw(optimizers(auto=auto))
    if draw(st.booleans()):
        tree["scheduler"] = draw(schedulers(auto=auto))
    tree["zero_optimization"] = draw(zeros(auto=auto))
    return {name: tree[name] for name in draw(st.permutations(sorted(tree)))}


@st.composite
def optimizers(draw: st.DrawFn, *, auto: bool) -> dict[str, Any]:
    """Of any type that DeepSpeed has or had."""
    kinds = [
        "Adam",
        "AdamW",
        "adamw",
        "Lamb",
        "Lion",
        "Muon",
        "Adagrad",
        "SGD",
        "OneBitAdam",
        "OneBitLamb",
        "ZeroOneAdam",
    ]
    kind, params = draw(st.sampled_from(kinds)), dict[str, Any]()
    maybe(draw, params, "lr", [1e-4, 3e-05], auto=auto)
    maybe(draw, params, "weight_decay", [0.01, 0, 3e-7], auto=auto)
    maybe(draw, params, "betas", [[0.9, 0.95], [0.8, 0.999]], auto=auto)
    maybe(draw, params, "eps", [1e-8], auto=auto)
    maybe(draw, params, "torch_adam", [True], auto=False)
    maybe(draw, params, "adam_w_mode", [True, False], auto=False)
    return {"type": kind, "params": params}


@st.composite
def schedulers(draw: st.DrawFn, *, auto: bool) -> dict[str, Any]:
    """Of any type, with what belongs to it or not."""
    kind, params = draw(st.sampled_from(["WarmupLR", "WarmupDecayLR", "OneCycle", "WarmupCosineLR"])), dict[str, Any]()
    maybe(draw, params, "warmup_min_lr", [0], auto=auto)
    maybe(draw, params, "warmup_max_lr", [1e-4], auto=auto)
    maybe(draw, params, "warmup_num_steps", [100], auto=auto)
    maybe(draw, params, "total_num_steps", [1000], auto=auto)
    return {"type": kind, "params": params}


@st.composite
def zeros(draw: st.DrawFn, *, auto: bool) -> dict[str, Any]:
    """A section of any stage, with keys of any stage."""
    tree: dict[str, Any] = {"stage": draw(st.sampled_from([0, 1, 2, 3]))}
    for name in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions"):
        maybe(draw, tree, name, [True, False], auto=False)
    maybe(draw, tree, "allgather_bucket_size", [5e8, 200000000], auto=False)
    maybe(draw, tree, "reduce_bucket_size", [5e8, 1e6, 16777216], auto=auto)
    maybe(draw, tree, "sub_group_size", [1e9], auto=False)
    maybe(draw, tree, "stage3_prefetch_bucket_size", [15099494], auto=auto)
    maybe(draw, tree, "stage3_param_persistence_threshold", [40960, 1e5], auto=auto)
    maybe(draw, tree, "stage3_max_live_parameters", [1e9], auto=False)
    maybe(draw, tree, "stage3_gather_16bit_weights_on_model_save", [True, False], auto=False)
    if draw(st.booleans()):
        tree["offload_optimizer"] = {"device": draw(st.sampled_from(["cpu", "none"])), "pin_memory": True}
    if draw(st.booleans()):
        nvme = {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5, "buffer_size": 1e8}
        tree["offload_param"] = draw(st.sampled_from([{"device": "cpu", "pin_memory": True}, nvme]))
    elif draw(st.booleans()) and not auto:
        tree |= draw(st.sampled_from([{"cpu_offload": True}, {"cpu_offload": False}]))
    return tree
