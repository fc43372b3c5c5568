"""`trainkit watch` beside a real run, in a real terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from handmade_plans import command, environment, python

pytestmark = pytest.mark.cli

# Makes steps, with a heartbeat and metrics as the built-in trainer has them, until a file is there.
TRAINS = """
import glob, json, os, sys, time
from trainkit.files import publish
from trainkit.heartbeat import attach
heartbeat, (run,) = attach(publish), glob.glob(sys.argv[1] + "/runs/handmade/*")
with open(run + "/metrics.jsonl", "a", buffering=1) as metrics:
    metrics.write(json.dumps({"event": "start", "steps": 5000, "first_step": 0, "evaluates_every": 1000}) + "\\n")
    print("begins", flush=True)
    step = 0
    while not os.path.exists(sys.argv[1] + "/end"):
        heartbeat.begin_step(step)
        time.sleep(0.05)
        step += 1
        heartbeat.step_done(step)
        metrics.write(json.dumps({"step": step, "loss": 2 + 1 / step, "seconds": 0.05}) + "\\n")
"""
COLOURS = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run that goes on until all tests of it are over."""
    folder = tmp_path_factory.mktemp("watched")
    argv = command(folder, *python(TRAINS), str(folder))
    with subprocess.Popen(argv, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as started:
        until = time.monotonic() + 60
        while not (found := [*folder.glob("runs/handmade/*/metrics.jsonl")]):
            assert time.monotonic() < until
            time.sleep(0.02)
        yield found[0].parent
        (folder / "end").touch()
        _, said = started.communicate(timeout=60)
    assert started.returncode == 0, said.decode()


def watch(run: Path, **environ: str) -> Any:
    """`trainkit watch` from a shell that tells the terminal's settings before and after it."""
    shell = f"trap : INT; stty -g; {sys.executable} -m trainkit watch {run}; echo code $?; stty -g; echo over"
    options: Any = {"timeout": 60, "encoding": "utf-8", "dimensions": (24, 80)}
    # A parent that uses readline exports the size that its own terminal had.
    environ = {"TERM": "xterm-256color", "LINES": "24", "COLUMNS": "80", **environ}
    return pexpect.spawn("/bin/sh", ["-c", shell], env=environment(**environ), **options)


def seen_step(child: Any) -> int:
    child.expect(r"step (\d+)/5000")
    return int(child.match[1])


def test_a_run_is_followed_resized_and_left_without_a_trace(run: Path) -> None:
    child = watch(run)
    child.logfile_read = log = Log()
    first = seen_step(child)
    child.expect_exact("begins")
    until = time.monotonic() + 60
    while seen_step(child) <= first:
        assert time.monotonic() < until
    child.send("l")
    child.expect_exact("(log)")
    child.setwinsize(30, 130)
    child.expect("─{110}")
    child.send("?")
    child.expect_exact("the run is not touched")
    child.send("q")
    child.expect(r"code (\d+)")
    assert child.match[1] == "0"
    child.expect_exact("over")
    child.close()
    before, after = re.findall(r"^(?:[0-9a-f]+:)+[0-9a-f]+", log.text, re.MULTILINE)
    assert before == after
    assert int(after.split(":")[3], 16) & termios.ECHO
    for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert log.text.rindex(off) > log.text.rindex(on)
    assert COLOURS.search(log.text)
    assert "\x1b[?1000h" not in log.text  # the terminal's own selection stays


def test_without_colours_none_are_written_and_ctrl_c_leaves_the_run_alone(run: Path) -> None:
    child = watch(run, NO_COLOR="1")
    child.logfile_read = log = Log()
    seen_step(child)
    child.send("\x03")
    child.expect_exact("code 0")
    child.expect_exact("over")
    child.close()
    assert not COLOURS.search(log.text)
    assert json.loads((run / "status.json").read_text())["state"] == "running"


def test_a_terminal_that_knows_no_screen_gets_a_line_for_each_logged_step(run: Path) -> None:
    child = watch(run, TERM="dumb")
    child.logfile_read = log = Log()
    first = seen_step(child)
    assert seen_step(child) > first
    child.sendintr()
    child.expect_exact("code 0")
    child.expect_exact("over")
    child.close()
    assert "\x1b" not in log.text
    rank = re.search(rf"^ +0  {os.uname().nodename[:14]} +\w+ ", log.text, re.M)
    assert rank, log.text


class Log:
    """What a terminal has received."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass
