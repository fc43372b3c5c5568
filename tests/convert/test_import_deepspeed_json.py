"""DeepSpeed's files as recipes: with a setting for each key that has one, and the file as base for the others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.reading import comments, imported, refusal, settings
from trainkit.errors import UsageError

Trainkit = Callable[..., subprocess.CompletedProcess[str]]

# As DeepSpeed's documentation begins (config-json), without what this trainer cannot do.
DOCUMENTED: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 0.01}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
# As transformers' documentation shows it for Trainer.
OF_TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
    "train_batch_size": "auto",
}


def test_a_file_of_known_keys_becomes_settings_and_is_not_needed_any_more() -> None:
    found = settings(imported("ds.json", {"ds.json": DOCUMENTED}))
    assert found == {
        "strategy.kind": "zero2",
        "strategy.bucket_mb": 5e8 * 2 / 2**20,  # of which the file says nothing: DeepSpeed's 5e8 values
        "precision.dtype": "fp16",
        "batch.global": 8,
        "batch.accumulation": 1,
        "optimizer.name": "adamw_torch",
        "optimizer.lr": 0.00015,
        "optimizer.weight_decay": 0.01,
        "optimizer.beta2": 0.999,
        "train.max_grad_norm": 1.0,
        "train.epochs": 1,
    }


def test_a_key_without_a_setting_keeps_the_file_as_base_and_is_named() -> None:
    files = {"ds.json": DOCUMENTED | {"wall_clock_breakdown": True, "aio": {"thread_count": 2}}}
    text = imported("ds.json", files)
    assert settings(text, files)["strategy.config"] == "/here/ds.json"
    assert "wall_clock_breakdown, aio.thread_count" in comments(text)


def test_a_script_of_its_own_keeps_deepspeeds_defaults() -> None:
    files = {"ds.json": DOCUMENTED}
    found = settings(imported("ds.json", files, program=("train.py", "--x", "1")), files)
    assert found == {
        "program.kind": "deepspeed",
        "program.script": "train.py",
        "program.args.x": "1",
        "strategy.kind": "zero2",
        "strategy.config": "/here/ds.json",
    }


def test_a_script_on_trainer_gets_the_file_as_it_stands() -> None:
    files = {"ds.json": OF_TRAINER}
    found = settings(imported("ds.json", files, program=("run_glue.py", "--do_train")), files)
    assert found == {
        "program.kind": "hf",
        "program.script": "run_glue.py",
        "program.args.do_train": True,
        "strategy.kind": "zero3",
        "strategy.config": "/here/ds.json",
    }


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train.py", ("--deepspeed_config", "ds.json")),
        ("run_glue.py", ("--do_train", "--deepspeed", "ds.json")),
    ],
)
@pytest.mark.parametrize("tree", [DOCUMENTED, {**DOCUMENTED, "zero_optimization": {"stage": 0}}])
def test_the_file_with_a_program_and_the_command_that_names_it_are_the_same_recipe(
    script: str, words: tuple[str, ...], tree: dict[str, Any]
) -> None:
    files = {"ds.json": tree}
    by_file = settings(imported("ds.json", files, program=(script, *words[:-2], "--x", "1")), files)
    command = " ".join(("deepspeed --no_local_rank", script, *words, "--x 1"))
    by_command = settings(imported(command, files), files)
    assert by_command.pop("launcher.kind") == "deepspeed"
    assert by_file == {key: value for key, value in by_command.items() if not key.startswith("devices.")}


def test_auto_is_named_and_not_guessed() -> None:
    text = imported("ds.json", {"ds.json": OF_TRAINER})
    assert "optimizer.params.lr" in comments(text).partition('"auto", which Trainer')[2]
    assert "batch.global" not in settings(text, {"ds.json": OF_TRAINER})


def test_all_three_corners_of_the_batch_are_brought_down_to_two() -> None:
    files = {"ds.json": DOCUMENTED | {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8,
                                      "gradient_accumulation_steps": 4}}  # fmt: skip
    text = imported("ds.json", files)
    found = settings(text, files)
    assert (found["batch.global"], found["batch.micro"], found.get("batch.accumulation")) == (64, 8, None)
    assert "gradient_accumulation_steps 4 follows from the other two with 2 ranks" in comments(text)


def test_parameters_offloaded_below_stage_3_are_named() -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    text = imported("ds.json", {"ds.json": DOCUMENTED | {"zero_optimization": zero}})
    assert "ds.json:1:" in comments(text)
    assert "parameters can be offloaded at ZeRO stage 3 only, and the stage is 2" in comments(text)
    assert settings(text)["strategy.offload_optimizer"] == "cpu"


def test_the_schedule_and_its_length_are_taken_over() -> None:
    schedule = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_min_ratio": 0, "cos_min_ratio": 0.05},
    }
    found = settings(imported("ds.json", {"ds.json": DOCUMENTED | {"scheduler": schedule}}))
    wanted = {"schedule.name": "cosine", "schedule.warmup_steps": 10, "schedule.min_lr_ratio": 0.05, "train.steps": 100}
    assert wanted.items() <= found.items()
    assert not {"train.epochs", "strategy.config"} & found.keys()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"train_batch_size": "many"}, "batch.global must be"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "10 is not 4 x 1 x a number of ranks"),
        ({"bf16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type Lamb has no counterpart"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type OneCycle has no counterpart"),
        ({"optimizer": {"type": ["AdamW"]}}, "optimizer.type must be the name of a class, not ['AdamW']"),
        ({"scheduler": {"type": {}}}, "scheduler.type must be the name of a class, not {}"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "Adam with adam_w_mode false"),
    ],
)
def test_what_cannot_be_taken_over_is_an_error_at_its_place(change: dict[str, Any], what: str) -> None:
    found = refusal("ds.json", {"ds.json": json.dumps(DOCUMENTED | change, indent=2)})
    assert what in found.what
    assert found.origin
    assert found.origin.source == "ds.json"
    assert found.origin.line > 1


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"strategy.offload_optimizer": "cpu"}),
        ({"fp16": {"enabled": False}, "bfloat16": {"enabled": True}}, {"precision.dtype": "bf16"}),
        ({"steps_per_print": 2000000000}, {"logging.every_steps": None}),
        ({"steps_per_print": 50}, {"logging.every_steps": 50}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"strategy.config": None}),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20, "allgather_bucket_size": 2**20}},
         {"strategy.bucket_mb": 2.0}),
        ({"fp16": {"enabled": "auto"},
          "zero_optimization": {"stage": 2, "reduce_bucket_size": 2**20, "allgather_bucket_size": 2**20}},
         {"strategy.bucket_mb": None, "strategy.config": "/here/ds.json"}),
    ],
)  # fmt: skip
def test_keys_of_any_age_are_the_settings_that_they_mean(change: dict[str, Any], wanted: dict[str, Any]) -> None:
    files = {"ds.json": DOCUMENTED | change}
    found = settings(imported("ds.json", files), files)
    assert {key: found.get(key) for key in wanted} == wanted


def test_what_deepspeed_makes_for_a_script_of_its_own_stays_in_the_file() -> None:
    files = {"ds.json": DOCUMENTED | {"optimizer": {"type": "OneBitAdam"}, "scheduler": {"type": "OneCycle"}}}
    found = settings(imported("ds.json", files, program=("train.py",)), files)
    assert found["strategy.config"] == "/here/ds.json"
    assert not {"optimizer.name", "schedule.name"} & found.keys()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"zero_optimization": 2}, "zero_optimization is 2"),
        ({"fp16": {}, "bfloat16": {"enabled": True}}, "bfloat16 in the DeepSpeed file is a name"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": "auto"}}, 'round_robin_gradients in the'),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_a_base_is_refused_for_a_script_on_trainer(change: dict[str, Any], what: str) -> None:
    found = refusal("ds.json", {"ds.json": DOCUMENTED | change}, program=("run_glue.py", "--do_train"))
    assert what in found.what
    assert found.origin


@pytest.mark.parametrize("said", [{"stage": 0}, None])
def test_a_script_on_the_engine_needs_no_stage(said: Any) -> None:
    files = {"ds.json": {key: each for key, each in DOCUMENTED.items() if key != "zero_optimization"}}
    files["ds.json"] |= {"zero_optimization": said} if said else {}
    found = settings(imported("ds.json", files, program=("train.py",)), files)
    assert (found["strategy.kind"], found["strategy.config"]) == ("zero0", "/here/ds.json")


@pytest.mark.parametrize("content", ["", "[1]", '{"name": "x"}'])
def test_a_file_of_another_kind_is_refused(content: str) -> None:
    with pytest.raises(UsageError):
        imported("ds.json", {"ds.json": content})


@pytest.mark.cli
def test_the_written_recipe_passes_check_and_replaces_nothing_unasked(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(DOCUMENTED | {"wall_clock_breakdown": True}))
    done = trainkit("import", "ds.json", "--output", "team/recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert trainkit("check", "team/recipe.yaml").returncode == 0
    again = trainkit("import", "--output", "team/recipe.yaml", "python", "-m", "json", "--output", "x")
    assert again.returncode == 2
    assert "team/recipe.yaml exists" in again.stderr
    itself = trainkit("import", "--force", "ds.json", "--output", "ds.json")
    assert itself.returncode == 2
    assert "ds.json is the file to import" in itself.stderr
    forced = trainkit("import", "--force", "--output", "team/recipe.yaml", "python", "-m", "json", "--output", "x")
    assert forced.returncode == 0, forced.stderr
    written = (tmp_path / "team/recipe.yaml").read_text()
    assert "module: json" in written
    assert "output: x" in written  # the command's own option, not trainkit's
    assert sorted(path.name for path in (tmp_path / "team").iterdir()) == ["recipe.yaml"]
    printed = trainkit("import", "ds.json", "-o", "-").stdout
    assert printed == trainkit("import", "ds.json").stdout
    assert "strategy:" in printed
    assert not (tmp_path / "-").exists()


@pytest.mark.cli
def test_a_command_in_one_word_is_read_as_a_shell_would(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = trainkit("import", "CUDA_VISIBLE_DEVICES=1 python train.py \\\n  --lr 0.1 'two words'")
    assert done.returncode == 0, done.stderr
    assert 'lr: [0.1, "two words"]' in done.stdout
    assert done.stderr == ""
    wrong = trainkit("import", "python train.py 'open")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "the command cannot be read" in wrong.stderr
