"""Ranks that were not given the same run say so before the first step, and save where all of them can see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import CASES, ROOT, Case, finish, write_corpus, write_settings

from tests.warm_ranks import start_ranks

DDP = CASES["ddp"].changed(train={"steps": 2})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


def torchrun(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks, each with the trainer.json of a run directory of its own, as on two nodes."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--log-dir={folder}",
        "--no-python",
    ]
    trainer = f"exec {sys.executable} -m trainkit.trainer --settings {folder}/node$RANK/trainer.json"
    return subprocess.run(
        [sys.executable, *launcher, "sh", "-c", trainer],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def nodes(folder: Path, corpus: Path, case: Case = DDP) -> list[Path]:
    """The settings files of two nodes."""
    return [write_settings(folder / f"node{rank}", case, corpus) for rank in range(2)]


def change(settings: Path, **values: Any) -> None:
    """Change entries of a settings file; a mapping changes what it names."""
    content = json.loads(settings.read_text())
    for name, value in values.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    settings.write_text(json.dumps(content))


def test_ranks_with_different_recipes_fail_in_one_line_that_names_what_differs_and_where(
    corpus: Path, tmp_path: Path
) -> None:
    _, second = nodes(tmp_path, corpus)
    change(second, training_digest="another", batch={"micro": 4, "accumulation": 2})
    done = torchrun(tmp_path)
    assert done.returncode == 1
    said = {line for line in done.stderr.splitlines() if "error: " in line and line.startswith(("error", "[rank"))}
    (line,) = {line[line.index("error: ") :] for line in said}
    assert line == (
        "error: the ranks were not given the same run: training settings is parity on rank 0, another on rank 1; "
        "batch is 16 = 2 x 4 x 2 on rank 0, 16 = 4 x 2 x 2 on rank 1 "
        "(start every node from the same recipe, data and trainkit)"
    )
    assert not (tmp_path / "node0/metrics.jsonl").exists()


def test_run_directories_of_their_own_do_not_keep_nodes_apart_and_rank_0_has_the_checkpoints(
    corpus: Path, tmp_path: Path
) -> None:
    nodes(tmp_path, corpus, DDP.changed(checkpoint={"every_steps": 1}))
    done = torchrun(tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "node0/checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]
    assert sorted(path.name for path in (tmp_path / "node1").iterdir()) == ["trainer.json"]


def test_more_ranks_than_planned_are_refused_before_they_meet(corpus: Path, tmp_path: Path) -> None:
    settings = write_settings(tmp_path / "run", DDP, corpus)
    assert finish(start_ranks(settings, 3)) == [1, 1, 1]
    assert (
        (tmp_path / "run/rank-2.log")
        .read_text()
        .startswith("error: the plan is for 2 ranks, and the launcher started 3")
    )
