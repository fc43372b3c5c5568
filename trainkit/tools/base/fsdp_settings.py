"""The keys of FSDP's settings, as transformers (`--fsdp_config`) and accelerate (`fsdp_config`) read them.

Each tool makes its table out of these fields: most are the same in both, under names that begin with `fsdp_` in
accelerate's file and may do so in transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainkit.errors import Diagnostic, Origin, note
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.rules import unsupported
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.grid import HYBRID
from trainkit.recipe.schema import Fsdp
from trainkit.recipe.suggestions import did_you_mean
from trainkit.tools.base.fields import UNSET, Field, Settings, Unsupported, boolean, chosen, setting

MESH = unsupported(
    "the libraries of such a program take a mesh of ranks from the environment",
    "set PARALLELISM_CONFIG_DP_REPLICATE_SIZE, _TP_SIZE or _CP_SIZE, with ACCELERATE_USE_PARALLELISM_CONFIG, "
    "in env, and leave it out here",
    None,
    1,
)
CHECKPOINTING = "efficiency.gradient_checkpointing.every"
# The words are those of accelerate, utils/constants.py (FSDP_AUTO_WRAP_POLICY, FSDP_STATE_DICT_TYPE).
POLICIES = {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"}
STATE_DICTS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
PREFETCHES = {"backward_pre": "backward_pre", "backward_post": "backward_post", "no_prefetch": "no_prefetch"}
# Settings of version 1 alone, and what version 2 does without being given them.
FIRST_VERSION: Mapping[str, object] = {
    "backward_prefetch": "backward_pre",
    "forward_prefetch": False,
    "limit_all_gathers": True,
    "use_orig_params": True,
    "sync_module_states": True,
}
SHARDING = ("full_shard", "shard_grad_op")
# of version 1 alone, where torch itself makes the groups of ranks (FullyShardedDataParallel, process_group)
FIRST_SHARDING = (*HYBRID, "no_shard")
# torch.distributed.fsdp.ShardingStrategy by number, as accelerate's file may have it
_NUMBERS = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}


def _version(value: Any) -> Settings | Unsupported:
    # True equals 1 in Python.
    if value not in (1, 2) or isinstance(value, bool):
        return Unsupported("", "write 2, or 1 for a script of your own")
    return {"strategy.version": value}


def _sharding(value: Any) -> Settings | Unsupported:
    """A word or its number in version 1; in version 2 whether gathered parameters are freed after forward."""
    if isinstance(value, bool):
        return {"strategy.sharding": "full_shard" if value else "shard_grad_op"}
    word = _NUMBERS.get(str(value), str(value).lower())
    if word not in (*SHARDING, *FIRST_SHARDING):
        return Unsupported("", f"write {', '.join(SHARDING)}, or in version 1 {', '.join(FIRST_SHARDING)}")
    return {"strategy.sharding": word}


def _frees(context: Context) -> Any:
    word = setting(context, "strategy.sharding")
    return word if setting(context, "strategy.version") == 1 else word == "full_shard"


def _min_params(value: Any) -> Settings | Unsupported:
    if type(value) is not int or value < 0:
        return Unsupported("a number of parameters is expected", "write a whole number")
    return {"strategy.min_params": value, "strategy.auto_wrap": "size"} if value else {}


def _classes(value: Any) -> Settings | Unsupported:
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        return Unsupported("class names are expected", 'write ["BertLayer"]')
    return {"strategy.wrap_classes": names, "strategy.auto_wrap": "transformer"}


def _where(policy: str, key: str) -> Callable[[Context], Any]:
    """The value of a key that only one wrap policy reads."""
    return lambda context: (setting(context, "strategy.auto_wrap") == policy and setting(context, key)) or UNSET


def choice(name: str, key: str, words: Mapping[str, str]) -> Field:
    """A field with a word for each value of one key; null in the recipe leaves it to the tool."""
    values = {word.lower(): value for value, word in words.items()}

    def decode(value: Any) -> Settings | Unsupported:
        found = values.get(str(value).lower())
        hint = f"write one of {', '.join(words.values())}"
        return {key: found} if found else Unsupported(f"{key} has no such value", hint)

    return Field(name, (key,), lambda context: words.get(setting(context, key), UNSET), decode)


def switch(
    name: str,
    key: str,
    encode: Callable[[Context], Any] | None = None,
    *,
    means: tuple[Any, Any] = (True, False),
    **columns: Any,
) -> Field:
    """A yes-or-no field of one key; null in the recipe leaves it to the tool. means: the values of yes and no."""
    return Field(name, (key,), encode or (lambda context: chosen(context, key)), boolean(key, *means), **columns)


def recomputes(context: Context) -> bool:
    """Whether wrapped units are recomputed."""
    return bool(setting(context, CHECKPOINTING))


# By transformers' names, in the order in which its file has them.
FIELDS: tuple[Field, ...] = (
    Field("version", ("strategy.version",), lambda context: setting(context, "strategy.version"), _version),
    Field("reshard_after_forward", ("strategy.sharding",), _frees, _sharding),
    Field("sharding_strategy", ("strategy.sharding",), decode=lambda value: _sharding(str(value))),
    switch("cpu_offload", "strategy.offload", aliases=("offload_params",)),
    choice("auto_wrap_policy", "strategy.auto_wrap", POLICIES),
    Field("min_num_params", ("strategy.min_params",), _where("size", "strategy.min_params"), _min_params),
    Field(
        "transformer_layer_cls_to_wrap",
        ("strategy.wrap_classes",),
        _where("transformer", "strategy.wrap_classes"),
        _classes,
    ),
    choice("backward_prefetch", "strategy.backward_prefetch", PREFETCHES),
    *(switch(name, f"strategy.{name}") for name in FIRST_VERSION if name != "backward_prefetch"),
    switch("cpu_ram_efficient_loading", "strategy.cpu_ram_efficient_loading"),
    choice("state_dict_type", "strategy.state_dict_type", STATE_DICTS),
    switch("activation_checkpointing", CHECKPOINTING, recomputes),
)


def of_first_version(context: Context) -> Iterator[str]:
    """The keys that the recipe sets and that FSDP's second version, which it chooses, does not have."""
    if setting(context, "strategy.version") != 2:
        return
    if setting(context, "strategy.sharding") in FIRST_SHARDING:
        yield "strategy.sharding"
    for name, anyway in FIRST_VERSION.items():
        if setting(context, f"strategy.{name}") not in (None, anyway):
            yield f"strategy.{name}"


def wrapping_notices(context: Context) -> Iterator[Diagnostic]:
    """Without class names the libraries wrap by those that the model itself names, if it does."""
    strategy = context.recipe.strategy
    if isinstance(strategy, Fsdp) and strategy.auto_wrap == "transformer" and not strategy.wrap_classes:
        what = "strategy.wrap_classes is empty: a model that does not name its blocks (_no_split_modules) is one unit"
        yield note(what, "name the class of its blocks")


def only_by_size(tool: str) -> str:
    """The remark on a size that no policy reads."""
    return f"{tool} reads min_num_params only beside auto_wrap_policy SIZE_BASED_WRAP; the recipe wraps by size."


def read_settings(
    tree: Mapping[str, Any], fields: Mapping[str, Field], place: Callable[[str], Origin], shown: str
) -> tuple[list[Assignment], list[Diagnostic]]:
    """Assignments for every key of a file, each with its place; a key that cannot be brought over is an error.

    fields: by every name, without `fsdp_`. shown: the file in messages.
    """
    assignments: list[Assignment] = []
    found: list[Diagnostic] = []
    # A policy decides what class names and sizes only suggest, wherever it stands in the file.
    for name, value in sorted(tree.items(), key=lambda item: item[0].endswith("auto_wrap_policy")):
        plain, origin = name.removeprefix("fsdp_"), place(name)
        if plain not in fields:
            hint = did_you_mean(plain, fields, f"known are: {', '.join(fields)}")
            found.append(Diagnostic("error", f"{shown} does not know the key {name!r}", origin=origin, hint=hint))
            continue
        settings = fields[plain].decode(value)
        if isinstance(settings, Unsupported):
            what = f"{shown} {name}: {str(value)[:60]!r} cannot be taken over"
            found.append(Diagnostic("error", what, origin=origin, why=settings.why, hint=settings.instead))
        else:
            assignments += [Assignment(key, each, origin) for key, each in settings.items()]
    return assignments, found
