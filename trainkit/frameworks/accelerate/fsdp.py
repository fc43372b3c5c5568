"""FSDP of `Accelerator()`: what FullyShardedDataParallelPlugin reads (accelerate, utils/dataclasses.py)."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.frameworks.accelerate.setting import Setting, Written, given, word
from trainkit.plan.context import Context
from trainkit.recipe.schema import Fsdp

STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
POLICIES = {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}
CHECKPOINTING = "efficiency.gradient_checkpointing.every"
# accelerate launch's own; a script that another launcher starts would have others.
FIRST_DEFAULTS = {"forward_prefetch": False, "use_orig_params": True, "sync_module_states": True}
LAUNCHED = "accelerate launch's own default, whatever the launcher"

Entry = tuple[str, Written, str]  # name after `fsdp_`, its value, the recipe key that decides it


def settings(context: Context) -> Iterator[Setting]:
    """FSDP's settings; none under other strategies."""
    strategy = context.recipe.strategy
    if not isinstance(strategy, Fsdp):
        return
    yield Setting("ACCELERATE_USE_FSDP", ("true",), keys=("strategy.kind",))
    for name, value, key in entries(context, strategy):
        variable = f"FSDP_{VARIABLES.get(name, name.upper())}"
        rule = "" if given(context, key) or name not in (*FIRST_DEFAULTS, "cpu_ram_efficient_loading") else LAUNCHED
        yield Setting(variable, (word(value),), f"fsdp_config.fsdp_{name}", value, (key,), rule)


VARIABLES = {"transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}


def entries(context: Context, strategy: Fsdp) -> Iterator[Entry]:
    """Name by name, as accelerate's config file has them."""
    yield "version", strategy.version, "strategy.version"
    yield from _sharding(strategy)
    yield "offload_params", strategy.offload, "strategy.offload"
    yield "auto_wrap_policy", POLICIES[strategy.auto_wrap], "strategy.auto_wrap"
    if strategy.auto_wrap == "size":
        yield "min_num_params", strategy.min_params, "strategy.min_params"
    if strategy.auto_wrap == "transformer" and strategy.wrap_classes:
        yield "transformer_layer_cls_to_wrap", ",".join(strategy.wrap_classes), "strategy.wrap_classes"
    if strategy.state_dict_type is not None:
        yield "state_dict_type", STATE_DICTS[strategy.state_dict_type], "strategy.state_dict_type"
    if strategy.version == 1:
        yield from _first_version(strategy)
    yield "cpu_ram_efficient_loading", _loads_once(strategy), "strategy.cpu_ram_efficient_loading"
    yield "activation_checkpointing", bool(context.recipe.efficiency.gradient_checkpointing.every), CHECKPOINTING


def _sharding(strategy: Fsdp) -> Iterator[Entry]:
    if strategy.version == 1:
        yield "sharding_strategy", strategy.sharding.upper(), "strategy.sharding"
    else:
        yield "reshard_after_forward", strategy.sharding == "full_shard", "strategy.sharding"


def _first_version(strategy: Fsdp) -> Iterator[Entry]:
    if strategy.backward_prefetch is not None:
        yield "backward_prefetch", strategy.backward_prefetch.upper(), "strategy.backward_prefetch"
    for name, default in FIRST_DEFAULTS.items():
        value = getattr(strategy, name)
        yield name, default if value is None else value, f"strategy.{name}"


def _loads_once(strategy: Fsdp) -> bool:
    """Whether rank 0 alone loads; the others get its weights only where module states are sent."""
    chosen = strategy.cpu_ram_efficient_loading
    return strategy.sync_module_states is not False if chosen is None else chosen
