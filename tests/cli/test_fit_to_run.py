"""`trainkit run` calls the doctor's fast checks before anything starts."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.doctor.examine import FAST

Trainkit = Callable[..., subprocess.CompletedProcess[str]]


def test_a_port_that_is_taken_refuses_the_run(trainkit: Trainkit, tiny_recipe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ("run", str(tiny_recipe), "--with", "strategy/ddp", f"nodes.rendezvous=127.0.0.1:{port}")
        done = trainkit(*words)
    assert done.returncode == 4
    assert f"error: ports: port {port} of nodes.rendezvous cannot be used: address already in use" in done.stderr
    assert f"next: ss -ltnp 'sport = :{port}' (who listens there)" in done.stderr
    assert not (tiny_recipe.parent / "runs").exists()


@pytest.mark.torch
def test_what_the_plan_lacks_is_said_together_with_what_the_doctor_finds(trainkit: Trainkit, tiny_recipe: Path) -> None:
    (tiny_recipe.parent / "runs").write_text("a file where the run root should be")
    done = trainkit("run", str(tiny_recipe), "devices.type=mps")
    assert done.returncode == 4
    assert "MPS" in done.stderr and "disk space: " in done.stderr and "2 errors" in done.stderr


@pytest.mark.e2e
def test_a_warning_is_said_and_the_run_goes_on(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("run", str(tiny_recipe), "train.steps=1", environ={"TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr
    assert "warning: stale settings: TORCHDYNAMO_DISABLE: torch.compile does nothing" in done.stderr


def test_a_full_shared_memory_refuses_a_run_with_loader_processes(trainkit: Trainkit, tiny_recipe: Path) -> None:
    """A real /dev/shm of 1 MiB, in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77; exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = trainkit("run", str(tiny_recipe), "data.workers=1", prefix=prefix)
    if done.returncode == 77 or done.stderr.startswith("unshare: "):
        pytest.skip("no mount namespaces here")
    assert done.returncode == 4
    assert "error: shared memory: no room left" in done.stderr and "/dev/shm: 1 MiB" in done.stderr


def test_a_run_calls_all_fast_checks_and_no_other() -> None:
    fast = {"interpreter", "driver", "gpu-health", "shared-memory", "limits", "disk-space", "ports", "settings"}
    fast |= {"container"}
    assert {check.name for check in FAST} == fast
