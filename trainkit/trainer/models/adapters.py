"""Low-rank adapters (LoRA) in a model, through peft: only the adapters, and a classifier's head, are trained."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.data.files import refuse_special
from trainkit.errors import TrainingError
from trainkit.files import parse_json
from trainkit.hub.cache import name_of
from trainkit.lora import AGREED, CONFIG, NO_LORA, SAME, WEIGHTS, differing, numbers
from trainkit.recipe.schema import HfModel, Peft, Recipe
from trainkit.text import join_names
from trainkit.trainer.models.base import Model, is_linear
from trainkit.trainer.models.weights import drawn, give_memory, sampled


def add_adapters(model: Model, settings: Peft) -> None:
    """Add adapters to the target modules, in place, and freeze everything else except a classifier's head."""
    # imported by peft; it warns of kernels that no adapter uses
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, inject_adapter_in_model

    targets = settings.target_modules or default_targets(model)
    names = [f".{name}" for name, _ in model.named_modules()]
    absent = [target for target in targets if not any(name.endswith(f".{target}") for name in names)]
    # peft would silently ignore a target that is not a module.
    lacking = "peft.target_modules: the model has no {} that peft can adapt"
    hint = f"it has {', '.join(linear_layers(model))}"
    if absent:
        raise TrainingError(lacking.format(", ".join(absent)), hint=hint)
    head = set(model.head())
    whole = [name for name, each in model.named_modules() if head.intersection(each.parameters(recurse=False))]
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        exclude_modules=whole or None,  # its weights are trained themselves
        use_rslora=settings.rslora,
        use_dora=settings.dora,
    )
    try:
        # peft warns that GPT-2's layers are transposed
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise TrainingError(lacking.format(", ".join(targets)), hint=hint) from error
    for parameter in model.head():
        parameter.requires_grad_(True)
    model.stochastic = model.stochastic or settings.dropout > 0


def draw_adapters(model: Model, seed: int, device: str) -> None:
    """Draw the adapters, each layer's by a generator of its own; on a device, as the weights beside them."""
    from peft.tuners.lora import LoraLayer

    for place, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        inside: Any = [each for name, each in layer.named_modules() if name.startswith("lora_")]
        for module in inside:
            give_memory(module, device)
        with drawn(seed, f"{place.replace('.base_layer', '')}.lora", inside):
            layer.reset_lora_parameters("default", True)


def default_targets(model: Model) -> list[str]:
    """The linear layers of the blocks: by the last part of their names, or by full name if that is ambiguous."""
    short, named = linear_layers(model), list(model.named_modules())
    if all(is_linear(each) for name, each in named if name.rpartition(".")[2] in short):
        return short
    inside = {each for block in model.blocks for each in block.modules() if is_linear(each)}
    return [name for name, each in named if each in inside]


def linear_layers(model: Model) -> list[str]:
    """The last parts of the names of the linear layers inside the model's blocks."""
    named = (each for block in model.blocks for each in block.named_modules())
    return sorted({name.rpartition(".")[2] for name, each in named if is_linear(each)})


def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters into their weights, and remove them."""
    for module in taken_out(model).values():
        module.merge()


def taken_out(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, by name, in whose place the model then has the layers without."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, BaseTunerLayer)}
    for name, module in adapted.items():
        model.set_submodule(name, module.get_base_layer())
    return adapted


_PREFIX, OWN = "base_model.model.", "inner."  # peft's prefix for the model, and ours for a wrapped one
# peft has no class for masked models
_TASKS = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM", "sequence_classification": "SEQ_CLS"}

# Other settings of a folder: checked against the tensors, or without effect on a model with given weights.
_ALLOWED = frozenset(
    (
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("inference_mode", "target_modules", "exclude_modules", "modules_to_save", "fan_in_fan_out", "lora_dropout"),
        *("eva_config", "runtime_config"),
    )
)
# peft's other initialisations change the base weights.
_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def write_adapters(model: Model, recipe: Recipe, folder: Path, step: int, dtype: torch.dtype | None = None) -> None:
    """Write the adapters, and a trained head, in the format of `PeftModel.from_pretrained`."""
    from safetensors.torch import save_file

    adapters = adapter_tensors(model).items()
    tensors = {_PREFIX + name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in adapters}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "step": str(step)})
    # "default" is what inject_adapter_in_model calls an adapter that is given no name.
    config = copy.copy(cast("Any", model).peft_config["default"])
    asked = recipe.model
    if isinstance(asked, HfModel):
        base = str(Path(asked.path).absolute()) if asked.path else None
        # By its public name on the Hub.
        config.base_model_name_or_path, config.revision = name_of(base or "") or (base, None)
        config.task_type = _TASKS.get(asked.task)
    config.target_modules = sorted(name.removeprefix(OWN) for name in config.target_modules)
    config.exclude_modules = sorted(name.removeprefix(OWN) for name in config.exclude_modules or ()) or None
    config.modules_to_save = sorted({name.partition(".")[0] for name in _head(model)}) or None
    config.inference_mode = True
    config.save_pretrained(str(folder))


def load_adapters(model: Model, folder: Path) -> None:
    """Load a model's adapters, and its head, from a folder.

    TrainingError if the folder is damaged or does not match.
    """
    # peft's own reader falls back to pickles without safetensors, to the Hub without a folder, and
    # silently ignores tensors that do not match.
    config, saved = _read(folder)
    _check_config(config, cast("Any", model).peft_config["default"].to_dict(), folder)
    own = adapter_tensors(model)
    _check_names(saved.keys(), own.keys(), folder)
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            sizes = f"{tuple(saved[name].shape)}, and this model's {tuple(tensor.shape)}"
            raise TrainingError(
                f"peft.path: the adapters in {folder} are of another model: their {name} is {sizes}",
                hint="start from the model that they were trained on",
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def fingerprint(settings: Peft) -> str:
    """SHA-256 of the adapters that a run starts from, or why they cannot be read; empty without any."""
    if settings.path is None:
        return ""
    try:
        return hashlib.sha256((Path(settings.path) / WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        return f"not to be read ({error.strerror})"


SAMPLED = 64  # number of values per tensor in a base model's fingerprint


def base_fingerprint(model: Model, read: Callable[[str], Tensor] | None = None) -> str:
    """SHA-256 of a base model for adapters: names, sizes and some values of its weights.

    Not of a classifier's head, which trains. Other values are another model of the same sizes; quantised weights are
    known by name and size alone, for a GPU rounds a few of them otherwise than a CPU. read: gives the values by name of
    a model on the meta device.
    """
    found, head = hashlib.sha256(), set(model.head())
    for name, each in model.named_parameters():
        if each in head:
            continue
        found.update(f"{name} {tuple(each.shape)}\n".encode())
        if each.is_floating_point():
            if read is not None:
                held = read(name)
            else:
                held = model.slices.look(each) if model.slices and each in model.slices else each
            # in 16 bits, to which both formats of precision.weights round alike
            values = sampled(held.detach(), SAMPLED)
            found.update(values.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return found.hexdigest()


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors for a checkpoint of adapters: trained parameters and saved buffers. No copies."""
    unsaved = {
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {
        **{name: each.detach() for name, each in model.named_parameters() if each.requires_grad},
        **{name: each for name, each in model.named_buffers() if name not in unsaved},
    }


def adapter_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors of the adapters and of the head, by peft's names. No copies."""
    from peft import get_peft_model_state_dict

    # The default, "auto", asks the Hub whether the vocabulary has grown (peft, utils/save_and_load.py).
    named: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {**{name.removeprefix(OWN): tensor for name, tensor in named.items()}, **_head(model)}


def _head(model: Model) -> dict[str, Tensor]:
    head = set(model.head())
    return {name.removeprefix(OWN): each.detach() for name, each in model.named_parameters() if each in head}


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration, and the tensors by their names without peft's prefix."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    refuse_special(str(folder), "peft.path")
    path, again = folder / CONFIG, "write the adapters again"
    try:
        config = parse_json(path.read_bytes())
        path = folder / WEIGHTS
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(path).items()}
    except FileNotFoundError as error:
        hint = "name a folder as peft, with safe_serialization, or trainkit export --adapter writes it"
        raise TrainingError(f"peft.path: there is no {path}", hint=hint) from error
    except OSError as error:
        raise TrainingError(f"peft.path: {path} cannot be read: {error.strerror or error}", hint=again) from error
    except (ValueError, SafetensorError) as error:
        fault = "is damaged" if isinstance(error, SafetensorError) else "is no JSON"
        raise TrainingError(f"peft.path: {path} {fault}: {error}", hint=again) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        what = f"peft.path: {folder / CONFIG} does not describe LoRA adapters"
        raise TrainingError(what, hint=NO_LORA)
    return config, tensors


def _check_config(saved: Mapping[str, Any], own: Mapping[str, Any], folder: Path) -> None:
    """TrainingError if the folder's adapters differ from the recipe's, or cannot be expressed in a recipe."""
    lacking = [name for name in ("r", "lora_alpha") if name not in numbers(saved)]
    if lacking:
        raise TrainingError(f"peft.path: {folder / CONFIG} does not say {' and '.join(lacking)}")
    if others := differing(saved, own):
        what = f"peft.path: the adapters in {folder} are others than the recipe's: {'; '.join(others)}"
        raise TrainingError(what, hint=SAME)
    known = {*_ALLOWED, *AGREED.values(), "init_lora_weights"}
    foreign = [name for name, value in saved.items() if name not in known and value and value != own.get(name)]
    if saved.get("init_lora_weights", True) not in _STARTS:
        foreign.append("init_lora_weights")
    if foreign:
        settings = ", ".join(f"{name} {json.dumps(saved[name])}" for name in foreign)
        raise TrainingError(
            f"peft.path: the adapters in {folder} were made with {settings}, which no recipe can express",
            hint="merge them into their model with peft, and name that as model.path",
        )


def _check_names(saved: Set[str], own: Set[str], folder: Path) -> None:
    """TrainingError that names layers, or other trained tensors, that only the recipe or only the folder has."""
    there, here = ({name.partition(".lora_")[0] for name in names if ".lora_" in name} for names in (saved, own))
    if there != here:
        kinds = ({name.rpartition(".")[2] for name in there}, {name.rpartition(".")[2] for name in here})
        theirs, ours = kinds if kinds[0] != kinds[1] else (there - here, here - there)
        raise TrainingError(
            f"peft.target_modules: the recipe adapts {join_names(sorted(ours)) or 'no others'}, and the adapters in "
            f"{folder} are of {join_names(sorted(theirs)) or 'no others'}",
            hint="name the same layers, and start from the model that they were trained on",
        )
    lacks, more = own - saved, saved - own
    if lacks or more:
        parts = ((f"lacks {join_names(sorted(lacks))}", lacks), (f"holds {join_names(sorted(more))} besides", more))
        raise TrainingError(
            f"peft.path: {folder / WEIGHTS} {' and '.join(what for what, names in parts if names)}",
            hint="what trains must be the same: the adapters, and the head of a classifier",
        )
