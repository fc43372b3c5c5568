"""Variants: named changes that resolve like a layer of their own, with the places of the file that holds them."""

from __future__ import annotations

from collections.abc import Callable

import jsonschema
import pytest
import yaml

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.json_schema import json_schema

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
Places = Callable[..., list[tuple[str, str]]]

TEXT = """\
train: {steps: 3}
optimizer: {lr: 1.0}
variants:
  fast:
    description: a higher rate
    optimizer: {lr: 2.0}
    precision: bf16
    env: {VERSION: 1.10, "C++": yes}
  sharded: {strategy: {kind: fsdp}}
  empty:
"""


def test_a_recipe_without_a_chosen_variant_is_the_recipe_itself(solve: Solve) -> None:
    resolved = solve(TEXT)
    assert resolved.recipe.optimizer.lr == 1.0
    assert resolved.variants == {"fast": "a higher rate", "sharded": "", "empty": ""}


def test_a_variant_is_a_layer_above_the_files_and_below_the_command_line(solve: Solve) -> None:
    resolved = solve(TEXT, variant="fast", overrides=("precision.dtype=fp32",))
    assert resolved.recipe.optimizer.lr == 2.0
    assert resolved.recipe.precision.dtype == "fp32"
    assert resolved.recipe.train.steps == 3
    layers = [(entry.value, entry.origin.layer) for entry in resolved.history["optimizer.lr"]]
    assert layers == [(1.0, "file r.yaml"), (2.0, "variant fast")]
    origin = resolved.origin("optimizer.lr")
    assert origin is not None
    assert origin.place == "r.yaml:6:21"


def test_a_variant_reads_values_and_names_as_the_recipe_does(solve: Solve) -> None:
    env = solve(TEXT, variant="fast").recipe.env
    assert env == {"VERSION": "1.10", "C++": "yes"}


def test_variants_of_extended_files_are_inherited_and_merge_by_name(solve: Solve) -> None:
    files = {"r.yaml": f"extends: a.yaml\n{TEXT}", "a.yaml": "variants: {fast: {train: {seed: 7}}, other: {}}\n"}
    resolved = solve(files, variant="fast")
    assert (resolved.recipe.train.seed, resolved.recipe.optimizer.lr) == (7, 2.0)
    assert list(resolved.variants) == ["fast", "other", "sharded", "empty"]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("variants: {a: {optmizer: {lr: 1.0}}}\n", "r.yaml:1:16", "no section or setting 'optmizer'"),
        ("variants: {a: {optimizer: {lr: x}}}\n", "r.yaml:1:32", "optimizer.lr must be a number"),
        ("variants: {a: {env: {TOKEN: x}}}\n", "r.yaml:1:29", "TOKEN"),
        ("variants: {a: {extends: strategy/fsdp}}\n", "r.yaml:1:16", "a variant has no `extends`"),
        ("variants: {a: {variants: {}}}\n", "r.yaml:1:16", "a variant has no `variants`"),
        ("variants: {a: {description: 1}}\n", "r.yaml:1:29", "must be a text"),
        ("variants: {a: 3}\n", "r.yaml:1:15", "must be a mapping"),
        ("variants: {base: {}}\n", "r.yaml:1:12", "without a variant"),
        ("variants: {a b: {}}\n", "r.yaml:1:12", "cannot name a variant"),
        ("variants: [a]\n", "r.yaml:1:11", "must be a mapping"),
        ("variants+: {a: {}}\n", "r.yaml:1:1", "no section or setting 'variants+'"),
    ],
)
def test_a_mistake_in_a_variant_is_found_at_its_place_whichever_is_chosen(
    places: Places, text: str, place: str, words: str
) -> None:
    ((found, what),) = places(f"{text}train: {{steps: 3}}\n")
    assert found == place
    assert words in what


def test_a_variant_that_is_not_there_is_an_error_with_the_nearest_one(refuse: Refuse) -> None:
    (error,) = refuse(TEXT, variant="fats")
    assert "no variant 'fats'" in error.what
    assert error.hint == "did you mean fast?"
    (error,) = refuse("train: {steps: 3}\n", variant="fast")
    assert error.hint == "it has none"


def test_the_json_schema_knows_variants_and_what_may_stand_in_them() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not list(validator.iter_errors(yaml.safe_load(TEXT.replace('"C++": yes', "A: b").replace("1.10", '"1.10"'))))
    for wrong in ("{a: {optmizer: {}}}", "{base: {}}", "{a: {variants: {}}}", "{a: {optimizer: {lr: x}}}"):
        assert list(validator.iter_errors(yaml.safe_load(f"variants: {wrong}"))), wrong
