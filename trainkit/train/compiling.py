"""torch.compile: faster steps after a first one that takes tens of seconds."""

from __future__ import annotations

import os
from typing import Any

import torch

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Compile
from trainkit.train.folders import cache_folders
from trainkit.train.models import Model

# These strategies hook modules from outside, so blocks are compiled one by one inside the hooks.
PER_BLOCK_STRATEGIES = ("fsdp", "zero3")


def compile_model(model: Model, settings: Compile, strategy: str) -> None:
    """Compile in place, so that names in checkpoints stay as they are. TrainingError if the backend is unknown here."""
    backends = torch.compiler.list_backends(exclude_tags=())
    if settings.backend not in backends:
        raise TrainingError(
            f"efficiency.compile.backend: {settings.backend} is not one of the installed torch's backends",
            hint=f"choose one of {', '.join(backends)}",
        )
    for folder in cache_folders(os.environ, "inductor"):  # torch's own choice is the system's temporary folder
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    options: dict[str, Any] = {"backend": settings.backend}
    if settings.mode != "default":
        options["mode"] = settings.mode
    for module in model.blocks if strategy in PER_BLOCK_STRATEGIES else [model]:
        module.compile(**options)
