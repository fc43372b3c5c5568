"""What accelerate is given, by file or by flag, under one name each; and what that says of FSDP and DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import Origin
from trainkit.frameworks.accelerate.fields import OFF, SETTINGS
from trainkit.frameworks.base.draft import LAYER, Draft, ImportContext
from trainkit.frameworks.base.fields import Unsupported, by_name
from trainkit.frameworks.base.foreign_file import open_foreign_file
from trainkit.frameworks.base.fsdp_settings import FIELDS, FIRST_VERSION, read_settings
from trainkit.frameworks.deepspeed.config import leaves
from trainkit.frameworks.deepspeed.fields import AUTO, FORMATS, ZERO3_INIT
from trainkit.frameworks.deepspeed.imported_base import use_as_base
from trainkit.frameworks.deepspeed.importer import take_apart
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.merge import value_at

BY_NAME = {each.name: each for each in SETTINGS}
# Names that older versions used, and today's.
RENAMED = {alias: each.name for each in SETTINGS for alias in each.aliases}
NOTHING: tuple[Any, ...] = (None, [], {}, "")
FSDP, ZERO = "fsdp_config", "deepspeed_config"
FILE, INIT = f"{ZERO}.deepspeed_config_file", f"{ZERO}.zero3_init_flag"
# What may be given beside a file.
_BESIDE_FILE = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher")
# Keys that one policy of wrapping reads (accelerate, utils/dataclasses.py: set_auto_wrap_policy).
READ_BY = {
    "fsdp_min_num_params": "SIZE_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP",
}
_UNSHARDED = "scripts that ask the plugin build no model in shards (zero3_init_flag)"
_NVME = "accelerate never hands NVMe paths to its workers; the recipe's is used"


@dataclass
class ImportedConfig:
    """Everything that accelerate is given. values: by the file's dotted names; used: names that have been understood.

    program: whether a program is named; without one, the recipe is for the built-in trainer.
    """

    draft: Draft
    context: ImportContext
    values: dict[str, Assignment]
    program: bool = False
    used: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """The value under a name, None where there is none; it counts as understood."""
        self.used.add(name)
        return self.values[name].value if name in self.values else None

    def by_flag(self, name: str) -> bool:
        """Whether a flag gives the value: a file's value of some keys is never applied."""
        return name in self.values and self.origin(name).layer == LAYER

    def origin(self, name: str) -> Origin:
        """Where the value under a name is given."""
        return self.values[name].origin

    def below(self, section: str) -> dict[str, Assignment]:
        """What a nested mapping holds, by name."""
        start = f"{section}."
        return {name.removeprefix(start): value for name, value in self.values.items() if name.startswith(start)}

    def take(self, name: str, reason: str = "") -> None:
        """Set what a value means by the table; one that means nothing in a recipe is an error."""
        value = self.get(name)
        settings = {} if value is None else BY_NAME[name].decode(value)
        if isinstance(settings, Unsupported):
            what = f"{name.rpartition('.')[2]} {value} cannot be taken over"
            self.draft.fail(what, self.origin(name), settings.instead, settings.why)
            return
        for key, each in settings.items():
            self.put(name, key, each, reason)

    def put(self, name: str, key: str, value: Any, reason: str = "") -> None:
        """Set a key to what a name means, or note what is wrong with the value."""
        self.used.add(name)
        self.draft.put_checked(Assignment(key, value, self.origin(name)), reason)

    def remark(self, name: str, text: str) -> None:
        """Note something on a value, which with this is understood."""
        self.used.add(name)
        place = "" if self.by_flag(name) else f"{self.origin(name).place}: "
        self.draft.remark(f"{place}{text}")


def flattened(tree: Mapping[str, Any], at: Callable[[str], Origin]) -> dict[str, Assignment]:
    """The values of a file, by dotted name of today. at: the place of a name."""
    given = [Assignment(name, each, at(name)) for name, each in leaves(tree) if each not in NOTHING]
    return {RENAMED.get(each.key, each.key): each for each in given}


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
    policy = str(values["fsdp_auto_wrap_policy"].value).upper() if "fsdp_auto_wrap_policy" in values else ""
    for name, read_by in READ_BY.items():
        if name in values and policy != read_by:
            place = "" if policy else ", and none is given"
            text = f"{name} is read beside fsdp_auto_wrap_policy {read_by} alone{place}: left out."
            config.remark(f"{FSDP}.{name}", text)
            del values[name]
    kind = config.origin("distributed_type")
    draft.set("strategy.kind", "fsdp", kind)
    words: dict[Any, Any] = {"true": True, "false": False}  # which accelerate reads in quotes too
    tree = {name: words.get(str(each.value).lower(), each.value) for name, each in values.items()}
    assignments, problems = read_settings(tree, by_name(FIELDS), lambda name: values[name].origin, "fsdp_config:")
    draft.put_all(assignments, problems)
    if "fsdp_version" not in values:
        draft.set("strategy.version", 1, kind, "accelerate takes version 1 where fsdp_version is not given")
    if draft.get("strategy.auto_wrap") is None:
        draft.set("strategy.auto_wrap", "none", kind, "accelerate wraps the model as a whole where no policy is given")


def deepspeed(config: ImportedConfig) -> None:
    """A DeepSpeed file, or accelerate's own keys for it."""
    (_by_keys if config.get(FILE) is None else _by_file)(config)
    for name in config.below(ZERO):
        if f"{ZERO}.{name}" not in config.used:
            config.remark(f"{ZERO}.{name}", f"{name} has no key in a recipe.")
    if config.get(INIT) is False and config.draft.get("strategy.kind") == "zero3" and config.program:
        config.put(INIT, f"env.{ZERO3_INIT}", "false", _UNSHARDED)
    compiles = config.get("dynamo_config.dynamo_backend") not in OFF
    for name in config.below("dynamo_config") if compiles else ():
        config.remark(f"dynamo_config.{name}", f"accelerate ignores {name} under DeepSpeed.")


def _by_file(config: ImportedConfig) -> None:
    """A base for a script, which makes its own optimizer and schedule; taken apart for the built-in trainer."""
    path = str(config.get(FILE))
    if config.program:
        file = use_as_base(config.draft, config.context, path, config.origin(FILE))
    else:
        file = open_foreign_file(config.context, path)
        take_apart(config.draft, config.context, file)
    if file is None:
        return
    for other in config.below(ZERO):
        if other not in _BESIDE_FILE:
            config.remark(f"{ZERO}.{other}", f"{other} beside a DeepSpeed file is an error in the workers; left out.")
    tree = file.tree  # which has the number format, where it does not leave that to a flag
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
    stage = int(kind.removeprefix("zero"))
    if not (stage or config.program):
        reason = "the built-in trainer has plain data parallelism in place of stage 0"
        config.draft.set("strategy.kind", "ddp", config.draft.settings["strategy.kind"].origin, reason)
    config.take(f"{ZERO}.gradient_accumulation_steps")
    config.take(f"{ZERO}.gradient_clipping")
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
