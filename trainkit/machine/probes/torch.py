"""What torch was built for, read from its version file: importing torch would take seconds."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainkit.machine.facts import TorchBuild

_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)


def probe(path: Iterable[str] | None = None) -> Mapping[str, TorchBuild | None]:
    """The first torch on the path. path: folders to look in, by default those of the interpreter."""
    for folder in sys.path if path is None else path:
        try:
            text = Path(folder or ".", "torch", "version.py").read_text()
        except OSError:
            continue
        told = dict(_ASSIGNED.findall(text))
        return {"torch": TorchBuild(told.get("__version__", ""), told.get("cuda"), told.get("hip"))}
    return {"torch": None}
