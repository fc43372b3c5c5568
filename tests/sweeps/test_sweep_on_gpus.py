"""Sweeps and benches on made-up GPUs: runs at once on GPUs of their own, and in turn with runs that wait for these."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from tests.made_up_cards import Cards, card
from trainkit.machine.gpu_locks import GpuLocks, Signature
from trainkit.machine.gpu_queue import Ticket, line

pytest.importorskip("optuna")
pytestmark = pytest.mark.e2e

# Fails where another run has its GPU; waits for as many as `come` says, and while there is a file `hold`.
PROGRAM = """
import fcntl, os, pathlib, time, trainkit
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
lock = open(f"gpu-{gpu}", "a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
pathlib.Path(f"seen-{os.getpid()}").write_text(gpu)
come = int(pathlib.Path("come").read_text())
while len([*pathlib.Path().glob("seen-*")]) < come or pathlib.Path("hold").exists():
    time.sleep(0.02)
trainkit.log(1, eval_loss=1.0)
"""
RECIPE = """
version: 1
name: own
program: {kind: torch, script: program.py, reads_recipe: true}
devices: {select: 1}
strategy: {kind: single}
launcher: {kind: python, grace_seconds: 5}
variants: {one: {env: {A: '1'}}}
"""
SWEEP = ("sweep", "own.yaml", "optimizer.lr=1,2,3", "--output", "found")
BENCH = ("bench", "own.yaml", "--no-plot", "--output", "found")
ONE, TWO = (card(0),), (card(0), card(1))
MIXED = (card(0), card(1, "V100"))  # the other one is no place for a run that began on the first


@pytest.fixture(autouse=True)
def _own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "own.yaml").write_text(RECIPE)
    (tmp_path / "come").write_text("1")


def seen(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.glob("seen-*")]


def until(process: subprocess.Popen[bytes], condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def started(folder: Path, environ: dict[str, str], *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process, with its standard error in the file `said`."""
    argv = [sys.executable, "-P", "-m", "trainkit", *words]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(argv, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=said)
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def test_trials_at_once_have_gpus_of_their_own(tmp_path: Path, trainkit: Trainkit, cards: Cards) -> None:
    (tmp_path / "come").write_text("2")
    environ = cards(*TWO)
    done = trainkit(*SWEEP, "--jobs", "2", "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    assert [each["state"] for each in json.loads(done.stdout)["trials_made"]] == ["done"] * 3
    gpus = seen(tmp_path)
    assert len(gpus) == 3 and {*gpus} == {each["uuid"] for each in TWO}
    assert f"lr=1 on {card(0)['uuid']}" in done.stderr
    assert not [*Path(environ["TRAINKIT_CARD_LOCKS"]).iterdir()]


@pytest.mark.parametrize(
    ("words", "machine", "runs"),
    [
        (SWEEP, MIXED, 3),
        ((*SWEEP, "devices.select=free"), ONE, 3),
        ((*SWEEP, "--jobs", "2"), TWO, 3),
        (BENCH, MIXED, 2),
        ((*BENCH, "optimizer.lr=1", "--repeat", "2", "--jobs", "2"), TWO, 4),
    ],
    ids=["sweep", "sweep on free ones", "sweep at once", "bench", "bench at once"],
)
def test_what_has_begun_waits_its_turn_beside_a_run_that_waits(
    tmp_path: Path, cards: Cards, clean_environment: dict[str, str], words: tuple[str, ...], machine: Any, runs: int
) -> None:
    (tmp_path / "hold").touch()
    environ = {**clean_environment, **cards(*machine)}
    at_once = 2 if "--jobs" in words else 1
    with started(tmp_path, environ, *words) as process:
        until(process, lambda: len(seen(tmp_path)) == at_once)
        mine = [each["uuid"] for each in machine][:at_once]
        ticket = Ticket(environ, len(mine), mine, Signature(os.getpid(), "bob", "large"))
        try:
            (tmp_path / "hold").unlink()
            until(process, lambda: "waits for its GPUs: before it large waits for" in said(tmp_path))
            until(process, lambda: len(line(environ)) == 2 if at_once == 1 else len(line(environ)) > 1)
            assert len(seen(tmp_path)) == at_once
        finally:
            ticket.release()
        assert process.wait(240) == 0, said(tmp_path)
    assert len(seen(tmp_path)) == runs
    assert {*seen(tmp_path)} == {*mine}


@pytest.mark.parametrize("words", [SWEEP, BENCH], ids=["sweep", "bench"])
def test_an_interrupt_ends_the_waiting_in_order(
    tmp_path: Path, cards: Cards, clean_environment: dict[str, str], words: tuple[str, ...]
) -> None:
    (tmp_path / "hold").touch()
    environ = {**clean_environment, **cards(*ONE)}
    with started(tmp_path, environ, *words) as process:
        until(process, lambda: seen(tmp_path))
        ticket = Ticket(environ, 1, [card(0)["uuid"]], Signature(os.getpid(), "bob", "large"))
        try:
            (tmp_path / "hold").unlink()
            until(process, lambda: "waits for its GPUs" in said(tmp_path))
            process.send_signal(signal.SIGINT)
            assert process.wait(240) == 130, said(tmp_path)
            assert [each.run for each in line(environ)] == ["large"]
        finally:
            ticket.release()
    assert len([*tmp_path.glob("runs/own/*/plan.json")]) == 1  # what has waited leaves nothing
    assert (tmp_path / "found" / "report.html").exists()


def test_a_sweep_is_refused_where_another_run_has_the_gpu_and_waits_if_it_is_asked_to(
    tmp_path: Path, trainkit: Trainkit, cards: Cards, clean_environment: dict[str, str]
) -> None:
    environ = {**clean_environment, **cards(*TWO)}
    locks = GpuLocks(environ)
    try:
        assert locks.take([each["uuid"] for each in TWO]) is None
        locks.sign("ada", "/runs/other")
        done = trainkit(*SWEEP, environ=environ)
        assert done.returncode == 4, done.stderr
        assert "GPU 0 is busy: held by the trainkit run /runs/other" in done.stderr
        assert not (tmp_path / "found").exists()
        with started(tmp_path, environ, *SWEEP, "--wait", "--jobs", "2") as process:
            until(process, lambda: said(tmp_path).count("waits for 1 of 2 GPUs: ") == 2)
            assert not seen(tmp_path)
            (tmp_path / "come").write_text("2")
            locks.release()
            assert process.wait(240) == 0, said(tmp_path)
    finally:
        locks.release()
    assert {*seen(tmp_path)} == {each["uuid"] for each in TWO}
    # Whether it waits makes no other sweep of it.
    again = trainkit(*SWEEP, environ=environ)
    assert again.returncode == 0, again.stderr
    assert len(seen(tmp_path)) == 3
