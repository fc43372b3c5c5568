"""An unedited script on Trainer: the same losses under every launcher, and resumed as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = Path(__file__).parent / "programs" / "hf_classification.py"
RECIPE = f"""\
version: 1
program: {{kind: hf, script: {PROGRAM}, args: {{length: 8}}}}
devices: {{type: cpu}}
batch: {{global: 16, micro: 4}}
optimizer: {{name: adamw_torch, lr: 1.0e-2}}
schedule: {{name: constant}}
train: {{steps: 4, seed: 3}}
checkpoint: {{every_steps: 0}}
logging: {{every_steps: 1, level: warning, replica_level: error, report_to: []}}
"""
OWN_ARGUMENTS = 'data, training = DataArguments(), TrainingArguments(output_dir="out", use_cpu=True, max_steps=2)'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the recipe."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def report(trainkit: Trainkit, folder: Path, *words: str, recipe: str = "recipe.yaml") -> dict[str, Any]:
    """What the script says of one run."""
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    done = trainkit("run", recipe, *words, f"program.args.report={path}", timeout=220)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(("strategy", "wrapped"), [("ddp", "DistributedDataParallel"), ("zero2", "DeepSpeedEngine")])
def test_losses_are_the_same_under_every_launcher(
    trainkit: Trainkit, folder: Path, strategy: str, wrapped: str
) -> None:
    curves = {}
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        said = report(trainkit, folder, f"launcher.kind={launcher}", "--with", f"strategy/{strategy}")
        assert (said["wrapped"], said["world_size"]) == (wrapped, 2), launcher
        assert said["verbosity"] == "warning"  # of rank 0: the libraries' level
        curves[launcher] = said["losses"]
    assert len(curves["torchrun"]) == 4
    assert curves["torchrun"][3] < curves["torchrun"][0]
    assert curves["accelerate"] == curves["torchrun"]
    assert curves["deepspeed"] == curves["torchrun"]


def test_a_single_process_is_one_and_goes_on_from_what_an_earlier_run_left(trainkit: Trainkit, folder: Path) -> None:
    whole = report(trainkit, folder, "name=whole")
    assert (whole["wrapped"], whole["world_size"]) == ("BertForSequenceClassification", 1)
    first = report(trainkit, folder, "name=cut", "train.steps=2", "checkpoint.every_steps=2")
    (left,) = (folder / "runs" / "cut").iterdir()
    assert first["output_dir"] == str(left / "output")
    second = report(trainkit, folder, "name=cut", "checkpoint.resume=auto")
    assert f"--resume_from_checkpoint={left}/output/checkpoint-2" in second["words"]
    assert second["losses"] == whole["losses"]  # Trainer keeps the log of what went before


def test_a_script_that_makes_its_arguments_itself_is_not_said_to_run_as_planned(
    trainkit: Trainkit, folder: Path
) -> None:
    source = PROGRAM.read_text().replace("data, training = parser.parse_args_into_dataclasses()", OWN_ARGUMENTS)
    (folder / "own.py").write_text(source)

    done = trainkit("run", "recipe.yaml", "program.script=own.py", timeout=220)

    assert done.returncode == 1
    assert "max_steps 4 was planned, and the script's TrainingArguments hold 2" in done.stderr
    assert "learning_rate 0.01 was planned" in done.stderr
    assert "set program.kind to torch" in done.stderr


def test_a_resume_that_does_not_happen_ends_the_run_and_one_that_does_is_seen(trainkit: Trainkit, folder: Path) -> None:
    first = trainkit("run", "recipe.yaml", "name=cut", "train.steps=2", "checkpoint.every_steps=2", timeout=220)
    assert first.returncode == 0, first.stderr
    resuming = ("run", "recipe.yaml", "name=cut", "checkpoint.resume=auto")
    done = trainkit(*resuming, timeout=220)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert "output/checkpoint-2 (step 2)" in done.stderr
    assert "as planned, seen in 1 rank: single, cpu, fp32, from step 2" in done.stderr

    left = next(folder.glob("runs/cut/*/output/checkpoint-2"))
    source = PROGRAM.read_text().replace("resume_from_checkpoint=training.resume_from_checkpoint", "")
    (folder / "forgets.py").write_text(source)
    done = trainkit(*resuming[:3], "program.script=forgets.py", f"checkpoint.resume={left}", timeout=220)
    assert done.returncode == 1
    assert "forgets.py names it nowhere" in done.stderr
    assert "resuming at step 2 was planned, and Trainer starts at step 0" in done.stderr


def test_a_script_that_writes_its_arguments_out_is_refused_before_the_run(trainkit: Trainkit, folder: Path) -> None:
    own = PROGRAM.read_text().replace("data, training = parser.parse_args_into_dataclasses()", OWN_ARGUMENTS)
    own = own.replace("HfArgumentParser((DataArguments, TrainingArguments))", "None").replace(
        "    HfArgumentParser,", ""
    )
    (folder / "own.py").write_text(own)
    (folder / "bare.yaml").write_text("version: 1\nprogram: {kind: hf, script: own.py}\ndevices: {type: cpu}\n")

    done = trainkit("run", "bare.yaml", "--max_steps", "4", "--learning_rate", "0.1")
    assert done.returncode == 2
    assert "train.steps cannot reach own.py: it makes its TrainingArguments itself" in done.stderr
    assert "optimizer.lr cannot reach own.py" in done.stderr
    assert not (folder / "runs").exists()

    done = trainkit("run", "bare.yaml", timeout=220)
    assert done.returncode == 0, done.stderr
    assert "as planned" in done.stderr


def test_older_flags_of_the_guides_run_with_the_installed_version(trainkit: Trainkit, folder: Path) -> None:
    (folder / "glue.py").write_text(PROGRAM.read_text())
    words = "--do_train --learning_rate 2e-5 --max_steps 2 --per_device_train_batch_size 4 --output_dir out/mrpc/"
    older = "--overwrite_output_dir --evaluation_strategy no --warmup_ratio 0.1 --no_cuda --save_strategy no"
    done = trainkit("import", "--output", "glue.yaml", "python", "glue.py", *words.split(), *older.split())
    assert done.returncode == 0, done.stderr
    assert report(trainkit, folder, recipe="glue.yaml")["steps"] == 2


CONFIGURED = """\
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    place = sys.argv.index("--config")
    parser.set_defaults(**json.loads(Path(sys.argv[place + 1]).read_text()))
    del sys.argv[place : place + 2]
"""


def test_a_file_of_the_scripts_own_settings_counts_until_the_recipe_says_otherwise(
    trainkit: Trainkit, folder: Path
) -> None:
    source = PROGRAM.read_text().replace(
        "    parser = HfArgumentParser((DataArguments, TrainingArguments))\n", CONFIGURED
    )
    (folder / "sft.py").write_text(source)
    settings = {"max_steps": 2, "learning_rate": 1e-2, "output_dir": str(folder / "theirs"), "report_to": "none"}
    (folder / "sft.json").write_text(json.dumps({**settings, "per_device_train_batch_size": 4, "length": 8}))
    (folder / "sft.yaml").write_text(
        "version: 1\nprogram: {kind: hf, script: sft.py, args: {config: sft.json}}\ndevices: {type: cpu}\n"
    )

    said = report(trainkit, folder, recipe="sft.yaml")
    assert (said["steps"], said["output_dir"]) == (2, str(folder / "theirs"))
    assert said["words"] == ["--report", str(folder / "report.json"), "--use_cpu", "True"]
    (summary,) = (json.loads(path.read_text()) for path in folder.glob("runs/*/*/summary.json"))
    assert summary["global_batch"] is None
    assert "the script's own" in summary["reasons"]["global_batch"]

    assert report(trainkit, folder, "--max_steps", "3", recipe="sft.yaml")["steps"] == 3
