"""Plans as JSON and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.errors import MachineError
from trainkit.launch_plan import model
from trainkit.launch_plan.model import PLAN_VERSION, Plan, Text, Variable, plan_from_json, plan_to_json, text
from trainkit.launch_plan.render import explain
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]

words = st.builds(text, st.text(max_size=8), st.sampled_from(list(Variable)), st.text(max_size=8)) | st.builds(
    text, st.text(max_size=8)
)
some = st.lists(words, max_size=4).map(tuple)
names = st.text(min_size=1, max_size=8)
choices = st.builds(model.Choice, names, st.text(max_size=8))
groups = st.builds(model.NodeGroup, st.integers(1, 9), st.integers(1, 9), st.lists(names, max_size=3).map(tuple))
plans = st.builds(
    Plan,
    plan_version=st.just(PLAN_VERSION),
    name=names,
    recipe_digest=names,
    training_digest=names,
    strategy=choices,
    launcher=choices,
    program=choices,
    topology=st.builds(
        model.Topology, st.sampled_from(["cpu", "cuda", "mps"]), st.lists(groups, max_size=2).map(tuple)
    ),
    batch=st.builds(model.BatchArithmetic, *[st.integers(1, 99)] * 5, st.text(max_size=8)),
    commands=st.lists(st.builds(model.Command, some, some, some), max_size=2).map(tuple),
    preparations=st.lists(st.builds(model.Preparation, names, some, names), max_size=2).map(tuple),
    environment=st.builds(
        model.EnvironmentDiff,
        set=st.dictionaries(names, words, max_size=3).map(lambda found: tuple(found.items())),
        unset=st.lists(names, max_size=3).map(tuple),
        take=st.lists(names, max_size=3).map(tuple),
        added=st.dictionaries(names, st.none() | words, max_size=3).map(lambda found: tuple(found.items())),
    ),
    files=st.dictionaries(names, st.text(), max_size=2).map(
        lambda found: tuple(model.PlannedFile(path, content) for path, content in found.items())
    ),
    resume=st.builds(model.Resume, st.none() | names, st.integers(0, 9), st.text(max_size=8)),
    output_root=names,
    max_restarts=st.integers(0, 9),
    grace_seconds=st.floats(0, 99),
    techniques=st.lists(st.builds(model.TechniqueInForce, names, names, names, names), max_size=2).map(tuple),
    notices=st.lists(
        st.builds(model.Notice, st.sampled_from(["note", "warning", "blocker"]), names, st.text(max_size=8)), max_size=2
    ).map(tuple),
    rendezvous=names,
)


@given(plan=plans)
def test_any_plan_survives_json_without_loss(plan: Plan) -> None:
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


@given(word=words)
def test_any_word_survives_json_without_loss(word: Text) -> None:
    assert Text.from_json(json.loads(json.dumps(word.to_json()))) == word


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_a_built_plan_survives_json_and_is_written_the_same_every_time(
    layered: Layered, machine: Machine, launcher: str
) -> None:
    recipe: dict[str, Any] = {
        "strategy": {"kind": "zero2"},
        "launcher": {"kind": launcher},
        "env": {"B": "1", "A": "2"},
    }
    plan = build_plan(layered(recipe), machine(2)).plan
    written = json.dumps(plan_to_json(plan))
    assert plan_from_json(json.loads(written)) == plan
    assert json.dumps(plan_to_json(build_plan(layered(recipe), machine(2)).plan)) == written


def test_provenance_positions_are_positions_in_the_json(layered: Layered, machine: Machine) -> None:
    planned = build_plan(layered({"strategy": {"kind": "ddp"}, "launcher": {"max_restarts": 2}}), machine())
    argv = plan_to_json(planned.plan)["commands"][0]["argv"]
    (part,) = [part for part, keys in planned.provenance.parts.items() if keys == ("launcher.max_restarts",)]
    assert argv[int(part.rpartition(".")[2])] == "--max-restarts=2"


@pytest.mark.parametrize("version", [0, PLAN_VERSION + 1, None, "1"])
def test_a_plan_of_another_version_is_refused_with_a_way_out(layered: Layered, machine: Machine, version: Any) -> None:
    data = plan_to_json(replace(build_plan(layered({}), machine()).plan, plan_version=version))
    with pytest.raises(MachineError) as caught:
        plan_from_json(data)
    assert str(version) in caught.value.diagnostics[0].what
    assert "trainkit plan" in caught.value.diagnostics[0].hint


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    below = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, each in below:
        yield from _places(each, (*place, name))


def test_a_plan_with_anything_in_the_place_of_a_value_is_read_or_refused(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"devices": {"type": "cpu"}}), machine()).plan
    whole = plan_to_json(plan)
    refused = 0
    for place in list(_places(whole))[1:]:
        for value in (None, [], {}, "x", -1, 1e308, True, [1], {"a": 1}, ["a", None]):
            damaged = copy.deepcopy(whole)
            holder: Any = damaged
            for name in place[:-1]:
                holder = holder[name]
            holder[place[-1]] = value
            try:
                other = plan_from_json(damaged)
            except (MachineError, ValueError, KeyError, TypeError):
                refused += 1
            else:
                explain.render_diff(other, plan)
    assert refused > 100


@pytest.mark.parametrize("data", [None, [], "text", 10**30, True])
def test_what_is_no_object_is_no_plan(data: object) -> None:
    with pytest.raises(ValueError, match="a plan is a JSON object"):
        plan_from_json(data)
