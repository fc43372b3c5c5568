"""The plan is the run: what really started is compared, word by word and variable by variable, with the bound plan."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template

import pytest

from trainkit.launch_plan.model import Plan, Variable, plan_from_json
from trainkit.runner.binding import bind, run_values
from trainkit.runner.rundir.layout import RunLayout

Trainkit = Callable[..., subprocess.CompletedProcess[str]]

WITNESS = Path(__file__).resolve().parent / "programs" / "witness.py"
ARGUMENTS = ["two words", "$HOME ${local_rank}", "--nnodes", "3", "ünï", "a'b\"c", "line\nbreak"]
# What a shell profile or an outer launcher may have left; each would change a launch in silence.
STALE = {
    "PET_NNODES": "3",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "RANK": "7",
    "WORLD_SIZE": "9",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "old",
    "OMP_NUM_THREADS": "77",
}
# The launchers give these to each rank; the plan decides what they say by world size, not by value.
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "MASTER_PORT"}


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("python", 1), ("torchrun", 2), ("accelerate", 2), ("deepspeed", 2), ("torchrun", 1), ("accelerate", 1)],
)
def test_the_processes_that_start_are_those_of_the_bound_plan(
    trainkit: Trainkit, clean_environment: dict[str, str], tmp_path: Path, launcher: str, ranks: int
) -> None:
    recipe = tmp_path / "witness.yaml"
    recipe.write_text(
        json.dumps(
            {
                "version": 1,
                "name": "witness",
                "program": {"kind": "torch", "script": str(WITNESS), "args": ARGUMENTS},
                "devices": {"type": "cpu"},
                "nodes": {"processes_per_node": ranks},
                "strategy": {"kind": "ddp"},
                "launcher": {"kind": launcher},
                "env": {"PLANNED": "by the recipe", "WITNESS": str(tmp_path)},
                "env_from": ["HF_TOKEN"],
            }
        )
    )
    caller = {**STALE, "HF_TOKEN": "hf_secret_value", "UNTOUCHED": "kept"}
    planned = plan_from_json(json.loads(trainkit("plan", str(recipe), "--json", environ=caller).stdout))
    done = trainkit("run", str(recipe), environ=caller, timeout=200)
    assert done.returncode == 0, done.stderr

    (run_dir,) = (tmp_path / "runs" / "witness").iterdir()
    plan = plan_from_json(json.loads((run_dir / "plan.json").read_text()))
    assert plan == planned

    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    for rank, report in enumerate(reports):
        values = values_seen(run_dir, reports[0]["processes"])
        bound = bind(plan, values, {**clean_environment, **caller})
        program = received(bound.argv[-len(plan.commands[0].program) :], launcher, ranks)
        wrapped = received(bound.argv[len(plan.commands[0].launcher) :], launcher, ranks)

        assert report["argv"] == ARGUMENTS
        # Word 0 is the interpreter, which the kernel shows as a link's target may have it.
        assert report["processes"][0][1:] == program[1:]
        assert report["processes"][1][1:] == wrapped[1:]
        assert report["environment"]["RANK"] == str(rank)
        assert report["environment"]["WORLD_SIZE"] == str(ranks)
        if plan.commands[0].launcher:
            assert list(bound.argv)[1:] in [words[1:] for words in report["processes"]]
        check_environment(plan, bound.environment, report["environment"])
        check_additions(plan, values, bound.environment, report["environment"])


def check_environment(plan: Plan, expected: Mapping[str, str], seen: Mapping[str, str]) -> None:
    """Each planned variable has its value, each removed one is gone or the launcher's own, the rest is the caller's."""
    for name, _ in plan.environment.set:
        if name not in RANK_VARIABLES:
            assert seen[name] == expected[name]
    for pattern in plan.environment.unset:
        for name, stale in STALE.items():
            if fnmatchcase(name, pattern):
                assert seen.get(name) != stale
    assert seen["PLANNED"] == "by the recipe"
    assert seen["HF_TOKEN"] == "hf_secret_value"
    assert seen["UNTOUCHED"] == "kept"


def check_additions(
    plan: Plan, values: Mapping[Variable, str], given: Mapping[str, str], seen: Mapping[str, str]
) -> None:
    """The launcher adds to what it was given what the plan shows, and nothing else."""
    added = dict(plan.environment.added)
    assert seen.keys() - given.keys() == added.keys() - given.keys()
    known = {name: value.bind(values) for name, value in added.items() if value}
    assert {name: seen[name] for name in known} == known
    changed = {name for name in seen.keys() & given.keys() if seen[name] != given[name]}
    assert changed <= RANK_VARIABLES | added.keys()


def values_seen(run_dir: Path, processes: list[list[str]]) -> Mapping[Variable, str]:
    """The run-time values, read off the processes: only the port is not known from the run directory."""
    words = " ".join(word for process in processes for word in process)
    port = re.search(r"(?:master_port|main_process_port)[= ](\d+)", words)
    found = int(port.group(1)) if port else 0
    return run_values(RunLayout(run_dir), found, 0, "127.0.0.1", "127.0.0.1")


def received(words: Sequence[str], launcher: str, ranks: int) -> list[str]:
    """What a rank gets of the words: torchrun, which accelerate calls for several, fills its macros in."""
    macros = launcher == "torchrun" or (launcher == "accelerate" and ranks > 1)
    return [Template(word).safe_substitute(local_rank="?") if macros else word for word in words]


def test_no_secret_is_written_into_the_run_directory_or_shown(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("pass\n")
    (tmp_path / "quiet.yaml").write_text(
        "version: 1\nname: quiet\nprogram: {kind: torch, script: quiet.py}\n"
        "devices: {type: cpu}\nenv_from: [HF_TOKEN]\n"
    )
    done = trainkit("run", "quiet.yaml", environ={"HF_TOKEN": "hf_secret_value"})
    assert done.returncode == 0, done.stderr
    assert "hf_secret_value" not in done.stdout + done.stderr
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"plan.json", "env.txt", "command.sh", "recipe.yaml", "status.json"} <= {path.name for path in written}
    assert not [path for path in written if "hf_secret_value" in path.read_text(errors="replace")]


def test_a_variable_that_the_caller_lacks_is_refused_before_the_start(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("open('ran', 'w')\n")
    (tmp_path / "quiet.yaml").write_text(
        "version: 1\nname: quiet\nprogram: {kind: torch, script: quiet.py}\n"
        "devices: {type: cpu}\nenv_from: [NOT_THERE]\n"
    )
    done = trainkit("run", "quiet.yaml")
    assert done.returncode == 4
    assert "NOT_THERE" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "runs").exists()
