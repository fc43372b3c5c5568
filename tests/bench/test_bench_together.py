"""Several runs of a bench at once: on GPUs of their own, as processes that end with it; and where that is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from tests.made_up_cards import Cards, card

# Each run says what it sees, and waits until as many have come as its argument says: alone it would wait for ever.
PROGRAM = """
import json, os, pathlib, sys, time
seen = pathlib.Path("seen")
seen.mkdir(exist_ok=True)
mine = seen / f"{os.getpid()}.json"
mine.write_text(json.dumps({"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "pid": os.getpid()}))
while len(list(seen.glob("*.json"))) < int(sys.argv[1]):
    time.sleep(0.02)
if sys.argv[2] == "fail":
    sys.exit("ValueError: no")
while sys.argv[2] == "stay":
    time.sleep(0.02)
"""
RECIPE = """
version: 1
name: both
program: {kind: torch, script: program.py, args: ['%s', '%s']}
devices: {select: %s}
strategy: {kind: single}
launcher: {kind: python, grace_seconds: 5}
variants:
  one: {description: the first, env: {A: '1'}}
  two: {env: {A: '2'}}
"""
FOUR = tuple(card(number) for number in range(4))


def prepare(folder: Path, *, come: int, then: str = "end", select: Any = 1) -> list[str]:
    """Write the recipe; the words of its bench. come: how many runs must be there at once."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "both.yaml").write_text(RECIPE % (come, then, select))
    return ["bench", "both.yaml", "--no-plot", "--output", "found"]


def rows(folder: Path) -> dict[str, Any]:
    return {row["variant"]: row for row in json.loads((folder / "found/bench.json").read_text())["rows"]}


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (folder / "seen").glob("*.json")]


@pytest.mark.e2e
def test_two_runs_at_once_have_gpus_of_their_own_and_the_third_follows(
    tmp_path: Path, trainkit: Trainkit, cards: Cards
) -> None:
    environ = cards(*FOUR[:2])
    done = trainkit(*prepare(tmp_path, come=2), "--jobs", "auto", environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: row["outcome"] for name, row in rows(tmp_path).items()} == dict.fromkeys(("base", "one", "two"), "ok")
    gpus = [each["gpus"] for each in seen(tmp_path)]
    assert len(gpus) == 3
    assert {*gpus} == {each["uuid"] for each in FOUR[:2]}
    for row in rows(tmp_path).values():
        (run,) = row["runs"]
        assert Path(run["run_directory"], "summary.json").exists()
    assert [path.name for path in sorted((tmp_path / "found").glob("*.log"))] == [
        "1-base.log",
        "2-one.log",
        "3-two.log",
    ]
    assert not [*Path(environ["TRAINKIT_CARD_LOCKS"]).iterdir()]


@pytest.mark.e2e
def test_a_run_that_fails_beside_others_is_a_row_with_its_reason(
    tmp_path: Path, trainkit: Trainkit, cards: Cards
) -> None:
    words = prepare(tmp_path, come=3)
    recipe = tmp_path / "both.yaml"
    recipe.write_text(recipe.read_text().replace("env: {A: '2'}", "program: {args: ['3', fail]}"))
    done = trainkit(*words, "--jobs", "3", environ=cards(*FOUR))
    assert done.returncode == 1, done.stdout + done.stderr
    found = rows(tmp_path)
    assert [found[name]["outcome"] for name in ("base", "one", "two")] == ["ok", "ok", "failed"]
    assert "exited with code 1" in found["two"]["reason"]
    assert "two: failed: " in done.stderr


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_runs_at_once_end_with_the_bench(
    tmp_path: Path, clean_environment: dict[str, str], cards: Cards, number: signal.Signals
) -> None:
    environ = cards(*FOUR[:2])
    argv = [sys.executable, "-P", "-m", "trainkit", *prepare(tmp_path, come=2, then="stay"), "--jobs", "2"]
    variables = {**clean_environment, **environ}
    with subprocess.Popen(argv, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as bench:
        try:
            until(lambda: len([*tmp_path.glob("seen/*.json")]) == 2)
            bench.send_signal(number)
            said = bench.communicate(timeout=60)[1]
        finally:
            bench.kill()
    for each in seen(tmp_path):
        until(lambda pid=each["pid"]: not Path(f"/proc/{pid}").exists())
    until(lambda: not [*Path(environ["TRAINKIT_CARD_LOCKS"]).iterdir()] or number == signal.SIGKILL)
    assert len(seen(tmp_path)) == 2  # nothing else was started
    if number == signal.SIGINT:
        assert bench.returncode == 130, said
        assert {name: row["outcome"] for name, row in rows(tmp_path).items()} == dict.fromkeys(
            ("base", "one"), "interrupted"
        )
        for status in tmp_path.glob("runs/both/*/status.json"):
            assert json.loads(status.read_text())["exit_code"] == 130


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("machine", "select", "jobs", "code", "message"),
    [
        ((), "none", "2", 2, "runs without GPUs of their own would slow one another down"),
        (FOUR, "[0]", "2", 2, "devices.select names the GPUs of a run"),
        (FOUR, "2", "3", 4, "a run takes 2 GPUs, and 4 of the kind are idle"),
        ((*FOUR[:1], card(1, "V100")), "1", "2", 4, "a run takes 1 GPU, and 1 of the kind are idle"),
        ((*FOUR[:1], card(1, "V100")), "1, when_busy: wait", "2", 2, "the runs would be on GPUs of several kinds"),
        (FOUR, "1", "many", 2, "neither a number nor auto"),
    ],
)
def test_runs_that_would_disturb_one_another_are_refused_before_any_starts(
    tmp_path: Path, trainkit: Trainkit, cards: Cards, machine: Any, select: str, jobs: str, code: int, message: str
) -> None:
    words = prepare(tmp_path, come=1, select=select)
    if not machine:
        recipe = tmp_path / "both.yaml"
        recipe.write_text(recipe.read_text().replace("{select: none}", "{type: cpu}"))
    done = trainkit(*words, "--jobs", jobs, environ=cards(*machine))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()
