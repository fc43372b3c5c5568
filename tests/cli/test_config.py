"""`trainkit config` without a terminal: defaults, answers in files and flags, plain lines, and how it is left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.wizard.conftest import machine_of

Trainkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def two_cards(tmp_path: Path) -> str:
    """Facts of a machine with two cards."""
    (tmp_path / "two.json").write_text(json.dumps(machine_of(2).to_json()))
    return "two.json"


@pytest.mark.torch
def test_the_defaults_make_a_recipe_that_runs(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("config", "--defaults", "--set", "train.steps=0", "--output", "sub/mine.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sub/mine.yaml is written. Next: trainkit run sub/mine.yaml\n"
    recipe = yaml.safe_load((tmp_path / "sub/mine.yaml").read_text())
    assert recipe["train"] == {"steps": 0}
    assert trainkit("check", "sub/mine.yaml").returncode == 0
    assert [each.name for each in (tmp_path / "sub").iterdir()] == ["mine.yaml"]


def test_an_existing_file_is_replaced_only_on_request(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine\n")
    done = trainkit("config", "--defaults")
    assert done.returncode == 2
    assert "recipe.yaml exists" in done.stderr
    assert (tmp_path / "recipe.yaml").read_text() == "mine\n"
    assert trainkit("config", "--defaults", "--force").returncode == 0
    assert "version: 1" in (tmp_path / "recipe.yaml").read_text()


def test_answers_come_from_a_file_and_flags_win(trainkit: Trainkit, tmp_path: Path, two_cards: str) -> None:
    (tmp_path / "a.yaml").write_text("strategy: {kind: zero2}\nprecision: fp32\nbatch: {global: 64}\n")
    words = ("--answers", "a.yaml", "--on", two_cards, "--set", "strategy.offload_optimizer=cpu")
    done = trainkit("config", "--defaults", *words, "--set", "batch.global=16")
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert recipe["extends"] == ["strategy/zero2-offload"]
    assert recipe["batch"] == {"global": 16}
    assert recipe["devices"] == {"type": "cuda", "select": 2}


def test_wrong_answers_are_diagnosed_all_at_once_at_their_places(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("strategy: {kind: zerro2}\nbacth: {micro: 8}\n")
    done = trainkit("config", "--defaults", "--answers", "a.yaml", "--set", "train.steps=many")
    assert done.returncode == 2
    assert "a.yaml:1:18: error: strategy.kind must be one of" in done.stderr
    assert "did you mean batch?" in done.stderr
    assert "train.steps=many: error: train.steps must be" in done.stderr
    assert "3 errors" in done.stderr
    assert not (tmp_path / "recipe.yaml").exists()


def test_variants_among_answers_are_refused_and_kept_by_a_recipe_to_start_from(
    trainkit: Trainkit, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("version: 1\nname: a\ntrain: {steps: 9}\nvariants: {short: {train: {steps: 3}}}\n")
    done = trainkit("config", "--defaults", "--answers", "a.yaml")
    assert done.returncode == 2
    assert "a.yaml: error: the variant 'short' is not an answer" in done.stderr
    assert not (tmp_path / "recipe.yaml").exists()
    assert trainkit("config", "--defaults", "--from", "a.yaml").returncode == 0
    assert trainkit("explain", "recipe.yaml", "train.steps", "--variant", "short").stdout.startswith(
        "train.steps = 3\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "launcher.kind=python", "--set", "nodes.processes_per_node=2"), "`python` starts one process"),
        (("--set", "strategy.kind=fsdp", "--set", "optimizer.name=adafactor"), "optimizer.name=adafactor: error"),
        (("--set", "batch.global=7", "--set", "batch.micro=2"), "batch.global=7: error: batch.global 7 cannot"),
        (("--set", "env+=x"), "changes a value that is not known here"),
        (("--set", "nonsense"), "is neither a flag nor key=value"),
        (("--answers", "gone.yaml"), "there is no file gone.yaml"),
        (("--from", "gone.yaml"), "there is no file gone.yaml"),
        (("--on", "gone.json"), "gone.json"),
        (("--set", "program.kind=torch"), "There is nothing to propose"),
        (("--set", "env.HF_TOKEN=hf_secret"), "is a secret by its name"),
        (("--output", "/proc/mine.yaml"), "/proc/mine.yaml cannot be written"),
        (
            ("--output", "there", "--force"),
            "error: there is a folder\n  next: name a file: --output there/recipe.yaml\n",
        ),
    ],
)
def test_answers_that_cannot_be_are_one_diagnostic_and_exit_2(
    trainkit: Trainkit, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "there").mkdir()
    done = trainkit("config", "--defaults", *words)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("recipe*"))


def test_a_pipe_answers_line_by_line(trainkit: Trainkit, tmp_path: Path, two_cards: str) -> None:
    first = ["pretrain", "?", "al", "nonsense", "zero3", "<", "fsdp", "", ""]
    lines = [*first, "accelerate", "", "bf16", "64/8", "y", "100/50", "y"]
    done = trainkit("config", "--on", two_cards, stdin="\n".join([*lines, ""]), environ={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert recipe["extends"] == ["strategy/fsdp", "precision/bf16"]
    assert recipe["launcher"] == {"kind": "accelerate"}
    assert recipe["batch"] == {"global": 64, "micro": 8}
    assert recipe["efficiency"] == {"gradient_checkpointing": True}
    assert recipe["train"] == {"steps": 100}
    assert "is none of the choices" in done.stdout
    assert "Plan of recipe" in done.stdout
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and "-m trainkit" not in line]
    assert not [line for line in long if not line.startswith("  CUDA_VISIBLE_DEVICES=")]
    assert "\x1b" not in done.stdout


def test_an_input_that_ends_early_is_an_error_and_nothing_is_lost(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("config", stdin="pretrain\ncpu-2\nddp\n")
    assert done.returncode == 2
    assert "the input ended before the last question" in done.stderr
    assert not (tmp_path / "recipe.yaml").exists()
    assert "trainkit config --answers recipe.answers.yaml" in done.stdout
    again = trainkit("config", "--defaults", "--answers", "recipe.answers.yaml")
    assert again.returncode == 0, again.stderr
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["nodes"] == {"processes_per_node": 2}


def test_kept_answers_replace_only_kept_answers(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "recipe.answers.yaml").write_text("precious\n")
    for _ in range(2):
        trainkit("config", stdin="pretrain\n")
    assert (tmp_path / "recipe.answers.yaml").read_text() == "precious\n"
    assert {each.name for each in tmp_path.glob("*.yaml")} == {"recipe.answers.yaml", "recipe.answers-2.yaml"}


def test_without_any_answer_nothing_is_written(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("config")
    assert done.returncode == 2
    assert "nothing is written" in done.stdout
    assert not list(tmp_path.glob("*.yaml"))


def test_the_last_question_takes_no_and_another_name(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine\n")
    everything = "pretrain\n" + "\n" * 6
    done = trainkit("config", stdin=f"{everything}\n")  # the proposal for a file that exists is no
    assert done.returncode == 0, done.stderr
    assert "recipe.yaml exists. Replace it?" in done.stdout
    assert (tmp_path / "recipe.yaml").read_text() == "mine\n"
    done = trainkit("config", stdin=f"{everything}what\nother.yaml\ny\n")
    assert done.returncode == 0, done.stderr
    assert "'what' is not an answer" in done.stdout
    assert (tmp_path / "other.yaml").exists()
    done = trainkit("config", stdin=f"{everything}<\n40/20\nreplace\n")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["train"] == {"steps": 40}


def test_a_file_that_cannot_be_written_is_asked_for_again(trainkit: Trainkit, tmp_path: Path) -> None:
    everything = "\n" * 8
    done = trainkit("config", "--output", "/proc/mine.yaml", stdin=f"{everything}{'x' * 300}.yaml\n\nother.yaml\n\n")
    assert done.returncode == 0, done.stderr
    assert "/proc/mine.yaml cannot be written" in done.stderr
    assert "xxx.yaml cannot be written: File name too long" in done.stderr
    assert (tmp_path / "other.yaml").exists()


def test_answers_are_kept_in_the_working_folder_where_that_of_the_recipe_cannot_be_written(
    trainkit: Trainkit, tmp_path: Path
) -> None:
    (tmp_path / "mine.answers.yaml").mkdir()
    done = trainkit("config", "--output", "/proc/mine.yaml", stdin="pretrain\ncpu-2\n")
    assert done.returncode == 2
    assert "trainkit config --output /proc/mine.yaml --answers mine.answers-2.yaml" in done.stdout
    assert yaml.safe_load((tmp_path / "mine.answers-2.yaml").read_text())["nodes"] == {"processes_per_node": 2}


def test_answers_that_no_file_can_keep_are_shown(trainkit: Trainkit) -> None:
    done = trainkit("config", "--output", f"/proc/{'x' * 245}.yaml", stdin="pretrain\ncpu-2\n")
    assert done.returncode == 2
    assert "your answers cannot be saved" in done.stdout
    assert yaml.safe_load(done.stdout.partition("file with these lines:\n")[2])["nodes"] == {"processes_per_node": 2}


def test_a_recipe_does_not_replace_what_it_extends(trainkit: Trainkit, tmp_path: Path) -> None:
    base = "version: 1\nname: base\ntrain: {steps: 7}\ndevices: {type: cpu}\n"
    (tmp_path / "base.yaml").write_text(base)
    done = trainkit("config", "--from", "base.yaml", "--output", "./base.yaml", "--force")
    assert done.returncode == 2
    assert "./base.yaml is the recipe to extend" in done.stderr
    assert not done.stdout
    done = trainkit("config", "--from", "base.yaml", "--force", stdin="\n" * 7 + "base.yaml\nmine.yaml\nyes\n")
    assert done.returncode == 0, done.stderr
    assert "goes in a circle" in done.stderr
    assert (tmp_path / "base.yaml").read_text() == base
    assert (tmp_path / "mine.yaml").exists()


def test_a_recipe_can_start_from_another(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit(
        "config", "--defaults", "--from", "quickstart", "--set", "train.steps=5", "--set", "devices.type=cpu"
    )
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert recipe["extends"] == ["recipes/quickstart"]
    assert recipe["train"] == {"steps": 5}
    assert trainkit("explain", "recipe.yaml", "optimizer.lr").stdout.startswith("optimizer.lr")
