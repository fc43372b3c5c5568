"""Versions of the packages that plans depend on, read from the names of their metadata folders."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.optimizers import OPTIMIZERS

WANTED = frozenset(
    {
        *(each.requires.name for each in OPTIMIZERS.values() if each.requires),
        "accelerate",
        "datasets",
        "deepspeed",
        "flash-attn",
        "ninja",
        "numpy",
        "nvidia-ml-py",
        "peft",
        "tensorboard",
        "torch",
        "torch-xla",
        "transformers",
        "wandb",
    }
)

NCCL = "nvidia-nccl-cu"  # and the CUDA that it is for

# importlib.metadata would take 39 ms to say the same.
_FOLDER = re.compile(r"^(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^-]+)*\.(?:dist|egg)-info$")


def probe(path: Iterable[str] | None = None) -> Mapping[str, Any]:
    """Version by distribution name. path: folders to look in, first wins; by default those of the interpreter."""
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, version in _distributions(folder or "."):
            if name in WANTED or name.startswith(NCCL):
                found.setdefault(name, version)
    nccl = [found.pop(name) for name in sorted(found) if name.startswith(NCCL)]
    return {"packages": dict(sorted(found.items())), "nccl": nccl[-1] if nccl else ""}


def _distributions(folder: str) -> Iterable[tuple[str, str]]:
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed, and a site folder has hundreds
    except OSError:  # zip files and folders that are gone stand on sys.path too
        return
    for entry in names:
        match = _FOLDER.match(entry)
        if match:
            yield re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"]
