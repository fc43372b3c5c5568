"""What differs by version of a library, as data; nothing is probed by running or importing the library."""

from __future__ import annotations

import re

from trainkit.machine.facts import Facts

# feature -> (package, first version that has it)
FEATURES: dict[str, tuple[str, str]] = {
    # https://github.com/pytorch/pytorch/pull/172596, seen in 2.13; taken as absent before, to be safe
    "torchrun --shutdown-timeout": ("torch", "2.13"),
    # https://github.com/pytorch/pytorch/pull/160690
    "torchrun --signals-to-handle": ("torch", "2.9"),
    # accelerate, utils/launch.py of 1.8 to 1.15: what is set for a worker
    "accelerate sets KMP_* on a CPU only": ("accelerate", "1.13"),
    "accelerate sets FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("accelerate", "1.15"),
    # deepspeed/__init__.py of 0.18.9 to 0.19.8
    "deepspeed sets PYTORCH_NVML_BASED_CUDA_CHECK": ("deepspeed", "0.19.3"),
}

_RELEASE = re.compile(r"\d+(?:\.\d+)*")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: ``2.13.0+cpu`` is (2, 13, 0); an unreadable one is ()."""
    found = _RELEASE.match(version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def at_least(version: str | None, minimum: str) -> bool:
    """Whether an installed version is the minimum or newer; False where it is not installed."""
    return version is not None and release(version) >= release(minimum)


def has(facts: Facts, feature: str) -> bool:
    """Whether the installed libraries have a feature of the table."""
    package, minimum = FEATURES[feature]
    return at_least(facts.packages.get(package), minimum)
