"""A script on Trainer whose flags are those of TrainingArguments."""

from transformers import HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser((TrainingArguments,))
Trainer(model=None, args=parser.parse_args_into_dataclasses()[0]).train()
