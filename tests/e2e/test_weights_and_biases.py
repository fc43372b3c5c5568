"""Metrics for Weights & Biases: whole, in the run directory, and nowhere else."""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from tests.wandb_server import WandbServer, wandb_server

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
    surroundings = {"TMPDIR": str(temporary), "HTTPS_PROXY": "http://127.0.0.1:9", "WANDB_MODE": "offline"}
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
    (offline,) = run_dir.glob("wandb/offline-run-*")
    assert f"metrics: wandb: wandb sync {offline}\n" in done.stdout + done.stderr
    assert (
        json.loads((run_dir / "summary.json").read_text())["reporters"]["wandb"]["address"] == f"wandb sync {offline}"
    )


def logged_in(home: Path, server: WandbServer) -> dict[str, str]:
    """Who is logged in, as `wandb login` leaves it."""
    netrc = home / ".netrc"
    netrc.write_text(f"machine {server.address.removeprefix('http://')}\n  login user\n  password {'0' * 40}\n")
    netrc.chmod(0o600)
    return {"WANDB_BASE_URL": server.address}


def test_who_is_logged_in_sees_the_run_and_goes_on_in_it_and_a_branch_is_a_run_of_its_own(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    home, words = Path(clean_environment["HOME"]), ["logging.report_to=[wandb]", "eval.every_steps=2"]
    words += ["checkpoint.every_steps=2", "checkpoint.keep=0"]
    runs = tmp_path / "runs/tiny"

    def run(*more: str, **environ: str) -> Path:
        before = {*runs.glob("*")}
        done = trainkit("run", str(tiny_recipe), *words, *more, environ={**surroundings, **environ})
        assert done.returncode == 0, done.stderr
        (made,) = {*runs.glob("*")} - before
        said.append(done.stdout + done.stderr)
        return made

    with wandb_server() as server:
        surroundings, said = logged_in(home, server), list[str]()
        first = run()
        (name,) = server.runs
        kept = server.runs[name]
        address = f"{server.address}/ada/tiny/runs/{name}"
        assert name == kept.name == first.name
        assert kept.exit_code == 0
        assert kept.config["train"]["steps"] == 3
        assert [each["_step"] for each in kept.steps] == [1, 2, 3]
        assert [each["_step"] for each in kept.steps if "eval_loss" in each] == [2, 3]
        assert said[0].count(f"metrics: wandb: {address}\n") == 1
        in_summary = re.compile(rf"Metrics \(wandb\) +{re.escape(address)}\n")
        assert in_summary.search(said[0])
        shown = trainkit("runs", "show", str(first))
        assert in_summary.search(shown.stdout)
        assert [path.name for path in home.rglob("*") if "wandb" in path.name] == []
        run(f"checkpoint.resume={first}/checkpoints/step-00000003", "train.steps=5")
        assert {*server.runs} == {name}
        assert [each["_step"] for each in kept.steps] == [1, 2, 3, 4, 5]
        assert kept.name == first.name
        branch = run(f"checkpoint.resume={first}/checkpoints/step-00000003", "train.steps=4")
        assert {*server.runs} == {name, branch.name}
        assert [each["_step"] for each in server.runs[branch.name].steps] == [4]
        assert f"metrics: wandb: a run of its own, for run {name} has gone on from step-00000003\n" in said[2]
        run("train.steps=1", WANDB_RUN_ID="mine", WANDB_PROJECT="other", WANDB_NAME="called")
        assert (server.runs["mine"].project, server.runs["mine"].name) == ("other", "called")


def test_who_is_not_logged_in_is_told_before_a_model_is_built_and_offline_may_be_a_setting_of_a_folder(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    words = ["logging.report_to=[wandb]", "train.steps=1"]
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = trainkit("run", str(tiny_recipe), *words, environ=server)
    assert done.returncode == 1
    assert "logging.report_to: wandb has no login for http://127.0.0.1:9" in done.stderr
    assert "wandb login" in done.stderr and "WANDB_MODE=offline" in done.stderr
    assert "parameters" not in done.stdout
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nmode = offline\n")  # of `wandb offline`
    done = trainkit("run", str(tiny_recipe), *words, environ=server)
    assert done.returncode == 0, done.stderr
    assert "metrics: wandb: wandb sync " in done.stdout + done.stderr


def test_a_server_that_cannot_be_reached_costs_a_warning_and_one_that_refuses_ends_the_run(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    words = ["logging.report_to=[wandb]", "train.steps=1"]
    login = {"WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "2"}
    done = trainkit("run", str(tiny_recipe), *words, environ={**login, "WANDB_BASE_URL": "http://127.0.0.1:9"})
    assert done.returncode == 0, done.stderr
    assert "warning: wandb's server cannot be reached, the run goes on offline: " in done.stderr
    (run_dir,) = (tmp_path / "runs/tiny").iterdir()
    assert [each["_step"] for each in history(run_dir)] == [1]
    with wandb_server() as server:
        server.refuses = 401
        done = trainkit("run", str(tiny_recipe), *words, environ={**login, "WANDB_BASE_URL": server.address})
    assert done.returncode == 1
    assert "logging.report_to: wandb refuses the run: " in done.stderr
    assert "check the login (wandb login)" in done.stderr


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
