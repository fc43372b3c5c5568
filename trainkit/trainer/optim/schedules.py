"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainkit.recipe.schema import Optimizer, Schedule

Shape = Callable[[float], float]  # share of the decay phase gone, 0 to 1 -> share of the way from minimum to peak

SHAPES: Mapping[str, Shape] = {
    "cosine": lambda gone: 0.5 * (1.0 + math.cos(math.pi * gone)),
    "linear": lambda gone: 1.0 - gone,
    "constant": lambda gone: 1.0,
    "constant_with_warmup": lambda gone: 1.0,
}


def learning_rate(optimizer: Optimizer, schedule: Schedule, steps: int) -> Callable[[int], float]:
    """The learning rate for each step, counted from 0; it reaches peak x `min_lr_ratio` at the last one."""
    warmup = 0 if schedule.name == "constant" else schedule.warmup_steps
    peak, lowest, shape = optimizer.lr, optimizer.lr * schedule.min_lr_ratio, SHAPES[schedule.name]
    decay_steps = max(1, steps - 1 - warmup)

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)  # never 0, so that no step is wasted
        return lowest + (peak - lowest) * shape(min(1.0, (step - warmup) / decay_steps))

    return rate
