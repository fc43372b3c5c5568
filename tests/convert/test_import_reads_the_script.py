"""Which library a script is built on: its source tells, before its flags and its launcher do."""

from __future__ import annotations

import pytest

from tests.convert.reading import comments, imported, settings

TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
SOURCES = {
    TRAINER: "hf",
    "import transformers as tf\nparser = tf.HfArgumentParser(tf.Seq2SeqTrainingArguments)\n": "hf",
    "from trl import SFTConfig, TrlParser\nfrom transformers import Trainer\n": "hf",
    "from accelerate import Accelerator, DistributedType\nfrom transformers import AutoModel\n": "accelerate",
    "import accelerate\nparser = 1\naccelerator = accelerate.Accelerator()\n": "accelerate",
    "import deepspeed\nengine, *_ = deepspeed.initialize()\n": "deepspeed",
    "def main():\n    from accelerate import Accelerator\n": "accelerate",
    "import torch\n": "torch",
    "this is not Python\n": "torch",
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


def test_a_trainer_that_reads_no_flags_is_not_given_any() -> None:
    text = imported("python train.py --lr 0.1", {"train.py": "from transformers import Trainer, TrainingArguments\n"})
    assert settings(text)["program.kind"] == "torch"
    assert "transformers.Trainer without HfArgumentParser" in comments(text)


def test_what_is_asked_for_wins_over_the_source() -> None:
    text = imported("python train.py --lr 0.1", {"train.py": TRAINER}, kind="torch")
    assert settings(text)["program.kind"] == "torch"
