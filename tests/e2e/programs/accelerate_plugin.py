"""Makes Accelerator() in the environment of each case on standard input, prepares a model, and says what it holds then.

A case is either an environment, or words of `accelerate launch`, whose own functions make one. One process, a CPU.
"""

import dataclasses
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import deepspeed.ops.adam.cpu_adam
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_parse import launched, plain


class Unbuilt:
    """In the place of the builder of DeepSpeed's Adam for CPUs: no step is taken, and to compile it takes minutes."""

    def load(self, **_):
        """The functions that the optimizer calls when it is made and let go."""
        return types.SimpleNamespace(create_adam=lambda *_: 0, destroy_adam=lambda *_: 0)


deepspeed.ops.adam.cpu_adam.CPUAdamBuilder = Unbuilt


def held(environment):
    """What a script finds in accelerator.state.deepspeed_plugin and beside it, before and after prepare()."""
    os.environ.clear()
    os.environ.update(environment)
    accelerator = Accelerator()
    plugin = accelerator.state.deepspeed_plugin
    fields = {each.name: plain(getattr(plugin, each.name)) for each in dataclasses.fields(plugin)}
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    try:
        gathered = sorted(accelerator.get_state_dict(model))
    except ValueError as error:
        gathered = str(error).partition(".")[0]
    found = {
        "plugin": {name: value for name, value in fields.items() if name != "hf_ds_config"},
        "config": {**plugin.deepspeed_config, "steps_per_print": 0},
        "precision": accelerator.mixed_precision,
        "accumulation": accelerator.gradient_accumulation_steps,
        "type": accelerator.distributed_type.value,
        "gathered": gathered,
    }
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    return found


def main():
    answers = []
    before = dict(os.environ)
    for case in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as folder:
            for path, content in case["files"].items():
                Path(folder, path).write_text(content)
            own = {
                **before,
                **{name: value.replace("<run_dir>", folder) for name, value in case["environment"].items()},
            }
            os.environ.clear()
            os.environ.update(own)
            if case["words"]:
                own = launched([word.replace("<run_dir>", folder) for word in case["words"]])["environment"]
            answers.append(held(own))
    torch.distributed.destroy_process_group()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
