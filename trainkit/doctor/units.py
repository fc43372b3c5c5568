"""Sizes and builds in words."""

from __future__ import annotations

from trainkit.machine.facts import TorchBuild

KIB, MIB, GIB = 2**10, 2**20, 2**30


def in_words(size: int) -> str:
    """Bytes as ``64 MiB`` or ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 100 * unit else f"{size / unit:.0f} {name}"
    return f"{size} bytes"


def built(build: TorchBuild) -> str:
    """What torch was built for, in words."""
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPUs"
    return f"torch {build.version}, built for {kind}"
