"""Which cards runs of trainkit's hold, read from the folder of card locks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainkit.machine.cards import holder
from trainkit.machine.facts import Gpu, MigInstance


def joined(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The cards, each with who holds it."""
    return tuple(
        replace(
            gpu,
            held_by=holder(gpu.uuid, environ),
            instances=tuple(_instance(part, environ) for part in gpu.instances),
        )
        for gpu in gpus
    )


def _instance(part: MigInstance, environ: Mapping[str, str]) -> MigInstance:
    return replace(part, held_by=holder(part.uuid, environ))
