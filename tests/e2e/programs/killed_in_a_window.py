"""The trainer, killed by SIGKILL between two micro steps of its sixth optimizer step.

Every checkpoint that is due by then is there: one is published beside the steps after it, however slow the disk is.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from trainkit.trainer import __main__ as trainer
from trainkit.trainer import loop

STEP, MICRO_STEP = 5, 2  # both counted from 0


def kill_inside_a_window() -> None:
    """Gradients of two micro steps are there by then, and no update."""
    honest = loop.seed_dropout

    def seed(parts: Any, step: int, index: int) -> None:
        if (step, index) == (STEP, MICRO_STEP):
            parts.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        honest(parts, step, index)

    loop.seed_dropout = seed


if __name__ == "__main__":
    kill_inside_a_window()
    trainer.start(sys.argv[1:])
