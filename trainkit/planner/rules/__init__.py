"""Every combination that does not work, by subject: data only."""

from __future__ import annotations

from trainkit.plan.combination import Refusal
from trainkit.planner.rules import accelerator, batch, memory, model, number_formats, optimizers, places, trainer, xla

REFUSALS: tuple[Refusal, ...] = (
    *places.REFUSALS,
    *batch.REFUSALS,
    *model.REFUSALS,
    *number_formats.REFUSALS,
    *memory.REFUSALS,
    *optimizers.REFUSALS,
    *trainer.REFUSALS,
    *accelerator.REFUSALS,
    *xla.REFUSALS,
)
