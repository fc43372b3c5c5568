"""The plan of an imported command tells Trainer what the command told it: the installed parser reads both."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.convert.reading import imported, read
from trainkit.cli.machines import machine_facts
from trainkit.launch_plan.model import Plan
from trainkit.planner.build import build_plan

PARSER = Path(__file__).parent / "programs" / "hf_parse.py"
ZERO = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
FILES = {
    "ds.json": ZERO,
    "fsdp.json": {
        "fsdp_transformer_layer_cls_to_wrap": ["Block"],
        "cpu_offload": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    },
}
LINES = [
    "--per_device_train_batch_size 4 --gradient_accumulation_steps=2 --learning_rate 2e-5 --num_train_epochs 3.0",
    "--per-device-train-batch-size 2 --bf16 True --tf32 False --seed 7 --data_seed 8 --max_grad_norm=0.5",
    "--do_eval --eval_strategy steps --eval_steps 50 --per_device_eval_batch_size 16 --eval_delay 2",
    "--eval_strategy epoch --save_strategy=epoch --load_best_model_at_end --metric_for_best_model f1",
    "--eval_strategy steps --eval_steps 5 --save_strategy best --metric_for_best_model loss --save_total_limit 1",
    "--save_strategy no --logging_strategy steps --logging_steps 5 --report_to none --log_level warning",
    "--optim sgd --optim_args momentum=0.9,nesterov=True --lr_scheduler_type linear --warmup_steps 10 --max_steps 100",
    "--optim paged_adamw_8bit --lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs '{\"num_cycles\": 2}'",
    "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --adam_beta2=0.98",
    "--gradient_checkpointing --gradient_checkpointing_kwargs '{\"use_reentrant\": false}' --label_names a b c",
    "--torch_compile true --torch_compile_backend eager --ddp_find_unused_parameters false --ddp_bucket_cap_mb 30",
    "--dataloader_num_workers 2 --dataloader_pin_memory False --dataloader_prefetch_factor 4 --log_on_each_node 0",
    "--fsdp 'full_shard auto_wrap' --fsdp_config fsdp.json --bf16 1",
    "--fsdp shard_grad_op --fsdp_config '{\"min_num_params\": 2000, \"auto_wrap_policy\": \"SIZE_BASED_WRAP\"}'",
    "--deepspeed ds.json --bf16 --learning_rate 1e-4 --adam_epsilon 1e-7",
]  # fmt: skip
PLACES = {"output_dir", "logging_dir", "run_name", "deepspeed", "fsdp_config"}  # of the run, or its files


def planned(line: str) -> Plan:
    """The plan of the recipe that an import makes of the line, on two cards."""
    facts = machine_facts("2x3090")
    assert facts is not None
    text = imported(f"torchrun --nproc_per_node 2 run_glue.py --do_train {line} --output_dir out", FILES)
    return build_plan(read(text, FILES), facts).plan


def case(words: list[str], files: dict[str, str], environment: dict[str, str]) -> dict[str, Any]:
    """What the parser is asked."""
    named = {"class": "TrainingArguments", "world_size": 2}
    return {"words": words, "files": files, "environment": environment, **named}


def asked(line: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The line as it was typed, and as the plan says it."""
    typed = [f"<run_dir>/{word}" if word in FILES else word for word in shlex.split(f"--do_train {line}")]
    plan = planned(line)
    told = [str(word) for word in plan.commands[0].program[2:]]
    files = {file.path: file.content for file in plan.files}
    ranks: dict[str, str] = {}
    written = {name: json.dumps(content) for name, content in FILES.items()}
    return case([*typed, "--output_dir", "out"], written, ranks), case(told, files, ranks)


def test_every_field_of_training_arguments_is_as_the_command_had_it() -> None:
    questions = [each for line in LINES for each in asked(line)]
    done = subprocess.run(
        [sys.executable, str(PARSER)],
        input=json.dumps(questions), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])["results"]
    for line, before, after in zip(LINES, answers[::2], answers[1::2], strict=True):
        assert "error" not in before, (line, before)
        assert "error" not in after, (line, after)
        kept = {name: value for name, value in after["fields"].items() if name not in PLACES}
        assert kept == {name: value for name, value in before["fields"].items() if name not in PLACES}, line
        assert after["fsdp"] == before["fsdp"], line
        assert bool(after["deepspeed"]) == ("--deepspeed" in line), line
