"""Where the trainer keeps what it can make again: corpora and compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folders(environ: Mapping[str, str], name: str) -> list[Path]:
    """The user's cache folder for one kind of thing (XDG base directory specification); none where there is no home."""
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if base.startswith("/"):  # the specification tells to ignore relative paths
        return [Path(base) / "trainkit" / name]
    return [Path(home) / ".cache" / "trainkit" / name] if home else []
