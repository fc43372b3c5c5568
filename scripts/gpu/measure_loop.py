"""The built-in loop beside a bare one, Accelerate's and HF Trainer's: those of scripts/bench/loop_peers.py."""

from __future__ import annotations

import statistics
from typing import Any

from loop_peers import LOOPS, Rows, compared, timed_round, write_text
from measure_parts import Asked, Row, parts_of, plan

SIZES = {  # layers, heads, width, length, micro batch
    "small": (4, 4, 128, 128, 4),
    "86M": (12, 12, 768, 1024, 8),
}
TINY = {"small": (2, 2, 32, 32, 2)}
OURS, BARE = "built-in", "bare PyTorch"
LEAST_OF_BARE, LEAST = 0.99, 0.995  # their time over ours; the second is 1.00 to two digits
TOLERANCE = 1e-2  # of losses in 16 bits, relative
RECIPE = """\
version: 1
name: loops
batch: {accumulation: 2}
data: {kind: text, include: "*.txt", validation_fraction: 1.0e-6}
optimizer: {name: adamw_torch_fused, lr: 3.0e-4, weight_decay: 0.1}
train: {max_grad_norm: 1.0}
logging: {every_steps: 10}
eval: {every_steps: 0}
precision: {dtype: bf16}
"""


def loop(asked: Asked) -> dict[str, Any]:
    """Their time over ours, in rounds in which every loop runs the same steps."""
    write_text(asked.scratch / "corpus")
    rows: list[Row] = []
    problems: list[str] = []
    for name in TINY if asked.tiny else SIZES:
        found, wrong = of_size(asked, name)
        rows += found
        problems += [f"{name}: {each}" for each in wrong]
    said = ", ".join(f"{row['size']} {row['loop']} {row['their time over ours']:.3f}" for row in rows)
    return {"problems": problems, "said": said, "loops": rows}


def of_size(asked: Asked, name: str) -> tuple[list[Row], list[str]]:
    """Rows of one size, and what is not reached."""
    steps, rounds = (2, 1) if asked.tiny else (20, 7)
    with parts_of(plan(asked, words_of(asked, name, steps), name)) as held:
        far, seconds = raced(held.pop(), rounds)
    wrong = [f"{peer}: losses differ by {apart:.1e}" for peer, apart in far.items() if not apart < TOLERANCE]
    ratios = {peer: statistics.median(each[peer] / each[OURS] for each in seconds) for peer in far}
    if asked.cuda and not asked.tiny:
        wrong += [
            f"{peer}: {ratio:.3f} of our time"
            for peer, ratio in ratios.items()
            if ratio < (LEAST_OF_BARE if peer == BARE else LEAST)
        ]
    ours = statistics.median(each[OURS] for each in seconds) / steps * 1e3
    columns = ("size", "loop", "ms of our step", "their time over ours", "losses differ by")
    return [
        dict(zip(columns, (name, peer, ours, ratio, far[peer]), strict=True)) for peer, ratio in ratios.items()
    ], wrong


def raced(parts: Any, rounds: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    """How far each loop's losses are from ours, and its seconds in each round."""
    rows = Rows(parts)
    far, _ = compared(parts)
    loops = {peer: make(parts, rows) for peer, make in LOOPS.items()}
    # The first round warms up.
    return far, [timed_round(parts.model, loops, turn) for turn in range(-1, rounds)][1:]


def words_of(asked: Asked, name: str, steps: int) -> list[str]:
    """The recipe of a size, in words."""
    layers, heads, width, length, micro = (TINY if asked.tiny else SIZES)[name]
    return [asked.recipe(RECIPE), f"data.path={asked.scratch / 'corpus'}", f"data.cache={asked.scratch / 'cache'}",
            f"model.layers={layers}", f"model.heads={heads}", f"model.hidden_size={width}",
            f"data.sequence_length={length}", f"batch.micro={micro}", f"train.steps={steps}"]  # fmt: skip
