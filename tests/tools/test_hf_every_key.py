"""Whatever a recipe sets for a script on Trainer either changes what is executed, or is an error: no key is dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_origin

import pytest
from pydantic import ValidationError

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import plan_to_json
from trainkit.launch_plan.rules import way
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.fields import Setting, members, schema
from trainkit.recipe.validate import choices
from trainkit.tools.hf.fields import FIELDS
from trainkit.tools.hf.support import SUPPORT
from trainkit.tools.registry import LAUNCHERS

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
BASE: dict[str, Any] = {"program": {"kind": "hf", "script": "train.py"}}
# What a key needs beside it to be a sound wish.
BESIDE: dict[str, dict[str, Any]] = {
    "checkpoint.keep_best": {"eval": {"every_steps": 5}},
    "efficiency.compile.backend": {"efficiency": {"compile": {"enabled": True}}},
    "efficiency.compile.mode": {"efficiency": {"compile": {"enabled": True}}},
    "data.prefetch_factor": {"data": {"workers": 2}},
    "data.persistent_workers": {"data": {"workers": 2}},
    "efficiency.gradient_checkpointing.selective": {"efficiency": {"gradient_checkpointing": {"every": True}}},
    "batch.memory_mib": {"batch": {"micro": "auto", "global": 16}},
    **{
        f"schedule.{name}": {"schedule": {"name": "wsd"}, "train": {"steps": 50}}
        for name in ("decay_steps", "decay_type")
    },
    "strategy.wrap_classes": {"strategy": {"auto_wrap": "transformer"}},
    "strategy.min_params": {"strategy": {"auto_wrap": "size"}},
    "strategy.nvme_path": {"strategy": {"offload_param": "nvme"}},
}
BESIDE |= {
    f"model.moe.{name}": {"model": {"moe": {"experts": 4}}} for name in ("top_k", "every", "balance_coef", "z_coef")
}
BESIDE |= {
    f"peft.{name}": {"peft": {"kind": "lora"}}
    for name in ("rank", "alpha", "dropout", "target_modules", "rslora", "dora", "path")
}
BESIDE |= {key: {"container": {"image": "i"}} for key in schema().settings if key.startswith("container.")}
VALUES: dict[str, Any] = {
    "container.image": "other",
    "container.mounts": ["/data:/data"],
    "container.workdir": "/work",
    "container.caches": "/caches",
    "container.packages": {"transformers": "5.5.0"},
    "container.shared_memory": "16g",
    "container.ulimits": {"nofile": 1000},
    "container.user": "image",
    "container.options": ["--verbose"],
    "nodes.rendezvous": "host:29500",
    "nodes.count": 2,
    "devices.type": "cpu",
    "devices.select": [1],
    "launcher.kind": "accelerate",
    "optimizer.args": {"momentum": 0.5},
    "env": {"NAME": "value"},
    "env_from": ["NAME"],
    "program.args": {"task_name": "mrpc"},
    "program.script": "other.py",
    "program.kind": "torch",
    "precision.dtype": "bf16",
    "precision.eval": "bf16",
    "efficiency.compile.scope": "blocks",
    "program.verify": False,
    "data.persistent_workers": True,
    "schedule.from_zero": False,  # and true is what Trainer does anyway
    "train.loss": "losses:mine",
    "model.heads": 8,
    "model.hidden_size": 256,
    "model.moe.experts": 4,
    "cluster.time": "10:00:00",
    "cluster.gpu_resource": "amd.com/gpu",
    "cluster.memory_per_node": "4G",
    "pbs:cluster.memory_per_node": "4gb",
    "cluster.hosts": ["b"],
    "cluster.workdir": "/elsewhere",
}
# Keys without an effect on this plan: they need another machine, or a file.
ELSEWHERE = {
    "version", "program.module", "program.public", "program.reads_recipe", "devices.idle_below", "strategy.config",
    "cluster.machine",
}  # fmt: skip


def another(setting: Setting) -> Any:
    """A value that is not the default."""
    for name in (f"{setting.variant}:{setting.key}", setting.key):
        if name in VALUES:
            return VALUES[name]
    options = [choice for choice in choices(setting.annotation) if choice != setting.default]
    kinds = {get_origin(member) or member for member, _ in members(setting.annotation)}
    if list in kinds and options and set(choices(setting.annotation)) and bool not in kinds and str not in kinds:
        return [options[0]]
    if options:
        return options[0]
    if bool in kinds:
        return setting.default is not True
    if int in kinds:
        return (setting.default if isinstance(setting.default, int) else 1) + 1
    if float in kinds:
        return (setting.default if isinstance(setting.default, float) and setting.default else 0.5) / 2
    return "x" if str in kinds else ["x"] if list in kinds else {"x": 1}


def tree(key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: tree(rest, value) if rest else value}


def test_each_field_has_one_row() -> None:
    fields = [field.name for field in FIELDS]
    assert len(fields) == len(set(fields))


def settings() -> Iterator[Setting]:
    for setting in schema().all_settings():
        # The script's own model and data are refused as a whole, of whatever kind.
        if setting.key.partition(".")[0] in ("model", "data") and setting.variant not in ("gpt", "text", ""):
            continue
        kind_of_a_section = setting.key.endswith(".kind") and setting.variant
        if setting.key not in ELSEWHERE and not kind_of_a_section:
            yield setting


def executed(resolved: Resolved, facts: Facts) -> dict[str, Any]:
    """The plan without its digests."""
    plan = plan_to_json(build_plan(resolved, facts).plan)
    return {name: value for name, value in plan.items() if not name.endswith("_digest")}


@pytest.mark.parametrize("setting", tuple(settings()), ids=lambda setting: f"{setting.variant}:{setting.key}")
def test_a_key_that_is_set_has_an_effect_or_is_an_error(layered: Layered, machine: Machine, setting: Setting) -> None:
    section = setting.key.partition(".")[0]
    kind = tree(f"{section}.kind", setting.variant) if setting.variant else {}
    beside = {"cluster": {"hosts": ["a"]}} if setting.variant == "ssh" else BESIDE.get(setting.key, {})
    facts = machine(2, packages=PACKAGES)
    wish = tree(setting.key, another(setting))
    try:
        resolved = layered(BASE, kind, beside, wish)
    except ValidationError:  # this key needs another value or company (above), unless it is refused in any case
        refused = way(SUPPORT, setting.key)
        assert refused is None or not refused.by
        return
    try:
        with_it = executed(resolved, facts)
    except RecipeError as error:
        assert all(each.key for each in error.diagnostics)
        return
    without = executed(layered(BASE, kind, beside), facts)
    assert json.dumps(with_it) != json.dumps(without)


LAUNCHERS_OWN = [
    each for each in schema().all_settings() if each.key.startswith("launcher.") and each.key != "launcher.kind"
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("setting", LAUNCHERS_OWN, ids=lambda setting: setting.key)
def test_every_launcher_obeys_or_refuses_each_of_its_keys(
    layered: Layered, machine: Machine, launcher: str, setting: Setting
) -> None:
    facts = machine(0, packages=PACKAGES)
    base = {
        "program": {"kind": "torch", "script": "train.py"},
        "devices": {"type": "cpu"},
        "launcher": {"kind": launcher},
        "strategy": {"kind": "single" if launcher == "python" else "ddp"},
        "nodes": {"processes_per_node": 1 if launcher == "python" else 2},
    }
    without = executed(layered(base), facts)
    try:
        with_it = executed(layered(base, tree(setting.key, another(setting))), facts)
    except RecipeError as error:
        assert setting.key in {each.key for each in error.diagnostics}
    else:
        assert json.dumps(with_it) != json.dumps(without)
