"""Looking up the place of a dotted key among many."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.errors import Origin


def nearest(origins: Mapping[str, Origin], key: str) -> Origin | None:
    """The origin at the key, or at the nearest key around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return None
