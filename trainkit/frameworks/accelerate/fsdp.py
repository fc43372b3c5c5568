"""FSDP of `Accelerator()`: what FullyShardedDataParallelPlugin reads (accelerate, utils/dataclasses.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit.frameworks.accelerate.setting import Encoder, Setting, given, never, shards, when, word
from trainkit.frameworks.base.fields import UNSET, by_name, setting
from trainkit.frameworks.base.fsdp_settings import FIELDS, FIRST_VERSION
from trainkit.frameworks.base.launcher_flags import fixed
from trainkit.plan.context import Context
from trainkit.plan.provenance import Source

LAUNCHED = "accelerate launch's own default, whatever the launcher"
_SHARED = by_name(FIELDS)


def _is_version(number: int) -> Callable[[Context], bool]:
    return lambda context: shards(context) and setting(context, "strategy.version") == number


def _wraps(policy: str) -> Callable[[Context], bool]:
    return lambda context: shards(context) and setting(context, "strategy.auto_wrap") == policy


def _fsdp(name: str, encode: Encoder | None = None, default: Any = UNSET, variable: str = "", **more: Any) -> Setting:
    """A key that transformers' file has too, and what accelerate makes of it."""
    shared = _SHARED[name]
    return Setting(
        f"fsdp_config.fsdp_{name}",
        shared.keys,
        encode or when(shards, shared.encode),
        shared.decode,
        default,
        variable=f"FSDP_{variable or name.upper()}",
        text=word,
        **more,
    )


def _first(name: str) -> Setting:
    """A switch of version 1; its default is accelerate launch's own, which a script under torchrun would not have."""
    key, default = f"strategy.{name}", FIRST_VERSION[name]

    def value(context: Context) -> Any:
        found = setting(context, key)
        return default if found is None else found

    return _fsdp(name, when(_is_version(1), value), default, source=_or_launched(key))


def _or_launched(key: str) -> Callable[[Context], Source]:
    return lambda context: Source((key,), "" if given(context, key) else LAUNCHED)


def _loads_once(context: Context) -> bool:
    """Whether rank 0 alone loads; the others get its weights only where module states are sent."""
    chosen = setting(context, "strategy.cpu_ram_efficient_loading")
    return setting(context, "strategy.sync_module_states") is not False if chosen is None else chosen


def _prefetch(context: Context) -> Any:
    chosen = setting(context, "strategy.backward_prefetch")
    return UNSET if chosen is None else chosen.upper()


FSDP: tuple[Setting, ...] = (
    Setting("use_fsdp", ("strategy.kind",), when(shards, fixed(True)), variable="ACCELERATE_USE_FSDP", text=word,
            in_file=never, switch=True),
    _fsdp("version", default=1),
    _fsdp("sharding_strategy", when(_is_version(1), lambda context: setting(context, "strategy.sharding").upper()),
          "FULL_SHARD"),
    _fsdp("reshard_after_forward",
          when(_is_version(2), lambda context: setting(context, "strategy.sharding") == "full_shard"), True),
    _fsdp("offload_params", default=False),
    _fsdp("auto_wrap_policy"),
    _fsdp("min_num_params", when(_wraps("size"), lambda context: setting(context, "strategy.min_params")),
          100_000_000),
    _fsdp("transformer_layer_cls_to_wrap",
          when(_wraps("transformer"), lambda context: ",".join(setting(context, "strategy.wrap_classes")) or UNSET),
          variable="TRANSFORMER_CLS_TO_WRAP"),
    _fsdp("state_dict_type"),
    _fsdp("backward_prefetch", when(_is_version(1), _prefetch),
          aliases=("fsdp_config.fsdp_backward_prefetch_policy",)),
    *map(_first, ("forward_prefetch", "use_orig_params", "sync_module_states")),
    _fsdp("cpu_ram_efficient_loading", when(shards, _loads_once), True,
          source=_or_launched("strategy.cpu_ram_efficient_loading")),
    _fsdp("activation_checkpointing", default=False),
    Setting("fsdp_config.fsdp_activation_checkpointing_offload", default=False, since="1.15",
            variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", text=word),
)  # fmt: skip
