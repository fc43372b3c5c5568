"""The real `trainkit doctor` on this machine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.made_up_cards import GIGABYTE, Cards, card
from trainkit.doctor.check import LEVELS
from trainkit.doctor.examine import CHECKS
from trainkit.runner.supervisor.processes import descendants, is_alive

Trainkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.e2e
def test_the_doctor_examines_this_machine_within_its_time(trainkit: Trainkit) -> None:
    done = trainkit("doctor")
    assert done.returncode in (0, 4), done.stderr
    assert (done.returncode == 4) == ("\nproblem " in done.stdout)
    assert f"\n{len(CHECKS) - 2} checks in " in done.stdout  # there is no plan, and no container
    assert {line.split(" ")[0] for line in done.stdout.splitlines()[2:-2] if line[:1].isalpha()} <= set(LEVELS)
    assert float(done.stdout.split(" checks in ")[1].split(" ")[0]) < 20


@pytest.mark.e2e
def test_with_a_recipe_only_what_its_plan_needs_is_examined(trainkit: Trainkit) -> None:
    done = trainkit("doctor", "quickstart", "--json")
    found = json.loads(done.stdout)
    assert found["recipe"] == "quickstart"
    assert [check["name"] for check in found["checks"]] == [name for name in CHECKS if name != "container"]
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert levels["ports"] == levels["host-names"] == "skipped"
    assert levels["disk-space"] != "skipped"
    assert (done.returncode == 4) == (found["level"] == "problem")


def test_a_wrong_recipe_is_a_wrong_recipe_here_too(trainkit: Trainkit) -> None:
    done = trainkit("doctor", "no-such-recipe")
    assert done.returncode == 2 and "no-such-recipe" in done.stderr


def test_one_recipe_at_a_time(trainkit: Trainkit) -> None:
    assert trainkit("doctor", "quickstart", "ddp").returncode == 2


def test_a_working_folder_that_is_gone_is_said(trainkit: Trainkit, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    leave = ["sh", "-c", f'rmdir {gone}; exec "$@"', "sh"]
    done = trainkit("doctor", cwd=gone, prefix=leave)
    assert done.returncode == 4 and "the working folder no longer exists" in done.stderr


@pytest.mark.e2e
def test_a_machine_without_loopback_is_found(trainkit: Trainkit, tmp_path: Path) -> None:
    """A real one: a network namespace in which no interface is up."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    done = trainkit("doctor", "ddp", "devices.type=cpu", "--json", prefix=["unshare", "--map-root-user", "--net"])
    if done.stderr.startswith("unshare: "):
        pytest.skip("no network namespaces here")
    assert done.returncode == 4
    levels = {check["name"]: check["level"] for check in json.loads(done.stdout)["checks"]}
    assert levels["host-names"] == levels["collectives"] == "problem"


@pytest.mark.e2e
def test_an_interrupted_doctor_leaves_nothing(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    """Neither processes, nor what a killed compiler had written."""
    (tmp_path / "temporary").mkdir()
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho half > "$TMPDIR/half.o"\nexec sleep 600\n')
    compiler.chmod(0o755)
    environ = {**clean_environment, "TMPDIR": str(tmp_path / "temporary"), "CXX": str(compiler)}
    doctor = subprocess.Popen([sys.executable, "-m", "trainkit", "doctor"], env=environ, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("temporary/**/half.o")) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = descendants(doctor.pid)
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait(timeout=60) == 130
    assert children and not [pid for pid in children if is_alive(pid)]
    assert list((tmp_path / "temporary").iterdir()) == []


def level_of(done: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    """What the JSON says of one check."""
    found: dict[str, Any] = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == name)
    return found


def test_what_nvml_tells_of_a_card_reaches_the_verdict(trainkit: Trainkit, cards: Cards) -> None:
    words = ("doctor", "quickstart", "devices.select=[1]", "--json")
    assert level_of(trainkit(*words, environ=cards(card(0), card(1))), "gpu-health")["level"] == "ok"
    found = level_of(trainkit(*words, environ=cards(card(0), card(1, free=GIGABYTE))), "gpu-health")
    assert found["level"] == "warning" and "79 GiB of GPU 1" in found["verdicts"][0]["what"]
    assert level_of(trainkit(*words, environ=cards(card(0, free=GIGABYTE), card(1))), "gpu-health")["level"] == "ok"


def test_a_driver_that_nvml_cannot_talk_to_is_a_problem(trainkit: Trainkit, cards: Cards) -> None:
    environ = cards(card(0), fails="init", message="Driver/library version mismatch")
    done = trainkit("doctor", "quickstart", "devices.type=cuda", "--json", environ=environ)
    found = level_of(done, "driver")
    assert done.returncode == 4 and found["level"] == "problem"
    assert "NVML: NVMLError: Driver/library version mismatch" in found["verdicts"][0]["evidence"]
