"""A node that is held over standard input says why it ends: what held it is gone, or has been silent for too long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Holds its input as a node does, and says why it was told to end. The argument is our patience, in seconds.
NODE = """
import signal, sys
from pathlib import Path
from trainkit.schedulers.jobs import ssh_supervisor
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.supervisor.processes import reason_of_signal

ssh_supervisor.SILENT_SECONDS = float(sys.argv[2])
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(reason_of_signal(number)[0]))
ssh_supervisor.hold_input(RunLayout(Path(sys.argv[1])))
signal.pause()
"""


pytestmark = pytest.mark.cli


@pytest.mark.parametrize(
    ("patience", "silent", "said"),
    [
        (60.0, False, "trainkit on tk0, which supervised the run, is gone, or out of reach"),
        (1.0, True, "nothing was heard for 1 s of trainkit on tk0, which supervised the run, so that it ends"),
    ],
)
def test_a_node_says_why_it_ends(tmp_path: Path, patience: float, silent: bool, said: str) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "submission.json").write_text('{"scheduler": "ssh", "job": "1", "host": "tk0"}')
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(tmp_path), str(patience)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert node.stdin is not None
    assert node.stderr is not None
    node.stdin.write('{"environ": {}}\n')
    node.stdin.flush()
    if not silent:
        node.stdin.close()
    assert node.wait(30) == 1
    assert node.stderr.read().strip() == said
