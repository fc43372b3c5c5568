"""Traces from the user's cache, or made by a process of the trainer's."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from trainkit.decode import DecodeError, decode
from trainkit.errors import Diagnostic, MachineError
from trainkit.files import cache_folder, read_json, write_json
from trainkit.foresight.trace import Trace, Wanted
from trainkit.launch_plan.model import Foresight

LONGEST = 600.0  # seconds that a trace may take; the largest models take twenty
_ENDS = 10.0  # seconds for the process to end after its input has


def kept_foresight(digest: str, make: Callable[[], Foresight | None]) -> Foresight | None:
    """An estimate from the user's cache, made and kept there if need be. digest: of all that it follows from."""
    folder = cache_folder(os.environ, "foresight")
    path = Path(folder, f"{digest[:32]}.json") if folder else None
    if path is not None:
        try:
            return cast("Foresight", decode(Foresight, read_json(path)))
        except (DecodeError, TypeError, KeyError):
            pass  # none, or of another version
    made = make()
    if made is not None and path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(made))
        except OSError:
            pass  # a full disk: it is made again the next time
    return made


class Traces:
    """A context; the process is started once, for the first trace that is not in the cache.

    python: the interpreter that has torch.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        folder = cache_folder(os.environ, "traces")
        self._folder = Path(folder) if folder else None

    def __enter__(self) -> Traces:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def has(self, wanted: Wanted) -> bool:
        """Whether the trace is in the cache."""
        path = self._path(wanted)
        return path is not None and path.exists()

    def known(self, wanted: Wanted) -> Trace | None:
        """The trace, if it is in the cache."""
        path = self._path(wanted)
        if path is None:
            return None
        try:
            return Trace.from_json(read_json(path))
        except (ValueError, KeyError, TypeError):  # none, or of another version: it is made again
            return None

    def get(self, wanted: Wanted) -> Trace:
        """The trace, made if need be. MachineError says why it cannot be."""
        if (known := self.known(wanted)) is not None:
            return known
        answer = self._ask(wanted)
        if "fault" in answer:
            hint = answer["hint"] or "`trainkit plan` with this recipe says what is missing here"
            raise MachineError(Diagnostic("error", f"the model cannot be traced: {answer['fault']}", hint=hint))
        trace, path = Trace.from_json(answer["trace"]), self._path(wanted)
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, answer["trace"])
            except OSError:
                pass  # a full disk: it is made again the next time
        return trace

    def _path(self, wanted: Wanted) -> Path | None:
        return self._folder / f"{wanted.key[:32]}.json" if self._folder else None

    def _ask(self, wanted: Wanted) -> dict[str, Any]:
        if self._process is None:
            argv = [self._python, "-m", "trainkit.trainer.tracing"]
            environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
            )
        given, answers = self._process.stdin, self._process.stdout
        assert given is not None and answers is not None
        try:
            given.write(json.dumps(asdict(wanted)).encode() + b"\n")
            given.flush()
        except BrokenPipeError:
            pass  # it has ended, and says why
        line = b""
        if select.select([answers], [], [], LONGEST)[0]:
            line = answers.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self._process.kill()
        _, said = self._process.communicate()
        self._process = None
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        return {
            "fault": last[0] if last else f"no answer within {LONGEST:.0f} s",
            "hint": "`trainkit doctor` looks at torch",
        }
