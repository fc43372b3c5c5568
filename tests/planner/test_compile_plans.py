"""What a plan says of torch.compile: backends that cannot train, that are gone, or that this torch does not list."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.made_up_recipes import MemoryFiles
from trainkit.errors import RecipeError
from trainkit.machine.facts import Facts, TorchBuild
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
AUTO = {"precision": {"dtype": "auto"}}


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        (("--torch_compile_backend=onnxrt",), "efficiency.compile.backend", "onnxrt cannot train"),
        (("--torch_compile_backend=ipex",), "efficiency.compile.backend", "ipex cannot train"),
        (
            ("--torch_compile_backend=aot_eager", "--torch_compile_mode=max-autotune"),
            "efficiency.compile.mode",
            "one of inductor's, and the backend is aot_eager",
        ),
    ],
)
def test_what_cannot_train_is_refused_with_the_reason(flags: tuple[str, ...], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(Request("r.yaml", "/w", overrides=flags), MemoryFiles({"/w/r.yaml": "train: {steps: 1}\n"}))
    (found,) = caught.value.diagnostics
    assert found.key == key
    assert words in found.what


@pytest.mark.parametrize(
    ("backend", "gpus", "severity", "words"),
    [
        ("nvfuser", 1, "note", "PyTorch no longer has nvFuser, and inductor replaces it"),
        ("aot_cudagraphs", 1, "note", "and cudagraphs replaces it"),
        ("cudagraphs", 0, "warning", "records nothing on cpu"),
        ("indcutor", 1, "blocker", "torch 2.13 has no compile backend indcutor"),
        ("aot_eager", 1, "note", "for finding faults"),
        ("inductor", 1, None, ""),
    ],
)
def test_a_plan_says_what_a_backend_is_here(
    layered: Layered, machine: Machine, backend: str, gpus: int, severity: str | None, words: str
) -> None:
    recipe = {**AUTO, "efficiency": {"compile": {"enabled": True, "backend": backend}}}
    notices = build_plan(layered(recipe), machine(gpus)).plan.notices
    assert [notice.severity for notice in notices] == ([severity] if severity else [])
    assert all(words in notice.what for notice in notices)


@pytest.mark.parametrize(("backend", "blocked"), [("another_packages", False), ("aot_ts", True), ("minifier", True)])
def test_the_backends_that_the_installed_torch_lists_are_those_that_there_are(
    layered: Layered, machine: Machine, backend: str, blocked: bool
) -> None:
    facts = replace(machine(), torch=TorchBuild("2.13.0", backends=("inductor", "another_packages", "minifier")))
    recipe = {**AUTO, "efficiency": {"compile": {"enabled": True, "backend": backend}}}
    notices = build_plan(layered(recipe), facts).plan.notices
    assert any(notice.severity == "blocker" and "no compile backend" in notice.what for notice in notices) is blocked


@pytest.mark.cli
def test_a_plan_asks_the_installed_torch_for_a_backend_that_not_every_torch_has(
    trainkit: Callable[..., subprocess.CompletedProcess[str]], clean_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    said = "print('a warning')\ndef list_backends(exclude_tags=None): return ['inductor', 'another_packages']\n"
    (tmp_path / "torch" / "__init__.py").write_text("from . import compiler\n")
    (tmp_path / "torch" / "compiler.py").write_text(said)
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    clean_environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    for backend, blocked in (("another_packages", False), ("aot_ts", True)):
        done = trainkit("plan", "quickstart", "--torch_compile", "--torch_compile_backend", backend)
        assert (f"has no compile backend {backend}" in done.stdout) is blocked, done.stderr


@pytest.mark.parametrize(("padding", "told"), [("longest", True), ("max_length", False)])
def test_a_plan_says_that_pairs_of_many_lengths_are_compiled_again(
    layered: Layered, machine: Machine, padding: str, told: bool
) -> None:
    recipe = {
        "model": {"kind": "hf", "architecture": "t5", "task": "seq2seq_lm"},
        "data": {"kind": "dataset", "path": "rows.jsonl", "padding": padding},
        "efficiency": {"compile": {"enabled": True}},
    }
    notices = build_plan(layered(recipe), machine(1)).plan.notices
    assert any("compiled again" in each.what for each in notices) == told


def test_only_backends_that_can_train_are_proposed(layered: Layered, machine: Machine) -> None:
    recipe = {**AUTO, "efficiency": {"compile": {"enabled": True, "backend": "indcutor"}}}
    (notice,) = build_plan(layered(recipe), machine(1)).plan.notices
    assert notice.hint == "did you mean inductor?"
    recipe = {**AUTO, "efficiency": {"compile": {"enabled": True, "backend": "my_own_thing"}}}
    (notice,) = build_plan(layered(recipe), machine(1)).plan.notices
    proposed = notice.hint.removeprefix("choose one of ").split(", ")
    assert "inductor" in proposed
    assert not {"tvm", "openxla_eval"} & set(proposed)


def test_a_torch_that_nothing_is_known_of_is_left_to_the_trainer(layered: Layered, machine: Machine) -> None:
    recipe = {**AUTO, "efficiency": {"compile": {"enabled": True, "backend": "something_new"}}}
    facts = machine(1, packages={"torch": "9.9.0", "numpy": "2.0", "safetensors": "0.8.0"})
    assert build_plan(layered(recipe), facts).plan.notices == ()


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_the_whole_model_is_not_compiled_where_blocks_are_hooked(
    layered: Layered, machine: Machine, strategy: str
) -> None:
    def recipe(scope: str) -> dict[str, Any]:
        return {"strategy": {"kind": strategy}, "efficiency": {"compile": {"enabled": True, "scope": scope}}}

    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe("model")), machine())
    assert "efficiency.compile.scope: blocks" in caught.value.diagnostics[0].hint
    for scope in ("auto", "blocks"):
        assert build_plan(layered(recipe(scope)), machine()).plan.strategy.kind == strategy


GRAPHS: tuple[dict[str, str], ...] = ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"})
ACCUMULATING: dict[str, Any] = {"batch": {"global": 8, "micro": 2}}


def refused(layered: Layered, facts: Facts, compiled: dict[str, str], **recipe: Any) -> list[tuple[str, str]]:
    """(why, hint) of each error of such a plan; none where it can run."""
    try:
        build_plan(layered({"efficiency": {"compile": {"enabled": True, **compiled}}, **recipe}), facts)
    except RecipeError as error:
        return [(each.why, each.hint) for each in error.diagnostics]
    return []


@pytest.mark.parametrize("compiled", [*GRAPHS, {"backend": "aot_cudagraphs"}])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2"])
def test_cuda_graphs_are_refused_with_accumulation(
    layered: Layered, machine: Machine, compiled: dict[str, str], strategy: str
) -> None:
    recipe: dict[str, Any] = {"strategy": {"kind": strategy}}
    ((why, hint),) = refused(layered, machine(1), compiled, **recipe, **ACCUMULATING)
    assert "over those that are being accumulated" in why
    assert "max-autotune-no-cudagraphs" in hint
    assert "mode: default" in hint
    assert refused(layered, machine(1), compiled, **recipe, batch={"global": 8, "micro": 8}) == []


@pytest.mark.parametrize("compiled", GRAPHS)
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_cuda_graphs_are_refused_where_weights_are_gathered(
    layered: Layered, machine: Machine, compiled: dict[str, str], strategy: str
) -> None:
    ((why, _),) = refused(layered, machine(2), compiled, strategy={"kind": strategy}, batch={"accumulation": 1})
    assert "gathers them anew" in why


@pytest.mark.parametrize(
    ("gpus", "compiled", "more"),
    [
        (0, {"mode": "reduce-overhead"}, {}),
        (0, {"mode": "max-autotune"}, {"strategy": {"kind": "fsdp"}}),
        (1, {"mode": "max-autotune-no-cudagraphs"}, {}),
        (1, {"mode": "default"}, {}),
        (1, {"mode": "max-autotune", "enabled": False}, {}),
        (1, {"mode": "reduce-overhead"}, {"program": {"kind": "hf", "script": "t.py"}}),
    ],
)
def test_what_records_no_graphs_goes_with_accumulation(
    layered: Layered, machine: Machine, gpus: int, compiled: dict[str, str], more: dict[str, Any]
) -> None:
    assert refused(layered, machine(gpus), compiled, **ACCUMULATING, **more) == []
