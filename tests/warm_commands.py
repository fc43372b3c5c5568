"""`trainkit WORDS…` in a process that begins with the command line imported, forked from a server.

The interpreter and these imports take several times longer than most commands. What depends on how the interpreter
starts (its variables, a wrapper around the command) is started as users start it; so is every test of the tiers that
start launchers.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import trainkit.cli.commands

_server = multiprocessing.get_context("forkserver")
_COMMANDS = [f"trainkit.cli.commands.{each.name}" for each in pkgutil.iter_modules(trainkit.cli.commands.__path__)]
_server.set_forkserver_preload(["trainkit.cli.boundary", "trainkit.cli.app", *_COMMANDS])
_OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG", "TZ")


def fits(environ: Mapping[str, str]) -> bool:
    """Whether a process of the server would see these variables as a new interpreter does."""
    return all(os.environ.get(name) == value for name, value in environ.items() if name.startswith(_OF_THE_INTERPRETER))


def run_warm(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], stdin: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` answers for `python -m trainkit WORDS…`."""
    with tempfile.TemporaryDirectory(prefix="trainkit-command-") as place:
        streams = [str(Path(place, name)) for name in ("stdin", "stdout", "stderr")]
        Path(streams[0]).write_text(stdin)
        process = _server.Process(target=_become, args=(tuple(words), str(folder), dict(environ), streams))
        process.start()
        process.join(timeout)
        if (code := process.exitcode) is None:
            process.kill()
            process.join()
        out, err = (Path(each).read_text() if Path(each).exists() else "" for each in streams[1:])
    argv = [sys.executable, "-m", "trainkit", *words]
    if code is None:
        raise subprocess.TimeoutExpired(argv, timeout, out, err)
    return subprocess.CompletedProcess(argv, code, out, err)


def _become(words: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[str]) -> None:
    """In the new process: what the interpreter would do with this command line."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, path in enumerate(streams):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    multiprocessing.set_start_method(None, force=True)
    sys.path[:0] = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["trainkit", *words]
    runpy.run_module("trainkit", run_name="__main__", alter_sys=True)
