"""What is exported and imported again is the recipe; an exported command chooses what the plan chooses."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.convert.reading import checked
from trainkit.cli.file_system import FileSystem
from trainkit.cli.machines import machine_facts
from trainkit.convert.exporting import EXPORTS, carried, exceptions, export, unfit
from trainkit.errors import RecipeError
from trainkit.launch_plan.context import Context
from trainkit.machine.facts import Facts
from trainkit.planner.build import decide
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema.fields import lies_in
from trainkit.recipe.schema.launching import program_argv
from trainkit.tools.base.imported_recipe import ImportContext

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
SHIPPED = FileSystem().shipped()
RECIPES = sorted(name for name in SHIPPED if name.startswith("recipes/"))
PRESETS = {part: sorted(name for name in SHIPPED if name.startswith(f"{part}/")) for part in ("strategy", "precision")}
DEVICES = {"devices/cpu": "laptop-cpu", "devices/mps": "m3-max", "devices/single-gpu": "1x4090"}
UNTRIED = {"strategy.xla_settings"}  # none of these machines has a TPU
MAIN = {"accelerate": "accelerate.yaml", "deepspeed": "deepspeed.json", "hf": "command.sh"}
GLUE = "program: {kind: hf, script: run_glue.py, args: {do_train: true, note: $HOME 'x' ü}}\nbatch: {micro: 4}\n"
CPU = "devices: {type: cpu, select: none}\n"
# What no shipped recipe says, and a format can carry.
OWN: dict[str, str] = {
    "a decay at the end": GLUE + "schedule: {name: wsd, decay_steps: 20, decay_type: sqrt, warmup_steps: 5}\n",
    "cosine down to a share": GLUE + "optimizer: {lr: 3.0e-4}\nschedule: {name: cosine, min_lr_ratio: 0.07}\n",
    "line down to a share": GLUE + "optimizer: {lr: 3.0e-4}\nschedule: {name: linear, min_lr_ratio: 0.07}\n",
    "sgd": GLUE + "optimizer: {name: sgd, beta1: 0.8, args: {nesterov: true}}\n",
    "adagrad": GLUE + "optimizer: {name: adagrad, eps: 1.0e-6, args: {lr_decay: 0.5}}\n",
    "the best": GLUE + "eval: {every_steps: 5}\ncheckpoint: {keep_best: true, keep: 3}\n",
    "the best by a metric": GLUE
    + "eval: {every_steps: 5, best_metric: error_rate, greater_is_better: false}\ncheckpoint: {keep_best: true}\n",
    "from a folder": GLUE + "checkpoint: {every_steps: 7, resume: out/checkpoint-14}\n",
    "uploads": GLUE + "checkpoint: {push_to_hub: {repo: ada/glue, strategy: all, private: true}}\n",
    "chosen cards": GLUE + "devices: {select: [1, 0], order: fastest}\nstrategy: {kind: ddp, bucket_mb: 12.0}\n",
    "accelerate's launcher": GLUE + "launcher: {kind: accelerate, max_restarts: 2}\nstrategy: {kind: ddp}\n",
    "deepspeed's launcher": GLUE + "launcher: {kind: deepspeed}\ndevices: {select: [0, 1]}\nstrategy: {kind: zero2}\n",
    "variables": GLUE + "env: {NCCL_DEBUG_SUBSYS: 'INIT,NET', A: two words, B: $x, C: '1'}\n",
    "swapped": GLUE + "strategy: {kind: zero3, offload_param: nvme, offload_optimizer: nvme, nvme_path: /fast,"
    " gather_16bit: true}\n",
    "overlapped": GLUE + "strategy: {kind: zero2, overlap_comm: true, bucket_mb: 100.0}\nprecision: bf16\n",
    "several on a CPU": GLUE + CPU + "strategy: {kind: ddp}\n",
    "several on a CPU with ZeRO": GLUE + CPU + "strategy: {kind: zero2}\nlauncher: {kind: deepspeed}\n",
    "two machines": GLUE + "nodes: {count: 2, rendezvous: 'n1:29400'}\nstrategy: {kind: ddp}\n",
    "compiled": GLUE + "efficiency: {compile: {enabled: true, backend: inductor, mode: reduce-overhead}}\n",
    "every plain flag": GLUE.replace("batch: {micro: 4}", "batch: {micro: 4, accumulation: 3, eval_micro: 6}")
    + """\
data: {workers: 2, persistent_workers: true, prefetch_factor: 4}
efficiency: {gradient_checkpointing: true}
hang: {collective_seconds: 900}
logging: {level: warning, replica_level: error, each_node: false, every_steps: 3, report_to: [tensorboard, wandb]}
nodes: {processes_per_node: 2}
strategy: {kind: ddp, find_unused_parameters: true}
optimizer: {name: adamw_torch, weight_decay: 0.02, beta2: 0.97}
schedule: {warmup_steps: 5}
precision: {dtype: bf16, eval: bf16}
output: {root: out/here}
train: {deterministic: true, max_grad_norm: 0.7, seed: 7, steps: 9}
""",
    "Trainer's older wrapper": GLUE
    + """\
strategy: {kind: fsdp, version: 1, auto_wrap: size, min_params: 2000, backward_prefetch: backward_post,
  forward_prefetch: true, limit_all_gathers: true, use_orig_params: true, sync_module_states: true,
  cpu_ram_efficient_loading: true}
""",
    "a module": "program: {kind: hf, module: pkg.train, args: [--do_train, --x, '-1', --x, a b]}\n",
    "the older wrapper": """\
strategy: {kind: fsdp, version: 1, sharding: shard_grad_op, offload: true, auto_wrap: size, min_params: 2000,
  backward_prefetch: no_prefetch, forward_prefetch: true, use_orig_params: false, sync_module_states: true,
  cpu_ram_efficient_loading: false, state_dict_type: sharded}
program: {kind: accelerate, script: run_glue.py}
precision: fp16
""",
    "blocks compiled": """\
program: {kind: accelerate, script: run_glue.py}
strategy: {kind: fsdp, wrap_classes: [A, B]}
efficiency: {compile: {enabled: true, dynamic: true, scope: blocks}, gradient_checkpointing: true}
devices: {select: [1, 0], order: fastest}
""",
    "batch in the file": "strategy: {kind: zero3, nvme_path: /fast, offload_optimizer: nvme, bucket_mb: 7.0}\n"
    "batch: {global: 16, micro: 2}\nprecision: bf16\ntrain: {steps: 5, max_grad_norm: 0.7}\n"
    "logging: {every_steps: 3}\n",
    "DeepSpeed's engine": """\
program: {kind: deepspeed, script: run_glue.py}
strategy: {kind: zero2, overlap_comm: true}
optimizer: {name: sgd, lr: 0.1, beta1: 0.8}
schedule: {name: cosine, warmup_steps: 5, min_lr_ratio: 0.2}
train: {steps: 50}
logging: {every_steps: 4}
""",
    "Trainer's weights gathered": GLUE + "strategy: {kind: zero3, gather_16bit: true}\n",
    "gathered weights": "program: {kind: accelerate, script: run_glue.py}\n"
    "strategy: {kind: zero3, gather_16bit: true}\n",
    "weights gathered by the engine": "program: {kind: deepspeed, script: run_glue.py}\n"
    "strategy: {kind: zero3, gather_16bit: true}\n",
    "schedule in the file": """\
strategy: {kind: zero2, overlap_comm: true}
optimizer: {name: sgd, lr: 0.1, beta1: 0.8}
schedule: {name: cosine, warmup_steps: 5, min_lr_ratio: 0.2}
train: {steps: 50}
""",
    "Adam in the file": "strategy: {kind: zero1}\noptimizer: {beta2: 0.97, eps: 1.0e-7}\n"
    "nodes: {processes_per_node: 2}\ntrain: {steps: 3}\n",
}


@dataclass(frozen=True)
class Case:
    """A recipe, by name or as text, with presets on top, on a machine."""

    recipe: str
    variant: str | None = None
    presets: tuple[str, ...] = ()
    machine: str = "2x3090"


@cache
def facts(machine: str) -> Facts:
    """A described machine with everything installed."""
    found = machine_facts(machine)
    assert found is not None
    return found


def variants(recipe: str) -> Iterator[str]:
    """The names of a shipped recipe's variants."""
    yield from yaml.safe_load(Path(SHIPPED[recipe]).read_text()).get("variants", {})


def cases(thorough: bool) -> Iterator[Case]:
    """Shipped recipes and our own; thorough: with all variants, and two of them under every preset too."""
    yield from (Case(name) for name in OWN)
    yield from (Case(recipe) for recipe in RECIPES)
    if not thorough:
        return
    for recipe in RECIPES:
        for variant in variants(recipe):
            yield Case(recipe, variant, machine="m3-max" if variant == "mps" else "2x3090")
    for recipe in ("recipes/quickstart", "recipes/hf-glue-mrpc"):
        for strategy in PRESETS["strategy"]:
            yield from (Case(recipe, None, (strategy, each)) for each in PRESETS["precision"])
            yield Case(recipe, None, (strategy, "devices/cpu"), "laptop-cpu")
        yield from (Case(recipe, None, (each,), machine) for each, machine in DEVICES.items())


def planned(case: Case, cwd: Path) -> Context:
    """All decisions for a case."""
    for name in ("run_glue.py", "nlp_example.py"):
        (cwd / name).write_text("")
    path = SHIPPED.get(case.recipe, str(cwd / "own.yaml"))
    if case.recipe in OWN:
        (cwd / "own.yaml").write_text(f"version: 1\n{OWN[case.recipe]}")
    request = Request(recipe=path, cwd=str(cwd), presets=case.presets, variant=case.variant)
    return decide(resolve(request, FileSystem()), facts(case.machine), ())[0]


def read_back(tool: str, context: Context, cwd: Path) -> Resolved:
    """The recipe that an import makes of the exported files."""
    (cwd / "out").mkdir()
    for name, content in export(context, tool, "out").files.items():
        (cwd / "out" / name).write_text(content)
    script = context.recipe.program.script if MAIN[tool] != "command.sh" else None
    program = (script, *program_argv(context.recipe.program.args)) if script else ()
    kind = context.recipe.program.kind if program else None
    there = ImportContext(FileSystem(), str(cwd))
    text = checked([f"out/{MAIN[tool]}"], there, str(cwd / "back.yaml"), program=program, kind=kind)
    (cwd / "back.yaml").write_text(text)
    return resolve(Request(recipe=str(cwd / "back.yaml"), cwd=str(cwd)), FileSystem())


def value(resolved: Resolved, key: str) -> Any:
    """The value of the validated recipe at a key; the program's words as they will be, variables as texts."""
    if key == "program.args":
        return program_argv(resolved.recipe.program.args)
    if key == "env":
        return {name: str(each) for name, each in resolved.recipe.env.items()}
    found: Any = resolved.recipe
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else getattr(found, name, getattr(found, f"{name}_", None))
    return found


def compared(context: Context, tool: str) -> list[str]:
    """Carried settings that the recipe gives, and that are decided: `auto` leaves the value to the machine."""
    whole = ("program.args", "env")
    given = [key for key in context.resolved.history if context.resolved.given(key)]
    given = [next((each for each in whole if key.startswith(each)), key) for key in given]
    told = carried(context, tool)
    otherwise = {key for key, way in exceptions(context, tool).items() if not way.comes_back}
    there = [key for key in dict.fromkeys(given) if lies_in(key, told) and not lies_in(key, otherwise)]
    return [key for key in there if value(context.resolved, key) != "auto"]


def exported_again(tool: str, back: Resolved, case: Case) -> dict[str, str]:
    """What the export of the recipe that came back says, without comments."""
    return bare(export(decide(back, facts(case.machine), ())[0], tool, "out").files)


def bare(files: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "\n".join(line for line in content.splitlines() if not line.startswith("#"))
        for name, content in files.items()
    }


@pytest.mark.e2e
@pytest.mark.parametrize("tool", EXPORTS)
def test_an_import_of_the_export_is_the_recipe_and_is_exported_to_the_same_files(
    tool: str, tmp_path: Path, thorough: bool
) -> None:
    compared_keys: set[str] = set()
    promised: set[str] = set()
    count = 0
    for number, case in enumerate(cases(thorough)):
        cwd = tmp_path / str(number)
        cwd.mkdir()
        try:
            context = planned(case, cwd)
        except RecipeError:
            assert case.recipe not in OWN, case
            continue  # a combination that is not sound has no plan to export
        if unfit(context, tool):
            continue
        back = read_back(tool, context, cwd)
        keys = compared(context, tool)
        found = {key: value(back, key) for key in keys}
        assert found == {key: value(context.resolved, key) for key in keys}, case
        assert exported_again(tool, back, case) == bare(export(context, tool, "out").files), case
        compared_keys |= set(keys)
        promised |= carried(context, tool) - UNTRIED
        count += 1
    assert count >= ({"accelerate": 150, "deepspeed": 50, "hf": 60}[tool] if thorough else 10)
    assert not thorough or not {key for key in promised if not any(lies_in(each, {key}) for each in compared_keys)}


@pytest.mark.torch
def test_what_a_tool_is_not_told_is_named(trainkit: Trainkit) -> None:
    done = trainkit("plan", "zero2", "--export", "deepspeed")
    assert done.returncode == 0, done.stderr
    assert "not supported by deepspeed, left out: model.layers" in done.stderr
    assert "optimizer.lr" not in done.stderr
    assert '"lr": 0.003' in done.stdout


@pytest.mark.cli
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("ddp", "--export", "hf"), "program.kind is builtin"),
        (("ddp", "--export", "deepspeed"), "strategy.kind is ddp"),
        (("ddp", "--export", "tf"), "there is no export to 'tf'"),
        (("zero2", "--export", "accelerate"), "add --output FOLDER"),
        (("ddp", "--output", "x"), "--output is for --export"),
        (("ddp", "--export", "accelerate", "--json"), "exclude one another"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_reason(
    trainkit: Trainkit, words: tuple[str, ...], what: str
) -> None:
    done = trainkit("plan", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr


@pytest.mark.torch
def test_an_export_replaces_no_file(trainkit: Trainkit, tmp_path: Path) -> None:
    first = trainkit("plan", "zero2", "--export", "accelerate", "--output", "out")
    assert first.returncode == 0, first.stderr
    assert first.stdout.split() == ["out/accelerate.yaml", "out/deepspeed.json"]
    (tmp_path / "out/deepspeed.json").write_text("mine")
    again = trainkit("plan", "zero2", "--export", "deepspeed", "--output", "out")
    assert again.returncode == 2
    assert (tmp_path / "out/deepspeed.json").read_text() == "mine"


@pytest.mark.torch
def test_the_installed_accelerate_loads_the_exported_file(trainkit: Trainkit, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    done = trainkit("plan", "fsdp", "--on", "2x3090", "--export", "accelerate", "--output", "out")
    assert done.returncode == 0, done.stderr
    config = load_config_from_file(str(tmp_path / "out/accelerate.yaml"))
    assert config.distributed_type.value == "FSDP"
    assert config.num_processes == 2
    assert config.fsdp_config["fsdp_version"] == 2


DDP = "strategy: {kind: ddp}\n"


def decided(folder: Path, recipe: str, machine: str = "2x3090", transformers: str = "5.23.0") -> Context:
    """All decisions for a recipe on a described machine."""
    (folder / "run_glue.py").write_text("")
    (folder / "recipe.yaml").write_text(f"version: 1\n{recipe}")
    there = facts(machine)
    there = dataclasses.replace(there, packages={**there.packages, "transformers": transformers})
    return decide(resolve(Request(recipe=str(folder / "recipe.yaml"), cwd=str(folder)), FileSystem()), there, ())[0]


@pytest.mark.parametrize(
    ("recipe", "machine", "begins"),
    [
        # one process that sees two cards would wrap itself in nn.DataParallel
        ("", "2x3090", "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID python run_glue.py"),
        ("", "1x4090", "python run_glue.py"),
        (DDP, "2x3090", "torchrun --nproc_per_node=2 --standalone run_glue.py"),
        ("devices: {select: [1]}\n", "2x3090", "CUDA_VISIBLE_DEVICES=1 CUDA_DEVICE_ORDER=PCI_BUS_ID python"),
        (DDP, "8xmi300x", "torchrun --nproc_per_node=8"),
        (DDP + "devices: {select: 2}\n", "8xmi300x", "HIP_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2"),
        (CPU, "2x3090", "CUDA_VISIBLE_DEVICES= python run_glue.py"),
        ("strategy: {kind: zero1}\nlauncher: {kind: deepspeed}\n", "2x3090",
         "deepspeed --no_local_rank --include=localhost:0,1 run_glue.py"),
        ("env: {A: $HOME 'x'}\n", "1x4090", """A='$HOME '"'"'x'"'"'' python run_glue.py"""),
        (DDP + "nodes: {count: 2, rendezvous: 'n1:29400'}\n", "2x3090",
         'torchrun --nproc_per_node=2 --nnodes=2 --node_rank="${NODE_RANK:?number of this machine, from 0}"'),
    ],
)  # fmt: skip
def test_a_command_begins_with_what_its_launcher_has_to_know(
    tmp_path: Path, recipe: str, machine: str, begins: str
) -> None:
    lines = export(decided(tmp_path, GLUE + recipe, machine), "hf", "out").files["command.sh"].splitlines()
    assert lines[0] == "#!/bin/sh"
    command = " ".join(" ".join(lines[2:]).replace("\\", " ").split())
    assert command.startswith(begins)
    assert shlex.split(command)[-2:] == ["--output_dir", "runs"] or "fsdp_config" in command or "--deepspeed" in command


def test_an_older_transformers_gets_its_variables(tmp_path: Path) -> None:
    fsdp = "strategy: {kind: fsdp, state_dict_type: sharded}\n"
    made = export(decided(tmp_path, GLUE + fsdp, transformers="4.57.6"), "hf", "out").files["command.sh"]
    assert "FSDP_VERSION=2" in made
    assert "FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT" in made


@pytest.mark.parametrize(
    ("recipe", "tool", "why"),
    [
        (GLUE + DDP + "nodes: {count: 2}\n", "hf", "nodes.rendezvous is auto"),
        (CPU + "strategy: {kind: fsdp}\ntrain: {steps: 1}\n", "accelerate", "copies that never talk to one another"),
    ],
)
def test_a_file_that_would_do_something_else_is_not_written(tmp_path: Path, recipe: str, tool: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        export(decided(tmp_path, recipe), tool, "out")


def test_what_accelerates_file_cannot_say_is_named(tmp_path: Path) -> None:
    recipe = CPU + DDP + "train: {steps: 1}\nlauncher: {max_restarts: 2}\nefficiency: {gradient_checkpointing: true}\n"
    made = export(decided(tmp_path, recipe), "accelerate", "out")
    assert {"devices.type", "launcher.max_restarts", "efficiency.gradient_checkpointing.every"} <= set(made.left)
    assert "ACCELERATE_USE_CPU=true" in made.notes[0]
    first = made.files["accelerate.yaml"].splitlines()[0]
    assert "ACCELERATE_USE_CPU=true accelerate launch --max_restarts 2 --main_process_port 0 --config_file" in first


def test_a_torch_program_that_gets_no_file_in_a_run_can_have_one_written(tmp_path: Path) -> None:
    (tmp_path / "loop.py").touch()
    recipe = (
        "program: {kind: torch, script: loop.py, reads_recipe: true}\nstrategy: {kind: zero3}\noptimizer: {lr: 0.5}\n"
    )
    made = export(decided(tmp_path, recipe, "2x3090"), "deepspeed", "out")
    content = json.loads(made.files["deepspeed.json"])
    assert (content["zero_optimization"]["stage"], content["optimizer"]["params"]["lr"]) == (3, 0.5)
    assert "optimizer.lr" not in made.left


@pytest.mark.torch
def test_a_name_that_the_shell_would_take_apart_is_quoted(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("plan", "ddp", "--export", "accelerate", "--output", "two words")
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "two words/accelerate.yaml").read_text().splitlines()[0]
    assert "--config_file 'two words/accelerate.yaml'" in first
