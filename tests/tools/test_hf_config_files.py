"""A file of settings that a script on Trainer reads itself counts as what its own flags say, below them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Notice, Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Machine = Callable[..., Facts]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
RECIPE = """\
version: 1
name: own
program: {kind: hf, script: sft.py, args: {config: sft.yaml}}
devices: {type: cpu}
"""
CONFIG = """\
# of the script
model_name_or_path: somewhere
bf16: true
learning_rate: 2.0e-05
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
output_dir: data/sft
report_to:
  - none
gradient_checkpointing: true
resume_from_checkpoint: null
"""


@pytest.fixture
def plan(solve: Callable[..., Resolved], machine: Machine) -> Callable[..., Plan]:
    """The plan of a script whose words name a file of its own."""

    def build(config: str = CONFIG, *overrides: str, recipe: str = RECIPE, cards: int = 0) -> Plan:
        files = {"r.yaml": recipe, "sft.yaml": config, "sft.py": "", "zero.json": '{"zero_optimization": {"stage": 2}}'}
        return build_plan(solve(files, overrides=overrides), machine(cards, packages=PACKAGES)).plan

    return build


def program(plan: Plan) -> list[str]:
    words = [str(word) for word in plan.commands[0].program]
    return words[words.index("sft.py") + 1 :]


def notes(plan: Plan) -> list[Notice]:
    return [each for each in plan.notices if each.severity == "note"]


def test_nothing_is_said_over_what_the_file_says(plan: Callable[..., Plan]) -> None:
    made = plan()
    assert program(made) == ["--config", "sft.yaml", "--use_cpu", "True"]
    assert (made.batch.global_, made.batch.micro, made.batch.accumulation) == (8, 4, 2)
    assert any("sft.yaml says output_dir data/sft" in each.what for each in notes(made))


def test_a_setting_of_the_recipe_counts_more_and_says_so(plan: Callable[..., Plan]) -> None:
    made = plan(CONFIG, "--learning_rate", "1e-3")
    assert program(made)[2:] == ["--use_cpu", "True", "--learning_rate", "0.001"]
    said = "sft.yaml says learning_rate 2e-05, and optimizer.lr counts instead"
    assert any(said in each.what for each in notes(made))


def test_the_global_batch_of_the_recipe_is_completed_with_the_sizes_of_the_file(plan: Callable[..., Plan]) -> None:
    made = plan(CONFIG.replace("gradient_accumulation_steps: 2\n", ""), "batch.global=32")
    assert made.batch.accumulation == 8
    assert program(made)[-2:] == ["--gradient_accumulation_steps", "8"]


@pytest.mark.parametrize(
    ("line", "what", "key"),
    [
        ("fsdp: full_shard", "sft.yaml says fsdp full_shard", "strategy.kind"),
        ("deepspeed: zero.json", "sft.yaml names deepspeed", "strategy.config"),
        ("resume_from_checkpoint: out/checkpoint-3", "resume_from_checkpoint", "checkpoint.resume"),
        ("tf32: true", "tf32 is for CUDA GPUs", "tf32"),
    ],
)
def test_what_only_the_plan_can_decide_is_an_error_at_its_place_in_the_file(
    plan: Callable[..., Plan], line: str, what: str, key: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(f"learning_rate: 0.1\n{line}\n")
    (error,) = caught.value.diagnostics
    assert what in error.what
    assert key in error.what + error.hint
    assert error.origin
    assert error.origin.place.startswith("sft.yaml:2:")


def test_a_strategy_of_the_recipe_replaces_that_of_the_file(plan: Callable[..., Plan]) -> None:
    made = plan("deepspeed: zero.json\nlearning_rate: 0.1\n", "--deepspeed", "zero.json")
    assert program(made)[-2:] == ["--deepspeed", "<run_dir>/deepspeed.json"]


def test_a_file_that_is_not_there_stops_the_run(plan: Callable[..., Plan]) -> None:
    made = plan(recipe=RECIPE.replace("sft.yaml", "other.yaml"))
    assert [each.what for each in made.blockers if "other.yaml" in each.what]


def test_a_file_that_is_the_first_word_is_read_too(plan: Callable[..., Plan]) -> None:
    recipe = RECIPE.replace("{config: sft.yaml}", '[sft.yaml, "--seed", "3"]')
    assert program(plan(recipe=recipe)) == ["sft.yaml", "--seed", "3", "--use_cpu", "True"]


def test_a_file_that_is_all_a_script_is_given_stays_so_where_the_plan_adds_nothing(plan: Callable[..., Plan]) -> None:
    recipe = RECIPE.replace("{config: sft.yaml}", "[sft.yaml]") + "precision: bf16\n"
    assert program(plan(f"{CONFIG}use_cpu: true\n", recipe=recipe)) == ["sft.yaml"]
    with pytest.raises(RecipeError, match="is one file"):
        plan(f"{CONFIG}use_cpu: true\n", "--seed", "3", recipe=recipe)
