"""A node that is tied to its submitter by ssh's pipes: it says why it ends with these, and outlives them once left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.schedulers.jobs.ssh_nodes import MARK

# Holds its input as a node does, and says why it was told to end. The argument is our patience, in seconds.
NODE = """
import signal, sys
from pathlib import Path
from trainkit.schedulers.jobs import ssh_nodes
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.processes import reason_of_signal

ssh_nodes.SILENT_SECONDS = float(sys.argv[2])
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(reason_of_signal(number)[0]))
layout = RunLayout(Path(sys.argv[1]))
node = ssh_nodes.TiedNode(layout, 1, 0)
if sys.argv[3:]:
    node.begun(layout, "")
    print("from now on in the run directory", flush=True)
signal.pause()
"""


pytestmark = pytest.mark.cli


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "plan.json").write_text("{}")
    (folder / "submission.json").write_text('{"scheduler": "ssh", "job": "1", "host": "tk0"}')
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(folder), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    order(node, environ={})
    return node


def order(node: subprocess.Popen[str], **what: object) -> None:
    assert node.stdin is not None
    node.stdin.write(json.dumps(what) + "\n")
    node.stdin.flush()


def told(node: subprocess.Popen[str]) -> Iterator[dict[str, object]]:
    assert node.stdout is not None
    for line in node.stdout:
        yield json.loads(line.removeprefix(MARK.decode()))


@pytest.mark.parametrize(
    ("patience", "silent", "said"),
    [
        (60.0, False, "trainkit on tk0, which was starting the run, is gone, or out of reach"),
        (1.0, True, "nothing was heard for 1 s of trainkit on tk0, which was starting the run, so that it ends"),
    ],
)
def test_a_node_says_why_it_ends(tmp_path: Path, patience: float, silent: bool, said: str) -> None:
    node = start(tmp_path, str(patience))
    assert node.stdin is not None
    assert node.stderr is not None
    if not silent:
        node.stdin.close()
    assert node.wait(60) == 1
    assert node.stderr.read().strip() == said


def test_a_node_that_is_left_to_itself_needs_neither_input_nor_output(tmp_path: Path) -> None:
    node = start(tmp_path, "1.0", "begins")
    assert node.stdin is not None
    assert node.stderr is not None
    said = told(node)
    assert "ready" in next(said)
    assert next(said) == {"begun": True}
    order(node, leave=True)
    assert [*said] == [{"left": True}]  # and then its output ends, though it runs
    node.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        node.wait(2.0)  # twice its patience
    node.terminate()
    assert node.wait(60) == 1
    assert node.stderr.read() == ""
    words = (tmp_path / "job.out").read_text().splitlines()
    assert words == ["from now on in the run directory", "trainkit received SIGTERM"]


def test_the_end_of_its_input_before_it_is_left_ends_a_node_that_has_begun(tmp_path: Path) -> None:
    node = start(tmp_path, "60.0", "begins")
    assert node.stdin is not None
    said = told(node)
    assert "ready" in next(said)
    assert next(said) == {"begun": True}
    node.stdin.close()
    assert node.wait(60) == 1
    assert "which was starting the run, is gone" in (tmp_path / "job.out").read_text()
