"""trainkit: a training launcher driven by config files.

The names below are the Python API (docs/python.md). Each is imported when it is first used: every rank and every
completion in a shell imports this file.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # not typing's, whose import would take longer than all the rest
if TYPE_CHECKING:
    from trainkit.api import (
        Answer,
        LoadedRecipe,
        Report,
        estimate,
        generate,
        load,
        plan,
        report,
        run,
        run_function,
        runs,
        sweep,
    )
    from trainkit.api.running import Run, RunError
    from trainkit.errors import MachineError, RecipeError, TrainkitError, UsageError
    from trainkit.metrics_file import log
    from trainkit.sweeps.results import SweepResult

__all__ = [
    "Answer",
    "LoadedRecipe",
    "MachineError",
    "RecipeError",
    "Report",
    "Run",
    "RunError",
    "SweepResult",
    "TrainkitError",
    "UsageError",
    "estimate",
    "generate",
    "load",
    "log",
    "plan",
    "report",
    "run",
    "run_function",
    "runs",
    "sweep",
]

if not TYPE_CHECKING:
    _OF_OTHERS = {
        "log": "trainkit.metrics_file",
        "SweepResult": "trainkit.sweeps.results",
        **dict.fromkeys(("Run", "RunError"), "trainkit.api.running"),
        **dict.fromkeys(("TrainkitError", "RecipeError", "UsageError", "MachineError"), "trainkit.errors"),
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'trainkit' has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_OF_OTHERS.get(name, "trainkit.api")), name)
        return found

    def __dir__():
        return [*globals(), *__all__]
