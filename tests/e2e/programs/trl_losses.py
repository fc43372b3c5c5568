"""Train each of the files of `trl sft` that are named, and write its losses beside it."""

import json
import sys
from pathlib import Path

from trl.scripts.sft import main, make_parser
from transformers import TrainerCallback, Trainer

for name in sys.argv[1:]:
    found: dict[int, float] = {}

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
            if "loss" in (logs or {}):
                found[state.global_step] = logs["loss"]

    kept = Trainer.__init__

    def listening(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        kept(self, *args, **kwargs)
        self.add_callback(Losses())

    Trainer.__init__ = listening
    try:
        main(*make_parser().parse_args_and_config(["--config", name, "--output_dir", f"{name}.out"]))
    finally:
        Trainer.__init__ = kept
    Path(f"{name}.losses").write_text(json.dumps(found))
