"""What the built-in trainer logs, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

ENDED = 1795973856.0


def records(steps: int, loss: Callable[[int], float | None], every: int = 0) -> Iterator[dict[str, Any]]:
    """What the built-in trainer logs: each step, and every so many an evaluation."""
    yield {"event": "start", "time": ENDED - 60, "steps": steps, "first_step": 0, "world_size": 1}
    for step in range(1, steps + 1):
        phases = {"data": 0.001, "forward": 0.02, "backward": 0.03, "optimizer": 0.01}
        rates = {"samples_per_second": 60.0, "tokens_per_second": 7000.0, "memory_bytes": 2**30 + step}
        own = {"loss": loss(step), "learning_rate": 0.003, "grad_norm": 1 + step % 7, "seconds": 0.061}
        yield {"step": step, **own, **rates, "elapsed": step * 0.061, "data_wait_share": 0.02, "phases": phases}
        if every and step % every == 0:
            yield {"step": step, "eval_loss": loss(step), "eval_accuracy": step / steps, "eval_seconds": 0.5}
