"""A function as a program: itself and its arguments by cloudpickle, in a script that calls it."""

from __future__ import annotations

import base64
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.distribution import install
from trainkit.errors import MachineError, UsageError
from trainkit.files import publish
from trainkit.text import strip_control

FOLDER = ".functions"  # below output.root; its name begins with a dot, as of no run
WIDTH = 116  # characters of a line of the script
_SCRIPT = '''\
"""The function {name}, as trainkit.run_function was given it.

{source}
"""

import base64
import pickle
import sys

# From where its modules are imported: of the process that has written this.
sys.path.extend(each for each in {path} if each not in sys.path)
PICKLED = """
{pickled}
"""

if __name__ == "__main__":  # processes that the function starts may read this file, too
    function, args, kwargs = pickle.loads(base64.b64decode(PICKLED))
    function(*args, **kwargs)
'''


def write_program(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, root: Path
) -> Path:
    """Write the script, named by its content, below a folder of runs; its absolute path.

    Raises MachineError where cloudpickle is not installed, UsageError where it cannot write a value.
    """
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        what = "cloudpickle is not installed, which writes a function of a notebook for other processes"
        raise MachineError(what, hint=install(sys.executable, "cloudpickle")) from error
    try:
        pickled = base64.b64encode(cloudpickle.dumps((function, args, dict(kwargs)))).decode()
    except Exception as error:  # of any object's own code
        what = f"{name} cannot be written for other processes: {type(error).__name__}: {error}"
        hint = "make what it uses (locks, open files, loaders, models on a GPU) inside the function"
        raise UsageError(strip_control(what), hint=hint) from error
    script = _SCRIPT.format(
        name=name,
        source=_source(function),
        path=repr([os.path.abspath(each) for each in sys.path]),  # noqa: PTH100 - as text
        pickled="\n".join(re.findall(f".{{1,{WIDTH}}}", pickled)),
    )
    digest = hashlib.sha256(script.encode()).hexdigest()[:12]
    path = root.absolute() / FOLDER / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}-{digest}.py"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        publish(path, script, mode=0o600)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}"
        raise MachineError(what, hint="set output.root to a folder that you may write to") from error
    return path


def _source(function: Callable[..., object]) -> str:
    """The function's lines for a reader of the script; nothing runs them."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # typed into an interpreter, or no function
        return "Its source is not known."
    return text.replace("\\", "\\\\").replace('"""', "'''").rstrip("\n")
