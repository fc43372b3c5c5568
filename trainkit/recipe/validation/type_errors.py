"""What a setting takes, in plain words, and what is wrong with a value that it does not take."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import annotated_types

from trainkit.optimizers import OTHER_NAMES
from trainkit.recipe.layers.secrets import MASK, is_secret_name, mask_values
from trainkit.recipe.schema.base import MOST, Section
from trainkit.recipe.schema.fields import Setting, members
from trainkit.recipe.schema.launching import NO_RANGE
from trainkit.recipe.validation.suggestions import did_you_mean
from trainkit.recipe.yaml.scalars import read_scalar

# What patterns mean, of a list's elements behind `[]`. A pattern without words here is shown as it is (a test asks).
PATTERN_WORDS = {
    "name": "a name of letters, digits, dots, dashes and underscores (at most 100, a letter or digit first)",
    "cluster.time": 'a time limit of Slurm\'s in quotes ("90:00" is minutes:seconds, "12:00:00", "1-12:00:00")',
    "cluster.hosts[]": "a machine as ssh knows it (`gpu1`, `me@10.0.0.5`)",
    "cluster.workdir": "a folder by its whole path (`/data/project`)",
    "container.image": "the name of an image",
    "container.python": "the name or path of an interpreter in the image",
    "container.workdir": "an absolute path inside, or null",
    "container.caches": "an absolute path without colon and comma, or null",
    "container.shared_memory": "`host`, or a size with its unit (16g)",
    "container.user": "`caller`, `image`, or uid:gid in quotes",
    "cluster.memory_per_node": 'an amount of memory ("480G"; Slurm takes "0" for all; Kubernetes has "480Gi")',
    **dict.fromkeys(
        ("cluster.namespace", "cluster.queue", "cluster.secret"),
        "a name of Kubernetes: small letters, digits and dashes (at most 63, no dash at either end)",
    ),
    "cluster.gpu_resource": "the name of a resource as nvidia.com/gpu",
    "nodes.rendezvous": "`auto` or host:port with a port from 1 to 65535",
    "optimizer.name": "an import path pkg.mod:Class",
    "output.root": "a folder",
    **dict.fromkeys(("train.loss", "model.target", "data.target", "data.collate"), "an import path pkg.mod:name"),
}
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

_RANGE = re.compile(r"\s*\d+\s*(\.\.|[:-])\s*\d+\s*")

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
        **dict.fromkeys(("16", "half", "float16"), ("PyTorch's float16", "write fp16")),
        "bfloat16": ("PyTorch's bfloat16", "write bf16"),
        **dict.fromkeys(("32", "float", "float32"), ("PyTorch's float32", "write fp32")),
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
    if setting.key in PATTERN_WORDS:
        return _either([*map(str, choices(setting.annotation)), PATTERN_WORDS[setting.key]])
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
