"""DeepSpeed's table reads back what it writes, and writes what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.deepspeed_contexts import base_of, context_of, leaves
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import BatchArithmetic
from trainkit.tools.base.fields import UNSET, Unsupported, setting
from trainkit.tools.deepspeed.config import deepspeed_config
from trainkit.tools.deepspeed.fields import (
    BUCKETS,
    FIELDS,
    FILE_S,
    KINDS,
    OFFLOADS,
    ROWS,
    STAGES,
    ZERO,
    elements,
    mebibytes,
)

# How swapping is done, where the recipe asks for it.
SWAPPING = {
    *(row.name for row in FIELDS if row.name.startswith("aio.")),
    *(f"{ZERO}.{name}" for name in ("offload_optimizer.buffer_count", "offload_param.max_in_cpu", "sub_group_size")),
}
# What no setting says: constants, and sizes that follow from several settings.
CONSTANT = {
    *SWAPPING,
    *(row.name for row in FIELDS if row in BUCKETS or row.keys == ("model.hidden_size",)),
    *("zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer", "data_types.grad_accum_dtype", "fp16.auto_cast"),
    "timers.throughput.enabled",
    *(f"{ZERO}.{name}.pin_memory" for name in OFFLOADS),
}
# What a script's file gets beside that: the recipe's AdamW is torch's, and DeepSpeed's list has no torch's SGD.
ADDED = {"zero_allow_untested_optimizer", "optimizer.params.torch_adam"}

# Keys of which a file has all or none, or must have.
TOGETHER = (
    *("train_", "gradient_accumulation", "scheduler", "optimizer.type", "optimizer.params.lr"),
    *(f"{ZERO}.{name}" for name in ("stage", "offload")),
)
BOUNDED = settings(max_examples=40, derandomize=True)

numbers = st.floats(1e-6, 0.9)
sizes = st.integers(1, 64)
devices = st.sampled_from(["none", "cpu"])


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes whose every setting DeepSpeed's file can hold."""
    kind = draw(st.sampled_from(sorted(KINDS.values())))
    strategy: dict[str, Any] = {"kind": kind}
    if kind != "zero0":
        strategy |= {"offload_optimizer": draw(devices), "overlap_comm": draw(st.booleans())}
    if kind == "zero3":
        strategy |= {"offload_param": draw(devices), "gather_16bit": draw(st.booleans())}
    if kind == "zero3" and draw(st.booleans()):
        strategy |= {"offload_param": "nvme", "nvme_path": draw(st.sampled_from(["/disk", "/a b"]))}
    shape = draw(st.sampled_from(["cosine", "linear", "constant_with_warmup"]))
    end = draw(numbers) if shape == "cosine" else 0.0
    names = ("lr", "weight_decay", "beta1", "beta2", "eps")
    return {
        "strategy": strategy,
        "optimizer": {"name": draw(st.sampled_from(["adamw_torch", "sgd"])), **{name: draw(numbers) for name in names}},
        "schedule": {"name": shape, "warmup_steps": draw(st.integers(2, 99)), "min_lr_ratio": end},
        "train": {"steps": draw(st.integers(100, 999)), "max_grad_norm": draw(numbers)},
        "logging": {"every_steps": draw(sizes)},
    }


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Decisions for such a recipe, some of whose keys a layer gives."""
    micro, accumulation = draw(sizes), draw(sizes)
    batch = BatchArithmetic(micro * accumulation * 2, micro, accumulation, 2, micro)
    return context_of(draw(recipes()), draw(st.sampled_from(["fp32", "bf16", "fp16"])), batch=batch)


@BOUNDED
@given(contexts())
def test_each_field_reads_back_the_settings_that_it_writes(context: Context) -> None:
    decided = {f"batch.{name.rstrip('_')}": size for name, size in asdict(context.batch).items()}
    decided["precision.dtype"] = context.dtype
    for row in FIELDS:
        value = row.encode(context) if STAGES[context.recipe.strategy.kind] in row.stages else UNSET
        found = {} if value is UNSET else row.decode(value)
        if isinstance(found, Unsupported):
            assert row.name in CONSTANT
            continue
        assert found == {key: decided.get(key, setting(context, key)) for key in found}
        assert found.keys() <= set(row.keys)


@BOUNDED
@given(sizes, st.sampled_from(["fp32", "bf16"]))
def test_a_bucket_has_the_same_size_in_elements_and_in_mebibytes(size: int, dtype: str) -> None:
    assert mebibytes(elements(size, dtype), dtype) == size


def _read_back(tree: Mapping[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    for key, value in leaves(tree):
        found = ROWS[key].decode(value) if key in ROWS and ROWS[key].policies.deepspeed != FILE_S else {}
        for name, each in () if isinstance(found, Unsupported) else found.items():
            section, _, last = name.partition(".")
            recipe.setdefault(section, {})[last] = each
    return recipe


@BOUNDED
@given(contexts(), st.sets(st.sampled_from(sorted(ROWS)), max_size=8))
def test_what_is_read_from_a_file_makes_that_file_again(context: Context, left_out: set[str]) -> None:
    written, _ = deepspeed_config(context, "deepspeed")
    for name in left_out:
        if not name.startswith(TOGETHER):
            _drop(written, name)
    for row in BUCKETS:
        _drop(written, row.name)

    recipe = _read_back(written)
    recipe.pop("batch")
    again, _ = deepspeed_config(context_of(recipe, context.dtype, batch=context.batch), "deepspeed")

    said, found = dict(leaves(written)), dict(leaves(again))
    assert {key: value for key, value in found.items() if key not in ADDED - said.keys()} == said


@BOUNDED
@given(contexts())
def test_a_file_that_says_everything_stays_as_it_is(context: Context) -> None:
    written, _ = deepspeed_config(context, "deepspeed")
    recipe = {"strategy": context.resolved.tree["strategy"]}
    again, _ = deepspeed_config(context_of(recipe, context.dtype, base_of(written), context.batch), "deepspeed")
    assert again == written


def _drop(tree: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        tree = tree.get(part, {})
    tree.pop(last, None)
