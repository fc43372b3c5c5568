"""Lets torch, on a machine without cards, count the made-up ones of FAKE_NVML as CUDA would: nothing else of it works.

A launcher that asks how many cards there are gets the answer that it would get beside a driver: those that
CUDA_VISIBLE_DEVICES names at that moment, or all where it is unset. Python imports this module at start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry])
    return len(json.loads(Path(os.environ["FAKE_NVML"]).read_text())["cards"])


class AfterImport(importlib.abc.MetaPathFinder):
    """Finds torch.cuda as everybody would, and has its questions answered by the made-up machine."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute: Any = spec.loader.exec_module

        def load(module: Any) -> None:
            execute(module)
            module.device_count = count
            module.is_available = lambda: count() > 0

        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


if "FAKE_NVML" in os.environ:
    sys.meta_path.insert(0, AfterImport())
