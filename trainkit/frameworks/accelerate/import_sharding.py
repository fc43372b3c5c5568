"""The strategies of accelerate: its FSDP keys, and DeepSpeed by a file or by accelerate's own keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainkit.frameworks.accelerate.fields import OFF
from trainkit.frameworks.accelerate.imported_config import ImportedConfig
from trainkit.frameworks.base.draft import FlagUse, read_flag
from trainkit.frameworks.base.fields import by_name
from trainkit.frameworks.base.foreign_file import open_foreign_file
from trainkit.frameworks.base.fsdp_settings import FIELDS, FIRST_VERSION, only_by_size, read_settings
from trainkit.frameworks.deepspeed.fields import AUTO, FORMATS
from trainkit.frameworks.deepspeed.importer import take_apart
from trainkit.frameworks.deepspeed.sharding import formats
from trainkit.recipe.layers.merge import value_at

FSDP, ZERO = "fsdp_config", "deepspeed_config"
FILE = f"{ZERO}.deepspeed_config_file"
# What may be given beside a file.
_BESIDE_FILE = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher")
_NVME = "accelerate never hands NVMe paths to its workers; the recipe's is used"


def fsdp(config: ImportedConfig) -> None:
    """Every key of fsdp_config, and what accelerate takes where one is missing."""
    draft, values = config.draft, config.below(FSDP)
    config.used |= {f"{FSDP}.{name}" for name in values}
    if "fsdp_version" in values and values["fsdp_version"].value == 2:
        for name in values.keys() & {f"fsdp_{each}" for each in ("sharding_strategy", *FIRST_VERSION)}:
            config.remark(f"{FSDP}.{name}", f"{name} is ignored with fsdp_version 2, and left out.")
            del values[name]
    offload = values.pop("fsdp_activation_checkpointing_offload", None)
    if offload and offload.value:
        draft.remark("fsdp_activation_checkpointing_offload has no key in a recipe: activations stay on the device.")
    policy = str(values["fsdp_auto_wrap_policy"].value) if "fsdp_auto_wrap_policy" in values else ""
    if "fsdp_min_num_params" in values and policy != "SIZE_BASED_WRAP":
        config.remark(f"{FSDP}.fsdp_min_num_params", only_by_size("accelerate"))
        if policy:
            del values["fsdp_min_num_params"]
    kind = config.origin("distributed_type")
    draft.set("strategy.kind", "fsdp", kind)
    words: dict[Any, Any] = {"true": True, "false": False}  # which accelerate reads in quotes too
    tree = {name: words.get(str(each.value).lower(), each.value) for name, each in values.items()}
    assignments, problems = read_settings(tree, by_name(FIELDS), lambda name: values[name].origin, "fsdp_config:")
    for each in assignments:
        draft.put(each)
    draft.problems += problems
    if "fsdp_version" not in values:
        draft.set("strategy.version", 1, kind, "accelerate takes version 1 where fsdp_version is not given")
    if draft.get("strategy.auto_wrap") is None:
        draft.set("strategy.auto_wrap", "none", kind, "accelerate wraps the model as a whole where no policy is given")


def deepspeed(config: ImportedConfig) -> None:
    """A DeepSpeed file, or accelerate's own keys for it."""
    if config.get(FILE) is not None:
        _by_file(config)
    else:
        _by_keys(config)
    for name in config.below(ZERO):
        if f"{ZERO}.{name}" not in config.used:
            config.remark(f"{ZERO}.{name}", f"{name} has no key in a recipe.")
    compiles = config.get("dynamo_config.dynamo_backend") not in OFF
    for name in config.below("dynamo_config") if compiles else ():
        config.remark(f"dynamo_config.{name}", f"accelerate ignores {name} under DeepSpeed.")


def _by_file(config: ImportedConfig) -> None:
    """A base for a script, which makes its own optimizer and schedule; taken apart for the built-in trainer."""
    path = str(config.get(FILE))
    if config.program:
        given = FlagUse("deepspeed", path, config.origin(FILE))
        assignments, problems = read_flag(config.draft, config.context, given)
        config.draft.problems += [replace(each, what=each.what.replace("--deepspeed: ", "")) for each in problems]
        for each in assignments:
            config.draft.put(each)
        if problems:
            return
    else:
        take_apart(config.draft, config.context, open_foreign_file(config.context, path))
    config.get(f"{ZERO}.zero3_init_flag")
    for other in config.below(ZERO):
        if other not in _BESIDE_FILE:
            config.remark(f"{ZERO}.{other}", f"{other} beside a DeepSpeed file is an error in the workers; left out.")
    _format_of_file(config, path)


def _format_of_file(config: ImportedConfig, path: str) -> None:
    """The plan compares its number format with the file's; a flag counts where the file leaves it open."""
    tree = open_foreign_file(config.context, path).tree
    for dtype in formats(tree) if config.program else ():
        config.put(FILE, "precision.dtype", dtype)
    if config.get("mixed_precision") in (None, False, "no"):
        return
    if config.by_flag("mixed_precision") and all(value_at(tree, row.name) in (None, AUTO) for row in FORMATS):
        config.put("mixed_precision", "precision.dtype", config.get("mixed_precision"))
    else:
        config.remark("mixed_precision", "mixed_precision beside a DeepSpeed file: the file has the number format.")


def _by_keys(config: ImportedConfig) -> None:
    if config.get(f"{ZERO}.zero_stage") is None:
        reason = "accelerate takes ZeRO stage 2 where zero_stage is not given"
        config.put("distributed_type", "strategy.kind", "zero2", reason)
    config.take(f"{ZERO}.zero_stage")
    kind = config.draft.get("strategy.kind")
    if config.draft.problems:
        return
    stage = int(kind.removeprefix("zero")) if kind.startswith("zero") else 0
    config.take(f"{ZERO}.gradient_accumulation_steps")
    clipping = config.get(f"{ZERO}.gradient_clipping")
    if clipping in (None, "auto", "none") or stage or not config.program:
        config.take(f"{ZERO}.gradient_clipping")
    else:
        text = f"gradient_clipping {clipping} is DeepSpeed's: with plain replicas the script's clip_grad_norm_ counts."
        config.remark(f"{ZERO}.gradient_clipping", text)
    _offload(config, "optimizer", stage, 1)
    _offload(config, "param", stage, 3)
    for name in ("zero3_init_flag", "zero3_save_16bit_model"):
        if config.get(f"{ZERO}.{name}") is True and stage != 3:
            text = f"{name} needs ZeRO stage 3, and the stage is {stage}: it does nothing, and is left out."
            config.remark(f"{ZERO}.{name}", text)
        elif name == "zero3_save_16bit_model":
            config.take(f"{ZERO}.{name}")
    if config.get(f"{ZERO}.deepspeed_multinode_launcher") not in (None, "standard", "pdsh"):
        config.used.discard(f"{ZERO}.deepspeed_multinode_launcher")


def _offload(config: ImportedConfig, place: str, stage: int, least: int) -> None:
    """Where a state is kept. least: the first stage that can move it."""
    name, path = f"{ZERO}.offload_{place}_device", f"{ZERO}.offload_{place}_nvme_path"
    device, _ = config.get(name), config.get(path)
    if device not in (None, "none") and stage < least:
        needs = f"{least} or more" if least < 3 else str(least)
        text = f"offload_{place}_device {device} needs ZeRO stage {needs}, and the stage is {stage}: it does nothing, "
        config.remark(name, f"{text}and is left out.")
        return
    config.take(name)
    if device == "nvme":
        config.take(path, _NVME)
