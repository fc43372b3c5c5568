"""Programs of `scripts/`: run, and as modules, for their names have no suffix by which an import would find them."""

from __future__ import annotations

import subprocess
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


def run_script(path: str, *words: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """What a program printed and ended with."""
    argv = [sys.executable, str(SCRIPTS / path), *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
