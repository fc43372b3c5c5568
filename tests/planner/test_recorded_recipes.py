"""The recipe that a run directory has, resolved alone, is planned as the one that was submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.made_up_recipes import MemoryFiles
from trainkit.cli.file_system import FileSystem
from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.nodes.assembly import comparable_leaves
from trainkit.schedulers.jobs.node import BOUND_HERE, SAID

SHIPPED = FileSystem().shipped()
RECIPES = [name for name in SHIPPED if name.startswith("recipes/")]
PROGRAMS = ("torch", "hf", "accelerate", "deepspeed")
# "corners" is a preset of these tests, which sets two corners of the batch above a recipe that may have the third.
PRESETS = (
    ("devices/cpu",), ("strategy/ddp",), ("strategy/fsdp-offload", "precision/bf16"), ("precision/tf32",),
    ("strategy/zero3-offload",), ("devices/single-gpu", "precision/fp16"), ("precision/pure-bf16",), ("corners",), (),
)  # fmt: skip
TEXTS = {path: Path(path).read_text(encoding="utf-8") for path in SHIPPED.values()}
TEXTS["/corners.yaml"] = "batch: {micro: 2, accumulation: 3}\n"
TEXTS |= {f"/w/{script}.py": "import torch\n" for script in ("train", "run_glue", "nlp_example")}
FILES = MemoryFiles(TEXTS, {**SHIPPED, "corners": "/corners.yaml"})
PACKAGES = {
    "torch": "2.13.0",
    "numpy": "2.4.0",
    "safetensors": "0.8.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "transformers": "5.13.0",
}
Machine = Callable[..., Facts]
Outcome = tuple[dict[str, Any], set[str]]


def outcome(resolved: Resolved, facts: Facts) -> Outcome:
    """What nodes must have alike, or why it is refused; and the notices, but for those about weaker layers."""
    try:
        plan = build_plan(resolved, facts).plan
    except RecipeError as error:
        return {each.key: each.what for each in error.diagnostics}, set()
    found = {
        key: value
        for key, value in comparable_leaves(plan).items()
        if not key.startswith(BOUND_HERE) and not key.endswith(SAID)
    }
    return found, {each.what for each in plan.notices if " dropped: " not in each.what}


def recorded(resolved: Resolved) -> Resolved:
    """The recipe of the run directory, with no other layer."""
    files = MemoryFiles({**TEXTS, "/runs/recipe.yaml": resolved_yaml(resolved)})
    return resolve(Request("/runs/recipe.yaml", "/w"), files)


def requests(name: str, presets: Iterator[tuple[str, ...]]) -> Iterator[Request]:
    """A shipped recipe and its variants as they are, and for programs of every other kind."""
    variants = [None, *resolve(Request(SHIPPED[name], "/w"), FILES).variants]
    kinds = [(kind, False) for kind in PROGRAMS]
    for variant in variants:
        own = [*kinds, *((kind, True) for kind in PROGRAMS)] if variant is None else kinds
        programs = (f"{{kind: {kind}, script: train.py, reads_recipe: {str(reads).lower()}}}" for kind, reads in own)
        for words in ((), *((f"program!={program}",) for program in programs)):
            yield Request(SHIPPED[name], "/w", next(presets), words, variant=variant)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recorded_recipe_is_planned_as_the_one_that_was_submitted(
    name: str, machine: Machine, thorough: bool
) -> None:
    facts = machine(8, packages=PACKAGES)
    planned, presets = 0, cycle(PRESETS)
    for request in requests(name, presets):
        if not thorough and request.variant is not None and request.overrides:
            continue  # programs of every kind are tried with the recipe itself
        try:
            resolved = resolve(request, FILES)
        except RecipeError:  # nothing is recorded of what does not resolve
            continue
        (before, said), (after, said_again) = outcome(resolved, facts), outcome(recorded(resolved), facts)
        assert after == before, request
        assert said_again <= said, request
        planned += "topology.world_size" in before
    assert planned


def test_a_kind_that_nobody_wrote_is_not_recorded(machine: Machine) -> None:
    """A run that was submitted without a word would end on every node: data.kind cannot reach the program."""
    request = Request(None, "/w", ("devices/cpu",), ("program.kind=torch", "program.script=train.py"))
    resolved = resolve(request, FILES)
    assert resolved.recipe.data.kind == "text"
    assert yaml.safe_load(resolved_yaml(resolved))["data"] == {"pin_memory": False}
    facts = machine(0, packages=PACKAGES)
    assert outcome(recorded(resolved), facts) == outcome(resolved, facts)


def test_what_was_written_is_recorded_even_where_it_is_the_default(machine: Machine) -> None:
    words = ("program={kind: accelerate, script: train.py}", "data.pin_memory=true", "data.kind=text", "precision=fp32")
    resolved = resolve(Request(None, "/w", (), (*words, "env_from+=[HOME]", "train.max_grad_norm=1.0")), FILES)
    tree = yaml.safe_load(resolved_yaml(resolved))
    assert (tree["data"], tree["precision"]) == ({"kind": "text", "pin_memory": True}, {"dtype": "fp32"})
    assert (tree["env_from"], tree["train"]) == (["HOME"], {"max_grad_norm": 1.0})
    refused = outcome(resolved, machine(2, packages=PACKAGES))
    assert {"data.kind", "data.pin_memory"} <= refused[0].keys()
    assert outcome(recorded(resolved), machine(2, packages=PACKAGES)) == refused


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_that_reads_the_recipe_is_given_every_setting(kind: str, machine: Machine) -> None:
    program = f"program={{kind: {kind}, script: train.py, reads_recipe: true}}"
    resolved = resolve(Request(None, "/w", ("devices/cpu",), (program, "train.seed=7")), FILES)
    plan = build_plan(resolved, machine(0, packages=PACKAGES)).plan
    named = str(dict(plan.environment.set)["TRAINKIT_RECIPE"])
    content = next(file.content for file in plan.files if named.endswith(f"/{file.path}"))
    settings = yaml.safe_load(content)
    assert (settings["train"]["seed"], settings["data"]["kind"]) == (7, "text")
    assert settings.keys() == {key.partition(".")[0] for key in schema().keys}
    assert "schedule" not in yaml.safe_load(resolved_yaml(resolved))


@pytest.mark.parametrize("strong", ["batch.global=64", "batch.micro=4", "batch.accumulation=4"])
def test_a_corner_that_gives_way_is_no_change_of_the_recipe(strong: str, machine: Machine) -> None:
    """Nodes compare the digest of the recorded recipe with the one that was planned."""
    resolved = resolve(Request(SHIPPED["recipes/ddp"], "/w", ("corners",), (strong,)), FILES)
    facts = machine(8, packages=PACKAGES)
    plan = build_plan(resolved, facts).plan
    assert "gives way" in plan.batch.note
    assert build_plan(recorded(resolved), facts).plan.recipe_digest == plan.recipe_digest
