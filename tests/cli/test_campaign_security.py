"""A small sample of the campaign `security`: that it runs, that what it tries holds, and that it can fail."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parents[2] / "scripts" / "campaign"


@pytest.mark.torch
def test_what_strangers_give_is_data(tmp_path: Path) -> None:
    argv = [sys.executable, str(CAMPAIGN / "security"), "--seed", "501", "--cases", "24", "--strategies", "single"]
    argv += ["--only", "pickles,checkpoints,recipes,imports,run directories,shared folders,hub"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 attacks" in done.stdout and "0 failed" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The judge as a module."""
    monkeypatch.syspath_prepend(str(CAMPAIGN))
    loader = SourceFileLoader("security_judge", str(CAMPAIGN / "security_judge.py"))
    spec = spec_from_loader("security_judge", loader)
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "security_judge", module)
    loader.exec_module(module)
    return module


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.system, (f"touch {self._path}",)


def _unpickles(folder: Path) -> int:
    pickle.loads(pickle.dumps(Harm(folder / "PWNED")))
    return 0


def _marks(folder: Path) -> int:
    (folder / "work/PWNED").touch()
    return 0


def _writes_elsewhere(folder: Path) -> int:
    (folder.parent / "elsewhere").write_text("x")
    return 0


def _follows(folder: Path) -> int:
    (folder / "work/link").symlink_to("../outside/secret.txt")
    return len((folder / "work/link").read_text()) and 0


def _changes(folder: Path) -> int:
    (folder / "outside/secret.txt").unlink()
    return 0


def _connects(folder: Path) -> int:
    socket.socket().connect(("127.0.0.1", 9))
    return 0


def _runs(folder: Path) -> int:
    (folder / "work/payload.py").write_text("1\n")
    exec(compile("1", str(folder / "work/payload.py"), "exec"))
    return 0


def _waits(folder: Path) -> int:
    os.mkfifo(folder / "work/fifo")
    (folder / "work/fifo").read_text()
    return 0


def _fills(folder: Path) -> int:
    return len(bytearray(200_000_000)) and 0


def _says(text: str) -> Callable[[Path], int]:
    def call(folder: Path) -> int:
        os.write(1, text.encode())
        return 0

    return call


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (_unpickles, "forbidden: unpickles posix.system"),
        (_marks, "the payload ran"),
        (_writes_elsewhere, "forbidden: opens"),
        (_follows, "forbidden: opens /outside/secret.txt"),
        (_changes, "forbidden: os.remove /outside/secret.txt"),
        (_connects, "forbidden: socket.connect"),
        (_runs, "forbidden: runs"),
        (_waits, "too slow"),
        (_fills, "too large"),
        (_says("\x1b]52;c;eA==\x07"), "prints U+001B"),
        (_says("a\u202eb"), "prints U+202E"),
        (_says("canary-5f1d0c27-of-the-environment"), "reveals the environment"),
        (lambda folder: 3, "exit code 3"),
        (lambda folder: 2, "held"),
    ],
)
def test_what_is_unsafe_is_found(
    judged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], int], outcome: str
) -> None:
    monkeypatch.setattr(judged, "WALL", 2 if call is _waits else 20)
    monkeypatch.setattr(judged, "BYTES", 100_000_000)
    attack = judged.Attack("any", "any", lambda folder: None, call)
    found, said = judged.outcome_of(attack, tmp_path / "attack")
    assert found.startswith(outcome), (found, said)


def test_a_reader_that_executes_pickles_is_found_by_the_campaigns_own_attacks(
    judged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import random

    import security_content as hostile

    found = set()
    for seed in range(15):
        draw = random.Random(seed)

        def call(folder: Path, draw: random.Random = draw) -> int:
            try:
                pickle.loads(b"\x80\x04" + hostile.call(draw, folder) + b".")
            except Exception:
                return 1
            return 0

        found.add(judged.outcome_of(judged.Attack("any", "any", lambda folder: None, call), tmp_path / f"{seed}")[0])
    assert len(found - {"held"}) >= 5, found
