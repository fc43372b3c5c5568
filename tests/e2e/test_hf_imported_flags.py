"""What TrainingArguments make of a command as it was typed, and of the plan that its import leads to, by field."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.convert.reading import imported, read
from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan

Machine = Callable[..., Facts]
PROGRAM = Path(__file__).parent / "programs" / "hf_parse.py"
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
COMMANDS = 150
# Decided for each run: where it writes and reads, and the cards, which this machine has none of.
PLACES = {"output_dir", "deepspeed", "fsdp_config", "use_cpu", "run_name", "hub_model_id"}
# Flags with values as people write them; an empty value is a bare switch.
WORDS: Mapping[str, tuple[str, ...]] = {
    "per_device_train_batch_size": ("1", "4", "32"),
    "per_device_eval_batch_size": ("1", "16"),
    "gradient_accumulation_steps": ("1", "16"),
    "learning_rate": ("2e-5", "1e-04", "0.0002"),
    "weight_decay": ("0.", "0.1"),
    "adam_beta2": ("0.95",),
    "max_grad_norm": ("0.3", "1.0"),
    "num_train_epochs": ("3", "0.5"),
    "max_steps": ("-1", "100"),
    "lr_scheduler_type": ("cosine", "constant", "polynomial", "cosine_with_restarts"),
    "warmup_steps": ("10", "0"),
    "warmup_ratio": ("0.03", "0.1"),
    "optim": ("adamw_torch", "adafactor", "paged_adamw_32bit", "adamw_bnb_8bit"),
    "bf16": ("", "True", "False"),
    "fp16": ("False",),
    "tf32": ("True",),
    "gradient_checkpointing": ("", "True", "False"),
    "evaluation_strategy": ("no", "epoch"),
    "eval_strategy": ("steps",),
    "eval_steps": ("50",),
    "save_strategy": ("no", "steps", "epoch"),
    "save_steps": ("200",),
    "save_total_limit": ("1",),
    "logging_steps": ("1", "0.1"),
    "logging_strategy": ("steps",),
    "report_to": ("none", "wandb", "tensorboard"),
    "seed": ("7",),
    "dataloader_num_workers": ("0", "4"),
    "dataloader_drop_last": ("True",),
    "dataloader_pin_memory": ("False",),
    "group_by_length": ("True", "False"),
    "overwrite_output_dir": ("", "True"),
    "push_to_hub": ("", "False"),
    "hub_model_id": ("ada/glue", "glue"),
    "hub_strategy": ("every_save", "all_checkpoints"),
    "hub_private_repo": ("True",),
    "ddp_find_unused_parameters": ("False",),
    "remove_unused_columns": ("False",),
    "do_train": ("", "True"),
    "do_eval": ("",),
    "label_smoothing_factor": ("0.1",),
    "half_precision_backend": ("auto",),
}
# What the installed version is to be told in place of the older words.
NEWER: Mapping[str, Callable[[str], list[str]]] = {
    "evaluation_strategy": lambda value: ["--eval_strategy", value],
    "warmup_ratio": lambda value: ["--warmup_steps", value],
    "group_by_length": lambda value: ["--train_sampling_strategy", "group_by_length"] if value == "True" else [],
    "overwrite_output_dir": lambda value: [],
    "half_precision_backend": lambda value: [],
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """A command line, and its words behind the script as the installed version takes them."""
    choose = random.Random(12)
    for number in range(COMMANDS):
        names = choose.sample(sorted(WORDS), choose.randrange(0, 12))
        if "warmup_steps" in names and "warmup_ratio" in names:
            names.remove("warmup_ratio")
        if "evaluation_strategy" in names and "eval_strategy" in names:
            names.remove("eval_strategy")
        if number % 3 == 2:  # DeepSpeed has a list of the optimizers that it takes without being asked
            names = [name for name in names if name != "optim"]
        given = [(name, choose.choice(WORDS[name])) for name in names]
        if ("lr_scheduler_type", "constant") in given:
            given = [(name, value) for name, value in given if not name.startswith("warmup")]
        typed = [word for name, value in given for word in (f"--{name}", *([value] if value else []))]
        newest = [
            word
            for name, value in given
            for word in (NEWER[name](value) if name in NEWER else (f"--{name}", *([value] if value else [])))
        ]
        launcher = "torchrun --nproc_per_node 2" if number % 3 else "python"
        deepspeed = ["--deepspeed", "zero.json"] if number % 3 == 2 else []
        end = ["--output_dir", "out"]
        yield shlex.join([*launcher.split(), "run_glue.py", *typed, *deepspeed, *end]), [*newest, *deepspeed, *end]


SOURCE = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
ZERO = {
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
}


def parsed(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(cases),
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["results"]
    return results


def planned(line: str, machine: Machine) -> Plan:
    files = {"zero.json": ZERO, "run_glue.py": SOURCE}
    try:
        return build_plan(read(imported(line, files), files), machine(2, packages=PACKAGES)).plan
    except RecipeError as error:
        raise AssertionError(f"{line}: {error.diagnostics[0].what}") from error


def test_an_imported_command_says_to_the_script_what_the_command_said(machine: Machine) -> None:
    original, ours = [], []
    for line, words in commands():
        plan = planned(line, machine)
        made = {file.path: file.content for file in plan.files if file.path.endswith(".json")}
        program = [str(word) for word in plan.commands[0].program]
        case = {"environment": {}, "world_size": plan.topology.world_size, "class": "TrainingArguments"}
        typed = [f"<run_dir>/{word}" if word == "zero.json" else word for word in words]
        original.append({**case, "words": typed, "files": {"zero.json": json.dumps(ZERO)}})
        ours.append({**case, "words": program[program.index("run_glue.py") + 1 :], "files": made})
    results = parsed([*original, *ours])
    wrong: dict[str, list[str]] = {}
    for (line, _), first, second in zip(commands(), results[:COMMANDS], results[COMMANDS:], strict=True):
        if "error" in first:  # by hand it ends so, too
            continue
        assert "error" not in second, f"{line}: {second['error']}"
        said = {**first["fields"], "deepspeed file": first["deepspeed"]}
        read_so = {**second["fields"], "deepspeed file": second["deepspeed"]}
        found = [name for name, value in said.items() if name not in PLACES and read_so[name] != value]
        wrong |= {line: [f"{name}: {said[name]!r} became {read_so[name]!r}" for name in found]} if found else {}
    assert not wrong, json.dumps(wrong, indent=1)
    assert sum("error" not in each for each in results[:COMMANDS]) > COMMANDS * 0.8
