"""A script, a module or a launcher's command in place of a recipe: what it means, and what is wrong with it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.line import is_line

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
FILES = {
    "train.py": "import sys\nprint(sys.argv[1:])\n",
    "on_trainer.py": "from transformers import HfArgumentParser, Trainer, TrainingArguments\n",
    "ds.json": '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}',
}
LINES = (
    "torchrun --nproc_per_node 2 train.py --lr 1e-3 'two words' strategy.kind=fsdp --json",
    "python train.py --lr 1e-3 --with nothing",
    "python -m pkg.main --steps 5",
    "CUDA_VISIBLE_DEVICES=1,0 NAME=x torchrun --nproc_per_node=2 -m pkg.main '${HOME}' '$x'",
    "torchrun --nproc_per_node 2 on_trainer.py --per_device_train_batch_size 4 --bf16 --learning_rate 1e-3",
    "accelerate launch --multi_gpu --num_processes 2 train.py --mixed",
    "deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json",
    "nohup torchrun --standalone --nproc_per_node 2 train.py -- --x",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with programs of several kinds."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pkg" / "inner").mkdir(parents=True)
    (tmp_path / "pkg" / "main.py").write_text("print('a module')\n")
    return tmp_path


def planned(trainkit: Trainkit, folder: Path, *words: str) -> dict[str, Any]:
    """The plan for a machine with cards."""
    done = trainkit("plan", "--json", "--on", "8xh100", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def explained(trainkit: Trainkit, folder: Path, *words: str) -> str:
    """What `trainkit explain` says."""
    done = trainkit("explain", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("line", LINES)
def test_a_command_means_the_recipe_that_import_makes_of_it(trainkit: Trainkit, folder: Path, line: str) -> None:
    words = shlex.split(line)
    end = words.index("--") if "--" in words else len(words)
    made = trainkit("import", "--output", "made.yaml", *words[:end], *words[end:], cwd=folder)
    assert made.returncode == 0, made.stderr

    assert planned(trainkit, folder, *words) == planned(trainkit, folder, "made.yaml")
    assert not {path.name for path in folder.iterdir()} - {*FILES, "pkg", "made.yaml", "home"}


def test_words_in_front_are_trainkits_and_words_behind_are_the_programs(trainkit: Trainkit, folder: Path) -> None:
    words = ("--nproc_per_node", "2", "name=mine", "train.py", "--lr", "1e-3", "train.steps=7", "--json", "-m", "x.py")

    plan = planned(trainkit, folder, *words)

    assert plan["name"] == "mine"
    assert plan["topology"]["world_size"] == 2
    assert plan["strategy"]["kind"] == "ddp"
    assert plan["commands"][0]["argv"][-7:] == ["train.py", "--lr", "1e-3", "train.steps=7", "--json", "-m", "x.py"]
    said = trainkit("plan", *words, cwd=folder).stderr
    assert "train.steps=7 comes after train.py, so it is passed to it" in said
    assert "--json comes after train.py, so it is passed to it" in said


def test_a_script_on_trainer_writes_where_its_words_say(trainkit: Trainkit, folder: Path) -> None:
    plan = planned(trainkit, folder, "on_trainer.py", "--output_dir", "out", "--learning_rate", "0.001")
    words = [word for word in plan["commands"][0]["argv"] if isinstance(word, str)]
    assert words[words.index("--output_dir") + 1] == "out"
    assert words.count("--output_dir") == 1
    assert plan["output_root"] == "runs"


def test_a_script_is_one_process_unless_words_in_front_ask_for_more(trainkit: Trainkit, folder: Path) -> None:
    alone = planned(trainkit, folder, "train.py")["topology"]
    assert [(group["processes"], group["devices"]) for group in alone["groups"]] == [(1, [str(n) for n in range(8)])]
    two = planned(trainkit, folder, "--nproc_per_node", "2", "train.py")["topology"]
    assert two == planned(trainkit, folder, "torchrun", "--nproc_per_node", "2", "train.py")["topology"]
    assert planned(trainkit, folder, "--with", "strategy/ddp", "train.py")["topology"]["world_size"] == 8
    assert planned(trainkit, folder, "--with", "strategy/fsdp", "-m", "pkg.main")["strategy"]["kind"] == "fsdp"
    assert "given by flag --nproc_per_node 2" in explained(
        trainkit, folder, "strategy.kind", "--nproc_per_node", "2", "train.py"
    )


def test_a_value_is_explained_by_the_words_of_the_command(trainkit: Trainkit, folder: Path) -> None:
    shown = explained(trainkit, folder, "nodes.processes_per_node", "torchrun", "--nproc_per_node", "2", "train.py")
    assert shown == "nodes.processes_per_node = 2\n  given by command line --nproc_per_node 2\n"
    assert 'program.kind = "hf"' in explained(trainkit, folder, "on_trainer.py")
    assert 'name = "on_trainer"' in explained(trainkit, folder, "on_trainer.py")
    assert 'program.kind = "torch"' in explained(trainkit, folder, "program.kind=torch", "on_trainer.py", "--bf16")


def test_what_sounds_like_a_secret_may_be_said_to_be_none(trainkit: Trainkit, folder: Path) -> None:
    words = ("program.public=[sort_key]", "train.py", "--sort_key=abcdefgh12345678")
    assert planned(trainkit, folder, *words)["commands"][0]["argv"][-1] == words[-1]


def test_a_shell_script_and_a_quoted_line_are_read_as_import_reads_them(trainkit: Trainkit, folder: Path) -> None:
    (folder / "go.sh").write_text('#!/bin/sh\ntorchrun --nproc_per_node 2 train.py --lr "$1"\n')
    expected = planned(trainkit, folder, "torchrun", "--nproc_per_node", "2", "train.py", "--lr", "1e-3")
    assert planned(trainkit, folder, "go.sh", "1e-3") == expected
    assert planned(trainkit, folder, "go.sh", "--", "1e-3") == expected
    assert planned(trainkit, folder, "bash", "go.sh", "1e-3") == expected
    assert planned(trainkit, folder, "bash go.sh 1e-3") == expected
    assert planned(trainkit, folder, "torchrun --nproc_per_node 2 train.py --lr 1e-3") == expected
    there = trainkit("plan", "--json", "cd pkg && torchrun main.py", cwd=folder)
    argv = json.loads(there.stdout)["commands"][0]["argv"]
    assert argv[argv.index("sh") + 1] == "pkg"


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("nosuch.py --lr 1", "nosuch.py: error: there is no file nosuch.py", "starts from the current folder"),
        ("pkg", "pkg is a folder without a recipe.yaml", "or a script"),
        ("given", "given/recipe.yaml is a link, and no run directory has one", "if you trust it"),
        ("folder.py", "folder.py is a folder", "name the script in it"),
        ("broken.py", "broken.py:2:5: error: broken.py is not a program for Python", "invalid syntax"),
        ("torchrun broken.py", "broken.py:2:5: error: broken.py is not a program for Python", "invalid syntax"),
        ("-m", "-m requires the name of a module", "-m package.module"),
        ("-m nosuch.main", "there is no module nosuch", "a module is looked for from"),
        ("-m pkg.nosuch", "there is no module pkg.nosuch", "a module is looked for from"),
        ("-m pkg.inner", "pkg.inner is a package without a __main__ module", "check the name"),
        ("torchrun --nprocs_per_node 2 train.py", "torchrun has no flag --nprocs_per_node", "--nproc_per_node?"),
        ("--nprocs_per_node 2 train.py", "unknown flag --nprocs_per_node", "did you mean --nproc_per_node?"),
        ("torchrun", "the command names no program", "train.py"),
        ("train.py --hub_token abcdefgh12345678", "--hub_token is a secret by its name", "program.public=[hub_token]"),
        ("quickstart train.py", "train.py", ""),
    ],
)
@pytest.mark.parametrize("command", ["check", "plan"])
def test_what_cannot_run_is_said_once_and_where(
    trainkit: Trainkit, folder: Path, command: str, words: str, said: str, hint: str
) -> None:
    (folder / "broken.py").write_text("import os\ndef (\n")
    (folder / "folder.py").mkdir()
    (folder / "given").mkdir()
    (folder / "given/recipe.yaml").symlink_to("/etc/passwd")
    done = trainkit(command, *words.split(), cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert hint in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr


def test_a_script_without_a_kind_is_one_error_with_the_kind_that_was_found(trainkit: Trainkit, folder: Path) -> None:
    done = trainkit("run", "program.script=on_trainer.py", "optimizer.lr=1", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("program.script=on_trainer.py: error: program.script requires program.kind\n")
    assert "set program.kind: hf (on_trainer.py:1 uses transformers.Trainer)" in done.stderr
    assert done.stderr.count("error: ") == 1
    (folder / "recipe.yaml").write_text("program:\n  module: pkg.main\n")
    done = trainkit("check", "recipe.yaml", cwd=folder)
    assert done.stderr.startswith("recipe.yaml:2:11: error: program.module requires program.kind\n")
    assert "set program.kind: torch (pkg.main uses no Trainer with its flags" in done.stderr
    (folder / "beside.py").write_text(f"import on_trainer\n{FILES['train.py']}")
    done = trainkit("run", "program.script=beside.py", cwd=folder)
    assert "set program.kind: hf (on_trainer.py:1 uses transformers.Trainer)" in done.stderr


def test_a_double_dash_behind_the_script_goes_to_it_and_is_noticed(trainkit: Trainkit, folder: Path) -> None:
    done = trainkit("plan", "train.py", "--", "--lr", "1", cwd=folder)
    assert "the `--` after train.py is passed to it too" in done.stderr
    assert planned(trainkit, folder, "train.py", "--", "--lr", "1")["commands"][0]["argv"][-3:] == ["--", "--lr", "1"]


def test_a_program_is_not_compared_with_variants(trainkit: Trainkit, folder: Path) -> None:
    done = trainkit("bench", "--no-plot", "train.py", cwd=folder)
    assert done.returncode == 2
    assert "bench compares the variants of a recipe" in done.stderr


def test_a_script_is_run_as_typed_and_its_recipe_is_kept(trainkit: Trainkit, folder: Path) -> None:
    done = trainkit("run", "train.py", "--lr", "two words", "", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--lr', 'two words', '', '--json']\n"
    (run,) = (folder / "runs" / "train").iterdir()

    again = trainkit("run", str(run), cwd=folder)
    assert again.stdout == done.stdout


def test_a_run_in_which_nothing_is_seen_says_so_and_fails_where_it_has_to_be_shown(
    trainkit: Trainkit, folder: Path
) -> None:
    done = trainkit("run", "train.py", cwd=folder)
    assert done.returncode == 0
    assert "In force       not shown: no torch optimizer took a step\n" in done.stderr
    done = trainkit("run", "program.verify=true", "train.py", cwd=folder)
    assert done.returncode == 1
    assert "what rank 0 runs is not shown: no torch optimizer took a step" in done.stderr


def test_a_folder_named_like_a_launcher_is_in_nobodys_way(trainkit: Trainkit, folder: Path) -> None:
    (folder / "deepspeed").mkdir()
    assert planned(trainkit, folder, "deepspeed", "--num_gpus", "2", "train.py")["launcher"]["kind"] == "deepspeed"


def test_a_program_that_a_shell_script_names_by_default_is_the_one(trainkit: Trainkit, folder: Path) -> None:
    (folder / "go.sh").write_text('echo "${1:-train.py}"\ntorchrun --nproc_per_node=${2:-2} ${1:-train.py}\n')
    done = trainkit("import", "bash", "go.sh", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "script: train.py\n" in done.stdout
    assert "# - The program is train.py, for nothing sets $ARG1: import again for another." in done.stdout


def test_an_option_behind_the_command_that_is_imported_is_noticed(trainkit: Trainkit, folder: Path) -> None:
    done = trainkit("import", "torchrun", "train.py", "-o", "made.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "-o comes after train.py, so it is passed to it" in done.stderr
    assert not (folder / "made.yaml").exists()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("program.script=train it.sh", False),
        ("train it.sh", False),
        ("go.sh", False),
        ("bash go.sh", True),
        ("go.sh 1e-3", True),
        ("torchrun go.sh", True),
        ("echo go.sh", False),
    ],
)
def test_a_quoted_line_is_told_from_a_name_with_a_space(word: str, line: bool) -> None:
    assert is_line(word) is line
