"""Metrics for Weights & Biases: whole, in the run directory, and nowhere else."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit

pytest.importorskip("wandb")

BLOCK, HEAD = (
    32768,
    7,
)  # of the log format of LevelDB, in which they keep records; the file begins with 7 bytes of theirs


def records(path: Path) -> Iterator[Any]:
    """Every record of an offline run, by their own protocol."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), HEAD, b""
    while at < len(data):
        if BLOCK - at % BLOCK < HEAD:  # too little is left of the block for another head
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last part
            yield protocol.Record.FromString(whole)
            whole = b""


def history(run_dir: Path) -> list[dict[str, Any]]:
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    found = [record.history for record in records(path) if record.HasField("history")]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in each.item} for each in found]


def test_two_ranks_leave_one_offline_run_with_every_metric_and_nothing_anywhere_else(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = ["logging.report_to=[wandb]", "strategy.kind=ddp", "eval.every_steps=3"]
    # a proxy that nobody answers at: a run that wanted to reach anybody would wait for it
    surroundings = {"TMPDIR": str(temporary), "HTTPS_PROXY": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = trainkit("run", str(tiny_recipe), *words, environ=surroundings)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs/tiny").iterdir()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = history(run_dir)
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert [(each["_step"], each[name]) for each in steps if name in each] == wanted
    assert [path for path in temporary.rglob("*") if "wandb" in path.name] == []
    home = Path(clean_environment["HOME"])
    assert not [path for path in home.rglob("*") if "wandb" in str(path.relative_to(home))]
    assert not list((run_dir / "wandb").glob("tmp"))
    assert _holding(run_dir) == []


def _holding(folder: Path) -> list[str]:
    """Processes that have a file of the folder open, or stand in it."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith(str(folder)):
                found.append(str(link))
        except OSError:
            continue
    return found


def test_a_missing_wandb_blocks_the_run_with_the_command_that_installs_it(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    shadow = tmp_path / "shadow/wandb-0.12.0.dist-info"
    shadow.mkdir(parents=True)  # an older one comes first on the path, as far as versions are looked up
    path = os.pathsep.join([str(shadow.parent), str(Path(__file__).parents[2])])
    done = trainkit("run", str(tiny_recipe), "logging.report_to=[wandb]", environ={"PYTHONPATH": path})
    assert done.returncode == 4
    assert "logging.report_to wandb requires wandb >= 0.19; 0.12.0 is installed" in done.stderr
    assert f"{sys.executable} -m pip install 'wandb>=0.19,<1'" in done.stderr
