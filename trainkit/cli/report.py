"""The report file that a bug in trainkit leaves behind: everything needed to look into it, ready to paste."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainkit import __version__
from trainkit.recipe.layers.secrets import mask_words


def write_report(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the report into the working folder, or the temporary one where that can't be written. Returns its path."""
    text = "\n".join(
        (
            f"trainkit {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"command: trainkit {shlex.join(mask_words(arguments))}",
            f"interpreter: {sys.executable}",
            "",
            "".join(traceback.format_exception(error)),
        )
    )
    for place in (os.getcwd, tempfile.gettempdir):
        try:
            folder = place()
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=folder, prefix="trainkit-bug-", suffix=".txt", delete=False
            ) as file:
                file.write(text)
            return Path(file.name)
        except OSError:
            continue
    sys.stderr.write(text)
    return Path("-")
