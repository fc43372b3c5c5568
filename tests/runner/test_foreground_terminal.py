"""One rank in the foreground keeps the terminal: real pseudo-terminals."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from handmade_plans import command, environment

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


def spawn(folder: Path, code: str, *, size: tuple[int, int] = (24, 80), **environ: str) -> Any:
    (folder / "program.py").write_text(code)
    interpreter, *words = command(folder, sys.executable, str(folder / "program.py"), grace=3)
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


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    child = spawn(tmp_path, METRICS.format(folder=tmp_path) + "step(1)\nstep(2)\n", TERM="dumb")
    assert finish(child) == 0
    assert "\x1b" not in child.before
    assert "step 2/9  loss 5.0000" in child.before
