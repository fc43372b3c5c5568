"""Plans executed with the real launchers: ranks meet, and a program's arguments arrive as they were written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

pytestmark = pytest.mark.e2e

Layered = Callable[..., Resolved]

PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
seen = {"sum": total.item(), "argv": sys.argv[1:], "environ": dict(os.environ)}
with open(os.path.join(os.environ["OUT"], os.environ["RANK"] + ".json"), "w") as out:
    json.dump(seen, out)
dist.destroy_process_group()
"""

# Words that shells, argparse, string.Template, format strings and launchers' flags could change.
WORDS = [
    "a b", "it's \"quoted\"", "two\nlines", "\u00fcn\u00efcode \u2603", "", "--", "-", "\ttab ", "@file", "#no comment",
    "$HOME", "$$", "$local_rank", "${local_rank}", "$$local_rank", "`id`", "a\\b", "*", "{}", "%s",
    "--nnodes", "7", "--n", "--num_processes=9", "-m", "--module", "--local_rank=3", "--config_file", "--help",
]  # fmt: skip

# What an outer launcher may have left behind; each alone would break or change one of these runs.
LEAKED = {"PET_NNODES": "5", "PET_RDZV_BACKEND": "etcd", "RANK": "9", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "false"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "the program.py"
    path.write_text(PROGRAM)
    return path


def outcomes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), ("torchrun", 2), ("accelerate", 2), ("accelerate", 1), ("deepspeed", 2), ("deepspeed", 1)],
)
def test_ranks_meet_and_arguments_arrive_word_for_word(
    layered: Layered,
    here: Facts,
    run_bare: Callable[..., CompletedProcess[str]],
    program: Path,
    tmp_path: Path,
    launcher: str,
    ranks: int,
) -> None:
    recipe = {
        "program": {"kind": "torch", "script": str(program), "args": WORDS},
        "strategy": {"kind": "ddp"},
        "launcher": {"kind": launcher},
        "nodes": {"processes_per_node": ranks},
        "env": {"OUT": str(tmp_path / "out"), "ODD": "a $b\n'c'"},
    }
    (tmp_path / "out").mkdir()
    plan = build_plan(layered(recipe), here).plan
    done = run_bare(plan, LEAKED)
    assert done.returncode == 0, done.stderr
    seen = outcomes(tmp_path / "out")
    assert len(seen) == ranks
    for rank, outcome in enumerate(seen):
        environ = outcome["environ"]
        assert outcome["sum"] == sum(range(1, ranks + 1))
        assert outcome["argv"] == WORDS
        assert (environ["RANK"], environ["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]) == (str(ranks), str(ranks))
        assert environ["OMP_NUM_THREADS"] == str(2 // ranks)
        planned = {name: str(value) for name, value in plan.environment.set}
        for name in set(planned) - {"MASTER_PORT", "TRAINKIT_RECIPE"}:
            assert environ[name] == planned[name], name
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "the program.py", "run-0"}


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_nodes_form_one_world(
    layered: Layered,
    here: Facts,
    run_bare: Callable[..., CompletedProcess[str]],
    program: Path,
    tmp_path: Path,
    free_port: int,
    launcher: str,
) -> None:
    recipe = {
        "program": {"kind": "torch", "script": str(program), "args": WORDS},
        "strategy": {"kind": "ddp"},
        "launcher": {"kind": launcher},
        "nodes": {"count": 2, "processes_per_node": 1, "rendezvous": f"127.0.0.1:{free_port}"},
        "env": {"OUT": str(tmp_path / "out")},
    }
    (tmp_path / "out").mkdir()
    plan = build_plan(layered(recipe), here).plan
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_bare, plan, {}, node_rank=node, port=free_port) for node in range(2)]
        for run in runs:
            assert run.result().returncode == 0, run.result().stderr
    seen = outcomes(tmp_path / "out")
    assert [outcome["sum"] for outcome in seen] == [3.0, 3.0]
    assert [outcome["argv"] for outcome in seen] == [WORDS, WORDS]
    assert {outcome["environ"]["MASTER_ADDR"] for outcome in seen} == {"127.0.0.1"}


def test_accelerate_restarts_ranks_as_often_as_the_recipe_says(
    layered: Layered, here: Facts, run_bare: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "fails_once.py"
    script.write_text(
        "import os, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(os.path.join(os.environ['OUT'], count + '-' + os.environ['RANK']), 'w').close()\n"
        "sys.exit(3 if count == '0' else 0)\n"
    )
    for launcher in ("torchrun", "accelerate"):
        out = tmp_path / launcher
        out.mkdir()
        recipe = {
            "program": {"kind": "torch", "script": str(script)},
            "strategy": {"kind": "ddp"},
            "launcher": {"kind": launcher, "max_restarts": 1},
            "env": {"OUT": str(out)},
        }
        done = run_bare(build_plan(layered(recipe), here).plan, {})
        assert done.returncode == 0, done.stderr
        assert {path.name for path in out.iterdir()} >= {"1-0", "1-1"}


def test_a_rank_that_accelerate_starts_for_deepspeed_has_the_environment_that_the_plan_shows(
    layered: Layered, here: Facts, run_bare: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "witness.py"
    script.write_text(
        "import json, os\njson.dump(dict(os.environ), open(os.environ['OUT'] + os.environ['RANK'], 'w'))\n"
    )
    recipe = {
        "program": {"kind": "accelerate", "script": str(script)},
        "devices": {"type": "cpu"},
        "strategy": {"kind": "zero2"},
        "launcher": {"kind": "accelerate"},
        "nodes": {"processes_per_node": 1},
        "env": {"OUT": str(tmp_path / "seen-")},
    }
    plan = build_plan(layered(recipe), here).plan
    done = run_bare(plan, {})
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen-0").read_text())
    planned = {name: str(value) for name, value in plan.environment.set}
    added = {name: value and str(value) for name, value in plan.environment.added}
    assert seen.keys() - os.environ.keys() == (planned.keys() | added.keys()) - os.environ.keys()
    assert {name: seen[name] for name, value in added.items() if value} == {k: v for k, v in added.items() if v}
    assert seen["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == planned["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"
