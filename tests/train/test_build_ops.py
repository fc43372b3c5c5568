"""Building DeepSpeed's ops ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkit.train import build_ops
from trainkit.train.build_ops import build_missing, clear_stale_locks

ROOT = Path(__file__).parents[2]


def test_a_lock_that_nobody_holds_is_cleared_and_one_that_a_build_holds_is_not(tmp_path: Path) -> None:
    (tmp_path / "stale").mkdir()
    (tmp_path / "held").mkdir()
    (tmp_path / "stale/lock").touch()
    with (tmp_path / "held/lock").open("w"):
        clear_stale_locks(tmp_path)
        assert not (tmp_path / "stale/lock").exists()
        assert (tmp_path / "held/lock").exists()


def test_what_is_built_is_not_built_again_and_a_lost_library_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, built = tmp_path / "op.so", []

    def build(name: str) -> str:
        built.append(name)
        library.touch()
        return str(library)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build_ops, "_build", build)
    build_missing(["cpu_adam"])
    build_missing(["cpu_adam"])
    assert built == ["cpu_adam"]
    library.unlink()
    build_missing(["cpu_adam"])
    assert built == ["cpu_adam"] * 2


def test_an_unknown_op_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_ops.main(["--ops", "cpu_adan"]) == 1
    assert "known: shm_comm, cpu_adam" in capsys.readouterr().err


@pytest.mark.e2e
def test_an_op_is_built_quietly_and_found_at_once_the_second_time(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "trainkit.train.build_ops", "--ops", "shm_comm"]
    for limit in (200, 5):
        began = time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert time.monotonic() - began < limit
