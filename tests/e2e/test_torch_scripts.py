"""An unedited loop on plain torch: the same losses under every launcher, however it is started, and its words exact."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = Path(__file__).parent / "programs" / "ddp_loop.py"
WORDS = ["two words", 'it\'s "so"', "two\nlines", "ünï ☃", "$HOME", "${local_rank}", "", "--"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the loop as a script, as a module of a package, and behind a shell script."""
    shutil.copy(PROGRAM, tmp_path / "loop.py")
    (tmp_path / "own").mkdir()
    shutil.copy(PROGRAM, tmp_path / "own" / "loop.py")
    shell = tmp_path / "train it.sh"
    shell.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} loop.py "$@"\n')
    shell.chmod(0o755)
    return tmp_path


def report(trainkit: Trainkit, folder: Path, name: str, target: str, launcher: str) -> dict[str, Any]:
    """What rank 0 of the loop says of one run, whose strategy was looked at."""
    settings = ("program.kind=torch", target, "program.verify=true", f"launcher.kind={launcher}", f"name={name}")
    presets = ("--with", "strategy/ddp", "--with", "devices/cpu")
    done = trainkit("run", *settings, *presets, "--", f"{name}.json", *WORDS, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "as planned, seen in 2 ranks: ddp, cpu" in done.stderr
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_losses_and_words_are_the_same_under_every_launcher_and_way_to_start(trainkit: Trainkit, folder: Path) -> None:
    first = report(trainkit, folder, "first", "program.script=loop.py", "torchrun")
    assert first["words"] == WORDS
    assert len(first["losses"]) == 8
    assert first["losses"][-1] < first["losses"][0]
    assert report(trainkit, folder, "second", "program.module=own.loop", "accelerate") == first
    assert report(trainkit, folder, "third", "program.script=train it.sh", "deepspeed") == first


def test_a_file_that_may_not_be_executed_is_said_to_be_one(trainkit: Trainkit, folder: Path) -> None:
    (folder / "train it.sh").chmod(0o644)
    done = trainkit("run", "program.kind=torch", "program.script=train it.sh", "--with=devices/cpu")
    assert done.returncode == 126
    assert "cannot start ./train it.sh: Permission denied" in done.stderr
    assert "chmod +x" in done.stderr


# As plain scripts find out whether a launcher started them.
ASKS_FOR_A_RANK = """
import json, os, sys
import torch
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(json.dumps({"ddp": ddp, "names": sorted({"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys())}))
"""
STARTS_ITS_OWN = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    if rank == 0:
        print("sum", total.item(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    if "RANK" in os.environ:  # some library would now wait for the others that a launcher has started
        sys.exit("started by a launcher")
    mp.spawn(main, (os.path.abspath("store"),), nprocs=2)
"""
LEADS_ITS_OWN = """
import os, subprocess, sys
import torch, torch.distributed as dist

if __name__ == "__main__":
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:  # as Lightning does: the first rank is the process that python started
        other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath('store')}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        print("ranks", dist.get_world_size(), flush=True)
        sys.exit(other.wait())
"""
COPIES = """
import os
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("trained", flush=True)
"""


def test_a_script_that_asks_for_a_rank_is_alone_as_by_hand(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS_FOR_A_RANK)
    done = trainkit("run", "asks.py", timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ddp": False, "names": []}
    assert "as planned, seen in 1 rank" in done.stderr
    shared = trainkit("run", "--with=devices/cpu", "nodes.processes_per_node=2", "asks.py", timeout=200)
    assert json.loads(shared.stdout)["ddp"] is True
    # Its model is in no wrapper: that is what the warning is about, and no more than a warning.
    assert shared.returncode == 0, shared.stderr
    assert (
        "warning: what runs is not what was planned: strategy ddp was planned, and no wrapper synchronises"
        in shared.stderr
    )


def test_a_script_that_starts_processes_of_its_own_is_left_to_it(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS_ITS_OWN)
    done = trainkit("run", "starts.py", timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum 3.0\n"


def test_a_script_that_leads_ranks_of_its_own_runs_as_planned(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "leads.py").write_text(LEADS_ITS_OWN)
    done = trainkit("run", "leads.py", timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ranks 2\n"
    assert "warning" not in done.stderr
    assert "as planned, seen in 1 rank: ddp, cpu; the script itself started 2 ranks" in done.stderr


def test_torchrun_without_a_number_starts_a_group_of_one_as_by_hand(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS_FOR_A_RANK)
    done = trainkit("run", "torchrun", "asks.py", timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ddp": True, "names": ["MASTER_ADDR", "RANK", "WORLD_SIZE"]}
    assert "warning" not in done.stderr
    assert "as planned, seen in 1 rank: single, cpu" in done.stderr


def test_two_copies_that_never_meet_are_said(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(COPIES)
    words = ("--with=devices/cpu", "nodes.processes_per_node=2")
    done = trainkit("run", *words, "copies.py", timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this rank trains a separate model") == 1  # the other rank's stands in its log
    assert "not as planned, seen in 2 ranks" in done.stderr
    (run,) = (tmp_path / "runs" / "copies").iterdir()
    seen = json.loads((run / "summary.json").read_text())["in_force"]
    assert [len(seen[rank]["warnings"]) for rank in ("0", "1")] == [2, 2]
    ended = trainkit("run", *words, "program.verify=true", "copies.py", timeout=200)
    assert ended.returncode == 1
    assert "does not run what was planned" in ended.stderr


@pytest.mark.parametrize(
    "launcher", ["python", "torchrun --nproc_per_node 2", "accelerate launch --cpu --num_processes 2"]
)
def test_a_program_starts_in_the_folder_that_the_line_goes_to(
    launcher: str, trainkit: Trainkit, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    where = (
        "import os, sys\nopen('where-' + os.environ.get('RANK', '0'), 'w').write(' '.join([os.getcwd(), *sys.argv]))\n"
    )
    (tmp_path / "sub" / "where.py").write_text(where)
    done = trainkit("run", "devices.type=cpu", f"cd sub && {launcher} where.py a.txt", timeout=240)
    assert done.returncode == 0, done.stderr
    ranks = 1 if launcher == "python" else 2
    found = [(tmp_path / "sub" / f"where-{rank}").read_text() for rank in range(ranks)]
    assert found == [f"{tmp_path / 'sub'} where.py a.txt"] * ranks
