"""What accelerate is told, by file or by flag, under one name each: the base of everything that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import Origin
from trainkit.frameworks.base.draft import Draft, ImportContext, wrong_values
from trainkit.recipe.layers.assignment import Assignment

# Nested mappings of the file, and the beginnings of flags that set their keys.
SECTIONS = (
    "fsdp_config",
    "deepspeed_config",
    "dynamo_config",
    "fp8_config",
    "parallelism_config",
    "megatron_lm_config",
)
# Flags that stand in deepspeed_config under the same name.
OF_DEEPSPEED = (
    *("deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names"),
)
# Names that older versions used, and today's.
RENAMED: Mapping[str, str] = {
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
}


@dataclass(frozen=True, slots=True)
class Told:
    """One value, where it stands, and whether a flag said it (a file's value of some keys is never applied)."""

    value: Any
    origin: Origin
    flag: bool = False


@dataclass
class Telling:
    """Everything that accelerate is told. said: by the file's dotted names; read: those that have been understood.

    program: whether a program is named; without one, the recipe is for the built-in trainer.
    """

    draft: Draft
    context: ImportContext
    said: dict[str, Told]
    program: bool = False
    read: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """The value under a name, None where there is none; it counts as understood."""
        self.read.add(name)
        return self.said[name].value if name in self.said else None

    def origin(self, name: str) -> Origin:
        """Where the value under a name stands."""
        return self.said[name].origin

    def below(self, section: str) -> dict[str, Told]:
        """What stands in a nested mapping, by name."""
        start = f"{section}."
        return {name.removeprefix(start): told for name, told in self.said.items() if name.startswith(start)}

    def put(self, name: str, key: str, value: Any, reason: str = "") -> None:
        """Set what a name means, or note what is wrong with its value."""
        assignment = Assignment(key, value, self.origin(name))
        self.read.add(name)
        problems = wrong_values([assignment], self.draft)
        self.draft.problems += problems
        if not problems:
            self.draft.put(assignment, reason)

    def remark(self, name: str, text: str) -> None:
        """Say something of a value, which with this is understood."""
        self.read.add(name)
        place = f"{self.origin(name).place}: " if not self.said[name].flag else ""
        self.draft.remark(f"{place}{text}")


def flat(tree: Mapping[str, Any], at: Any) -> dict[str, Told]:
    """The values of a file that say something, by dotted name; older names become today's. at: place of a name."""
    said: dict[str, Told] = {}
    for name, value in tree.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        entries = (
            [(f"{name}.{below}", each) for below, each in inner] if isinstance(value, Mapping) else [(name, value)]
        )
        for key, each in entries:
            if each not in (None, [], {}, ""):
                said[RENAMED.get(key, key)] = Told(each, at(key))
    return said
