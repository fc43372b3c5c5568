"""What is derived from the schema and the recipe: JSON Schema, reference, written recipes, shipped files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainkit.cli.file_system import FileSystem, shipped_root
from trainkit.errors import TrainkitError
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema.fields import members, open_keys, schema, short_forms, tagged_sections
from trainkit.recipe.schema.json_schema import json_schema, reference_text
from trainkit.recipe.validate import accepts, expected
from trainkit.recipe.yaml_writer import recipe_yaml, resolved_yaml

Solve = Callable[..., Resolved]
SHIPPED = FileSystem().shipped()
PRESETS = [name for name in SHIPPED if not name.startswith("recipes/")]
SHORT = "train: {steps: 3}\n"

RECIPES = [
    SHORT,
    SHORT + "strategy: {kind: zero3, offload_param: cpu}\nprecision: bf16\nname: '1.10'\n",
    SHORT + "env: {A: 'no', B: '1.10', C: '010', D: 'a: b'}\n",
    SHORT + "env: {E: \"x\\ny\\t\\u00e9\\x01\", F: '', 'no': x, '1': y, G: '${H}'}\n",
    SHORT + "program: {args: {a: 1.10, b: true, c: [1, on, null], d: null, 'e f': \"'\\\"\", g: '${x}'}}\n",
    SHORT + "program: {args: [--a, '1 2', '', '#', '${x}', '-', 'é', '\\n']}\nenv_from: [A]\n",
    "optimizer: {eps: 1e-30, args: {x: 1e+20}}\ntrain!: {epochs: 0.5}\ndata: {path: [a, 'b c'], include: '~'}\n",
    SHORT + "sample: {prompt: 'def \\${x}'}\nefficiency: {compile: true}\ndevices: {select: [GPU-1, 2]}\n",
]


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    document = json_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_shipped_file_satisfies_the_json_schema(name: str) -> None:
    tree = yaml.safe_load(Path(SHIPPED[name]).read_text(encoding="utf-8"))
    assert [error.message for error in validator().iter_errors(tree)] == []


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_and_starts_with_a_sentence(name: str) -> None:
    resolved = resolve(Request(None, "/", presets=(name,), overrides=("train.steps=1",)), FileSystem())
    assert not resolved.warnings
    assert Path(SHIPPED[name]).read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("recipes/")])
def test_a_shipped_recipe_that_may_train_on_cards_says_in_which_format(name: str) -> None:
    resolved = resolve(Request(SHIPPED[name], "/"), FileSystem())
    recipe = resolved.recipe
    if recipe.program.kind == "builtin" and recipe.devices.type != "cpu":
        assert resolved.given("precision.dtype") is not None


def test_the_presets_that_the_documentation_names_are_shipped() -> None:
    strategies = {
        "single",
        "ddp",
        "fsdp",
        "fsdp-shard-grad-op",
        "zero1",
        "zero2",
        "zero3",
        "zero2-offload",
        "zero3-offload",
    }
    assert {f"strategy/{name}" for name in strategies} <= set(PRESETS)
    assert {"devices/single-gpu", "devices/mps", "devices/cpu", "precision/bf16", "precision/tf32"} <= set(PRESETS)
    assert (shipped_root() / "configs").is_dir()


@pytest.mark.parametrize(
    ("tree", "valid"),
    [
        ({"precision": "bf16"}, True),
        ({"precision": "bf17"}, False),
        ({"precision": {"tf32": True}}, True),
        ({"batch": {"micro": "x"}}, False),
        ({"batch": {"micro": "${oc.env:M,8}"}}, True),
        ({"batch": {"global": 8}}, True),
        ({"batch": {"global_": 8}}, False),
        ({"batch": None}, True),
        ({"bacth": {}}, False),
        ({"extends": "a"}, True),
        ({"extends": ["a", "b"]}, True),
        ({"extends": 3}, False),
        ({"logging": {"report_to+": "tensorboard"}}, True),
        ({"logging": {"report_to+": ["x"]}}, False),
        ({"env!": {"A": "x"}}, True),
        ({"strategy!": {"kind": "ddp"}}, True),
        ({"strategy": {"bucket_mb": 5}}, True),
        ({"strategy": {"kind": "ddp", "offload": True}}, False),
        ({"efficiency": {"compile": True}}, True),
        ({"name+": ["x"]}, False),
    ],
)
def test_the_json_schema_agrees_with_the_recipe_language(tree: dict[str, Any], valid: bool) -> None:
    assert validator().is_valid(tree) is valid


def test_the_json_schema_is_stable_and_says_what_each_setting_means() -> None:
    assert json.dumps(json_schema()) == json.dumps(json_schema())
    assert "Peak learning rate." in json.dumps(json_schema())


@pytest.mark.parametrize("text", RECIPES)
def test_a_written_recipe_reads_back_as_the_same_recipe(solve: Solve, text: str) -> None:
    recipe = solve(text).recipe
    written = recipe_yaml(recipe)
    again = solve(written)
    assert again.recipe == recipe
    assert recipe_yaml(again.recipe) == written
    assert all(each.key.startswith("env.") for each in again.warnings)


@pytest.mark.parametrize(
    ("weak", "strong", "yielding"),
    [
        ("{global: 10, micro: 4}", "batch.accumulation=3", "global_"),
        ("{accumulation: 3, micro: 4}", "batch.global=10", "accumulation"),
        ("{micro: 4}", "batch={global: 10, accumulation: 3}", "micro"),
    ],
)
def test_three_corners_from_several_layers_are_written_so_that_they_cannot_contradict(
    solve: Solve, weak: str, strong: str, yielding: str
) -> None:
    resolved = solve(f"{SHORT}batch: {weak}\n", overrides=(strong,))
    batch = solve(resolved_yaml(resolved)).recipe.batch
    assert batch == resolved.recipe.batch.model_copy(update={yielding: "auto"})


def test_a_written_recipe_means_the_same_to_other_yaml_readers(solve: Solve) -> None:
    recipe = solve(SHORT + "optimizer: {eps: 1e-30, args: {x: 1e+20}}\n").recipe
    read = yaml.safe_load(recipe_yaml(recipe))
    assert (read["optimizer"]["eps"], read["optimizer"]["args"]) == (1e-30, {"x": 1e20})
    assert validator().is_valid(read)


def test_the_reference_names_every_setting_with_its_description() -> None:
    text = reference_text()
    for setting in schema().all_settings():
        if setting.key.endswith(".kind") and setting.variant:
            continue
        assert f"`{setting.key}`" in text
        assert setting.description in text


def test_every_setting_is_described_and_every_pattern_has_words() -> None:
    for setting in schema().all_settings():
        assert setting.description.endswith("."), setting.key
        assert "a value" not in expected(setting), setting.key
        metadata = [each for _, found in members(setting.annotation, setting.metadata) for each in found]
        patterned = any(getattr(each, "pattern", None) for each in metadata)
        assert patterned == bool(setting.expects and not accepts(setting.annotation, list)), setting.key


def test_the_table_of_the_schema_knows_its_special_places() -> None:
    of_libraries = {"optimizer.args", "data.args", "model.args", "model.config", "strategy.xla_settings"}
    of_libraries |= {"cluster.pod", "cluster.resources", "data.columns"}
    assert open_keys() == {"env", "program.args", "container.packages", "container.ulimits", *of_libraries}
    assert tagged_sections() == {"strategy", "model", "data", "cluster", "container"}
    assert short_forms() == {
        "precision": "dtype",
        "efficiency.compile": "enabled",
        "efficiency.gradient_checkpointing": "every",
        "checkpoint.push_to_hub": "repo",
        "model.moe": "experts",
        "model.quantize": "bits",
        "predict": "split",
        "profile": "steps",
    }


def test_the_disk_reads_what_is_there_and_says_what_is_not(tmp_path: Path) -> None:
    disk = FileSystem()
    (tmp_path / "a").write_bytes(b"x" * 5_000_000)
    assert len(disk.read(str(tmp_path / "a"))) == 4 * 1024 * 1024 + 1
    for path, error in ((tmp_path / "gone", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            disk.read(str(path))
    with pytest.raises(FileNotFoundError):
        disk.read("a\0b")
    assert not disk.exists("a\0b")


def test_a_folder_or_a_huge_file_as_recipe_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "huge.yaml").write_bytes(b"a: 1\n" * 2_100_000)
    for name, words in (("huge.yaml", "at most 4,194,304"), (".", "is a folder")):
        with pytest.raises(TrainkitError) as caught:
            resolve(Request(name, str(tmp_path), overrides=("train.steps=1",)), FileSystem())
        (found,) = caught.value.diagnostics
        assert words in found.what
