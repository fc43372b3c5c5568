"""FSDP of Trainer: the switch or the words of `--fsdp`, the file of `--fsdp_config`, and accelerate's environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainkit.frameworks.hf_trainer import xla
from trainkit.frameworks.hf_trainer.row import Value, version
from trainkit.frameworks.hf_trainer.versions import can
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.context import Context
from trainkit.plan.provenance import SourcedVariable, variable
from trainkit.recipe.schema import Fsdp

CONFIG = "fsdp_config.json"
# Settings of version 1; version 2 does always what they say, or has nothing of the kind.
FIRST_VERSION = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states")
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
POLICIES = {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}

Entry = tuple[str, Any, str]  # key of the file, its value, the recipe key that made it


def chosen(context: Context) -> bool:
    """Whether the strategy is fsdp."""
    return isinstance(context.recipe.strategy, Fsdp)


def switch(context: Context) -> Value:
    """What follows `--fsdp`: nothing where it is a switch, which takes no `True`."""
    strategy = context.recipe.strategy
    if not isinstance(strategy, Fsdp):
        return None
    if can("fsdp is a switch", version(context)):
        return []
    wraps = ("auto_wrap",) if strategy.auto_wrap != "none" else ()
    return " ".join((strategy.sharding, *wraps, *(("offload",) if strategy.offload else ())))


def config(context: Context) -> tuple[Entry, ...]:
    """The file, key by key. Keys that a version does not read do no harm: older ones read the words and variables."""
    strategy = context.recipe.strategy
    assert isinstance(strategy, Fsdp), "only the strategy fsdp has this file"
    if on_xla(context):
        return (*xla.entries(context, strategy), *_wrapping(strategy))
    return (*_sharding(strategy), *_wrapping(strategy), *_further(strategy), *_recomputing(context))


def _sharding(strategy: Fsdp) -> Iterator[Entry]:
    yield "version", strategy.version, "strategy.version"
    frees = strategy.sharding == "full_shard"
    yield "reshard_after_forward", frees if strategy.version == 2 else strategy.sharding, "strategy.sharding"
    yield "cpu_offload", strategy.offload, "strategy.offload"


def _further(strategy: Fsdp) -> Iterator[Entry]:
    """What is left to transformers where the recipe says nothing."""
    for name in (*FIRST_VERSION, "cpu_ram_efficient_loading"):
        if (value := getattr(strategy, name)) is not None:
            yield name, value, f"strategy.{name}"
    if strategy.state_dict_type is not None:
        yield "state_dict_type", STATE_DICTS[strategy.state_dict_type], "strategy.state_dict_type"


def _wrapping(strategy: Fsdp) -> Iterator[Entry]:
    yield "auto_wrap_policy", POLICIES[strategy.auto_wrap], "strategy.auto_wrap"
    if strategy.auto_wrap == "size":
        yield "min_num_params", strategy.min_params, "strategy.min_params"
    if strategy.auto_wrap == "transformer" and strategy.wrap_classes:
        yield "transformer_layer_cls_to_wrap", strategy.wrap_classes, "strategy.wrap_classes"


def _recomputing(context: Context) -> Iterator[Entry]:
    key = "efficiency.gradient_checkpointing.every"
    if context.resolved.given(key):
        yield "activation_checkpointing", bool(context.recipe.efficiency.gradient_checkpointing.every), key


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """What transformers leaves to accelerate, which reads it from the environment."""
    strategy = context.recipe.strategy
    installed = version(context)
    if not isinstance(strategy, Fsdp) or on_xla(context) or can("fsdp is a switch", installed):
        return ()
    rule = f"transformers {installed} leaves this to accelerate"
    found: list[SourcedVariable] = []
    if strategy.state_dict_type is not None:
        name, key = "FSDP_STATE_DICT_TYPE", "strategy.state_dict_type"
        found.append(variable(name, STATE_DICTS[strategy.state_dict_type], keys=(key,), rule=rule))
    if not can("fsdp_config has a version", installed):
        found.append(variable("FSDP_VERSION", str(strategy.version), keys=("strategy.version",), rule=rule))
        reshard = str(strategy.sharding == "full_shard").lower() if strategy.version == 2 else strategy.sharding
        found.append(variable("FSDP_RESHARD_AFTER_FORWARD", reshard, keys=("strategy.sharding",), rule=rule))
    return tuple(found)
