"""What pip is asked for: the name that trainkit is installed by, and the releases of other packages that fit it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

NAME = "training-launcher"  # `trainkit` on the public index is somebody else's
# Of the extras in pyproject.toml: the oldest release that was tested, and the one after the newest.
RELEASES: Mapping[str, tuple[str, str]] = {
    "accelerate": ("1.9", "1.16"),
    "bitsandbytes": ("0.50", "0.51"),
    "cloudpickle": ("3", "4"),
    "datasets": ("3", "6"),
    "deepspeed": ("0.19.4", "0.19.9"),
    "fsspec": ("2025.3", "2027"),
    "huggingface-hub": ("0.36", "3"),
    "jinja2": ("3.1.6", "4"),
    "matplotlib": ("3.8", "4"),
    "ninja": ("1.11.1", "2"),
    "numpy": ("1.26", "3"),
    "optuna": ("5", "6"),
    "peft": ("0.15", "0.22"),
    "pyarrow": ("15", "27"),
    "rouge-score": ("0.1.2", "0.2"),
    "s3fs": ("2025.3", "2027"),
    "sacrebleu": ("2.4", "3"),
    "safetensors": ("0.4.3", "0.9"),
    "scikit-learn": ("1.4", "2"),
    "setuptools": ("70", "85"),
    "tensorboard": ("2.18", "3"),
    "tokenizers": ("0.21", "0.24"),
    "torch": ("2.6", "2.14"),
    "torch-optimi": ("0.2", "0.4"),
    "trackio": ("0.43", "1"),
    "transformers": ("4.50", "5.24"),
    "trl": ("1.15", "1.17"),
    "wandb": ("0.19", "1"),
    "zstandard": ("0.23", "1"),
}
# What an installation of a package is to bring beside it.
_BESIDE: Mapping[str, tuple[str, ...]] = {"deepspeed": ("ninja",)}
_INSTALLS = re.compile(r"(?:'[^']+'|\S+) -m pip install ")


def pip(python: str) -> str:
    """An interpreter's pip, for commands to paste: the one on PATH may belong to another."""
    return f"{shlex.quote(python)} -m pip"


def install(python: str, *packages: str) -> str:
    """The command that installs packages for an interpreter: `python -m pip install 'torch>=2.6,<2.14'`.

    A name, or a name with what is needed at least (`torch>=2.7`), gets the bounds of RELEASES; others stay as they are.
    """
    words = (word for each in packages for word in (each, *_BESIDE.get(each.partition(">=")[0], ())))
    return " ".join((pip(python), "install", *(shlex.quote(_bounded(word)) for word in words)))


def is_install(hint: str) -> bool:
    """Whether a hint is such a command."""
    return _INSTALLS.match(hint) is not None


def _bounded(package: str) -> str:
    name, _, needed = package.partition(">=")
    if name not in RELEASES:
        return package
    oldest, untested = RELEASES[name]
    newest_first = sorted(filter(None, (oldest, needed)), key=lambda each: [*map(int, each.split("."))], reverse=True)
    return f"{name}>={newest_first[0]},<{untested}"
