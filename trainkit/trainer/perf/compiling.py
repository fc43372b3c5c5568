"""torch.compile: faster steps after a first one that takes tens of seconds."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Compile
from trainkit.tools.compile_backends import NOT_FOR_RUNNING, backend_in_use
from trainkit.trainer.models.base import Model
from trainkit.trainer.parallel import STRATEGIES


def listed_backends() -> list[str]:
    """What the installed torch lists, less the devices of its own tests."""
    listed = torch.compiler.list_backends(exclude_tags=())
    return [name for name in listed if not any(word in name for word in NOT_FOR_RUNNING)]


def compile_model(model: Model, settings: Compile, strategy: str) -> None:
    """Compile in place. TrainingError if the backend is unknown here."""
    backend, backends = backend_in_use(settings.backend), listed_backends()
    if backend not in backends:
        raise TrainingError(
            f"efficiency.compile.backend: {backend} is not one of the installed torch's backends",
            hint=f"choose one of {', '.join(backends)}",
        )
    options: dict[str, Any] = {"backend": backend, "dynamic": settings.dynamic}
    if settings.mode != "default":
        options["mode"] = settings.mode
    if backend == "inductor" and torch.are_deterministic_algorithms_enabled():
        _inductor_is_deterministic()
    blocks = settings.scope == "blocks" or (settings.scope == "auto" and STRATEGIES[strategy].hooks)
    for module in model.blocks if blocks else [model]:
        # Not torch.compile(module), which would prefix the names in checkpoints with `_orig_mod`.
        module.compile(**options)


def _inductor_is_deterministic() -> None:
    """No kernel of inductor's is chosen by its time on the device, which differs between runs, and rounds otherwise."""
    from torch._inductor import config  # seconds to import, and of use to a compiled model alone

    if hasattr(config, "deterministic"):  # releases before 2.10 have it not
        config.deterministic = True


class CompileClock:
    """Seconds that torch.compile has taken, in forward and backward, apart from those of steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def listen(self) -> None:
        """Count from now on."""
        # seconds to import, and only of use to a compiled model
        from torch._dynamo.callback import on_compile_end, on_compile_start

        # Whole again at each end; no one reads it while something compiles.
        on_compile_start(lambda *_: self._add(-time.monotonic()))
        on_compile_end(lambda *_: self._add(time.monotonic()))

    def _add(self, seconds: float) -> None:
        self.seconds += seconds
