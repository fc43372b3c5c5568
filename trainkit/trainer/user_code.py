"""User code that a recipe names by import path, ``pkg.mod:Class``: import it, and name it in errors."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError


def imported(path: str, key: str) -> Callable[..., Any]:
    """What an import path names; modules in the working folder count, after all others. key: of the recipe."""
    module, _, name = path.partition(":")
    here = str(Path.cwd())  # ranks are started with -P, which leaves it out
    if here not in sys.path:
        sys.path.append(here)
    # bitsandbytes warns of kernels that no optimizer uses
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise TrainingError(f"{key}: {path} cannot be imported: {error}", hint="it is read as pkg.mod:Class") from error
    made: Callable[..., Any] = found
    return made


@contextmanager
def blaming(key: str, target: str) -> Iterator[None]:
    """Turn an exception of user code into one line with the target, the error and its location in the code."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:  # user code raises anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TrainingError(
            f"{key}: {target} failed: {type(error).__name__}: {error}", hint=f"at {last.filename}:{last.lineno}"
        ) from error
