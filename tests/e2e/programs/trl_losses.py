"""Train the files of `trl sft` that are named, one after another; each one's losses go to FILE.losses.

Adapters are written to FILE.adapters as they are before the first step.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers import trainer as of_transformers
from trl.scripts.sft import main, make_parser  # type: ignore[import-not-found, unused-ignore]

FOUND: dict[int, float] = {}


class Losses(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keeps the losses with all their digits."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Trainer is about to begin."""
        if hasattr(model, "peft_config"):
            model.save_pretrained(f"{name}.adapters")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Trainer has logged."""
        if "loss" in (logs or {}):
            FOUND[state.global_step] = logs["loss"]


of_transformers.DEFAULT_CALLBACKS.append(Losses)
for name in sys.argv[1:]:
    FOUND.clear()
    main(*make_parser().parse_args_and_config(["--config", name, "--output_dir", f"{name}.out"]))
    Path(f"{name}.losses").write_text(json.dumps(FOUND))
