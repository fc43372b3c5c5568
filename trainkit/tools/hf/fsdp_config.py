"""The file for `--fsdp_config`: written and read, by the version of transformers.

Seen in 4.50.3, 4.53.3, 4.57.6, 5.0.0, 5.5.0, 5.12.0, 5.18.0 and 5.23.0; a change between two of them is taken to have
come with the later one, whose new form the earlier does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import Source, SourcedFile, SourcedVariable, json_file, variable
from trainkit.machine.facts import at_least
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.schema import Fsdp
from trainkit.tools.base.fields import UNSET, Field, Settings, Unsupported, by_name, chosen, is_set, setting
from trainkit.tools.base.fsdp_settings import (
    CHECKPOINTING,
    FIELDS,
    FIRST_SHARDING,
    FIRST_VERSION,
    read_settings,
    recomputes,
    switch,
)
from trainkit.tools.torch_xla import on_xla

OLDEST, BEYOND = "4.50", "6"  # the versions that the tables know: from the first up to and without the second
NEWEST_SEEN = "5.23.0"

# Feature -> the first version that has it, or the first without it, seen to be so up to the newest.
SINCE = {
    "fsdp is a switch": "5.12",  # before, the words of --fsdp say what is done
    "fsdp_config has a version": "5.0",  # before, accelerate reads it from the environment
    "optim_args reach torch's optimizers": "5.5",  # sgd and adagrad
}
UNTIL = {
    "--optim adamw_hf": "5.0",
    "an optimizer for torch_xla's FSDP": "5.3",  # Trainer makes one only for models that accelerate wraps
}


def version(context: Context) -> str:
    """The installed transformers; the newest that the tables know where it is missing, which blocks the run."""
    return context.facts.packages.get("transformers", NEWEST_SEEN)


def can(feature: str, context: Context) -> bool:
    """Whether the installed version has a feature of the tables."""
    if feature in UNTIL:
        return not at_least(version(context), UNTIL[feature])
    return at_least(version(context), SINCE[feature])


CONFIG = "fsdp_config.json"
YES, NO = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # training_args.py: str_to_bool
SWITCH = "fsdp is a switch"


def _only(name: str, accepted: Any, why: str) -> Field:
    """A key of torch_xla's FSDP in a file for torch's: the value that says nothing passes."""

    def decode(value: Any) -> Settings | Unsupported:
        said_nothing = value == accepted and type(value) is type(accepted)
        return {} if said_nothing else Unsupported(why, "remove the key")

    return Field(name, decode=decode)


def _if_said(context: Context) -> Any:
    """What is left to transformers where the recipe says nothing."""
    return recomputes(context) if is_set(context, CHECKPOINTING) else UNSET


# Keys that Trainer reads as str_to_bool(str(value)): the words of a JSON file count as what they say.
WORDED = (
    *("activation_checkpointing", "cpu_ram_efficient_loading", "reshard_after_forward", "forward_prefetch"),
    *("use_orig_params", "sync_module_states", "limit_all_gathers"),
)
# Keys that Trainer asks for their truth: a word for no would be yes to it, and is refused.
ASKED = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
MISSPELT = "backward_pos"  # in transformers' documentation, which means backward_post


def _as_trainer_reads(field: Field) -> Field:
    """The field with what Trainer accepts of values that are no true and false."""
    if field.name not in (*WORDED, "backward_prefetch"):
        return field

    def decode(value: Any) -> Settings | Unsupported:
        word = value.strip().lower() if isinstance(value, str) else ""
        if field.name == "backward_prefetch":
            return field.decode("backward_post" if word == MISSPELT else value)
        return field.decode(word in YES if word in (*YES, *NO) else value)

    return replace(field, decode=decode)


_ALONE = "Trainer follows it beside xla: true alone"
_READ = tuple(map(_as_trainer_reads, FIELDS))
TORCH: tuple[Field, ...] = (
    *(replace(each, encode=_if_said) if each.name == "activation_checkpointing" else each for each in _READ),
    _only("xla", False, "true or false is expected"),
    _only("xla_fsdp_v2", False, _ALONE),
    _only("xla_fsdp_grad_ckpt", False, f"{_ALONE}, and a wrap policy"),
    _only("xla_fsdp_settings", {}, _ALONE),
)
_BY_NAME = by_name(TORCH)
_WRAPPING = tuple(
    each for each in FIELDS if each.name in ("auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap")
)
XLA: tuple[Field, ...] = (
    Field("xla", ("devices.type",), lambda context: True, lambda value: {"devices.type": "xla"}),
    switch("xla_fsdp_v2", "strategy.version", lambda context: setting(context, "strategy.version") == 2, means=(2, 1)),
    Field(
        "xla_fsdp_settings",
        ("strategy.xla_settings",),
        lambda context: chosen(context, "strategy.xla_settings") or UNSET,
        lambda value: (
            {"strategy.xla_settings": value}
            if isinstance(value, dict)
            else Unsupported("a mapping is expected", 'write {"compute_dtype": "bfloat16"}')
        ),
    ),
    switch("xla_fsdp_grad_ckpt", CHECKPOINTING, _if_said),
    # without the key Trainer wraps by the model's _no_split_modules
    Field(
        "transformer_layer_cls_to_wrap",
        ("strategy.auto_wrap",),
        lambda context: [] if setting(context, "strategy.auto_wrap") == "none" else UNSET,
    ),
    *_WRAPPING,
)


def is_chosen(context: Context) -> bool:
    """Whether the strategy is fsdp."""
    return isinstance(context.recipe.strategy, Fsdp)


def encode_switch(context: Context) -> Any:
    """What follows `--fsdp`: nothing where it is a switch, which takes no `True`."""
    strategy = context.recipe.strategy
    if not isinstance(strategy, Fsdp):
        return UNSET
    if can(SWITCH, context):
        return []
    wraps = ("auto_wrap",) if strategy.auto_wrap != "none" else ()
    return " ".join((strategy.sharding, *wraps, *(("offload",) if strategy.offload else ())))


def file(context: Context) -> SourcedFile:
    """The file of `--fsdp_config`. Keys that a version does not read do no harm."""
    fields = XLA if on_xla(context) else TORCH
    found = ((field, field.encode(context)) for field in fields)
    return json_file(CONFIG, {field.name: (each, Source(field.keys[:1])) for field, each in found if each is not UNSET})


def environment(context: Context) -> Iterator[SourcedVariable]:
    """What versions before the switch leave to accelerate, which reads it from the environment."""
    if not is_chosen(context) or on_xla(context) or can(SWITCH, context):
        return
    rule = f"transformers {version(context)} leaves this to accelerate"
    older = () if can("fsdp_config has a version", context) else ("version", "reshard_after_forward")
    for name in ("state_dict_type", *older):
        field = _BY_NAME[name]
        value = field.encode(context)
        if value is not UNSET:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield variable(f"FSDP_{name.upper()}", text, keys=field.keys, rule=rule)


def read_fsdp_config(
    tree: Mapping[str, Any], place: Callable[[str], Origin]
) -> tuple[list[Assignment], list[Diagnostic]]:
    """Assignments for every key of the file, with positions in it; a key that cannot be brought over is an error."""
    written = {name.removeprefix("fsdp_"): name for name in tree}
    yes = [written[each] for each in ASKED if each in written and str(tree[written[each]]).strip().lower() in YES]
    tree = {**tree, **dict.fromkeys(yes, True)}
    if tree.get(written.get("xla", "")) is not True:
        assignments, found = read_settings(tree, _BY_NAME, place, "--fsdp_config")
        return [*_first_version(assignments, written), *assignments], found
    second = tree.get(written.get("xla_fsdp_v2", "")) is True
    implied: dict[str, Any] = {"strategy.version": 2 if second else 1}
    if not {field.name for field in _WRAPPING} & written.keys():
        implied["strategy.auto_wrap"] = "transformer"  # whatever the words of --fsdp
    # Trainer reads the version for torch's FSDP alone.
    read = {name: value for name, value in tree.items() if name != written.get("version")}
    assignments, found = read_settings(read, {**by_name(_READ), **by_name(XLA)}, place, "--fsdp_config")
    return [*(Assignment(key, each, place(written["xla"])) for key, each in implied.items()), *assignments], found


def _first_version(assignments: Sequence[Assignment], written: Mapping[str, str]) -> Iterator[Assignment]:
    """Version 1 for settings that only it has, in a file that names no version."""
    asking = (each for each in assignments if each.key.removeprefix("strategy.") in FIRST_VERSION)
    only = [each for each in asking if each.value != FIRST_VERSION[each.key.removeprefix("strategy.")]]
    only += [each for each in assignments if each.key == "strategy.sharding" and each.value in FIRST_SHARDING]
    if "version" not in written and (first := next(iter(only), None)):
        yield Assignment("strategy.version", 1, first.origin)
