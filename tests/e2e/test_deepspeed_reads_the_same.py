"""What DeepSpeed, and Trainer in front of it, make of another project's file is what they make of the plan's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.convert.reading import imported, read
from tests.tools.foreign_deepspeed_files import files
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.recipe.schema.fields import nest
from trainkit.tools.deepspeed.config import KEYS, OPTIMIZERS

PROGRAM = Path(__file__).parent / "programs" / "deepspeed_files.py"
CARDS = tuple(Gpu(each, f"GPU-{each}", "A100", 2**36, 2**36, (8, 0)) for each in range(2))
PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
MACHINE = Facts("linux", "x86_64", "h", "3.11", sys.executable, 8, 2**36, gpus=CARDS, packages=PACKAGES)
CODE = {
    "hf": "from transformers import HfArgumentParser, Trainer, TrainingArguments\n",
    "deepspeed": "import deepspeed\ndeepspeed.initialize()\n",
}
LINES = {
    "hf": "torchrun --nproc_per_node 2 own.py --deepspeed ds.json",
    "deepspeed": "deepspeed --num_gpus 2 own.py --deepspeed --deepspeed_config ds.json",
}
# As people write numbers, and what tools read beside JSON.
BY_HAND = """{
  # the sizes
  "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1e0,
  "steps_per_print": 1e5,
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 1E9,
    "stage3_max_live_parameters": 1e+9, "offload_optimizer": {"device": "none"}},
  "bf16": {"enabled": true}
}
"""


def case(kind: str, text: str, words: str = "") -> dict[str, Any]:
    """A file and the plan's, with the words that Trainer gets beside each."""
    there = {"ds.json": text, "own.py": CODE[kind]}
    plan = build_plan(read(imported(f"{LINES[kind]} {words}", there), there), MACHINE).plan
    (ours,) = (file.content for file in plan.files if file.path == "deepspeed.json")
    own = [str(word) for word in plan.commands[0].program]
    fields = (
        "learning_rate",
        "max_grad_norm",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "warmup_steps",
    )
    known = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", *fields)
    given = [each for place, word in enumerate(own) if word[2:] in known for each in own[place : place + 2]]
    return {"kind": kind, "theirs": text, "ours": ours, "their_words": words.split() or given, "our_words": given}


def drawn(kind: str, count: int) -> list[dict[str, Any]]:
    """Cases of made-up files."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=count, derandomize=True, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(files(auto=kind == "hf"))
    def draw(tree: Mapping[str, Any]) -> None:
        found.append(case(kind, json.dumps(tree)))

    draw()
    return found


def test_the_installed_deepspeed_has_none_of_what_is_said_to_be_removed(clean_environment: dict[str, str]) -> None:
    trees = [nest({"train_batch_size": 4, key: {}}) for key in KEYS]
    done = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("deepspeed_parse.py"))],
        input=json.dumps([{"file": tree, "world_size": 2} for tree in trees]),
        env={**clean_environment, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert all("removed" in answer.get("error", "") for answer in answers), answers
    source = Path(find_spec("deepspeed.runtime.config").origin).read_text().lower()  # type: ignore[union-attr, arg-type]
    assert not [name for name in OPTIMIZERS if name in source]


@pytest.mark.parametrize("kind", LINES)
def test_no_key_is_added_lost_or_changed(kind: str, clean_environment: dict[str, str]) -> None:
    cases = drawn(kind, 40)
    if kind == "hf":
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}  # fmt: skip
        words = "--per_device_train_batch_size 3 --gradient_accumulation_steps 5 --bf16 True --learning_rate 0.001"
        cases += [case(kind, json.dumps(auto), words), case(kind, json.dumps(auto), f"{words} --adam_beta1 0.8")]
    else:
        cases.append(case(kind, BY_HAND))
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(cases),
        env={**clean_environment, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    readable = 0
    for asked, (theirs, ours) in zip(cases, answers, strict=True):
        assert theirs == ours, asked["theirs"]
        readable += "error" not in theirs
    assert readable >= 30, [theirs["error"] for theirs, _ in answers if "error" in theirs][:5]
