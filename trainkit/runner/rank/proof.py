"""Have a program observed at its first optimizer step, and read what was seen. Standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HOOK = os.path.join(_PACKAGE, "verify", "hook")


def observed(environ: Mapping[str, str], expected: str, shown: str) -> dict[str, str]:
    """The environment in which Python observes the program. expected, shown: what to compare with, where to write."""
    path = os.pathsep.join([HOOK, *filter(None, [environ.get("PYTHONPATH", "")])])
    return {**environ, "PYTHONPATH": path, "TRAINKIT_EXPECTED": expected, "TRAINKIT_SHOWN": shown}


def differences(shown: str) -> str:
    """How the program differed from the plan, in words; empty where it did not, or was not seen."""
    return "; ".join(read(shown).get("differences") or [])  # type: ignore[arg-type]


def read(shown: str) -> Mapping[str, object]:
    """What was seen; empty where nothing was."""
    try:
        with open(shown, encoding="utf-8") as file:
            seen = json.load(file)
    except (OSError, ValueError):  # no optimizer has stepped
        return {}
    return seen if isinstance(seen, dict) else {}
