"""Reads pairs of DeepSpeed files on standard input as DeepSpeed and Trainer of this machine do, and compares them.

Each file goes through hjson, as `deepspeed.initialize` reads it, and through what a library fills in before that.
"""

import io
import json
import sys
from unittest import mock

import hjson
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime import config
from deepspeed_parse import plain
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig


class Arguments:
    """What Trainer fills an auto from, as its own defaults have it."""

    world_size, per_device_train_batch_size, gradient_accumulation_steps = 2, 8, 1
    max_grad_norm, learning_rate, adam_beta1, adam_beta2, adam_epsilon = 1.0, 5e-5, 0.9, 0.999, 1e-8
    weight_decay, save_on_each_node, warmup_steps = 0.0, False, 0
    fp16 = fp16_full_eval = bf16 = bf16_full_eval = False

    def __init__(self, words):
        for name, value in zip(words[::2], words[1::2], strict=True):
            text = value in ("True", "False")
            setattr(self, name.lstrip("-"), value == "True" if text else type(getattr(self, name.lstrip("-")))(value))

    def get_warmup_steps(self, _total):
        return self.warmup_steps


class Model:
    config = mock.Mock(spec=["hidden_size"], hidden_size=64)


def by_trainer(tree, words):
    found = HfTrainerDeepSpeedConfig(tree)
    arguments = Arguments(words)
    found.trainer_config_process(arguments)
    plugin = DeepSpeedPlugin(hf_ds_config=found)
    plugin.set_mixed_precision("bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no")
    found.trainer_config_finalize(arguments, Model(), 100)
    return found.config


def seen(case, text, words):
    tree = hjson.load(io.StringIO(text))
    try:
        if case["kind"] == "hf":
            tree = by_trainer(tree, words)
        filled = json.loads(json.dumps(tree))
        held = vars(config.DeepSpeedConfig(tree))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"file": filled, "held": {name: plain(value) for name, value in held.items() if name != "_param_dict"}}


def main():
    config.dist.get_rank = lambda: 0
    config.dist.get_world_size = lambda: 2
    answers = [
        [seen(case, case[f"{which}s"], case[f"{which}_words"]) for which in ("their", "our")]
        for case in json.load(sys.stdin)
    ]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
