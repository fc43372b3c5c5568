"""The command line in this very process, as most tests of it need no other; runs and prefixes get a real one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import Trainkit, call_trainkit
from trainkit.cli.boundary import run_command_line

STARTS_PROCESSES = ("run", "bench", "data", "export", "generate", "doctor")
READ_AT_START = ("PYTHON", "LC_", "LANG")  # variables that only a new interpreter reads


@pytest.fixture
def trainkit(tmp_path: Path, clean_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Trainkit:
    """Call `trainkit WORDS…` in an empty folder, as the fixture of that name everywhere else does."""
    started = call_trainkit(tmp_path, clean_environment)

    def call(
        *words: str,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        timeout: float = 240,
        stdin: str = "",
        prefix: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        fresh = any(name.startswith(READ_AT_START) for name in environ or {})
        if fresh or prefix or not words or words[0] in STARTS_PROCESSES:
            return started(*words, cwd=cwd, environ=environ, timeout=timeout, stdin=stdin, prefix=prefix)
        out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        with monkeypatch.context() as context:
            context.chdir(cwd or tmp_path)
            for name in os.environ:
                context.delenv(name)
            for name, value in {**clean_environment, **(environ or {})}.items():
                context.setenv(name, value)
            context.setattr(sys, "argv", ["trainkit", *words])
            context.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
            context.setattr(sys, "stdout", out)
            context.setattr(sys, "stderr", errors)
            code = run_command_line(words)
        texts = [stream.buffer.getvalue().decode() for stream in (out, errors)]
        return subprocess.CompletedProcess(["trainkit", *words], code, *texts)

    return call
