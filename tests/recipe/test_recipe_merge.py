"""Merging: what replaces, what merges, what is dropped, and that history keeps all of it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, ItemsView
from typing import Any

import pytest

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layer import Layer
from trainkit.recipe.merge import merge
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
Places = Callable[..., list[tuple[str, str]]]
Refuse = Callable[..., list[Diagnostic]]


def two(weak: str, strong: str) -> dict[str, str]:
    return {"r.yaml": f"extends: weak.yaml\ntrain: {{steps: 3}}\n{strong}", "weak.yaml": weak}


def told(resolved: Resolved, key: str) -> list[tuple[Any, str, bool]]:
    return [(each.value, each.origin.place, each.dropped) for each in resolved.history[key]]


def test_mappings_merge_scalars_and_lists_replace(solve: Solve) -> None:
    weak = "data: {path: [a, b], workers: 2}\nenv: {A: x, B: y}\n"
    resolved = solve(two(weak, "data: {path: [c]}\nenv: {B: z}\n"))
    assert resolved.tree["data"] == {"path": ["c"], "workers": 2}
    assert resolved.tree["env"] == {"A": "x", "B": "z"}
    assert told(resolved, "data.path") == [(["a", "b"], "weak.yaml:1:14", False), (["c"], "r.yaml:3:14", False)]


def test_plus_appends_to_a_list_and_keeps_each_elements_place(solve: Solve) -> None:
    resolved = solve(two("env_from: [A]\n", "env_from+: [B, C]\n"))
    assert resolved.recipe.env_from == ["A", "B", "C"]
    assert "appended ['B', 'C']" in resolved.history["env_from"][-1].note
    places = [resolved.origin(f"env_from.{index}") for index in range(3)]
    assert [each.place if each else "" for each in places] == ["weak.yaml:1:12", "r.yaml:3:13", "r.yaml:3:16"]


def test_places_in_a_list_of_mappings_are_told_in_one_pass() -> None:
    class Counted(UserDict[str, Origin]):
        passes = 0

        def items(self) -> ItemsView[str, Origin]:
            self.passes += 1
            return super().items()

    mix = [{"path": f"part-{number}"} for number in range(50)]
    places = Counted({f"data.mix.{number}.path": Origin("r.yaml", 1, f"r.yaml:{number}:1") for number in range(50)})
    state = merge([Layer("r.yaml", 1, "/", {"data": {"mix": mix}}, places)])
    assert state.places["data.mix.49.path"].place == "r.yaml:49:1"
    assert places.passes == 1


def test_plus_appends_a_single_value_and_starts_a_list(solve: Solve) -> None:
    assert solve(two("", "env_from+: A\n"), overrides=("env_from+=B",)).recipe.env_from == ["A", "B"]


def test_plus_on_something_else_is_an_error_that_names_both_places(refuse: Refuse) -> None:
    (error,) = refuse(two("data: {path: here}\n", "data: {path+: [there]}\n"))
    assert error.origin is not None
    assert error.origin.place == "r.yaml:3:15"
    assert "weak.yaml:1:14" in error.why


def test_an_exclamation_mark_replaces_a_whole_mapping(solve: Solve) -> None:
    resolved = solve(two("env: {A: x, B: y}\n", "env!: {C: z}\n"))
    assert resolved.recipe.env == {"C": "z"}
    (entry,) = resolved.history["env.A"]
    assert entry.dropped
    assert "replaced as a whole by r.yaml:3:7" in entry.note


def test_the_users_own_names_may_end_in_modifiers(solve: Solve) -> None:
    resolved = solve("train: {steps: 3}\nprogram: {kind: builtin, args: {c+: 1, d!: x}}\n")
    assert resolved.recipe.program.args == {"c+": "1", "d!": "x"}


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ("extends++: strategy/fsdp\n", "r.yaml:2:1", "extends++"),
        ("extends+++: [x]\n", "r.yaml:2:1", "extends+++"),
        ("variants++: {a: {}}\n", "r.yaml:2:1", "variants++"),
        ("variants!+: {a: {}}\n", "r.yaml:2:1", "variants!+"),
        ("batch!!: {micro: 1}\n", "r.yaml:2:1", "batch!!"),
        ("batch: {micro+!: 1}\n", "r.yaml:2:9", "micro+!"),
        ("variants: {a: {batch++: {micro: 1}}}\n", "r.yaml:2:16", "batch++"),
    ],
)
def test_an_unknown_modifier_is_an_error_at_its_place(places: Places, text: str, place: str, name: str) -> None:
    assert places("train: {steps: 3}\n" + text) == [(place, f"`{name}` ends in an unknown modifier")]


@pytest.mark.parametrize("name", ["extends+", "extends!", "variants+", "variants!"])
def test_what_a_recipe_consists_of_takes_no_modifier_in_a_variant_either(places: Places, name: str) -> None:
    text = "train: {steps: 3}\n" + f"variants: {{a: {{{name}: strategy/fsdp}}}}\n"
    assert places(text) == [("r.yaml:2:16", f"there is no section or setting {name!r}")]


def test_a_change_of_kind_drops_the_weaker_fields_of_the_old_kind(solve: Solve) -> None:
    weak = "strategy: {kind: zero3, offload_param: cpu, bucket_mb: 10.0}\n"
    resolved = solve(two(weak, "strategy: {kind: ddp}\n"))
    assert resolved.tree["strategy"] == {"kind": "ddp"}
    assert told(resolved, "strategy.offload_param") == [("cpu", "weak.yaml:1:40", True)]
    assert "strategy.kind changed from zero3 to ddp at r.yaml:3:18" in resolved.history["strategy.bucket_mb"][0].note
    assert [entry.value for entry in resolved.history["strategy.kind"]] == ["zero3", "ddp"]
    origin = resolved.origin("strategy.bucket_mb")
    assert origin is not None
    assert origin.place == "r.yaml:3:11"


def test_the_same_kind_again_keeps_the_weaker_fields(solve: Solve) -> None:
    resolved = solve(two("strategy: {kind: zero2, offload_optimizer: cpu}\n", "strategy: {kind: zero2}\n"))
    assert resolved.tree["strategy"]["offload_optimizer"] == "cpu"


def test_a_field_given_again_after_a_change_of_kind_counts(solve: Solve) -> None:
    resolved = solve(two("strategy: {kind: zero2, bucket_mb: 1.0}\n", "strategy: {kind: ddp, bucket_mb: 2.0}\n"))
    assert resolved.tree["strategy"] == {"kind": "ddp", "bucket_mb": 2.0}
    assert [(entry.value, entry.dropped) for entry in resolved.history["strategy.bucket_mb"]] == [
        (1.0, True),
        (2.0, False),
    ]


@pytest.mark.parametrize(
    ("weak", "strong"),
    [("precision: bf16\n", "precision: {tf32: true}\n"), ("precision: {tf32: true}\n", "precision: bf16\n")],
)
def test_short_forms_merge_like_the_mappings_they_stand_for(solve: Solve, weak: str, strong: str) -> None:
    resolved = solve(two(weak, strong))
    assert resolved.tree["precision"] == {"dtype": "bf16", "tf32": True}
    origin = resolved.origin("precision.dtype")
    assert origin is not None
    assert origin.column == 12


def test_compile_has_a_short_form_too(solve: Solve) -> None:
    resolved = solve(two("efficiency: {compile: {backend: eager}}\n", "efficiency: {compile: true}\n"))
    compiled = resolved.recipe.efficiency.compile
    assert (compiled.enabled, compiled.backend) == (True, "eager")


def test_a_list_of_arguments_replaces_a_mapping_and_words_behind_dashes_follow(solve: Solve) -> None:
    weak = "program: {args: {lr: 1e-3, flag: true, off: false, many: [1, 2]}}\n"
    resolved = solve(two(weak, ""), arguments=("--x", "a b", "${y}"))
    words = ["--lr", "1e-3", "--flag", "--many", "1", "2", "--x", "a b", "${y}"]
    assert resolved.recipe.program.args == words
    assert resolved.history["program.args.lr"][-1].dropped


def test_layers_are_not_changed_by_merging(solve: Solve) -> None:
    files = two("data: {path: ['${name}']}\n", "data: {path+: [b]}\nname: n\n")
    resolved = solve(files)
    assert resolved.recipe.data.model_dump()["path"] == ["n", "b"]
    assert resolved.history["data.path"][0].value == ["${name}"]


def test_a_section_that_is_replaced_as_a_whole_is_judged_by_its_own_kind(solve: Solve, refuse: Refuse) -> None:
    below = "train: {steps: 3}\ndata: {path: x}\n"
    assert solve(two(below, "data!: {kind: random}\n")).recipe.data.kind == "random"
    assert "data.kind random has no setting 'path'" in refuse(two(below, "data: {kind: random}\n"))[0].what
    assert "no setting 'pathh'" in refuse(two("data: {pathh: x}\n", "data!: {kind: random}\n"))[0].what
