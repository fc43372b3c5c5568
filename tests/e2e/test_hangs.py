"""A run that hangs is told from a slow one, and the rank that holds it up is named while everything still runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised_run import SupervisedRun, wait_for

from tests.unused_port import unused_port

AFTER = 3  # seconds


class HangingRun(SupervisedRun):
    """Two ranks of programs/hanging.py."""

    @property
    def steps(self) -> int:
        try:
            return int((self.folder / "steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    def moves(self, steps: int = 30) -> None:
        before = self.steps
        wait_for("steps", lambda: self.steps > before + steps)

    def hang(self) -> str:
        """The newest line about a hang, once status.json has it."""
        return str(wait_for("a hang", lambda: self.status().get("hang")))

    def name(self, rank: int) -> str:
        """As people are told of it, but for the bracket at the end."""
        return f"rank {rank} ({os.uname().nodename}, pid {self.record(rank)['pid']}"

    def goes_on(self) -> None:
        wait_for("its end", lambda: not self.status().get("hang"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HangingRun]:
    words = (f"hang.after_seconds={AFTER}", "hang.start_seconds=60")
    started = HangingRun(tmp_path, "hanging.py", launcher="torchrun", ranks=2, words=words)
    try:
        yield started
    finally:
        started.end()


def test_the_rank_that_holds_the_others_up_is_named_and_a_slow_one_is_not(run: HangingRun) -> None:
    wait_for("steps", lambda: run.steps > 20)
    (run.folder / "slow").touch()  # a hundred times slower than before
    run.moves(4)
    assert "hang" not in run.console()
    (run.folder / "slow").unlink()
    asked = dump(run)
    assert [each["step"] > 20 for each in asked["ranks"]] == [True, True]
    assert "hanging.py" in asked["ranks"][0]["place"]

    stopped = run.record(1)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    who = run.name(1)
    assert run.hang().startswith(f"hang: {who}, state T stopped) has not joined ")
    assert "of default_pg for" in run.hang()
    assert "rank 0 waits there (hanging.py:" in run.hang()
    dumps = run.run_dir / "attempts" / "1" / "dumps"
    assert "hanging.py" in (dumps / "rank-0.stack").read_text()
    assert "a stopped process cannot answer" in (dumps / "rank-1.stack").read_text()
    os.kill(stopped, signal.SIGCONT)
    run.goes_on()

    os.mkfifo(run.folder / "pipe")
    assert f"{who}) has not joined all_reduce" in run.hang()
    assert "It is at hanging.py:" in run.hang()
    assert " in load, last seen in step" in run.hang()
    (run.folder / "pipe").rename(run.folder / "read")
    (run.folder / "read").write_text("")
    run.goes_on()

    (run.folder / "spin").touch()
    run.moves(4)
    (run.folder / "sleep").touch()
    assert f"{who}) has not joined all_reduce" in run.hang()
    assert "in load, last seen in step" in run.hang()
    assert " in load" in (dumps / "rank-1.stack").read_text()
    (run.folder / "sleep").unlink()
    run.goes_on()

    (run.folder / "skip").touch()
    assert "rank 0 is in all_reduce" in run.hang()
    assert "rank 1 is in barrier" in run.hang()
    wait_for("the line on the console", lambda: run.console().count("hang: ") >= 4)  # status.json is written first
    assert run.console().count("hang: ") == 4
    assert run.console().count("the run moves again") == 3
    assert run.process.poll() is None  # nothing was ended for it


def test_a_suspended_run_does_not_hang_and_one_whose_trainkit_is_stopped_may(run: HangingRun) -> None:
    run.moves()
    everybody = [int(line.split()[0]) for line in run.living()]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * AFTER)
    pids = run.status()["pids"]
    for pid in sorted(everybody, key=lambda each: each not in (pids["trainkit"], pids["guardian"])):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)  # a node that is busy takes as long to wake them all
    run.moves()
    assert "hang" not in run.console()
    assert not run.status()["hang"]

    (run.folder / "sleep").touch()
    os.kill(pids["trainkit"], signal.SIGSTOP)
    assert f"{run.name(1)}) has not joined all_reduce" in run.hang()
    os.kill(pids["trainkit"], signal.SIGCONT)
    (run.folder / "sleep").unlink()
    run.goes_on()

    (run.folder / "leave").touch()
    assert f"{run.name(1)}, has ended) has not joined all_reduce" in run.hang()
    assert "; rank 0 waits there (hanging.py:" in run.hang()
    asked = dump(run)
    assert [each["ended"] for each in asked["ranks"]] == [False, True]


def test_a_program_without_an_optimizer_moves_while_it_joins_collectives(tmp_path: Path) -> None:
    words = (f"hang.after_seconds={AFTER}", "hang.start_seconds=600")
    run = HangingRun(tmp_path, "collectives.py", launcher="torchrun", ranks=2, words=words)
    try:
        wait_for("collectives", lambda: run.steps > 20)
        (run.folder / "compute").touch()  # the other one waits for it meanwhile
        time.sleep(2 * AFTER)
        (run.folder / "compute").unlink()
        run.moves()
        assert "hang" not in run.console()

        (run.folder / "sleep").touch()
        assert run.hang().startswith(f"hang: {run.name(1)}) has not joined all_reduce ")
        assert "rank 0 waits there (collectives.py:" in run.hang()
        assert ". It is at collectives.py:" in run.hang()
        assert "start-up" not in run.hang()
        (run.folder / "sleep").unlink()
        run.goes_on()
    finally:
        run.end()


def test_a_rank_that_has_ended_on_another_node_is_named_and_the_run_ended_for_it(tmp_path: Path) -> None:
    meeting: dict[str, Any] = {"count": 2, "rendezvous": f"127.0.0.1:{unused_port()}"}
    nodes: list[HangingRun] = []
    try:
        for node in range(2):
            (tmp_path / str(node)).mkdir()
            words = ("--node-rank", str(node), f"hang.after_seconds={AFTER}", "hang.then=end")
            folder = tmp_path / str(node)
            nodes.append(
                HangingRun(folder, "hanging.py", launcher="torchrun", nodes=meeting, words=words, shared=tmp_path)
            )
        (tmp_path / "leave").touch()
        assert [each.wait() for each in nodes] == [124, 124], [each.console() for each in nodes]
        who = nodes[0].name(1)
        assert f"the run failed: hang: {who}, has ended) has not joined all_reduce" in nodes[0].console()
    finally:
        for each in nodes:
            each.end()


def dump(run: HangingRun) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainkit", "dump", str(run.run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not (run.run_dir / "attempts" / "1" / "orders").exists()
    account: dict[str, Any] = json.loads(done.stdout)
    return account


# A data set that one rank reads slowly, of tokens for the built-in GPT.
ROWS = """
import os, time, torch
class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if os.environ["RANK"] == "1":
            time.sleep(0.05)
        tokens = torch.arange(9)
        return {"tokens": tokens[:-1], "targets": tokens[1:]}
"""


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """A recipe for the built-in trainer on slow_rows.py in a folder."""
    return {
        "version": 1,
        "name": "r",
        "devices": {"type": "cpu"},
        "strategy": {"kind": "ddp"},
        "nodes": {"processes_per_node": 2},
        "batch": {"global": 4},
        "model": {"layers": 1, "heads": 1, "hidden_size": 16, "vocab_size": 16},
        "data": {"kind": "target", "target": "slow_rows:Rows", "sequence_length": 8},
        "train": {"steps": 30},
        "eval": {"batches": 1},
        "env": {"PYTHONPATH": str(folder)},
    }


def test_a_collective_fails_after_the_recipes_time_and_ends_the_run(
    trainkit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "slow_rows.py").write_text(ROWS.replace("time.sleep(0.05)", "time.sleep(120)"))
    (tmp_path / "r.yaml").write_text(json.dumps(on_two_ranks(tmp_path)))
    words = ("hang.collective_seconds=4", "launcher.grace_seconds=2", f"output.root={tmp_path}")
    done = trainkit("run", str(tmp_path / "r.yaml"), *words)
    assert done.returncode == 1, done.stderr
    (run,) = tmp_path.glob("r/*")
    assert json.loads((run / "status.json").read_text())["rank"] == 0  # the other one is asleep
    said = (run / "attempts" / "1" / "logs" / "rank-0.err").read_text()
    assert "Timed out waiting 4000ms" in said, said


def test_the_slow_rank_is_named_in_the_summary_and_not_those_that_wait_for_it(
    trainkit: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "slow_rows.py").write_text(ROWS)
    (tmp_path / "r.yaml").write_text(json.dumps(on_two_ranks(tmp_path)))
    done = trainkit("run", str(tmp_path / "r.yaml"), f"output.root={tmp_path}")
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("r/*/summary.json")
    (slow,) = json.loads(summary.read_text())["stragglers"]
    assert (slow["rank"], slow["host"]) == (1, os.uname().nodename)
    assert slow["own_seconds"] > 0.1  # two samples of a step
    assert slow["own_seconds"] > 2 * slow["median_seconds"]
    assert f"Straggler  {' ' * 10}rank 1 ({os.uname().nodename}): " in done.stdout + done.stderr
