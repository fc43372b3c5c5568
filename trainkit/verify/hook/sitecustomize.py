"""Python runs this file before the program: starts the observation, then loads the sitecustomize that it hides.

`trainkit.runner.rank` puts its folder first on PYTHONPATH. Processes that the program starts are not observed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _step_aside() -> None:
    """Remove this folder, wherever it is by now: a shell script may have put others before it."""
    path = [folder for folder in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if folder != _HERE]
    if path:
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]


def _observe() -> None:
    package = os.path.dirname(os.path.dirname(_HERE))
    files = _load("files", package)
    heartbeat = _load("heartbeat", package).attach(files.publish) if "TRAINKIT_HEARTBEAT" in os.environ else None
    expected, shown = (os.environ.pop(name, "") for name in ("TRAINKIT_EXPECTED", "TRAINKIT_SHOWN"))
    if expected and shown:
        _load("observe").watch(expected, shown, files, heartbeat)


def _load(name: str, folder: str = os.path.dirname(_HERE)) -> Any:
    """A module by its place, by default in the folder above: trainkit need not be importable here."""
    place = os.path.join(folder, f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"trainkit_{name}", place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_the_hidden_one() -> None:
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


_step_aside()
try:
    _observe()
finally:
    _run_the_hidden_one()
