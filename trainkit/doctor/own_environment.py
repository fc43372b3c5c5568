"""The environment of what the doctor starts, with a temporary folder that ends with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping

REMOVING = 1.0  # seconds in which what was killed may still write


@contextlib.contextmanager
def own_environment() -> Iterator[Mapping[str, str]]:
    """This process's environment with a temporary folder for the checks alone, removed with all that is left in it.

    A compiler that is killed leaves its files, and Python's search for a temporary folder its trial file.
    """
    environ = dict(os.environ)
    folder = ""
    with contextlib.suppress(OSError):  # no folder can be written to: then nothing can be left either
        folder = environ["TMPDIR"] = tempfile.mkdtemp(prefix="trainkit-doctor-")
    try:
        yield environ
    finally:
        end = time.monotonic() + REMOVING
        while folder and os.path.lexists(folder) and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
