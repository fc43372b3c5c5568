"""A node of a run on machines without a scheduler, by its ssh: orders to it, and how it introduces itself."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import trainkit
from trainkit.errors import Diagnostic
from trainkit.files import parse_json
from trainkit.jobs.held import MARK
from trainkit.jobs.hosts import why_not
from trainkit.schedulers import ssh


class Node:
    """One node by its ssh. lines: of it, not yet complete."""

    def __init__(self, number: int, host: str, argv: Sequence[str]) -> None:
        self.number, self.host, self._given = number, ssh.bare(host), host
        # A session of its own: a Ctrl-C in the terminal is this process's alone, and ssh can ask nobody anything.
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self.ready = False
        self.refused = ""
        self.said = b""  # before it was ready
        self.rest: dict[str, bytes] = {"out": b"", "err": b""}
        self._unsent = deque[bytes]()
        self._writing = threading.Lock()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def name(self) -> str:
        """As people are told of it."""
        return f"node {self.number} ({self.host})"

    def send(self, message: Mapping[str, object]) -> None:
        """An order; kept where ssh does not take it now. For any thread and for signal handlers, and never waits."""
        self._unsent.append(json.dumps(message).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Send what is kept, as far as it is taken. Where another is at it, that one sends it, or the next call."""
        stream = self.process.stdin
        assert stream is not None
        if not self._writing.acquire(blocking=False):
            return
        try:
            while self._unsent and not stream.closed:
                rest = self._unsent[0][os.write(stream.fileno(), self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:  # ssh has ended, which the loop sees
            self._unsent.clear()
        finally:
            self._writing.release()

    def release(self) -> None:
        """End its input, and by that the node."""
        assert self.process.stdin is not None
        with self._writing:
            self.process.stdin.close()

    def introduce(self, stream: str, data: bytes) -> bytes:
        """What login shell and setup say, until the node says that it is there; the bytes behind that."""
        if stream == "err":
            self.said += data
            return b""
        self.rest["out"] += data
        while b"\n" in self.rest["out"]:
            line, _, self.rest["out"] = self.rest["out"].partition(b"\n")
            if not line.startswith(MARK):
                self.said += line + b"\n"
                continue
            known = parse_json(line.removeprefix(MARK))
            self.refused = str(known.get("refused") or "")
            if not self.refused and known.get("version") != trainkit.__version__:
                self.refused = f"it has trainkit {known.get('version')}, and this machine {trainkit.__version__}"
            self.ready = not self.refused
            rest, self.rest["out"] = self.rest["out"], b""
            return rest
        return b""

    @property
    def why_not(self) -> Diagnostic:
        """Why it has not come, and what to do."""
        if self.refused:
            hint = "the run directory is on a file system that all hosts share: output.root, cluster.workdir"
            return Diagnostic("error", f"{self.host}: {self.refused}", hint=hint)
        said = "; ".join(filter(None, (each.strip() for each in self.said.decode("utf-8", "replace").splitlines())))
        return why_not(self._given, said or f"ssh ended with exit code {self.process.poll()}")

    @property
    def last_words(self) -> str:
        """What ssh said last, without a line end."""
        return self.rest["err"].decode("utf-8", "replace").strip()
