"""Building DeepSpeed's ops ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.trainer.perf import build_ops
from trainkit.trainer.perf.build_ops import build_missing, clear_stale_locks

ROOT = Path(__file__).parents[2]


def test_a_lock_that_nobody_holds_is_cleared_and_one_that_a_build_holds_is_not(tmp_path: Path) -> None:
    (tmp_path / "stale").mkdir()
    (tmp_path / "held").mkdir()
    (tmp_path / "stale/lock").touch()
    with (tmp_path / "held/lock").open("w"):
        clear_stale_locks(tmp_path)
        assert not (tmp_path / "stale/lock").exists()
        assert (tmp_path / "held/lock").exists()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The devices and cards that an op has been built for; its library is op.so in the test's folder."""
    done: list[tuple[str, str]] = []

    def build(name: str, device: str, capabilities: str) -> str:
        done.append((device, capabilities))
        (tmp_path / "op.so").touch()
        return str(tmp_path / "op.so")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(build_ops, "_build", build)
    return done


def test_what_is_built_is_not_built_again_and_a_lost_library_is(tmp_path: Path, built: list[tuple[str, str]]) -> None:
    build_missing(["cpu_adam"])
    build_missing(["cpu_adam"])
    assert len(built) == 1
    lock = tmp_path / "op" / "lock"  # of a rank that was killed while it loaded the op: others would wait for ever
    lock.parent.mkdir()
    lock.touch()
    build_missing(["cpu_adam"])
    assert not lock.exists()
    (tmp_path / "op.so").unlink()
    build_missing(["cpu_adam"])
    assert len(built) == 2


def test_what_is_built_for_one_device_is_not_taken_for_another(
    built: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*asked: str) -> list[tuple[str, str]]:
        built.clear()
        build_missing(["cpu_adam"], *asked)
        return list(built)

    assert missing("cpu") == [("cpu", "")]
    assert missing("cuda", "8.0") == [("cuda", "8.0")]
    assert missing("cuda", "8.0") == []
    assert missing("cuda", "8.0;9.0") == [("cuda", "8.0;9.0")]
    assert missing("cpu") == [("cpu", "")]  # for the same file is the cards' library now
    assert missing("cuda") == missing("cuda") == [("cuda", "")]  # for cards that only DeepSpeed will see
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # which the ranks obey, too
    assert missing("cuda", "8.0") == [("cuda", "9.0")]


def building(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainkit.trainer.perf.build_ops", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_no_op_for_cards_is_built_where_torch_sees_none(tmp_path: Path) -> None:
    hidden = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = building("--ops", "fused_adam", "--device", "cuda", "--capabilities", "8.0,9.0", **hidden)
    assert (done.returncode, done.stdout) == (4, "")
    assert "fused_adam cannot be built on this machine: torch sees no CUDA GPU" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_an_unknown_op_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_ops.main(["--ops", "cpu_adan"]) == 1
    assert "known: shm_comm, cpu_adam" in capsys.readouterr().err


WITHOUT_LIBAIO = """#!/bin/sh
for word; do [ "$word" = -laio ] && exit 1; done
exec cc "$@"
"""


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("CXX", "there is no compiler no-such-compiler (install g++, or set CXX)"),
        ("CC", "libaio or its headers are not found (apt install libaio-dev"),
    ],
)
def test_what_a_machine_lacks_for_an_op_is_one_line_and_exit_code_4(variable: str, told: str, tmp_path: Path) -> None:
    linker = tmp_path / "cc-without-libaio"
    linker.write_text(WITHOUT_LIBAIO)
    linker.chmod(0o755)
    lacking = {"CXX": "no-such-compiler", "CC": str(linker)}[variable]
    done = building("--ops", "async_io", **{"TORCH_EXTENSIONS_DIR": str(tmp_path), variable: lacking})
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"error: the DeepSpeed op async_io cannot be built on this machine: {told}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.so"))
