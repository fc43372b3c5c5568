"""Versions of the packages that plans depend on, and what torch was built for, without an import of any of them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.machine.facts import TorchBuild
from trainkit.optimizers import OPTIMIZERS

PACKAGES = frozenset((
    *(each.requires.name for each in OPTIMIZERS.values() if each.requires),
    "accelerate", "datasets", "deepspeed", "flash-attn", "ninja", "numpy", "nvidia-ml-py", "peft", "tensorboard",
    "torch", "torch-xla", "transformers", "wandb",
))  # fmt: skip
NCCL = "nvidia-nccl-cu"  # and the CUDA that it is for

# Read from the names of metadata folders: importlib.metadata would take 39 ms to say the same.
# Unambiguous, because installers write a hyphen in a name as an underscore there (PEP 427).
_FOLDER = re.compile(r"^(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^-]+)*\.(?:dist|egg)-info$")
_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)


def probe(path: Iterable[str] | None = None) -> Mapping[str, Any]:
    """Version by distribution name. path: folders to look in, first wins; by default those of the interpreter."""
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, version in distributions(folder or "."):
            if name in PACKAGES or name.startswith(NCCL):
                found.setdefault(name, version)
    nccl = [found.pop(name) for name in sorted(found) if name.startswith(NCCL)]
    return {"packages": dict(sorted(found.items())), "nccl": nccl[-1] if nccl else ""}


def probe_torch(path: Iterable[str] | None = None) -> Mapping[str, TorchBuild | None]:
    """The build of the first torch on the path, read from its version file: importing torch would take seconds."""
    for folder in sys.path if path is None else path:
        with contextlib.suppress(OSError):
            assigned = dict(_ASSIGNED.findall(Path(folder or ".", "torch", "version.py").read_text()))
            return {"torch": TorchBuild(assigned.get("__version__", ""), assigned.get("cuda"), assigned.get("hip"))}
    return {"torch": None}


def compile_backends() -> tuple[str, ...]:
    """What the installed torch lists, other packages' too; empty where it says nothing. Importing it takes seconds."""
    code = "import torch; print(*torch.compiler.list_backends(exclude_tags=()))"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        argv = (sys.executable, "-P", "-W", "ignore", "-c", code)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return tuple(done.stdout.splitlines()[-1].split())
    return ()


def distributions(folder: str) -> Iterator[tuple[str, str]]:
    """Name and version of what is installed in a folder, by the names of its metadata folders."""
    entries: list[str] = []
    with contextlib.suppress(OSError):  # zip files and folders that are gone are on sys.path too
        entries = os.listdir(folder)  # noqa: PTH208 - names are all that is needed, and a site folder has hundreds
    for match in filter(None, map(_FOLDER.match, entries)):
        yield canonical(match["name"]), match["version"]


def canonical(name: str) -> str:
    """The form in which names of distributions are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
