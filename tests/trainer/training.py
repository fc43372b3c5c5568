"""Runs on the CPU of this process: their parts, a training from the start or a checkpoint, its lines of metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import torch

from trainkit.trainer.checkpoint.resuming import resume
from trainkit.trainer.loop import SignalRequests, TrainingProgress, train
from trainkit.trainer.metrics.predictions import result
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import Parts, assemble

MakeSettings = Callable[..., Settings]
CPU = torch.device("cpu")


class Trained(NamedTuple):
    parts: Parts
    progress: TrainingProgress
    lines: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "loss" in line]

    @property
    def result(self) -> dict[str, Any]:
        return result(self.parts, self.progress)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.parts.model.named_parameters()}


def parts_of(settings: Settings) -> Parts:
    return assemble(settings, World(), CPU)


def trained(given: Settings | Parts) -> Trained:
    """A training to its end, from the checkpoint that the settings name, if any."""
    parts = parts_of(given) if isinstance(given, Settings) else given
    with closing(Metrics(parts.settings.run_dir, parts.settings.recipe.logging.report_to, main=True)) as metrics:
        first = resume(parts, restarted=False)
        parts.checkpoints.reporters = {name: each["id"] for name, each in metrics.runs.items()}
        progress = train(parts, first, metrics, SignalRequests())
    return Trained(parts, progress, lines_of(parts.settings))


def lines_of(settings: Settings) -> list[dict[str, Any]]:
    path = settings.run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
