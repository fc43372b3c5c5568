"""accelerate's mesh of ranks (`parallelism_config_*`): what variables carry to `Accelerator()`, and what it demands.

Sources: accelerate, utils/launch.py (prepare_extend_env_parallelism_config) and parallelism_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.plan.context import Context
from trainkit.recipe.schema import Fsdp

if TYPE_CHECKING:
    from trainkit.frameworks.accelerate.imported_config import ImportedConfig

SECTION, SWITCH = "parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG"
START = "PARALLELISM_CONFIG_"
# What is spread over each dimension of the mesh.
SIZES = {
    "dp_replicate_size": "replicas of the shards (HSDP)",
    "dp_shard_size": "shards",
    "tp_size": "parts of each weight (tensor parallelism)",
    "cp_size": "parts of each sequence (context parallelism)",
    "sp_size": "parts of each sequence (DeepSpeed's sequence parallelism)",
}
_CARRIED = "the mesh of ranks, which only Accelerator() builds; it reads these variables"
_NEEDS = "accelerate builds a mesh under FSDP version 2, DDP and DeepSpeed, over several processes"


def read_mesh(config: ImportedConfig) -> None:
    """What is given of the mesh, as the variables of the ranks; an error where accelerate would not build it."""
    given = config.below(SECTION)
    sizes = {name: given[key] for name in SIZES if (key := f"{SECTION}_{name}") in given}
    for name, each in sizes.items():
        if type(each.value) is not int:
            config.draft.fail(f"{SECTION}_{name} is {each.value!r}", each.origin, "write a whole number")
            return
    widest = next((name for name, each in sizes.items() if each.value > 1), None)
    if widest is None or config.draft.problems:
        return  # one rank in every direction is no mesh
    key = f"{SECTION}.{SECTION}_{widest}"
    if config.by_flag(key) and not config.get("use_parallelism_config"):
        config.used |= {f"{SECTION}.{name}" for name in given}
        config.draft.remark(f"accelerate ignores --{SECTION}_{widest} without --use_parallelism_config.")
        return
    what = f"{SECTION}_{widest} {sizes[widest].value} ({SIZES[widest]})"
    strategy, version = config.draft.get("strategy.kind"), config.draft.get("strategy.version")
    if not config.program:
        hint = "name the script that builds on Accelerator() behind `--`, or use strategy.kind: fsdp alone"
        why = "it needs a mesh of ranks, which the built-in trainer has not"
        config.draft.fail(f"{what} cannot be run by trainkit's own trainer", sizes[widest].origin, hint, why)
        return
    if strategy in (None, "single") or (strategy == "fsdp" and version == 1):
        hint = "set fsdp_version to 2" if strategy == "fsdp" else "use distributed_type FSDP with fsdp_version 2"
        config.draft.fail(f"{what} cannot be run here", sizes[widest].origin, hint, _NEEDS)
        return
    for name, each in given.items():
        config.used.add(f"{SECTION}.{name}")
        variable = f"{START}{name.removeprefix(f'{SECTION}_').upper()}"
        config.draft.set(f"env.{variable}", str(each.value), each.origin)
    config.draft.set(f"env.{SWITCH}", "true", sizes[widest].origin)
    config.draft.reasons.setdefault("env", _CARRIED)


def widths(context: Context) -> dict[str, int]:
    """The ranks in each dimension of the mesh that the variables ask for; empty without a mesh."""
    environment = context.recipe.env
    if str(environment.get(SWITCH, "")).lower() != "true":
        return {}
    sizes = {name: str(environment.get(f"{START}{name.upper()}", "1")) for name in SIZES}
    return {name: int(size) for name, size in sizes.items()} if all(map(str.isdecimal, sizes.values())) else {}


def mesh_problems(context: Context) -> Iterator[Diagnostic]:
    """A mesh that accelerate would refuse when the ranks have started."""
    recipe, numbers = context.recipe, widths(context)
    if not numbers:
        return
    # DeepSpeed divides the ranks by itself (_validate_accelerator).
    ranks, whole = context.topology.world_size, prod(numbers.values())
    if whole not in (1, ranks) and not (context.zero and numbers["sp_size"] > 1):
        shown = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in numbers.items() if size > 1)
        what = f"the mesh {shown} is {whole} ranks, and the plan has {ranks}"
        hint = f"set nodes.processes_per_node, or the sizes under env, so that both are {ranks}"
        yield context.resolved.error("env", what, hint, at=context.resolved.given(f"env.{SWITCH}"))
    if isinstance(recipe.strategy, Fsdp) and recipe.strategy.version == 1 and whole > 1:
        key = "strategy.version"
        yield context.resolved.error(
            key, "a mesh of ranks needs FSDP version 2", "set strategy.version to 2", why=_NEEDS
        )
