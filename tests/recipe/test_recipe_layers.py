"""Layers: what a recipe extends, the order in which layers win, the environment, presets on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.made_up_recipes import MemoryFiles
from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
Places = Callable[..., list[tuple[str, str]]]

SHORT = "train: {steps: 3}\n"


def test_later_layers_win_in_the_documented_order(solve: Solve) -> None:
    files = {
        "r.yaml": "extends: [a.yaml, b.yaml]\ntrain: {steps: 3}\noptimizer: {lr: 3.0}\n",
        "a.yaml": "optimizer: {lr: 1.0, beta1: 0.1, beta2: 0.1, eps: 0.1}\n",
        "b.yaml": "optimizer: {lr: 2.0, beta1: 0.2, beta2: 0.2, eps: 0.2}\n",
        "c.yaml": "optimizer: {lr: 4.0, beta1: 0.4, beta2: 0.4}\n",
    }
    environ = {"TRAINKIT__OPTIMIZER__LR": "5.0", "TRAINKIT__OPTIMIZER__BETA1": "0.5"}
    resolved = solve(files, presets=("c.yaml",), environ=environ, overrides=("optimizer.lr=6.0",))
    optimizer = resolved.recipe.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (6.0, 0.5, 0.4, 0.2)
    layers = [(entry.value, entry.origin.layer) for entry in resolved.history["optimizer.lr"]]
    assert layers == [
        (1.0, "file a.yaml"),
        (2.0, "file b.yaml"),
        (3.0, "file r.yaml"),
        (4.0, "file c.yaml"),
        (5.0, "environment"),
        (6.0, "flag"),
    ]


def test_presets_are_found_by_name_and_files_relative_to_the_file_that_names_them(solve: Solve) -> None:
    files = {
        "r.yaml": "extends: [strategy/fsdp, sub/a.yaml]\n",
        "sub/a.yaml": "extends: ./b.yaml\n",
        "sub/b.yaml": SHORT,
    }
    resolved = solve(files)
    assert resolved.recipe.strategy.kind == "fsdp"
    origin = resolved.origin("train.steps")
    assert origin is not None
    assert (origin.layer, origin.place) == ("file sub/b.yaml", "sub/b.yaml:1:16")
    kind = resolved.origin("strategy.kind")
    assert kind is not None
    assert kind.layer == "preset strategy/fsdp"


def test_a_file_that_two_others_extend_counts_once_below_both(solve: Solve) -> None:
    files = {
        "r.yaml": "extends: [a.yaml, b.yaml]\n",
        "a.yaml": "extends: c.yaml\ntrain: {seed: 2}\n",
        "b.yaml": "extends: c.yaml\n",
        "c.yaml": "train: {steps: 3, seed: 1}\n",
    }
    resolved = solve(files)
    assert resolved.recipe.train.seed == 2
    assert [entry.value for entry in resolved.history["train.seed"]] == [1, 2]


def test_a_preset_on_top_wins_over_the_file_even_where_the_file_extends_it(solve: Solve) -> None:
    text = "extends: precision/bf16\nprecision: fp32\n" + SHORT
    assert solve(text).recipe.precision.dtype == "fp32"
    assert solve(text, presets=("precision/bf16",)).recipe.precision.dtype == "bf16"


def test_presets_and_flags_alone_make_a_recipe(solve: Solve) -> None:
    resolved = solve({}, None, presets=("strategy/zero2", "length/short"), overrides=("--seed", "7"))
    assert (resolved.recipe.strategy.kind, resolved.recipe.train.steps, resolved.recipe.train.seed) == ("zero2", 3, 7)


def test_a_circle_is_shown_as_a_chain_at_the_line_that_closes_it(places: Places) -> None:
    files = {"r.yaml": "extends: a.yaml\n" + SHORT, "a.yaml": "# x\nextends: [b.yaml]\n", "b.yaml": "extends: r.yaml\n"}
    assert places(files) == [("b.yaml:1:10", "`extends` goes in a circle: r.yaml → a.yaml → b.yaml → r.yaml")]


@pytest.mark.parametrize(
    ("text", "place", "words", "hint"),
    [
        ("extends: strategy/fspd\n", "r.yaml:1:10", "no preset 'strategy/fspd'", "strategy/fsdp?"),
        ("extends: ./gone.yaml\n", "r.yaml:1:10", "no file gone.yaml", "check the path"),
        ("extends: /etc/shadow\n", "r.yaml:1:10", "/etc/shadow is not a recipe", "name a recipe"),
        ("extends: [strategy/fsdp, 3]\n", "r.yaml:1:26", "expected a preset or a path", "text"),
        ("extends: {a: 1}\n", "r.yaml:1:10", "must be a preset, a path, or a list", "strategy/fsdp"),
        ("extends: [a.yaml, a.yaml]\n", "r.yaml:1:19", "extended twice", "keep"),
        ("extends: strategy/fsdp.yaml\n", "r.yaml:1:10", "no file strategy/fsdp.yaml", "`strategy/fsdp`"),
        ("extends+: strategy/fsdp\n", "r.yaml:1:1", "no section or setting 'extends+'", "did you mean extends?"),
    ],
)
def test_a_wrong_extends_is_an_error_at_its_place(refuse: Refuse, text: str, place: str, words: str, hint: str) -> None:
    (error,) = refuse({"r.yaml": text + SHORT, "a.yaml": ""})
    assert error.origin is not None
    assert error.origin.place == place
    assert words in error.what
    assert hint in error.hint


def test_a_shipped_recipe_is_extended_by_the_name_by_which_run_finds_it() -> None:
    shipped = {"recipes/quick": "/s/recipes/quick.yaml", "recipes/fsdp": "/s/r.yaml", "strategy/fsdp": "/s/p.yaml"}
    texts = {"/w/r.yaml": "extends: quick\n", "/s/recipes/quick.yaml": SHORT, "/w/both.yaml": "extends: fsdp\n"}
    files = MemoryFiles(texts, shipped)
    origin = resolve(Request("r.yaml", "/w"), files).origin("train.steps")
    assert origin is not None
    assert origin.layer == "shipped quick"
    with pytest.raises(RecipeError) as caught:
        resolve(Request("both.yaml", "/w"), files)
    (error,) = caught.value.diagnostics
    assert error.hint == "did you mean strategy/fsdp, or recipes/fsdp?"
    assert "among what `trainkit ls` lists, and in no folder" in error.why


def test_a_chain_of_too_many_files_is_refused(refuse: Refuse) -> None:
    files = {f"f{n}.yaml": f"extends: f{n + 1}.yaml\n" for n in range(60)} | {"r.yaml": "extends: f0.yaml\n" + SHORT}
    (error,) = refuse(files)
    assert "files deep" in error.what


def test_a_layer_that_cannot_be_read_does_not_hide_the_errors_of_others(places: Places) -> None:
    files = {
        "r.yaml": "extends: [a.yaml, b.yaml]\ntrain: {steps: -1}\n",
        "a.yaml": "a: [1\n",
        "b.yaml": "optimizer: {lr: x}\n",
    }
    assert [place for place, _ in places(files)] == ["a.yaml:1:4", "b.yaml:1:17", "r.yaml:2:16"]


def test_a_missing_recipe_is_one_clear_error(places: Places) -> None:
    assert ("gone.yaml", "there is no file gone.yaml") in places({}, "gone.yaml", overrides=("train.steps=1",))


@pytest.mark.parametrize("text", ["- 1\n", "3\n", "just words\n"])
def test_a_recipe_that_is_no_mapping_is_refused(places: Places, text: str) -> None:
    found = places(text, overrides=("train.steps=1",))
    assert len(found) == 1
    assert found[0][0] == "r.yaml:1:1"
    assert "the recipe is" in found[0][1]


def test_an_empty_section_gives_nothing(solve: Solve) -> None:
    assert "batch" not in solve("batch:\n" + SHORT).tree


@pytest.mark.parametrize(
    ("variable", "value", "key", "expected"),
    [
        ("TRAINKIT__BATCH__EVAL_MICRO", "4", "batch.eval_micro", 4),
        ("TRAINKIT__LOGGING__REPORT_TO", "[tensorboard]", "logging.report_to", ["tensorboard"]),
        ("TRAINKIT__PRECISION", "bf16", "precision.dtype", "bf16"),
        ("TRAINKIT__NAME", "007", "name", "007"),
        ("TRAINKIT__STRATEGY", "{kind: zero3}", "strategy.kind", "zero3"),
        ("TRAINKIT__EFFICIENCY__COMPILE__ENABLED", "true", "efficiency.compile.enabled", True),
        ("TRAINKIT__ENV__NCCL_DEBUG", "INFO", "env.NCCL_DEBUG", "INFO"),
        ("TRAINKIT__ENV__MY__VAR", "1.10", "env.MY__VAR", "1.10"),
        ("TRAINKIT__PROGRAM__ARGS__max_Len", "1.10", "program.args.max_Len", "1.10"),
    ],
)
def test_the_environment_is_a_layer(solve: Solve, variable: str, value: str, key: str, expected: Any) -> None:
    resolved = solve(SHORT, environ={variable: value, "TRAINKIT_OTHER": "x", "HOME": "/h"})
    entry = resolved.history[key][-1]
    assert entry.value == expected
    assert (entry.origin.layer, entry.origin.place) == ("environment", variable)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TRAINKIT__": "1"}, "names no setting"),
        ({"TRAINKIT__BATCH__": "1"}, "names no setting"),
        ({"TRAINKIT__EXTENDS": "a"}, "cannot extend"),
        ({"TRAINKIT__TRAIN__SEED": "1", "TRAINKIT__train__seed": "2"}, "the same key"),
        ({"TRAINKIT__TRAIN__SEEED": "1"}, "train has no setting 'seeed'"),
        ({"TRAINKIT__TRAIN__SEED": "[1"}, "cannot be read"),
        ({"TRAINKIT__TRAIN__SEED": "x"}, "train.seed must be"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(places: Places, environ: dict[str, str], words: str) -> None:
    ((place, what),) = places(SHORT, environ=environ)
    assert place in environ
    assert words in what


@pytest.mark.parametrize(
    "text",
    [
        "extends: ./gone.yaml\n",
        "extends: strategy/fsdpp\nstrategy: {sharding: full_shard}\n",
        "extends: gone\nnodes: {processes_per_node: 2}\n",
        "extends: ./gone.yaml\nprogram: {kind: torch}\n",
        "extends: ./gone.yaml\nprogram: {script: x.py}\n",
        "train: [\n",
        "- a\n",
    ],
)
def test_a_layer_that_cannot_be_read_is_the_only_error(refuse: Refuse, text: str) -> None:
    assert len(refuse({"r.yaml": text, "x.py": ""})) == 1


def test_mistakes_beside_a_missing_layer_are_still_reported(refuse: Refuse) -> None:
    errors = refuse("extends: ./gone.yaml\nbatch: {micro: x}\nstrategy: {kind: fsdp, bucket_mb: 1}\n")
    assert [each.key for each in errors] == ["", "batch.micro", "strategy.bucket_mb"]


@pytest.mark.parametrize(
    ("word", "hint"), [("fsdp", "strategy/fsdp"), ("short", "length/short"), ("fsdp.yaml", "strategy/fsdp")]
)
def test_a_preset_named_without_its_folder_is_suggested(refuse: Refuse, word: str, hint: str) -> None:
    (error,) = refuse(f"extends: {word}\n")
    assert hint in error.hint


@pytest.mark.parametrize(("word", "hint"), [("r", "r.yaml"), ("tiney", "tiny"), ("nothing-like-it", "trainkit ls")])
def test_a_recipe_that_is_not_there_is_suggested(word: str, hint: str) -> None:
    files = MemoryFiles({"/w/r.yaml": "", "/s/tiny.yaml": ""}, {"recipes/tiny": "/s/tiny.yaml"})
    with pytest.raises(RecipeError) as caught:
        resolve(Request(word, "/w"), files)
    (error,) = caught.value.diagnostics
    assert hint in error.hint
