"""Which library a script is built on: its source tells, before its flags and its launcher do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.convert.reading import checked, comments, context, imported, read, settings
from trainkit.recipe.schema.launching import program_argv

TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
SOURCES = {
    TRAINER: "hf",
    "import transformers as tf\nparser = tf.HfArgumentParser(tf.Seq2SeqTrainingArguments)\n": "hf",
    "from trl import SFTConfig, TrlParser\nfrom transformers import Trainer\n": "hf",
    "from accelerate import Accelerator, DistributedType\nfrom transformers import AutoModel\n": "accelerate",
    "import accelerate\nparser = 1\naccelerator = accelerate.Accelerator()\n": "accelerate",
    "import deepspeed\nparser = deepspeed.add_config_arguments(parser)\ndeepspeed.initialize()\n": "deepspeed",
    "import deepspeed\nadd_argument('--deepspeed_config')\nengine, *_ = deepspeed.initialize()\n": "deepspeed",
    "def main():\n    from accelerate import Accelerator\n": "accelerate",
    "import torch\n": "torch",
    "this is not Python\n": "torch",
    "from trl import ScriptArguments, SFTConfig, SFTTrainer, TrlParser\n": "hf",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from accelerate import Accelerator\n": "torch",
    "from .transformers import Trainer, HfArgumentParser\n": "torch",
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_source_tells_the_kind(source: str) -> None:
    text = imported("python train.py --lr 0.1", {"train.py": source})
    assert settings(text)["program.kind"] == SOURCES[source]


def test_the_source_wins_over_flags_and_launcher() -> None:
    files = {"train.py": "from accelerate import Accelerator\n"}
    text = imported("torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4", files)
    assert settings(text)["program.kind"] == "accelerate"
    assert settings(text)["program.args.per_device_train_batch_size"] == "4"
    started = settings(imported("accelerate launch train.py --learning_rate 1e-3", {"train.py": TRAINER}))
    assert (started["program.kind"], started["optimizer.lr"]) == ("hf", 1e-3)
    line = "accelerate launch --num_processes 2 --mixed_precision bf16 train.py"
    plain = imported(line, {"train.py": "import torch"})
    assert (settings(plain)["program.kind"], settings(plain)["launcher.kind"]) == ("torch", "accelerate")
    assert "precision.dtype bf16 is left out, for it cannot reach a program of kind torch" in comments(plain)
    deep = {f"pkg/{name}.py": f"from .{below} import x" for name, below in zip("abc", "bcd", strict=True)}
    deep |= {"pkg/d.py": "from accelerate import Accelerator", "pkg/__init__.py": ""}
    deep["train.py"] = "import pkg.a"
    assert settings(imported("accelerate launch train.py", deep))["program.kind"] == "accelerate"


@pytest.mark.parametrize("deep", [0, 1, 3])
def test_a_trainer_that_reads_no_flags_is_told_by_accelerate_launch_what_it_tells_accelerator(deep: int) -> None:
    trainer = "from transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments('out')).train()"
    names = ["train", *(f"part{number}" for number in range(deep))]
    files = {f"{name}.py": f"import {below}" for name, below in pairwise(names)} | {f"{names[-1]}.py": trainer}
    told = "--num_processes 2 --use_fsdp --mixed_precision bf16"
    found = settings(imported(f"accelerate launch {told} train.py", files))
    assert (found["program.kind"], found["strategy.kind"]) == ("accelerate", "fsdp")
    assert found["precision.dtype"] == "bf16"
    engine = {"train.py": "import deepspeed\ndeepspeed.initialize()"}
    assert settings(imported("accelerate launch train.py", engine))["program.kind"] == "torch"


def test_a_trainer_that_reads_no_flags_is_not_given_any() -> None:
    text = imported("python train.py --lr 0.1", {"train.py": "from transformers import Trainer, TrainingArguments\n"})
    assert settings(text)["program.kind"] == "torch"
    assert "transformers.Trainer without HfArgumentParser" in comments(text)


READS_FILE = f"{TRAINER}args, = HfArgumentParser(TrainingArguments).parse_json_file(path)\n"
READS_YAML = READS_FILE.replace("json", "yaml")
READS_BOTH = f"{READS_FILE}args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
JSON = {"output_dir": "out", "do_train": True, "learning_rate": 1e-3, "save_total_limit": None}


@pytest.mark.parametrize(
    ("line", "source", "kind"),
    [
        ("python own.py my.json", "import json\n", "torch"),
        ("python own.py my.json", READS_FILE, "torch"),
        ("torchrun --nproc_per_node 2 own.py --config my.json", READS_FILE, "torch"),
        ("accelerate launch --use_fsdp --num_processes 2 own.py --config my.json", READS_FILE, "accelerate"),
        ("accelerate launch --num_processes 2 own.py my.json", READS_YAML, "accelerate"),
        ("python own.py my.json", TRAINER.replace("HfArgumentParser, ", ""), "torch"),
    ],
)
def test_a_file_that_only_the_script_reads_stays_its_own_and_nothing_is_said_beside_it(
    line: str, source: str, kind: str
) -> None:
    files = {"own.py": source, "my.json": JSON}
    text = imported(line, files)
    resolved = read(text, files)
    assert resolved.recipe.program.kind == kind, text
    assert program_argv(resolved.recipe.program.args) == line.partition("own.py ")[2].split()
    assert "taken apart" not in text
    assert not {"optimizer.lr", "output.root", "env.ACCELERATE_USE_FSDP"} & settings(text, files).keys()


def test_a_file_that_a_script_takes_in_place_of_flags_becomes_these_and_what_it_leaves_open_is_said() -> None:
    files = {"own.py": READS_BOTH, "my.json": JSON}
    text = imported("python own.py my.json", files)
    assert (settings(text, files)["program.kind"], settings(text, files)["optimizer.lr"]) == ("hf", 1e-3)
    assert "my.json is taken apart" in comments(text)
    assert "save_total_limit: null there, is left at its default" in comments(text)


def test_what_is_asked_for_wins_over_the_source() -> None:
    text = imported("python train.py --lr 0.1", {"train.py": TRAINER}, kind="torch")
    assert settings(text)["program.kind"] == "torch"


PARTS = {
    "src/train.py": "from transformers import Trainer\nfrom .options import options\n",
    "src/options.py": "from transformers import HfArgumentParser, TrainingArguments\n",
}
LOCAL: dict[str, dict[str, str]] = {
    "python src/train.py": PARTS,
    "python -m src.train": PARTS,
    "python run.py": {**PARTS, "run.py": "from src.train import main\nmain()\n", "src/train.py": TRAINER},
    "python pkg/inner/go.py": {"pkg/__init__.py": "", "pkg/work.py": TRAINER,
                               "pkg/inner/go.py": "from pkg.work import main\n"},
    "python -m pkg": {"pkg/__main__.py": TRAINER},
    "python -m deep.go": {"deep/go.py": "from transformers import HfArgumentParser\nfrom .a import Arguments\n",
                          "deep/a.py": "from .b import Arguments\n", "deep/b.py": "from .c import Arguments\n",
                          "deep/c.py": "from transformers import TrainingArguments\n"},
}  # fmt: skip


@pytest.mark.parametrize("line", LOCAL)
def test_files_of_the_same_program_are_looked_into(line: str) -> None:
    assert settings(imported(line, LOCAL[line]), LOCAL[line])["program.kind"] == "hf"


def test_a_library_is_not_the_same_program() -> None:
    files = {"env/site-packages/tool/__init__.py": TRAINER, "env/site-packages/go.py": "import tool\n"}
    assert settings(imported("python env/site-packages/go.py", files), files)["program.kind"] == "torch"


def test_an_installed_module_is_looked_into_and_not_imported() -> None:
    files = {"lib/tool/__init__.py": "raise SystemExit\n", "lib/tool/train.py": "from accelerate import Accelerator\n"}
    there = replace(context(files), library=("/here/lib",))
    text = checked(["torchrun", "-m", "tool.train", "--do_train"], there, "/here/recipe.yaml")
    assert settings(text)["program.kind"] == "accelerate"


@pytest.mark.parametrize("flag", ["", "--do_train", "--per_device_train_batch_size 4", "--deepspeed_config ds.json"])
@pytest.mark.parametrize("source", [source for source in SOURCES if "import" in source])
def test_a_script_is_the_same_kind_whatever_its_flags(source: str, flag: str) -> None:
    files = {"train.py": source, "ds.json": {"zero_optimization": {"stage": 1}}}
    assert settings(imported(f"python train.py {flag}", files), files)["program.kind"] == SOURCES[source]


def test_an_engine_with_a_configuration_of_its_own_is_given_none_unless_the_command_names_it() -> None:
    files = {"train.py": "import deepspeed\ndeepspeed.initialize(config={})\n", "ds.json": {"zero_optimization": {}}}
    text = imported("python train.py --lr 1", files)
    assert settings(text, files)["program.kind"] == "torch"
    assert "without add_config_arguments: settings of DeepSpeed's engine do not reach it" in comments(text)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("from accelerate import Accelerator\n", "accelerate"), (TRAINER, "hf"), ("import deepspeed\n", "deepspeed")],
)
def test_a_script_behind_a_deepspeed_file_is_the_kind_that_its_source_tells(source: str, kind: str) -> None:
    files = {"train.py": source, "ds.json": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}
    found = settings(imported("ds.json", files, program=("train.py", "--x", "1")), files)
    assert (found["program.kind"], found["strategy.kind"]) == (kind, "zero2")
