"""Programs of `scripts/` as modules: their names have no suffix, so that an import does not find them."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def script(path: str) -> Any:
    """A program, loaded anew: `script("campaign/kill")`. What lies beside it can be imported, too."""
    name = Path(path).stem
    loader = SourceFileLoader(name, str(SCRIPTS / path))
    spec = spec_from_loader(name, loader)
    assert spec
    module = sys.modules[name] = module_from_spec(spec)  # where dataclasses look
    loader.exec_module(module)
    return module
