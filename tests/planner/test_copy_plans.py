"""What a plan makes of checkpoint.copy_to: packages, preparations, credentials, and where a checkpoint comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.made_up_plans import PACKAGES
from trainkit.cli.diagnostics import render_diagnostics
from trainkit.errors import Diagnostic, RecipeError
from trainkit.launch_plan.model import Plan, Variable
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.planner.resume import SavedCheckpoint
from trainkit.recipe.address import has_credentials, scheme
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
ADDRESS = "s3://bucket/path"
STORAGE = {"fsspec": "2026.9.0", "s3fs": "2026.9.0"}
SECRET = "hunter2hunter2"


def recipe(address: str = ADDRESS, **more: Any) -> dict[str, Any]:
    return {"devices": {"type": "cpu"}, "checkpoint": {"copy_to": address, "resume": "auto"}, **more}


def plan_of(resolved: Resolved, facts: Facts, *saved: SavedCheckpoint) -> Plan:
    return build_plan(resolved, facts, saved).plan


@pytest.mark.parametrize(
    ("address", "named", "credentials"),
    [
        ("s3://bucket/path", "s3", False),
        ("S3://bucket", "s3", False),
        ("/data/copies", "", False),
        ("abfs://container@account.dfs.core.windows.net/path", "abfs", False),
        ("abfs://container:word@account.dfs.core.windows.net/path", "abfs", True),
        ("sftp://ada@host/path", "sftp", True),
        ("s3://key@bucket/path", "s3", True),
        ("s3://bucket/who@where", "s3", False),
    ],
)
def test_an_address_and_what_of_it_is_a_credential(address: str, named: str, credentials: bool) -> None:
    assert (scheme(address), has_credentials(address)) == (named, credentials)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (f"s3://key:{SECRET}@bucket/path", "checkpoint.copy_to is a secret by its value"),
        (f"s3://key:{SECRET}@bucket/path?version=1", "a path, or an address `scheme://…`"),
        ("s3://key@bucket/path", "checkpoint.copy_to names a user"),
        ("memory://path", "nothing can be kept in memory://, because it ends with its process"),
        ("https://host/path", "nothing can be kept in https://, because fsspec only reads from it"),
        ("s3://bucket/path?signature=1", "a path, or an address `scheme://…`"),
        ("simplecache::s3://bucket/path", "a path, or an address `scheme://…`"),
    ],
)
def test_addresses_that_name_secrets_or_keep_nothing_are_refused(
    refuse: Callable[..., list[Diagnostic]], address: str, why: str
) -> None:
    errors = refuse(f"train: {{steps: 1}}\ncheckpoint: {{copy_to: '{address}'}}\n")

    assert why in " ".join(each.what for each in errors)
    assert SECRET not in render_diagnostics(errors)


@pytest.mark.parametrize("address", ["file:///data/copies", "/data/copies", "copies", "gs://bucket", ADDRESS])
def test_folders_are_addresses(solve: Callable[..., Resolved], address: str) -> None:
    assert solve(f"train: {{steps: 1}}\ncheckpoint: {{copy_to: '{address}'}}\n").recipe.checkpoint.copy_to == address


def test_packages_that_are_missing_are_named_with_their_installation(layered: Layered, machine: Machine) -> None:
    def blockers(address: str, **packages: str) -> list[tuple[str, str]]:
        notices = plan_of(layered(recipe(address)), machine(packages={**PACKAGES, **packages})).notices
        return [(each.what, each.hint) for each in notices if each.severity == "blocker"]

    assert blockers(ADDRESS, **STORAGE) == []
    assert blockers("/data", fsspec="2026.9.0") == []
    (s3fs,) = blockers(ADDRESS, fsspec="2026.9.0")
    assert s3fs[0] == "checkpoint.copy_to s3:// requires s3fs >= 2025.3; it is not installed"
    assert s3fs[1] == "/opt/python -m pip install 's3fs>=2025.3,<2027'"
    (gcsfs,) = blockers("gs://bucket", fsspec="2026.9.0")
    assert "requires gcsfs" in gcsfs[0]
    (fsspec,) = blockers("/data")
    assert "requires fsspec" in fsspec[0]


def test_before_the_ranks_the_place_is_made_ready_and_the_checkpoint_fetched(
    layered: Layered, machine: Machine
) -> None:
    facts = machine(packages={**PACKAGES, **STORAGE})
    (ready,) = plan_of(layered(recipe()), facts).preparations
    assert ready.title == f"make {ADDRESS} ready for checkpoints"
    assert ADDRESS in map(str, ready.argv)
    assert Variable.RESUME in ready.argv[-1].parts
    never = recipe() | {"checkpoint": {"copy_to": ADDRESS}}
    (ready,) = plan_of(layered(never), facts).preparations
    assert not any(Variable.RESUME in word.parts for word in ready.argv)
    assert plan_of(layered({"devices": {"type": "cpu"}}), facts).preparations == ()


def test_the_plan_says_from_which_address_a_checkpoint_is_fetched_and_what_is_incomplete(
    layered: Layered, machine: Machine
) -> None:
    facts = machine(packages={**PACKAGES, **STORAGE})
    digest = plan_of(layered(recipe()), facts).training_digest

    def there(step: int, damage: str = "") -> SavedCheckpoint:
        name = f"tiny/r/checkpoints/step-{step:08d}"
        return SavedCheckpoint(
            f"/runs/{name}", step, digest, "r", "single", 1, damage=damage, source=f"{ADDRESS}/{name}"
        )

    plan = plan_of(layered(recipe()), facts, there(6, "it has no manifest.json"), there(4))
    assert (plan.resume.path, plan.resume.step) == ("/runs/tiny/r/checkpoints/step-00000004", 4)
    assert f"fetched from {ADDRESS}/tiny/r/checkpoints/step-00000004, saved by single" in plan.resume.reason
    skipped = f"{ADDRESS}/tiny/r/checkpoints/step-00000006 is damaged and skipped: it has no manifest.json"
    assert skipped in [each.what for each in plan.notices]


def test_credentials_that_a_container_does_not_get_are_warned_of(layered: Layered, machine: Machine) -> None:
    container: dict[str, Any] = {
        "container": {"kind": "podman", "image": "i", "packages": {"torch": "2.13.0", **STORAGE}}
    }
    facts = machine(packages={**PACKAGES, **STORAGE})

    def warnings(**more: Any) -> list[str]:
        notices = plan_of(layered(recipe(**container, **more)), facts).notices
        return [each.hint for each in notices if "your credentials do not get into the container" in each.what]

    (hint,) = warnings()
    assert "list AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY under env_from" in hint
    assert warnings(env_from=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]) == []
    assert not any("AWS" in str(word) for word in plan_of(layered(recipe()), facts).commands[0].argv)


@pytest.mark.parametrize("kind", ["hf", "torch", "accelerate"])
def test_programs_of_ones_own_copy_nothing_and_the_key_is_refused(
    layered: Layered, machine: Machine, kind: str
) -> None:
    own = {"devices": {"type": "cpu"}, "program": {"kind": kind, "script": "train.py"}}
    resolved = layered({**own, "checkpoint": {"copy_to": ADDRESS}})
    with pytest.raises(RecipeError, match=r"checkpoint\.copy_to"):
        plan_of(resolved, machine(packages={**PACKAGES, **STORAGE}))
