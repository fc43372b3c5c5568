"""HF's `--fsdp_config` file, key by key: what each means in the recipe, and why the rest is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.validation.suggestions import nearest
from trainkit.recipe.yaml.reader import Document

if TYPE_CHECKING:
    from trainkit.flags.flag import Outcome, Use

_MESH = ("it needs a mesh of replicas and shards, which trainkit does not build yet", "use full_shard or shard_grad_op")
# Sharding words that HF knows and trainkit does not run: why, and what to do.
FSDP_REFUSED: Mapping[str, tuple[str, str]] = {
    "no_shard": ("without sharding FSDP is plain data parallelism", "use strategy.kind=ddp"),
    "hybrid_shard": _MESH,
    "hybrid_shard_zero2": _MESH,
    "hybrid_shard_grad_op": _MESH,
}
_SHARDING = {"full_shard": "full_shard", "1": "full_shard", "shard_grad_op": "shard_grad_op", "2": "shard_grad_op"}
_REFUSED_NUMBERS = {"3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
_POLICIES = {"transformer_based_wrap": "transformer", "size_based_wrap": "size", "no_wrap": "none"}


class _Unfit(Exception):  # noqa: N818 - never leaves this module
    """The value cannot be brought into the recipe; arguments: why, and what to do."""


Settings = list[tuple[str, Any]]


def _version(value: Any) -> Settings:
    if value not in (1, 2) or isinstance(value, bool):
        raise _Unfit("", "write 2, or 1 for a script of your own")
    return [("strategy.version", value)]


def _classes(value: Any) -> Settings:
    names = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        raise _Unfit("class names are wanted", 'write ["BertLayer"]')
    return [("strategy.wrap_classes", names), ("strategy.auto_wrap", "transformer")]


def _min_params(value: Any) -> Settings:
    if type(value) is not int or value < 0:
        raise _Unfit("a number of parameters is wanted", "write a whole number")
    return [("strategy.min_params", value), ("strategy.auto_wrap", "size")] if value else []


def _sharding(value: Any) -> Settings:
    word = _REFUSED_NUMBERS.get(str(value), str(value).lower())
    if word in FSDP_REFUSED:
        raise _Unfit(*FSDP_REFUSED[word])
    if isinstance(value, bool) or word not in _SHARDING:
        raise _Unfit("", "write full_shard or shard_grad_op")
    return [("strategy.sharding", _SHARDING[word])]


def _reshard(value: Any) -> Settings:
    if isinstance(value, bool):
        return [("strategy.sharding", "full_shard" if value else "shard_grad_op")]
    return _sharding(value)


def _policy(value: Any) -> Settings:
    word = str(value).lower()
    if word not in _POLICIES:
        raise _Unfit("", f"write one of {', '.join(each.upper() for each in _POLICIES)}")
    return [("strategy.auto_wrap", _POLICIES[word])]


def _truth(key: str, means: Mapping[bool, Any] | None = None) -> Callable[[Any], Settings]:
    """A switch: the key gets its value, or what that means."""

    def read(value: Any) -> Settings:
        if not isinstance(value, bool):
            raise _Unfit("true or false is wanted", "write true or false without quotes")
        return [(key, means[value] if means else value)]

    return read


def _word(key: str, *known: str) -> Callable[[Any], Settings]:
    def read(value: Any) -> Settings:
        if str(value).lower() not in known:
            raise _Unfit("", f"write one of {', '.join(known)}")
        return [(key, str(value).lower())]

    return read


def _state_dict(value: Any) -> Settings:
    kinds = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}
    if str(value) not in kinds:
        raise _Unfit("it names no kind of state dict that recipes have", f"write one of {', '.join(kinds)}")
    return [("strategy.state_dict_type", kinds[str(value)])]


def _only(accepted: tuple[Any, ...], why: str) -> Callable[[Any], Settings]:
    """A key without a setting in the recipe: values that FSDP2 stands for anyway pass, all others are refused."""

    def read(value: Any) -> Settings:
        if not any(value == each and type(value) is type(each) for each in accepted):
            raise _Unfit(why, "remove the key")
        return []

    return read


def _settings_of_xla(value: Any) -> Settings:
    if not isinstance(value, dict):
        raise _Unfit("a mapping is wanted", 'write {"compute_dtype": "bfloat16"}')
    return [("strategy.xla_settings", value)]


def _keys_of_xla(tree: Mapping[str, Any]) -> Mapping[str, Callable[[Any], Settings]]:
    """Readers of the keys that Trainer follows beside `xla: true` alone; the second version is one of them."""
    told = {name.removeprefix("fsdp_"): value for name, value in tree.items()}
    if told.get("xla") is not True:
        return _WITHOUT_XLA
    version = 2 if told.get("xla_fsdp_v2") is True else 1
    # which Trainer does where the file names nothing else, whatever the words of --fsdp
    wraps = {"min_num_params", "transformer_layer_cls_to_wrap", "auto_wrap_policy"} & told.keys()
    by_blocks = [] if wraps else [("strategy.auto_wrap", "transformer")]
    return {
        "xla": lambda value: [("devices.type", "xla"), ("strategy.version", version), *by_blocks],
        "xla_fsdp_v2": _truth("strategy.version", {True: 2, False: 1}),
        "xla_fsdp_grad_ckpt": _truth("efficiency.gradient_checkpointing.every"),
        "xla_fsdp_settings": _settings_of_xla,
        "version": lambda value: [],  # which Trainer reads for torch's FSDP alone
    }


_ALONE = "Trainer follows it beside xla: true alone"
_WITHOUT_XLA: Mapping[str, Callable[[Any], Settings]] = {
    "xla": _only((False,), "true or false is wanted"),
    "xla_fsdp_v2": _only((False,), _ALONE),
    "xla_fsdp_grad_ckpt": _only((False,), f"{_ALONE}, and a wrap policy"),
    "xla_fsdp_settings": _only(({},), _ALONE),
}
# By HF's name without the old prefix `fsdp_`; both spellings are read.
_KEYS: Mapping[str, Callable[[Any], Settings]] = {
    "version": _version,
    "transformer_layer_cls_to_wrap": _classes,
    "min_num_params": _min_params,
    "auto_wrap_policy": _policy,
    "sharding_strategy": _sharding,
    "reshard_after_forward": _reshard,
    "cpu_offload": _truth("strategy.offload"),
    "offload_params": _truth("strategy.offload"),
    "activation_checkpointing": _truth("efficiency.gradient_checkpointing.every"),
    "backward_prefetch": _word("strategy.backward_prefetch", "backward_pre", "backward_post", "no_prefetch"),
    "forward_prefetch": _truth("strategy.forward_prefetch"),
    "limit_all_gathers": _truth("strategy.limit_all_gathers"),
    "use_orig_params": _truth("strategy.use_orig_params"),
    "sync_module_states": _truth("strategy.sync_module_states"),
    "cpu_ram_efficient_loading": _truth("strategy.cpu_ram_efficient_loading"),
    "state_dict_type": _state_dict,
    **_WITHOUT_XLA,
}


def read_fsdp_config(use: Use, document: Document, place: Callable[[Use, Document, str], Origin]) -> Outcome:
    """Assignments for every key of the file, with positions in it; a key that cannot be brought over is an error."""
    assignments = [use.assign("strategy.kind", "fsdp")]
    found: list[Diagnostic] = []
    keys = {**_KEYS, **_keys_of_xla(document.tree)}
    # A policy decides what class names and sizes only suggest, wherever it stands in the file.
    for name, value in sorted(document.tree.items(), key=lambda item: item[0].endswith("auto_wrap_policy")):
        reader = keys.get(name.removeprefix("fsdp_"))
        origin = place(use, document, name)
        if reader is None:
            close = nearest(name.removeprefix("fsdp_"), _KEYS)
            hint = f"did you mean {close}?" if close else f"known are: {', '.join(_KEYS)}"
            found.append(use.error(f"--fsdp_config does not know the key {name!r}", hint, origin=origin))
            continue
        try:
            assignments += [Assignment(key, setting, origin) for key, setting in reader(value)]
        except _Unfit as unfit:
            why, hint = unfit.args
            found.append(
                use.error(
                    f"--fsdp_config {name}: {str(value)[:60]!r} cannot be taken over", hint, why=why, origin=origin
                )
            )
    return assignments, found
