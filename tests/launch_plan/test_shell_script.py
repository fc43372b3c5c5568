"""`plan --shell`: scripts that a POSIX shell runs without trainkit's command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.launch_plan.model import Plan, PlannedFile
from trainkit.launch_plan.render import shell
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

REPORT = """
import json, os, sys
name = os.path.join(os.environ["OUT"], os.environ.get("RANK", "0") + ".json")
with open(name, "w") as out:
    json.dump({"argv": sys.argv[1:], "environ": dict(os.environ)}, out)
"""
WORDS = [
    "a b",
    "it's",
    "two\nlines",
    "$HOME",
    "${local_rank}",
    "$$",
    "`id`",
    "--nnodes",
    "7",
    "",
    "\u2603",
    "\x1b]0;x\x07\r\x85'\u202e",
]
ODD = "a $b\n'c' \"d\" \\ `e`\x1b[31m"
SHELLS = [name for name in ("sh", "dash", "bash") if shutil.which(name)]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.py"
    path.write_text(REPORT)
    (tmp_path / "out").mkdir()
    return path


def planned(layered: Layered, facts: Facts, report: Path, launcher: str, **more: Any) -> Plan:
    recipe = {
        "name": "demo",
        "program": {"kind": "torch", "script": str(report), "args": WORDS},
        "strategy": {"kind": "single" if launcher == "python" else "ddp"},
        "launcher": {"kind": launcher},
        "env": {"OUT": str(report.parent / "out"), "ODD": ODD},
        "output": {"root": "my runs"},
    }
    return build_plan(layered(recipe, more), facts).plan


def execute(script: str, folder: Path, sh: str = "sh", **environ: str) -> subprocess.CompletedProcess[str]:
    path = folder / "plan.sh"
    path.write_text(script)
    return subprocess.run(
        [sh, str(path)],
        env={**os.environ, **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "out").glob("*.json"))]


@pytest.mark.e2e
@pytest.mark.parametrize(("launcher", "ranks"), [("python", 1), ("torchrun", 2), ("accelerate", 2), ("deepspeed", 2)])
def test_the_script_runs_the_plan(
    layered: Layered, here: Facts, report: Path, tmp_path: Path, launcher: str, ranks: int
) -> None:
    plan = planned(layered, here, report, launcher)
    done = execute(shell.render(plan), tmp_path, PET_NNODES="5", RANK="9", ACCELERATE_X="1")
    assert done.returncode == 0, done.stderr
    assert len(seen(tmp_path)) == ranks
    for rank, outcome in enumerate(seen(tmp_path)):
        environ = outcome["environ"]
        assert outcome["argv"] == WORDS
        place = (None, None) if launcher == "python" else (str(rank), str(ranks))
        assert (environ.get("RANK"), environ.get("WORLD_SIZE"), environ["ODD"]) == (*place, ODD)
        assert not {"PET_NNODES", "ACCELERATE_X"} & set(environ)
        run_dir = Path(environ["TRAINKIT_RECIPE"]).parent
        assert run_dir.is_dir()
        assert run_dir.parent == tmp_path / "my runs" / "demo"


@pytest.mark.cli
@pytest.mark.parametrize("sh", SHELLS)
def test_any_posix_shell_writes_files_and_environment_exactly(
    layered: Layered, here: Facts, report: Path, tmp_path: Path, sh: str
) -> None:
    contents = {
        "plain.yaml": "a: 1\n",
        "hostile.txt": "$HOME `id` \\ 'x' \"y\"\nEND_OF_FILE\n\tEND_OF_FILE_\nEND_OF_FILE_\n",
        "no end": "last line without an end, 'quoted' $x\\",
        "empty.txt": "",
        "\u00fcmlaut.txt": "\u2603\n\n",
        "colour.txt": "\x1b[31m'red'\n",
    }
    files = tuple(PlannedFile(path, content) for path, content in contents.items())
    plan = replace(planned(layered, here, report, "python"), files=files)
    script = shell.render(plan, recipe_yaml="name: demo\n")
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e]", script), "a terminal would obey the script"
    done = execute(script, tmp_path, sh, RUN_DIR="the run")
    assert done.returncode == 0, done.stderr
    for path, content in {**contents, "recipe.yaml": "name: demo\n"}.items():
        assert (tmp_path / "the run" / path).read_bytes() == content.encode()
    (outcome,) = seen(tmp_path)
    assert outcome["environ"]["ODD"] == ODD
    assert outcome["environ"]["TRAINKIT_RECIPE"] == str(tmp_path / "the run" / "recipe.yaml")
    assert outcome["argv"] == WORDS


@pytest.mark.cli
def test_the_programs_exit_code_is_the_scripts(layered: Layered, here: Facts, tmp_path: Path) -> None:
    script = tmp_path / "seven.py"
    script.write_text("import sys; sys.exit(7)")
    plan = build_plan(layered({"program": {"kind": "torch", "script": str(script)}}), here).plan
    assert execute(shell.render(plan), tmp_path).returncode == 7


@pytest.mark.cli
def test_a_variable_to_be_taken_must_be_there_and_is_never_written_down(
    layered: Layered, here: Facts, report: Path, tmp_path: Path
) -> None:
    plan = planned(layered, here, report, "python", env_from=["HF_TOKEN", "ACCELERATE_LOG_LEVEL"])
    script = shell.render(plan)
    done = execute(script, tmp_path)
    assert done.returncode != 0
    assert "HF_TOKEN" in done.stderr or "ACCELERATE_LOG_LEVEL" in done.stderr
    assert "env_from" in done.stderr
    done = execute(script, tmp_path, HF_TOKEN="secret $x", ACCELERATE_LOG_LEVEL="debug", ACCELERATE_OTHER="1")
    assert done.returncode == 0, done.stderr
    environ = seen(tmp_path)[0]["environ"]
    assert (environ["HF_TOKEN"], environ["ACCELERATE_LOG_LEVEL"]) == ("secret $x", "debug")
    assert "ACCELERATE_OTHER" not in environ
    assert "secret" not in script


@pytest.mark.e2e
def test_several_nodes_are_started_by_the_same_script(
    layered: Layered, here: Facts, report: Path, tmp_path: Path, free_port: int
) -> None:
    where = {"count": 2, "processes_per_node": 1, "rendezvous": f"127.0.0.1:{free_port}"}
    script = shell.render(planned(layered, here, report, "torchrun", nodes=where))
    assert "RUN_ID" in execute(script, tmp_path).stderr
    assert "NODE_RANK" in execute(script, tmp_path, RUN_ID="r").stderr
    path = tmp_path / "plan.sh"
    nodes = [
        subprocess.Popen(
            ["sh", str(path)],
            env={**os.environ, "RUN_ID": "r", "NODE_RANK": str(rank), "LOCAL_ADDR": "127.0.0.1"},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=120)
        assert node.returncode == 0, errors
    assert len(seen(tmp_path)) == 2


def test_the_script_says_what_blocks_the_plan(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"devices": {"select": 2}, "strategy": {"kind": "ddp"}}), machine(1)).plan
    assert "# Cannot run where it was planned: not on this machine: 2 GPUs are requested" in shell.render(plan)
