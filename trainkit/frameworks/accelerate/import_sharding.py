"""The strategies of accelerate: its FSDP keys by the reader of --fsdp_config, its DeepSpeed keys by a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainkit.frameworks.accelerate.import_settings import Telling
from trainkit.frameworks.base import fsdp as sharding
from trainkit.frameworks.base.draft import FlagUse, read_flag
from trainkit.frameworks.base.fields import by_name
from trainkit.frameworks.base.foreign_file import open_foreign_file
from trainkit.frameworks.deepspeed.importer import take_apart
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.yaml.reader import compose_bytes

FSDP, ZERO = "fsdp_config", "deepspeed_config"
_FIRST = "accelerate takes version 1 where fsdp_version is not given"
_OBSOLETE = (
    *("fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_backward_prefetch"),
    "fsdp_forward_prefetch",
)
_PLAIN = {"gradient_accumulation_steps": "batch.accumulation", "gradient_clipping": "train.max_grad_norm"}
_NVME = "accelerate never hands NVMe paths to its workers; the recipe's is used"


def fsdp(telling: Telling) -> None:
    """Every key of fsdp_config, and what accelerate takes where one is missing."""
    draft, said = telling.draft, telling.below(FSDP)
    telling.read |= {f"{FSDP}.{name}" for name in said}
    second = "fsdp_version" in said and said["fsdp_version"].value == 2
    for name in _OBSOLETE if second else ():
        if name in said:
            telling.remark(f"{FSDP}.{name}", f"{name} is ignored with fsdp_version 2, and left out.")
            del said[name]
    offload = said.pop("fsdp_activation_checkpointing_offload", None)
    if offload and offload.value:
        draft.remark("fsdp_activation_checkpointing_offload has no key in a recipe: activations stay on the device.")
    if "fsdp_min_num_params" in said and _policy(telling) != "SIZE_BASED_WRAP":
        telling.remark(f"{FSDP}.fsdp_min_num_params", sharding.only_by_size("accelerate"))
        if _policy(telling):
            del said["fsdp_min_num_params"]
    values = {name: _truth(told.value) for name, told in said.items()}
    kind = telling.origin("distributed_type")
    draft.set("strategy.kind", "fsdp", kind)
    fields = by_name(sharding.FIELDS)
    assignments, problems = sharding.read_settings(values, fields, lambda name: said[name].origin, "fsdp_config:")
    for each in assignments:
        draft.put(each)
    draft.problems += problems
    if "fsdp_version" not in said:
        draft.set("strategy.version", 1, kind, _FIRST)
    if draft.get("strategy.auto_wrap") is None:
        draft.set("strategy.auto_wrap", "none", kind, "accelerate wraps the model as a whole where no policy is given")


def _truth(value: Any) -> Any:
    """accelerate reads quoted truths too."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _policy(telling: Telling) -> str:
    told = telling.below(FSDP).get("fsdp_auto_wrap_policy")
    return str(told.value) if told else ""


def deepspeed(telling: Telling) -> None:
    """A DeepSpeed file, or accelerate's own keys for it."""
    if telling.get(f"{ZERO}.deepspeed_config_file") is not None:
        _by_file(telling)
    else:
        _by_keys(telling)
    for name in list(telling.below(ZERO)):
        if f"{ZERO}.{name}" not in telling.read:
            telling.remark(f"{ZERO}.{name}", f"{name} has no key in a recipe.")
    compiles = telling.get("dynamo_config.dynamo_backend") not in (None, False, "no", "NO")
    for name in telling.below("dynamo_config") if compiles else ():
        telling.remark(f"dynamo_config.{name}", f"accelerate ignores {name} under DeepSpeed.")


def _by_file(telling: Telling) -> None:
    name = f"{ZERO}.deepspeed_config_file"
    if telling.program:
        _as_base(telling, name)
    else:
        take_apart(telling.draft, telling.context, open_foreign_file(telling.context, str(telling.get(name))))
    for other in telling.below(ZERO):
        if other not in ("deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher"):
            telling.remark(f"{ZERO}.{other}", f"{other} beside a DeepSpeed file is an error in the workers; left out.")
    telling.get(f"{ZERO}.zero3_init_flag")
    _format_beside_file(telling, name)


def _format_beside_file(telling: Telling, name: str) -> None:
    """As a flag it counts where the file leaves the number format open."""
    wanted = telling.get("mixed_precision")
    if wanted in (None, False, "no"):
        return
    tree = compose_bytes(telling.context.files.read(absolute(str(telling.get(name)), telling.context.cwd))).tree
    said = [value_at(tree, f"{dtype}.enabled") for dtype in ("bf16", "fp16")]
    if telling.said["mixed_precision"].flag and all(each in (None, "auto") for each in said):
        telling.put("mixed_precision", "precision.dtype", wanted)
    else:
        telling.remark("mixed_precision", "mixed_precision beside a DeepSpeed file: the file has the number format.")


def _as_base(telling: Telling, name: str) -> None:
    """The file as it stands, for a script that makes its own optimizer and schedule."""
    given = FlagUse("deepspeed", str(telling.get(name)), telling.origin(name))
    assignments, problems = read_flag(telling.draft, telling.context, given)
    telling.draft.problems += [replace(each, what=each.what.replace("--deepspeed: ", "")) for each in problems]
    for each in assignments:
        telling.draft.put(each)
    if not problems:
        _said_in_file(telling, name)


def _said_in_file(telling: Telling, name: str) -> None:
    """What the recipe has to say too, because the plan compares it with the file."""
    tree = compose_bytes(telling.context.files.read(absolute(str(telling.get(name)), telling.context.cwd))).tree
    for dtype in ("bf16", "fp16"):
        if value_at(tree, f"{dtype}.enabled") is True:
            telling.put(name, "precision.dtype", dtype)


def _by_keys(telling: Telling) -> None:
    stage = telling.get(f"{ZERO}.zero_stage")
    stage = int(stage) if isinstance(stage, str) and stage.isdecimal() else stage
    name = f"{ZERO}.zero_stage" if stage is not None else "distributed_type"
    if stage not in (None, 0, 1, 2, 3):
        telling.draft.fail(f"zero_stage is {stage!r}", telling.origin(name), "write 0, 1, 2 or 3")
        return
    reason = "accelerate takes ZeRO stage 2 where zero_stage is not given" if stage is None else ""
    stage = 2 if stage is None else stage
    telling.put(name, "strategy.kind", f"zero{stage}" if stage else "ddp", reason)
    for theirs, ours in (
        ("gradient_accumulation_steps", "batch.accumulation"),
        ("gradient_clipping", "train.max_grad_norm"),
    ):
        value = telling.get(f"{ZERO}.{theirs}")
        if value not in (None, "auto", "none") and theirs == "gradient_clipping" and not stage and telling.program:
            text = f"gradient_clipping {value} is DeepSpeed's: with plain replicas the script's clip_grad_norm_ counts."
            telling.remark(f"{ZERO}.{theirs}", text)
        elif value not in (None, "auto", "none"):
            telling.put(f"{ZERO}.{theirs}", ours, value)
    _offloads(telling, stage)
    if telling.get(f"{ZERO}.zero3_init_flag") is True and stage != 3:
        text = f"zero3_init_flag needs ZeRO stage 3, and the stage is {stage}: it does nothing, and is left out."
        telling.remark(f"{ZERO}.zero3_init_flag", text)
    if telling.get(f"{ZERO}.deepspeed_multinode_launcher") not in (None, "standard", "pdsh"):
        telling.read.discard(f"{ZERO}.deepspeed_multinode_launcher")
    _gathering(telling, stage)


def _gathering(telling: Telling, stage: int) -> None:
    name = f"{ZERO}.zero3_save_16bit_model"
    if telling.get(name) is True and stage == 3:
        telling.put(name, "strategy.gather_16bit", True)
    elif telling.get(name) is True:
        text = f"zero3_save_16bit_model needs ZeRO stage 3, and the stage is {stage}: it does nothing, and is left out."
        telling.remark(name, text)


def _offloads(telling: Telling, stage: int) -> None:
    for place in ("optimizer", "param"):
        name, path = f"{ZERO}.offload_{place}_device", f"{ZERO}.offload_{place}_nvme_path"
        device, folder = telling.get(name), telling.get(path)
        if device in (None, "none"):
            continue
        if (place == "param" and stage != 3) or not stage:
            what = f"offload_param_device {device}" if place == "param" else f"offload_optimizer_device {device}"
            telling.remark(name, f"{what} needs ZeRO stage {3 if place == 'param' else '1 or more'}, and the stage is "
                                 f"{stage}: it does nothing, and is left out.")  # fmt: skip
            continue
        telling.put(name, f"strategy.offload_{place}", device)
        if folder is not None and device == "nvme":
            telling.put(path, "strategy.nvme_path", folder, _NVME)
