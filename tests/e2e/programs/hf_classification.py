"""Fine-tunes a tiny BERT with random weights on sentences that it makes up, with the Trainer of transformers."""

import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class DataArguments:
    samples: int = field(default=64, metadata={"help": "How many sentences to make up."})
    length: int = field(default=16, metadata={"help": "Words in a sentence."})
    report: str = field(default="", metadata={"help": "Where to write what was measured."})


class Sentences(torch.utils.data.Dataset):
    """A sentence of random words; its label says whether the first word is in the upper half of the dictionary."""

    def __init__(self, samples, length, words, seed):
        rng = random.Random(seed)
        self.rows = [[rng.randrange(1, words) for _ in range(length)] for _ in range(samples)]
        self.middle = words // 2

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        row = self.rows[place]
        return {"input_ids": row, "attention_mask": [1] * len(row), "labels": int(row[0] > self.middle)}


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training,
        train_dataset=Sentences(data.samples, data.length, config.vocab_size, seed=1),
        eval_dataset=Sentences(16, data.length, config.vocab_size, seed=2),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    if trainer.is_world_process_zero() and data.report:
        wrapped = trainer.model_wrapped
        with Path(data.report).open("w") as file:
            json.dump(
                {
                    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
                    "eval": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
                    "steps": trainer.state.global_step,
                    "wrapped": type(wrapped).__name__,
                    "world_size": training.world_size,
                    "device": str(training.device),
                    "output_dir": training.output_dir,
                    "verbosity": os.environ.get("TRANSFORMERS_VERBOSITY"),
                    "words": sys.argv[1:],
                },
                file,
            )


if __name__ == "__main__":
    main()
    time.sleep(0.5)  # gloo's threads let go of their last work; in a dying interpreter that would abort the rank
