"""What CONTRIBUTING lists is all that has to be touched: what exists of each kind is named nowhere else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from trainkit.doctor.examine import CHECKS
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.schema.cluster import Cluster
from trainkit.recipe.schema.launching import Launcher, Program
from trainkit.schedulers.registry import SCHEDULERS
from trainkit.tools.registry import LAUNCHERS, PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
CONTRIBUTING = ROOT / "docs" / "contributing.md"
# Besides their entry, optimizers are named in help and advice for people, and as the default of another tool.
NAMED = {
    "optimizers.py",
    "recipe/schema/training.py",
    "recipe/rules.py",
    "tools/hf/fields.py",
}


def files_with(pattern: str) -> set[str]:
    """Modules of trainkit in which a pattern occurs, relative to the package."""
    package = ROOT / "trainkit"
    return {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if re.search(pattern, path.read_text())
    }


def test_every_path_that_is_named_exists() -> None:
    named = re.findall(r"`((?:trainkit|tests|scripts|docs|\.github)/[\w./]*)`", CONTRIBUTING.read_text())
    assert len(named) > 12
    assert not [path for path in named if "NAME" not in path and not (ROOT / path).exists()]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name.count("_") > 1])
def test_an_optimizer_is_one_entry(name: str) -> None:
    assert files_with(rf'"{name}"') <= NAMED


def test_a_launcher_is_its_module_its_line_and_its_place_in_the_schema() -> None:
    assert set(get_args(Launcher.model_fields["kind"].annotation)) == {"auto", *LAUNCHERS}
    assert set(get_args(Program.model_fields["kind"].annotation)) == {*PROGRAMS}
    golden = {path.stem for path in (ROOT / "tests" / "golden" / "commands").glob("*.txt")}
    assert set(LAUNCHERS) <= golden


# Besides its own file, the registry and its section: facts of a machine, what an imported script asks for, and ssh as
# the command that reaches a node of PBS.
OF_SCHEDULERS = {"machine/host.py", "convert/sbatch.py", "schedulers/pbs.py"}


def test_a_scheduler_is_its_module_its_line_and_its_section() -> None:
    union, _ = get_args(Cluster)
    assert {each.model_fields["kind"].default for each in get_args(union)} == {"none", *SCHEDULERS}
    for name, scheduler in SCHEDULERS.items():
        assert scheduler.kind == name
        own = {f"schedulers/{name}.py", "schedulers/registry.py", "recipe/schema/cluster.py"}
        assert files_with(rf'"{name}"') <= own | OF_SCHEDULERS, name
    assert not files_with(r"isinstance\([^)]*\b(Slurm|Pbs|Ssh|Kubernetes)\b")


def test_a_check_of_the_doctor_is_its_function_and_its_row() -> None:
    for name in CHECKS:
        found = files_with(rf'Check\("{name}"')
        assert found == {"doctor/examine.py"}, name
