"""The commands that docs/clusters.md prints, as printed, on a real Slurm."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.cluster.slurm_jobs import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def test_every_command_of_the_page_runs(cluster: Cluster) -> None:
    blocks = re.findall(r"^```sh slurm\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program == "trainkit"
        small = ["model.hidden_size=16", "model.layers=1", "model.heads=1", "data.sequence_length=32", "eval.batches=1"]
        done = cluster.trainkit(*words, *(small if words[0] == "submit" else ()))
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert cluster.runs("quickstart")
