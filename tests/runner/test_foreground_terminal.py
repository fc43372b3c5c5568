"""One rank in the foreground keeps the terminal: real pseudo-terminals."""

from __future__ import annotations

import os
import re
import sys
import termios
import tty
from pathlib import Path
from typing import Any

import pexpect
import pytest
from handmade_plans import command, environment

from trainkit.runner.report.console import Terminal

METRICS = """
import json, pathlib, sys, time
folder = next(pathlib.Path(r"{folder}/runs/handmade").iterdir())
def step(number):
    with (folder / "metrics.jsonl").open("a") as file:
        if number == 1:
            file.write(json.dumps({{"event": "start", "steps": 9}}) + "\\n")
        file.write(json.dumps({{"step": number, "loss": 10.0 / number, "seconds": 1.0}}) + "\\n")
    time.sleep(0.5)
"""


def spawn(folder: Path, code: str, *, size: tuple[int, int] = (24, 80), heartbeat: bool = False, **environ: str) -> Any:
    (folder / "program.py").write_text(code)
    program = (sys.executable, str(folder / "program.py"))
    interpreter, *words = command(folder, *program, grace=3, heartbeat=heartbeat)
    env = environment(**{"TERM": "xterm", **environ})
    return pexpect.spawn(interpreter, words, env=env, dimensions=size, timeout=30, encoding="utf-8")


def finish(child: Any) -> int:
    """Its exit code; what it has printed since the last pattern stays in `before`."""
    child.expect(pexpect.EOF)
    text = child.before
    child.close()
    child.before = text
    return int(child.exitstatus)


def test_input_and_isatty_work_and_the_log_has_the_output(tmp_path: Path) -> None:
    child = spawn(tmp_path, "import sys\nprint(sys.stdin.isatty(), sys.stdout.isatty())\nprint(input('name? ')[::-1])")
    child.expect("True True")
    child.expect("name[?] ")
    child.sendline("ada")
    child.expect("\nada\r\n|ada\r\nada\r\n|ada")
    assert finish(child) == 0
    log = next((tmp_path / "runs" / "handmade").iterdir()) / "attempts/1/logs/rank-0.out"
    assert "True True\n" in log.read_text()


def test_the_debugger_works(tmp_path: Path) -> None:
    child = spawn(tmp_path, "secret = 6 * 7\nbreakpoint()\nprint('after')\n")
    child.expect("[(]Pdb[)] ")
    child.sendline("p secret")
    child.expect("42")
    child.expect("[(]Pdb[)] ")
    child.sendline("c")
    child.expect("after")
    assert finish(child) == 0
    assert "step" not in child.before  # a program that reports no steps gets no line about them


def test_ctrl_c_lets_the_program_clean_up_and_ends_the_run_with_130(tmp_path: Path) -> None:
    code = """
import time
try:
    print("ready")
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("cleaned up")
    raise
"""
    child = spawn(tmp_path, code)
    child.expect("ready")
    child.sendintr()
    child.expect("cleaned up")
    child.expect("the run was ended: trainkit received SIGINT")
    assert finish(child) == 130


def test_the_program_sees_the_size_of_the_terminal(tmp_path: Path) -> None:
    child = spawn(tmp_path, "import os\nprint(os.get_terminal_size(1))\n", size=(33, 101))
    child.expect("columns=101, lines=33")
    assert finish(child) == 0


@pytest.mark.parametrize("columns", [40, 80])
def test_the_live_line_is_redrawn_within_the_width_and_leaves_program_lines_whole(tmp_path: Path, columns: int) -> None:
    code = (
        METRICS.format(folder=tmp_path) + "step(1)\nprint('whole line')\nstep(2)\nprint('half', end='', flush=True)\n"
    )
    code += "step(3)\nprint(' line')\nstep(4)\n"
    child = spawn(tmp_path, code, size=(24, columns))
    assert finish(child) is not None
    text = child.before
    drawn = re.findall(r"\r\x1b\[2K([^\r\n\x1b]*)", text)
    assert any("step 1/9" in line for line in drawn)
    assert all(len(line) < columns for line in drawn)
    assert "half line\r\n" in text  # step 3 came in the middle of the program's own line, where nothing is drawn


HEARTBEAT = """
import json, pathlib, time
from trainkit.files import publish
from trainkit.heartbeat import attach
beat = attach(publish)
folder = next(pathlib.Path(r"{folder}/runs/handmade").iterdir())
start = {{"event": "start", "steps": 6, "evaluates_every": 4}}
(folder / "metrics.jsonl").write_text(json.dumps(start) + "\\n")
for step in range(1, 7):
    time.sleep(0.6)
    beat.step_done(step)
    beat.begin_step(step)
time.sleep(0.4)
"""


def test_the_live_line_moves_at_every_step_though_none_is_logged(tmp_path: Path) -> None:
    child = spawn(tmp_path, HEARTBEAT.format(folder=tmp_path), heartbeat=True)
    assert finish(child) == 0
    drawn = re.findall(r"\r\x1b\[2K([^\r\n\x1b]*)", child.before)
    steps = list(dict.fromkeys(found[1] for line in drawn if (found := re.search(r"step (\d+)/6", line))))
    assert steps == sorted(steps)
    assert len(steps) > 4  # a busy machine may miss one
    assert any(line.endswith("evaluation at step 4") for line in drawn)


def test_a_line_of_several_rows_is_erased_whole_also_after_the_terminal_was_made_narrower() -> None:
    near, far = os.openpty()
    try:
        tty.setraw(far)  # so that line ends come as they were written
        termios.tcsetwinsize(far, (24, 40))
        terminal = Terminal({"TERM": "xterm"}, far, far)
        terminal.live(lambda width: f"{'a' * (width - 1)}\nbb")
        assert os.read(near, 100) == b"\r\x1b[2K" + b"a" * 39 + b"\r\nbb"
        terminal.live(lambda width: "cc")
        assert os.read(near, 100) == b"\r\x1b[2K\x1b[A\x1b[2Kcc"
        terminal.live(lambda width: f"{'a' * (width - 1)}\nbb")
        os.read(near, 100)
        termios.tcsetwinsize(far, (24, 20))  # the terminal breaks the row of 39 into two
        terminal.say("dd")
        assert os.read(near, 100) == b"\r\x1b[2K" + 2 * b"\x1b[A\x1b[2K" + b"dd\n"
    finally:
        os.close(near)
        os.close(far)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    child = spawn(tmp_path, METRICS.format(folder=tmp_path) + "step(1)\nstep(2)\n", TERM="dumb")
    assert finish(child) == 0
    assert "\x1b" not in child.before
    assert "step 2/9  loss 5.0000" in child.before
