"""Validate the merged recipe: unknown keys, wrong values, and what a setting expects, in plain words."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainkit.errors import Diagnostic, Origin
from trainkit.optimizers import OTHER_NAMES
from trainkit.recipe.layer import Layer
from trainkit.recipe.merge import MODIFIERS, split_modifier, value_at
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.base import MOST, Section
from trainkit.recipe.schema.fields import Setting, members, open_keys, schema, tagged_sections
from trainkit.recipe.schema.launching import NO_RANGE
from trainkit.recipe.secrets import MASK, is_secret_name, mask_values
from trainkit.recipe.suggestions import NO_PIPELINE, PIPELINES, REPLACED, REPLACED_KINDS, did_you_mean, nearest_key
from trainkit.recipe.yaml_reader import read_scalar

_PLAIN = {bool: "true or false", str: "a text", float: "a number", int: "a whole number", types.NoneType: "null"}
_PLURAL = {"a text": "texts", "a whole number": "whole numbers", "a number": "numbers", "a mapping": "mappings"}
# Defaults as a recipe writes them.
_WRITTEN = {"None": "null", "": '""', "True": "true", "False": "false"}
_BOUNDS = {
    annotated_types.Ge: ("ge", "{} or more"),
    annotated_types.Gt: ("gt", "above {}"),
    annotated_types.Le: ("le", "at most {}"),
    annotated_types.Lt: ("lt", "below {}"),
}

# As `trainkit sweep` reads several values (trainkit/sweeps/space.py).
_DRAWN = re.compile(r"(range|uniform|log|int)\([^()]+\)")
_SCALAR = re.compile(r"[\w.+-]+")
_RANGE = re.compile(r"\s*\d+\s*(\.\.|[:-])\s*\d+\s*")

_FSDP = "write strategy: {{kind: fsdp, {}}}"
_FP8 = (
    "8-bit products are kernels of Transformer Engine or torchao, with scales that no recipe describes",
    'write bf16; a script of your own can ask for it itself, by Accelerator(mixed_precision="fp8")',
)
# Values that people know from other tools: why they are not taken, and what to write instead.
_REFUSED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "optimizer.name": OTHER_NAMES,
    "devices.type": {
        "tpu": ("trainkit runs on TPUs through torch_xla", "write xla"),
        **dict.fromkeys(
            ("gpu", "nvidia", "rocm", "hip", "amd"), ("PyTorch calls NVIDIA's and AMD's GPUs cuda", "write cuda")
        ),
        **dict.fromkeys(("metal", "apple"), ("PyTorch calls Apple's GPU mps", "write mps")),
    },
    "precision.dtype": {
        "tf32": (
            "TF32 is how the hardware multiplies fp32 numbers",
            "write --with precision/tf32, or precision: {dtype: fp32, tf32: true}",
        ),
        **dict.fromkeys(("fp8", "float8", "mxfp8", "fp8_e4m3"), _FP8),
        **dict.fromkeys(("16", "half", "float16"), ("PyTorch's float16", "write fp16")),
        "bfloat16": ("PyTorch's bfloat16", "write bf16"),
        **dict.fromkeys(("32", "float", "float32"), ("PyTorch's float32", "write fp32")),
    },
    "strategy.kind": {
        **dict.fromkeys(PIPELINES, NO_PIPELINE),
        **dict.fromkeys(
            ("tp", "tensor", "tensor_parallel"), ("it divides blocks under fsdp", _FSDP.format("tensor: 2"))
        ),
        **dict.fromkeys(
            ("hsdp", "hybrid_shard"), ("it is fsdp in several copies", _FSDP.format("sharding: hybrid_shard"))
        ),
    },
    "precision.weights": dict.fromkeys(("fp8", "float8"), _FP8),
    "precision.eval": dict.fromkeys(("fp8", "float8"), _FP8),
    "model.task": {
        **{
            name: ("TRL's trainers learn this, and trainkit launches them", f"start from `trainkit cp {recipe}`{more}")
            for names, recipe, more in (
                (("dpo", "ipo"), "dpo", ""),
                (("reward", "reward_model", "reward_modeling", "rm"), "reward-model", ""),
                (("grpo",), "grpo", ""),
                (("rloo",), "grpo", ", with program.module: trl.scripts.rloo"),
                (("kto",), "dpo", ", with program.module: trl.scripts.kto"),
            )
            for name in names
        },
        **dict.fromkeys(
            ("orpo", "cpo", "simpo", "ppo", "online_dpo", "gkd", "distillation", "prm"),
            ("TRL's trainers learn this, in a script of yours", "launch the script: trainkit run train.py"),
        ),
        "sft": ("it is the next token's prediction on chats, or on prompts with completions", "write causal_lm"),
    },
    "efficiency.compile.backend": dict.fromkeys(
        ("openxla_eval", "tvm", "ofi", "fx2trt", "onnxrt", "ipex", "tensorrt", "torch_tensorrt", "torchxla_trace_once"),
        ("it compiles for inference: there is no backward pass to train with", "write inductor"),
    ),
    # Reached by zero1 and zero2 alone: zero3 takes the value.
    "strategy.offload_optimizer": {
        "nvme": (
            "DeepSpeed keeps the optimizer state of stages 1 and 2 in CPU memory, whatever its file says of NVMe",
            "choose strategy.kind: zero3, or write cpu",
        )
    },
}


def refused(key: str, value: object) -> tuple[str, str] | None:
    """Why a known value is not taken, and what to do; None for a value that nothing is known of."""
    if not isinstance(value, str):
        return None
    if key == "nodes.count" and _RANGE.fullmatch(value):
        return NO_RANGE
    if key == "optimizer.name" and value.endswith("_multi_tensor"):
        value = "multi_tensor"
    return _REFUSED.get(key, {}).get(value)


def expected(setting: Setting) -> str:
    """What the setting takes: ``auto, all, none, a whole number (1 or more) or a list of whole numbers or texts``."""
    if setting.expects and not accepts(setting.annotation, list):
        return _either([*map(str, choices(setting.annotation)), setting.expects])
    return _either(_words(setting.annotation, setting.metadata))


def choices(annotation: Any) -> list[Any]:
    """The literal values that a type allows, as a value or as elements of a list."""
    found: list[Any] = []
    for member, _ in members(annotation):
        if get_origin(member) is Literal:
            found += get_args(member)
        elif get_origin(member) is list:
            found += choices(get_args(member)[0])
    return found


def accepts(annotation: Any, *kinds: type) -> bool:
    """Whether one of the alternatives of a type is one of these types."""
    return any((get_origin(member) or member) in kinds for member, _ in members(annotation))


def takes_text_only(setting: Setting) -> bool:
    """Whether any text is a value of the setting, and nothing but a text (or null)."""
    return _kinds(setting.annotation) == {str}


def takes_switch(setting: Setting) -> bool:
    """Whether the setting is a yes-or-no question."""
    found = _kinds(setting.annotation)
    return found == {bool} or (found == {Literal} and {type(each) for each in choices(setting.annotation)} == {bool})


def _kinds(annotation: Any) -> set[Any]:
    return {get_origin(member) or member for member, _ in members(annotation)} - {types.NoneType}


def complain(setting: Setting, key: str, value: Any) -> tuple[str, str, str]:
    """What, why and hint for a value of the wrong type or outside its bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key} must be a finite number, not {value}", setting.description, "write a number"
    want = expected(setting)
    if isinstance(value, (int, float)) and value > MOST and "at most" not in want:
        want += f", at most {MOST:.0e}"
    what = f"{key} must be {want}, not {shown(key, value)}"
    default = f"; the default is {_WRITTEN.get(str(setting.default), setting.default)}" if setting.key == key else ""
    why, hint = refused(key, value) or (setting.description, _remedy(setting, value))
    return what, why, hint or f"write {want}{default}"


def element(setting: Setting) -> type[Section] | None:
    """The section that each element of a list is, where one is."""
    lists = (get_args(member)[0] for member, _ in members(setting.annotation) if get_origin(member) is list)
    return next((each for each in lists if isinstance(each, type) and issubclass(each, Section)), None)


def inside(setting: Setting, container: type, name: object = None) -> Setting:
    """What an element of a list or an entry of a mapping must be, as a setting. name: of the entry."""
    if isinstance(setting.annotation, type) and issubclass(setting.annotation, Section):
        info = setting.annotation.model_fields[str(name)]
        key = f"{setting.key}.{name}"
        return Setting(key, info.annotation, tuple(info.metadata), info.get_default(), info.description or "")
    held = (get_args(member)[-1] for member, _ in members(setting.annotation) if get_origin(member) is container)
    return replace(setting, key=f"{setting.key}[]", annotation=next(held, setting.annotation), metadata=())


def shown(key: str, value: Any) -> str:
    """The value as a message shows it."""
    if is_secret_name(key.rpartition(".")[2]):
        return MASK
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if len(str(value)) > 60 else f"the list {value}"
    if isinstance(value, str):
        value = mask_values(value)  # of one that is cut nobody would know that it is a secret
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}…"
    return str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}…"


def _remedy(setting: Setting, value: Any) -> str:
    options = [str(choice) for choice in choices(setting.annotation)]
    if isinstance(value, str) and value in options:
        return "write a list: [a, b]"
    if isinstance(value, str):
        if hint := did_you_mean(value, options, ""):
            return hint
        try:
            read: object = read_scalar(value)
        except ValueError:
            read = value
        if isinstance(read, bool) and accepts(setting.annotation, bool):
            return "remove the quotes: expected true or false"
        if isinstance(read, (int, float)) and accepts(setting.annotation, int, float):
            fits = isinstance(read, int) or accepts(setting.annotation, float)
            return "remove the quotes: expected a number" if fits else "write a whole number without quotes"
    if value is None:
        return "write a value, or remove the line to take the default"
    if isinstance(value, (bool, int, float)) and accepts(setting.annotation, str):
        return "put it in quotes: expected a text"
    if isinstance(value, float) and value.is_integer() and accepts(setting.annotation, int):
        return f"write {int(value)}"
    if isinstance(value, (str, int)) and accepts(setting.annotation, list) and not options:
        return "write a list: [a, b]"
    return ""


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> list[str]:
    found: list[str] = []
    for member, constraints in members(annotation):
        origin = get_origin(member)
        if origin is Literal:
            found += [_WRITTEN.get(str(choice), str(choice)) for choice in get_args(member)]
        elif origin is list:
            elements = [_PLURAL.get(word, word) for word in _words(get_args(member)[0]) if word != "null"]
            found.append(f"a list of {_either(elements)}{_bounds(constraints)}")
        elif origin is dict or (isinstance(member, type) and issubclass(member, Section)):
            found.append("a mapping")
        else:
            found.append(_PLAIN.get(member, "a value") + _bounds([*constraints, *metadata]))
    # `null` last, and a number that is said twice once.
    return sorted(dict.fromkeys(found), key=lambda word: word == "null")


def _bounds(constraints: Iterable[Any]) -> str:
    said = [
        text.format(getattr(each, name))
        for each in constraints
        for kind, (name, text) in _BOUNDS.items()
        if isinstance(each, kind) and getattr(each, name) != MOST
    ]
    said += ["not empty" for each in constraints if isinstance(each, annotated_types.MinLen)]
    return f" ({', '.join(said)})" if said else ""


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# Comparing an unknown word with every key takes a millisecond; more advice than this is not read anyway.
_MAX_SUGGESTIONS = 30

Locate = Callable[[str], Origin | None]


def unknown_keys(layer: Layer) -> list[Diagnostic]:
    """An error for each key of the layer that the schema does not have in any kind of its section."""
    found: list[Diagnostic] = []
    unknown: list[tuple[str, str]] = []
    _sift(layer.tree, unknown)
    for key, written in unknown:
        origin = layer.keys.get(key) or layer.origin(key)  # a caret under the key itself
        if "." in written and key in schema().keys:
            # A key with dots is one name in YAML; only the command line takes it apart.
            *sections, last = written.split(".")
            nested = "".join(f"{section}: {{" for section in sections) + f"{last}: …" + "}" * len(sections)
            what = f"{written} is written as one name, and the settings of a file are nested"
            hint = f"write `{nested}`; only flags have dots: {key}=VALUE"
            found.append(Diagnostic("error", what, key, origin, hint=hint))
            continue
        close = nearest_key(key) if len(found) < _MAX_SUGGESTIONS else None
        section, _, name = key.rpartition(".")
        name = name if "." in written else written
        what = f"{section} has no setting {name!r}" if section else f"there is no section or setting {name!r}"
        siblings = sorted(each.rpartition(".")[2] for each in schema().keys if each.rpartition(".")[0] == section)
        hint = f"did you mean {close}?" if close else f"known are: {', '.join(siblings)}"
        if key in REPLACED:
            hint = f"it is {REPLACED[key]} now; columns that have these names by themselves need none"
        why, hint = NO_PIPELINE if name.lower() in PIPELINES else ("", hint)
        found.append(Diagnostic("error", what, key, origin, why, hint))
    return found


def without_unknown(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without keys that no kind of their section has; those are reported at their layers' positions."""
    return _sift(tree, [])


def _sift(
    tree: Mapping[str, Any],
    unknown: list[tuple[str, str]],
    prefix: str = "",
    kinds: Mapping[str, str] | None = None,
    skip: Callable[[Any], bool] | None = None,
) -> dict[str, Any]:
    """The settings of a tree, keys without their modifiers.

    unknown: gets the dotted key and the name as written of each that the schema does not have.
    kinds: what tagged sections are where they do not say it.
    skip: whether a value is not final; then lists to be appended, which are not either, are left out too.
    """
    kept: dict[str, Any] = {}
    for raw, value in tree.items():
        name, modifier = split_modifier(raw, prefix) if raw.endswith(MODIFIERS) else (raw, "")
        key = f"{prefix}.{name}" if prefix else name
        if "." in name or (key not in schema().sections and key not in schema().settings):
            unknown.append((key, name if "." in name else raw))
        elif isinstance(value, Mapping) and key in schema().sections:
            kept[name] = _sift(value, unknown, key, kinds, skip)
        elif skip is None or (modifier != "+" and (key in open_keys() or not skip(value))):
            kept[name] = value
    if kinds and prefix in kinds:
        kept.setdefault("kind", kinds[prefix])
    return kept


def validate_layer(layer: Layer, kinds: Mapping[str, str], skip: Callable[[Any], bool]) -> list[Diagnostic]:
    """Errors in the values that one layer gives, even where a stronger layer replaces them.

    kinds: the kind of each tagged section, for a layer that does not say it.
    skip: whether a value is not final (an interpolation).
    """
    tree = _sift(layer.tree, [], kinds=kinds, skip=skip)
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        # A rule over several settings can be judged only where all of them are known: on the merged tree.
        single = [each for each in error.errors(include_url=False) if each["type"] != "value_error"]
        return list(_translate(single, tree, layer.origin))
    return []


def validate(tree: Mapping[str, Any], locate: Locate) -> tuple[Recipe | None, list[Diagnostic]]:
    """The recipe, or every error in the merged tree."""
    complete = with_kinds(tree)
    try:
        return Recipe.model_validate(complete), []
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    found = list(_translate(wrong, complete, locate))
    # Settings are compared only where each by itself is right: once more without those that are not.
    apart = {
        key for each in wrong if (key := _setting_key(each["loc"])[0]) and (each["type"] != "value_error" or "." in key)
    }
    sound = deepcopy(complete)
    for key in apart:
        section, _, name = key.rpartition(".")
        (value_at(sound, section) if section else sound).pop(name, None)
    if sound != complete:
        names = {key.rpartition(".")[2] for key in apart}
        found += [each for each in validate(sound, locate)[1] if names.isdisjoint(re.findall(r"\w+", each.what))]
    return None, found


def with_kinds(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with the default kind in each tagged section that does not say its kind."""
    complete = dict(tree)
    for key in tagged_sections():
        section = complete.get(key)
        if isinstance(section, Mapping) and "kind" not in section:
            complete[key] = {"kind": default_kind(key), **section}
    return complete


def default_kind(section: str) -> str:
    """The kind of a tagged section that no layer mentions."""
    info = next(field for name, field in Recipe.model_fields.items() if (field.alias or name) == section)
    return str(info.get_default().kind)


def likely_kind(section: str, given: Any) -> str:
    """The kind of a tagged section that names none: the first that has the given settings, else the default."""
    names = given.keys() if isinstance(given, Mapping) else ()
    kinds = schema().sections[section].kinds.items()  # in the order of the schema, the default first
    return next((kind for kind, model in kinds if {*names} <= model.model_fields.keys()), default_kind(section))


def _translate(errors: Sequence[ErrorDetails], tree: Mapping[str, Any], locate: Locate) -> Iterator[Diagnostic]:
    found: dict[str, Diagnostic] = {}
    for each in errors:
        key, rest = _setting_key(each["loc"])
        if each["type"] == "extra_forbidden":
            yield from _foreign(key, rest, tree, locate)
            continue
        if each["type"] == "value_error" and key in schema().sections:
            messages = each["msg"].removeprefix("Value error, ").splitlines()
            yield from (_contradiction(key, message, tree, locate) for message in messages)
            continue
        wrong = _wrong(key, rest, each, tree, locate)
        found.setdefault(wrong.key, wrong)
    # Each alternative of a type complains for itself: those that want no list, about the whole of it.
    with_elements = {key.rpartition(".")[0] for key in found}
    yield from (wrong for key, wrong in found.items() if key not in with_elements)


def _setting_key(loc: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """The setting or section that a pydantic location lies in, and what of the location lies below it."""
    key, table = "", schema()
    tag = -1
    for position, part in enumerate(loc):
        if tag < 0 and key in tagged_sections() and part in table.sections[key].kinds:
            tag = position  # pydantic names the kind of a tagged section as a step of the path, before any setting
            continue
        following = f"{key}.{part}" if key else str(part)
        if following not in table.sections and following not in table.settings:
            return key, loc[position:]
        key = following
    return key, ()


def _wrong(
    key: str, rest: tuple[int | str, ...], error: ErrorDetails, tree: Mapping[str, Any], locate: Locate
) -> Diagnostic:
    setting = schema().setting(key, str(value_at(tree, f"{key.partition('.')[0]}.kind")))
    value = value_at(tree, key)
    if error["type"] == "union_tag_invalid":
        kinds = list(schema().sections[key].kinds)
        given = value.get("kind") if isinstance(value, Mapping) else value
        what = f"{key}.kind must be one of {', '.join(kinds)}, not {shown('kind', given)}"
        otherwise = f"write one of them; the default is {default_kind(key)}"
        hint = did_you_mean(given, kinds, otherwise) if isinstance(given, str) else otherwise
        if now := REPLACED_KINDS.get((key, str(given))):
            hint = f"it is {key}.kind: {now} now"
        why, hint = refused(f"{key}.kind", given) or ("", hint)
        return Diagnostic("error", what, f"{key}.kind", locate(f"{key}.kind"), why, hint)
    if setting is None:
        section = schema().sections[key]
        kind = isinstance(value, str) and value in section.kinds
        hint = f"write `{key}: {{kind: {value}}}`" if kind else f"write `{key}:` and its settings indented below"
        what = f"{key} must be a mapping, not {shown(key, value)}"
        return Diagnostic("error", what, key, locate(key), section.description, hint)
    # The list elements and mapping entries that a location names, behind the names of union members.
    for part in rest:
        if part in (range(len(value)) if isinstance(value, list) else value if isinstance(value, Mapping) else ()):
            key, setting, value = f"{key}.{part}", inside(setting, type(value), part), value[part]
    if error["type"] == "value_error":
        what = f"{key}: {error['msg'].removeprefix('Value error, ')}"
        return Diagnostic("error", what, key, locate(key), setting.description, "change what it says")
    what, why, hint = complain(setting, key, value)
    origin = locate(key)
    if origin is not None and origin.layer == "flag" and (several := _several(setting, value)):
        what = f"{key} takes one value in a run, not {shown(key, value)}"
        hint = f"several values are a sweep, of a run each: trainkit sweep RECIPE '{key}={several}'"
    return Diagnostic("error", what, key, origin, why, hint)


def _several(setting: Setting, value: Any) -> str:
    """The values of an override that a sweep takes, as it takes them; empty of one value, and of no value."""
    if accepts(setting.annotation, list, dict):
        return ""
    if isinstance(value, str) and _DRAWN.fullmatch(value):
        return value
    parts = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else []
    texts = [str(part).strip() for part in parts]
    return ",".join(texts) if len(texts) > 1 and all(map(_SCALAR.fullmatch, texts)) else ""


def _contradiction(section: str, message: str, tree: Mapping[str, Any], locate: Locate) -> Diagnostic:
    """A rule over several settings of a section, at the place where the strongest layer gives one of them."""
    given = value_at(tree, section)
    named = [name for name in given if name in message.split()] if isinstance(given, Mapping) else []
    places = {f"{section}.{name}": locate(f"{section}.{name}") for name in named}
    key = max(places, key=lambda each: place.strength if (place := places[each]) else 0, default=section)
    about = {each for word in message.split() if (each := f"{section}.{word}") in schema().settings}
    hint = f"{'change' if named else 'set'} {about.pop()}" if len(about) == 1 else "change one of them"
    return Diagnostic("error", f"{section}: {message}", key, locate(key), hint=hint)


def _foreign(key: str, rest: tuple[int | str, ...], tree: Mapping[str, Any], locate: Locate) -> Iterator[Diagnostic]:
    """A key that other kinds of its section have, but not the chosen one."""
    if (declared := schema().setting(key)) and len(rest) > 1 and (model := element(declared)):
        # A mapping in a list, which no layer is searched for unknown keys in.
        full, names = ".".join(map(str, (key, *rest))), sorted(model.model_fields)
        hint = did_you_mean(str(rest[1]), names, f"known are: {', '.join(names)}")
        yield Diagnostic("error", f"{key}.{rest[0]} has no setting {rest[1]!r}", full, locate(full), hint=hint)
        return
    full = key if key in schema().settings and not rest else f"{key}.{rest[0]}" if rest else key
    section, _, name = full.rpartition(".")
    kinds = schema().sections[section].kinds if section in schema().sections else {}
    owners = [kind for kind, model in kinds.items() if name in model.model_fields]
    if not owners:
        return  # no kind has it: already reported at the layer that gives it
    kind = value_at(tree, f"{section}.kind")
    what = f"{section}.kind {kind} has no setting {name!r}"
    owner = " or ".join(owners)
    hint = f"remove it, or choose {section}.kind: {owner}"
    if locate(f"{section}.kind") == locate(section):  # this layer leaves the kind to others
        hint += f"; with `kind: {owner}` beside it, it yields to the kind of a stronger layer"
    yield Diagnostic("error", what, full, locate(full), hint=hint)
