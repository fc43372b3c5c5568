"""What accelerate's own launcher hands to the ranks: of a command as typed, and of the plan that its import makes."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.convert.reading import checked
from trainkit.cli.file_system import FileSystem
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request
from trainkit.runner.binding import bind, run_values
from trainkit.runner.rundir.layout import RunLayout
from trainkit.tools.base.imported_recipe import ImportContext

pytestmark = [pytest.mark.torch, pytest.mark.needs("accelerate>=1.15")]

Machine = Callable[..., Facts]
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0", "numpy": "2.0"}
CARDS = 8
# What Accelerator() reads; the rest of the environment is not accelerate's settings.
READ = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
# utils/dataclasses.py (FullyShardedDataParallelPlugin) and parallelism_config.py
DEFAULTS = {
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1", "PARALLELISM_CONFIG_TP_SIZE": "1", "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch", "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
}  # fmt: skip
FIRST_ALONE = tuple(
    f"FSDP_{name}"
    for name in ("SHARDING_STRATEGY", "FORWARD_PREFETCH", "USE_ORIG_PARAMS", "SYNC_MODULE_STATES", "BACKWARD_PREFETCH")
)


class Started(NamedTuple):
    """What would be started. settings: variables that Accelerator() reads; processes: of this machine."""

    processes: int
    settings: dict[str, str]


class Caught(Exception):
    """The launcher has got as far as starting processes."""


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], Mapping[str, str]], Started]:
    """accelerate's own launcher on a machine of eight cards, up to where it would start a process."""
    import torch
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as launcher

    seen: list[Started] = []

    def settings(environment: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if name.startswith(READ)}

    def group(args: Any) -> None:
        seen.append(Started(int(args.nproc_per_node), settings(os.environ)))

    class Process:
        returncode = 0

        def __init__(self, _command: object, env: Mapping[str, str], **_more: object) -> None:
            seen.append(Started(1, settings(env)))

        def wait(self) -> None:
            """There is nothing to wait for."""

    monkeypatch.setattr(torchrun, "run", group)
    monkeypatch.setattr(launcher.subprocess, "Popen", Process)
    monkeypatch.setattr(launcher, "is_bf16_available", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: CARDS)

    def run(words: list[str], environ: Mapping[str, str]) -> Started:
        with monkeypatch.context() as patched:
            for name in [name for name in os.environ if name.startswith(READ)]:
                patched.delenv(name)
            for name, value in environ.items():
                patched.setenv(name, value)
            launcher.launch_command(launcher.launch_command_parser().parse_args(words))
        return seen.pop()

    return run


SOURCE = "from accelerate import Accelerator\n"
PRECISION = ("no", "bf16", "fp16")
FSDP = {
    "fsdp_offload_params": (True, False),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_min_num_params": (2000, 100000000),
    "fsdp_transformer_layer_cls_to_wrap": ("BertLayer", "GPT2Block,Block"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp_activation_checkpointing": (True, False),
    "fsdp_cpu_ram_efficient_loading": (True, False),
}
FIRST = {
    "fsdp_sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", 1, 2),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_forward_prefetch": (True, False),
    "fsdp_use_orig_params": (True, False),
    "fsdp_sync_module_states": (True, False),
}
SECOND = {"fsdp_reshard_after_forward": (True, False)}
COMPILED = {"dynamo_mode": ("default", "max-autotune"),
            "dynamo_use_dynamic": (True, False), "dynamo_use_regional_compilation": (True, False)}  # fmt: skip


def chosen(dice: random.Random, options: Mapping[str, tuple[Any, ...]], share: float = 0.6) -> dict[str, Any]:
    return {name: dice.choice(values) for name, values in options.items() if dice.random() < share}


def config(seed: int) -> dict[str, Any]:
    """A config file as `accelerate config` writes them, with some keys left out."""
    dice = random.Random(seed)
    kind = dice.choice(("NO", "MULTI_GPU", "FSDP", "FSDP", "FSDP"))
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "num_machines": 1, "machine_rank": 0,
        "num_processes": 1 if kind == "NO" else dice.choice((2, 4, CARDS)), "main_training_function": "main",
        "downcast_bf16": "no", "use_cpu": False,
    }  # fmt: skip
    if dice.random() < 0.8:
        tree["mixed_precision"] = dice.choice(PRECISION)
    if kind == "FSDP":
        version = dice.choice((1, 2))
        part = chosen(dice, FSDP) | chosen(dice, FIRST if version == 1 else SECOND)
        if version == 2 or dice.random() < 0.5:
            part["fsdp_version"] = version
        if part.get("fsdp_sync_module_states") is False:  # accelerate refuses the two together
            part["fsdp_cpu_ram_efficient_loading"] = False
        tree["fsdp_config"] = part
    if dice.random() < 0.3:
        tree["dynamo_config"] = {"dynamo_backend": "INDUCTOR"} | chosen(dice, COMPILED)
    if kind == "FSDP" and tree["fsdp_config"].get("fsdp_version") == 2 and dice.random() < 0.4:
        ranks = tree["num_processes"]
        tree["parallelism_config"] = {
            "parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": ranks // 2,
        }  # fmt: skip
    return tree


def meaning(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings, each that is not there as Accelerator() takes it then, without those that nothing reads."""
    found = {**DEFAULTS, **settings}
    of_mesh = [name for name in settings if name.startswith("PARALLELISM_CONFIG_")]
    found = {name: value for name, value in found.items() if of_mesh or not name.startswith("PARALLELISM_CONFIG_")}
    if found.get("ACCELERATE_USE_FSDP") != "true":
        return {name: value for name, value in found.items() if not name.startswith("FSDP_")}
    number = found["FSDP_SHARDING_STRATEGY"]  # or its name
    found["FSDP_SHARDING_STRATEGY"] = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP"}.get(number, number)
    policy = found["FSDP_AUTO_WRAP_POLICY"]
    unread = {"SIZE_BASED_WRAP": "FSDP_MIN_NUM_PARAMS", "TRANSFORMER_BASED_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
    unread = {each: name for each, name in unread.items() if each != policy}
    first = FIRST_ALONE if found["FSDP_VERSION"] == "2" else ("FSDP_RESHARD_AFTER_FORWARD",)
    return {name: value for name, value in found.items() if name not in (*unread.values(), *first)}


def as_planned(
    launch: Callable[[list[str], Mapping[str, str]], Started], words: list[str], folder: Path, facts: Facts
) -> Started:
    """What accelerate's launcher makes of the plan, with the plan's own words, environment and files."""
    disk = FileSystem()
    there = ImportContext(disk, str(folder), {"HOME": str(folder)})
    text = checked(words, there, str(folder / "recipe.yaml"))
    (folder / "recipe.yaml").write_text(text)
    resolved = resolve(Request(recipe=str(folder / "recipe.yaml"), cwd=str(folder), environ={}), disk)
    plan = build_plan(resolved, facts).plan
    layout = RunLayout(folder / "run")
    for file in plan.files:
        path = layout.root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content)
    bound = bind(plan, run_values(layout, 0, 0, "127.0.0.1", "127.0.0.1"), {})
    words_of_launcher = list(bound.argv[bound.argv.index("accelerate.commands.launch") + 1 :])
    return launch(words_of_launcher, bound.environment)


def as_flags(tree: Mapping[str, Any]) -> list[str]:
    """The config as flags of `accelerate launch`; without a number of processes it takes every card."""
    kind, words = tree["distributed_type"], list[str]()
    words += {"FSDP": ["--use_fsdp"], "MULTI_GPU": ["--multi_gpu"]}.get(kind, [])
    words += ["--use_parallelism_config"] if "parallelism_config" in tree else []
    words += [f"--num_processes={tree['num_processes']}"] if tree["num_processes"] != CARDS else []
    words += ["--mixed_precision", tree["mixed_precision"]] if "mixed_precision" in tree else []
    for section in ("fsdp_config", "dynamo_config", "parallelism_config"):
        for name, value in tree.get(section, {}).items():
            is_switch = name.startswith("dynamo_use")
            word = str(value).lower() if name == "dynamo_backend" else str(value)
            words += ([f"--{name}"] if value else []) if is_switch else [f"--{name}", word]
    return words


@pytest.mark.parametrize("way", ["file", "flags"])
@pytest.mark.parametrize("seed", range(100))
def test_accelerate_starts_the_same_from_a_command_and_from_its_import(
    launch: Callable[[list[str], Mapping[str, str]], Started],
    machine: Machine,
    tmp_path: Path,
    seed: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = config(seed)
    (tmp_path / "a.yaml").write_text(json.dumps(tree))
    (tmp_path / "train.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    words = [*(["--config_file", "a.yaml"] if way == "file" else as_flags(tree)), "train.py", "--lr", "1"]
    typed = launch(words, {})
    ours = as_planned(launch, ["accelerate", "launch", *words], tmp_path, machine(CARDS, packages=PACKAGES))
    assert ours.processes == typed.processes
    assert meaning(ours.settings) == meaning(typed.settings)
