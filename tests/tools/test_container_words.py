"""The words that each engine is started with: as a golden file, and what the plan refuses of a container."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Planned, plan_from_json, plan_to_json
from trainkit.launch_plan.render import explain
from trainkit.launch_plan.render.shell import lines, quoted, render
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.tools.containers.engines import slug

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GOLDEN = Path(__file__).parents[1] / "golden" / "commands" / "containers.txt"
RENEW = "TRAINKIT_RENEW_GOLDEN=1 python -m pytest tests/tools"
IMAGES = {"docker": "team/pytorch:2", "podman": "team/pytorch:2", "apptainer": "pytorch.sif", "pyxis": "team#pytorch:2"}
SCRIPT: dict[str, Any] = {
    "program": {"kind": "torch", "script": "train.py"},
    "env_from": ["HF_TOKEN"],
    "env": {"NCCL_DEBUG": "WARN"},
}
MORE: dict[str, Any] = {
    "shared_memory": "16g",
    "user": "image",
    "entrypoint": "image",
    "ulimits": {"memlock": -1},
    "workdir": "/work",
    "caches": "/big/caches",
    "mounts": ["/data:/data:ro", "/big/scratch:/scratch"],
    "options": ["--memory=64g"],
    "pull": "missing",
}


def boxed(kind: str, **more: Any) -> dict[str, Any]:
    return {**SCRIPT, "container": {"kind": kind, "image": IMAGES[kind], **more}}


def cases(layered: Layered, machine: Machine) -> Iterator[tuple[str, Planned]]:
    ddp = {"strategy": {"kind": "ddp"}}
    for kind in IMAGES:
        yield f"{kind}, one process on cpu", build_plan(layered(boxed(kind)), machine(0))
        two = layered(boxed(kind), ddp, {"devices": {"select": [3, 1]}})
        yield f"{kind}, ddp on 2 of 4 cards", build_plan(two, machine(4))
    zero = {"strategy": {"kind": "zero2"}, "program": {"kind": "builtin", "script": None}}
    built = layered({"container": {"kind": "docker", "image": "i"}}, {"strategy": zero["strategy"]})
    yield "docker, zero2 of the built-in trainer on 2 cards, by number", build_plan(built, machine(2))
    nodes = {"nodes": {"count": 2, "rendezvous": "node0:29400"}, **ddp}
    yield "podman, ddp on 2 nodes", build_plan(layered(boxed("podman"), nodes), machine(2))
    yield "docker, with settings", build_plan(layered(boxed("docker", **MORE)), machine(0))


def test_engines_are_started_with_the_words_that_are_written_down(layered: Layered, machine: Machine) -> None:
    text = ""
    for title, planned in cases(layered, machine):
        command, container = planned.plan.commands[0], planned.plan.container
        assert container is not None
        text += f"== {title}\n" + "\n".join(lines((quoted(word) for word in command.container), 118, "    ")) + "\n"
        look = [quoted(word) for word in planned.plan.preparations[0].argv if str(word).startswith("--package=")]
        text += f"looks for: {' '.join(look)}\n"
        text += f"ended by: {' '.join(map(quoted, container.end)) or 'its own processes'}\n\n"
    if os.environ.get("TRAINKIT_RENEW_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), f"renew it: {RENEW}"


@pytest.mark.parametrize("kind", IMAGES)
def test_every_word_of_a_container_has_its_origin(layered: Layered, machine: Machine, kind: str) -> None:
    planned = build_plan(layered(boxed(kind, mounts=["/data:/data:ro"])), machine(2))
    for position, word in enumerate(planned.plan.commands[0].container):
        part = f"commands.0.argv.{position}"
        known = planned.provenance.parts.get(part) or planned.provenance.rules.get(part)
        assert known, f"nothing says what made {word}"


@pytest.mark.parametrize("kind", IMAGES)
def test_a_plan_with_a_container_is_read_back_as_it_was(layered: Layered, machine: Machine, kind: str) -> None:
    plan = build_plan(layered(boxed(kind)), machine(2)).plan
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan.commands[0].bare[: len(plan.commands[0].container)] == plan.commands[0].container


def test_a_word_of_the_engine_is_explained_by_its_key(layered: Layered, machine: Machine) -> None:
    resolved = layered(boxed("docker", mounts=["/data:/data:ro"]))
    planned = build_plan(resolved, machine(0))
    shown = explain.render("--mount=type=bind,source=/data,target=/data,readonly", resolved, planned)
    assert "from container.mounts" in shown


def test_no_value_of_a_variable_is_in_the_words(layered: Layered, machine: Machine) -> None:
    for kind in IMAGES:
        plan = build_plan(layered(boxed(kind)), machine(0)).plan
        words = " ".join(map(str, plan.commands[0].argv))
        assert "NCCL_DEBUG=WARN" not in words and ("NCCL_DEBUG" in words or plan.container.prefix)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("container", "key"),
    [
        ({"options": ["--pid=container:x"]}, "container.options.0"),
        ({"options": ["--memory=1g", "-v/data:/data"]}, "container.options.1"),
        ({"options": ["--env", "TOKEN=secret"]}, "container.options.0"),
        ({"options": ["--privileged", "other"]}, "container.options.1"),
        ({"mounts": ["/a:/d", "/b:/d/"]}, "container.mounts.1"),
        ({"mounts": ["/a:/opt/trainkit/trainkit"]}, "container.mounts.0"),
        ({"mounts": ["/runs:/runs:ro"]}, "container.mounts.0"),
    ],
)
def test_words_that_the_plan_sets_or_the_engine_would_mistake_are_refused(
    layered: Layered, machine: Machine, container: dict[str, Any], key: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(boxed("docker", **container), {"output": {"root": "/runs"}}), machine(0))
    assert [each.key for each in caught.value.diagnostics] == [key]


def test_variables_that_the_engine_itself_reads_are_refused(layered: Layered, machine: Machine) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(boxed("podman"), {"env": {"HOME": "/x"}, "env_from": ["LD_LIBRARY_PATH"]}), machine(0))
    assert {each.key for each in caught.value.diagnostics} == {"env.HOME", "env_from"}


def test_a_path_that_is_not_seen_inside_stops_the_run(layered: Layered, machine: Machine) -> None:
    data = {"container": {"kind": "docker", "image": "i"}, "data": {"path": "/data/corpus"}}
    plan = build_plan(layered(data), machine(0)).plan
    assert [each.what for each in plan.blockers] == ["data.path /data/corpus is not seen inside the container"]
    seen = layered(data, {"container": {"mounts": ["/data:/data:ro"]}})
    assert not build_plan(seen, machine(0)).plan.blockers


def test_a_folder_that_is_there_already_is_mounted_once(layered: Layered, machine: Machine) -> None:
    own = {"output": {"root": "/runs"}}
    named = {"mounts": ["/runs:/runs", "/data:/data:ro", "/data/:/data:ro"]}
    plan = build_plan(layered(boxed("docker", **named), own), machine(0)).plan
    mounted = [str(word) for word in plan.commands[0].container if str(word).startswith("--mount=")]
    assert sum("target=/runs" in word for word in mounted) == 1
    assert sum("target=/data" in word for word in mounted) == 1


@pytest.mark.parametrize(("kind", "folder", "stops"), [("docker", "/a,b", ","), ("podman", '/a"b', '"'),
                         ("docker", "/a:b", ""), ("apptainer", "/a:b", ":"), ("pyxis", "/a,b", ",")])  # fmt: skip
def test_a_folder_that_the_engine_cannot_be_told_of_stops_the_run(
    layered: Layered, machine: Machine, kind: str, folder: str, stops: str
) -> None:
    plan = build_plan(layered(boxed(kind), {"output": {"root": folder}}), machine(0)).plan
    assert [each.what for each in plan.blockers] == (
        [f"output.root {folder} has a {stops} in its name, which ends a path in {kind}'s words for folders"]
        if stops
        else []
    )


def test_what_this_machine_has_installed_is_no_obstacle_and_the_image_is_asked(
    layered: Layered, machine: Machine
) -> None:
    plan = build_plan(layered({"container": {"kind": "docker", "image": "i"}}), machine(0, packages={})).plan
    assert not plan.blockers
    words = [str(word) for word in plan.preparations[0].argv]
    assert "--package=torch>=2.6" in words and "--package=pydantic>=2.9" in words
    given = layered({"container": {"kind": "docker", "image": "i", "packages": {"torch": "2.7.1"}}})
    words = [str(word) for word in build_plan(given, machine(0)).plan.preparations[0].argv]
    assert "--package=torch==2.7.1" in words


def test_an_image_that_is_said_to_have_too_old_a_package_stops_the_run(layered: Layered, machine: Machine) -> None:
    box = {"kind": "docker", "image": "i", "packages": {"torch": "2.0.1", "accelerate": "0.1"}}
    plan = build_plan(layered({"container": box}), machine(0)).plan
    assert [each.what for each in plan.blockers] == ["the run requires torch >= 2.6; container.packages says 2.0.1"]


def test_folders_of_images_do_not_meet() -> None:
    assert slug("nvcr.io/nvidia/pytorch:25.09-py3") == "nvcr.io-nvidia-pytorch-25.09-py3"
    assert slug("./a b.sif") == "a-b.sif"


@pytest.mark.cli
def test_the_script_of_a_plan_hands_variables_in_by_apptainer_s_names(
    layered: Layered, machine: Machine, tmp_path: Path
) -> None:
    script = render(build_plan(layered(boxed("apptainer")), machine(0)).plan)
    assert 'export APPTAINERENV_HF_TOKEN="$HF_TOKEN"' in script
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False, timeout=20).returncode == 0
