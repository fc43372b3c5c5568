"""The plan as a whole: decisions with their reasons, digests, resuming, and what made each part."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan, Variable, plan_to_json, text
from trainkit.machine.facts import Facts
from trainkit.planner.build import SavedCheckpoint, build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]


def words(plan: Plan) -> list[str]:
    return [str(word) for word in plan.commands[0].program]


@pytest.mark.parametrize(
    ("recipe", "launcher", "reason"),
    [
        ({}, "python", "one process needs no launcher"),
        ({"strategy": {"kind": "ddp"}}, "torchrun", "2 processes"),
        ({"strategy": {"kind": "zero2"}}, "torchrun", "2 processes"),
        ({"strategy": {"kind": "fsdp"}, "nodes": {"processes_per_node": 1}}, "python", "one process"),
        ({"launcher": {"kind": "torchrun"}}, "torchrun", "asks for it"),
    ],
)
def test_the_launcher_follows_from_the_number_of_processes_unless_one_is_asked_for(
    layered: Layered, machine: Machine, recipe: dict[str, Any], launcher: str, reason: str
) -> None:
    plan = build_plan(layered(recipe), machine()).plan
    assert plan.launcher.kind == launcher
    assert reason in plan.launcher.reason


def test_the_built_in_trainer_is_told_every_decision_in_one_file(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"strategy": {"kind": "zero2"}, "batch": {"global": 64, "micro": 4}}), machine()).plan
    files = {file.path: json.loads(file.content) for file in plan.files}
    assert set(files) == {"trainer.json", "deepspeed.json"}
    settings = files["trainer.json"]
    sides = {"global_": 64, "micro": 4, "accumulation": 8, "ranks": 2, "eval_micro": 4}
    assert settings["batch"] == {**sides, "search": []}
    assert (settings["device"], settings["dtype"], settings["deepspeed"]) == ("cpu", "fp32", "deepspeed.json")
    assert settings["recipe"]["batch"]["global"] == 64
    assert settings["training_digest"] == plan.training_digest
    deepspeed = files["deepspeed.json"]
    assert (deepspeed["train_batch_size"], deepspeed["gradient_accumulation_steps"]) == (64, 8)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ({"script": "train.py"}, ["train.py"]),
        ({"module": "pkg.train"}, ["-m", "pkg.train"]),
        ({"script": "-odd.py"}, ["./-odd.py"]),
        ({"script": "t.py", "args": ["--a", "b c", "", "--", "$x"]}, ["t.py", "--a", "b c", "", "--", "$x"]),
        (
            {"script": "t.py", "args": {"lr": 0.5, "do_train": True, "no": False, "nil": None, "ids": [1, "b"]}},
            ["t.py", "--lr", "0.5", "--do_train", "--ids", "1", "b"],
        ),
    ],
)
def test_a_program_of_ones_own_is_started_with_its_arguments_word_for_word(
    layered: Layered, machine: Machine, program: dict[str, Any], expected: list[str]
) -> None:
    plan = build_plan(layered({"program": {"kind": "torch", **program}}), machine()).plan
    assert words(plan) == ["/opt/python", *expected]
    assert [file.path for file in plan.files] == ["expected.json"]


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ({"program": {"script": "a.py"}}, "program.script cannot reach a program of kind builtin"),
        ({"program": {"args": ["--x"]}}, "program.args cannot reach a program of kind builtin"),
        ({"program": {"local_rank": True}}, "program.local_rank cannot reach a program of kind builtin"),
        (
            {"program": {"kind": "torch", "script": "a.py"}, "checkpoint": {"resume": "auto"}},
            "cannot reach a program of kind torch",
        ),
    ],
)
def test_a_program_section_that_contradicts_itself_is_an_error(
    layered: Layered, machine: Machine, recipe: dict[str, Any], what: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine())
    assert what in caught.value.diagnostics[0].what
    assert caught.value.diagnostics[0].hint


def test_several_nodes_need_a_place_to_meet(layered: Layered, machine: Machine) -> None:
    plan = build_plan(layered({"strategy": {"kind": "ddp"}, "nodes": {"count": 2}}), machine()).plan
    assert any("meet at the first one of the scheduler's list" in notice.what for notice in plan.notices)
    placed = {"strategy": {"kind": "ddp"}, "nodes": {"count": 2, "rendezvous": "[::1]:29400"}}
    plan = build_plan(layered(placed), machine()).plan
    assert plan.notices == ()
    assert plan.rendezvous == "[::1]:29400"
    assert "--rdzv-endpoint=[<master_addr>]:<port>" in [str(word) for word in plan.commands[0].launcher]


SAME_TRAINING: list[dict[str, Any]] = [
    {"strategy": {"kind": "ddp"}},
    {"strategy": {"kind": "zero2"}, "launcher": {"kind": "deepspeed"}},
    {"batch": {"global": 16, "micro": 2}},
    {"train": {"steps": 900}},
    {"logging": {"every_steps": 1}, "checkpoint": {"every_steps": 7}, "output": {"root": "elsewhere"}},
    {"name": "other", "eval": {"every_steps": 5}, "data": {"workers": 2, "cache": "/tmp/x"}},
    {"efficiency": {"gradient_checkpointing": True}},
]
OTHER_TRAINING: list[dict[str, Any]] = [
    {"optimizer": {"lr": 1.0}},
    {"schedule": {"warmup_steps": 3}},
    {"model": {"layers": 2}},
    {"data": {"path": "corpus"}},
    {"data": {"kind": "random"}},
    {"data": {"kind": "random", "classes": 2}},
    {"data": {"kind": "dataset", "path": "rows", "tokenizer": "bytes"}},
    {"data": {"kind": "dataset", "path": "rows", "tokenizer": "bytes", "max_rows": 100}},
    {"data": {"kind": "dataset", "path": "rows", "tokenizer": "bytes", "train_on_prompts": True}},
    {"batch": {"global": 32}},
    {"train": {"seed": 1}},
    {"train": {"max_grad_norm": 0.0}},
    {"precision": {"dtype": "bf16"}},
    {"peft": {"kind": "lora"}},
    {"peft": {"kind": "lora", "path": "adapters"}},
]
BASE: dict[str, Any] = {"batch": {"global": 16}, "train": {"steps": 100}}


def test_the_training_digest_stands_for_what_decides_training_and_for_nothing_else(
    layered: Layered, machine: Machine
) -> None:
    base = build_plan(layered(BASE), machine()).plan
    for recipe in SAME_TRAINING:
        other = build_plan(layered(BASE, recipe), machine()).plan
        assert other.training_digest == base.training_digest, recipe
        assert other.recipe_digest != base.recipe_digest, recipe
    digests = [build_plan(layered(BASE, recipe), machine()).plan.training_digest for recipe in OTHER_TRAINING]
    assert len({base.training_digest, *digests}) == 1 + len(OTHER_TRAINING)


def test_a_plan_says_how_many_rows_are_read_and_that_prompts_are_learned(layered: Layered, machine: Machine) -> None:
    for data, said in (
        ({"path": "rows"}, "at most the first 100 rows; 5% of the rows held out; prompts are learned too"),
        ({"streaming": True, "mix": [{"path": "a"}, {"path": "b"}]}, "at most the first 100 rows of each; the first 1"),
    ):
        asked = {"data": {"kind": "dataset", "max_rows": 100, "train_on_prompts": True, **data}}
        assert said in dict(build_plan(layered(BASE, asked), machine()).plan.training)["data"]


ROWS: dict[str, Any] = {"kind": "dataset", "path": "rows.jsonl", "tokenizer": "llama"}
BERT: dict[str, Any] = {"kind": "hf", "architecture": "bert", "task": "masked_lm"}


@pytest.mark.parametrize(
    ("recipe", "digest"),
    [
        ({}, "2566c0d6b4a9e148279e94a47ec2fb1cf762ee4bbbbe790c540d1a699d43c117"),
        (
            {"model": {"kind": "hf", "path": "llama"}, "peft": {"kind": "lora"}, "data": ROWS},
            "ec980e1031288eb3e00e9cde10576e88974c318eb5ab4e75ce8499e2953ac462",
        ),
        (
            {"model": BERT, "data": {"kind": "dataset", "path": "rows"}},
            "8bc9f7d274516d8db77717ba02becc7aba82318a76e13058679f77f3dfaff085",
        ),
    ],
)
def test_a_run_goes_on_from_checkpoints_of_releases_that_lack_newer_settings(
    recipe: dict[str, Any], digest: str, layered: Layered, machine: Machine
) -> None:
    assert build_plan(layered(BASE, recipe), machine()).plan.training_digest == digest


def test_auto_resumes_from_the_newest_checkpoint_of_the_same_training(layered: Layered, machine: Machine) -> None:
    resolved = layered(BASE, {"checkpoint": {"resume": "auto"}})
    digest = build_plan(resolved, machine()).plan.training_digest
    saved = [
        SavedCheckpoint("/runs/c/step-00000030", 30, "another", "c"),
        SavedCheckpoint("/runs/b/step-00000020", 20, digest, "b"),
        SavedCheckpoint("/runs/a/step-00000090", 90, digest, "a"),
    ]
    plan = build_plan(resolved, machine(), saved).plan
    assert (plan.resume.path, plan.resume.step) == ("/runs/b/step-00000020", 20)
    assert "of run b" in plan.resume.reason
    assert plan.commands[0].argv[-1] == text("--resume=", Variable.RESUME)  # bound when the run starts


def test_auto_starts_afresh_when_nothing_fits_and_says_so(layered: Layered, machine: Machine) -> None:
    resolved = layered(BASE, {"checkpoint": {"resume": "auto"}})
    plan = build_plan(resolved, machine()).plan
    assert (plan.resume.path, plan.notices) == (None, ())
    plan = build_plan(resolved, machine(), [SavedCheckpoint("/runs/c/step-00000030", 30, "another", "c")]).plan
    assert plan.resume.path is None
    assert "none of the 1 complete checkpoints" in plan.notices[0].what


@pytest.mark.parametrize(
    ("path", "step", "severity"),
    [
        ("/runs/c/checkpoints/step-00000030", 30, "warning"),  # known, of another training
        ("/elsewhere/step-00000007/", 7, None),
        ("/elsewhere/model", 0, "blocker"),
    ],
)
def test_a_named_checkpoint_is_taken_as_named(
    layered: Layered, machine: Machine, path: str, step: int, severity: str | None
) -> None:
    saved = [SavedCheckpoint("/runs/c/checkpoints/step-00000030", 30, "another", "c")]
    plan = build_plan(layered({"checkpoint": {"resume": path}}), machine(), saved).plan
    assert (plan.resume.path, plan.resume.step) == (path, step)
    assert [notice.severity for notice in plan.notices] == ([severity] if severity else [])


def test_what_never_resumes_ignores_checkpoints(layered: Layered, machine: Machine) -> None:
    resolved = layered(BASE)
    digest = build_plan(resolved, machine()).plan.training_digest
    assert (
        build_plan(resolved, machine(), [SavedCheckpoint("/r/step-00000001", 1, digest, "r")]).plan.resume.path is None
    )


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_every_part_of_a_plan_can_say_what_made_it(layered: Layered, machine: Machine, launcher: str) -> None:
    recipe = {"strategy": {"kind": "zero2"}, "launcher": {"kind": launcher}, "env": {"A": "1"}, "env_from": ["B"]}
    planned = build_plan(layered(recipe), machine(2))
    plan, known = planned.plan, {*planned.provenance.parts, *planned.provenance.rules}
    wanted = {f"commands.0.argv.{position}" for position in range(len(plan.commands[0].argv))}
    wanted |= {f"environment.{name}" for name, _ in plan.environment.set}
    wanted |= {f"environment.{name}" for name in (*plan.environment.unset, *plan.environment.take)}
    for file in plan.files:
        assert any(part.startswith(f"files.{file.path}.") for part in known)
    assert wanted <= known
    named = {key for keys in planned.provenance.parts.values() for key in keys}
    settings = resolved_keys(plan_to_json(plan))
    assert all(key.startswith("env.") or key in settings for key in named)


def resolved_keys(data: dict[str, Any]) -> set[str]:
    """Dotted keys of the recipe in a plan's trainer.json, sections included."""

    def walk(value: Any, prefix: str) -> set[str]:
        inner = value.items() if isinstance(value, dict) else ()
        return {prefix}.union(*(walk(item, f"{prefix}.{key}" if prefix else key) for key, item in inner))

    return walk(json.loads(data["files"]["trainer.json"])["recipe"], "")


@pytest.mark.parametrize(("root", "shown"), [("x//y/", "x/y"), ("/", "/"), ("//a", "/a"), ("./x", "./x")])
def test_folders_are_shown_with_single_slashes(layered: Layered, machine: Machine, root: str, shown: str) -> None:
    assert build_plan(layered({"output": {"root": root}}), machine()).plan.output_root == shown


def test_planning_thousands_of_nodes_takes_no_more_work_than_two(layered: Layered, machine: Machine) -> None:
    def calls(nodes: int) -> int:
        resolved = layered({"strategy": {"kind": "fsdp"}, "nodes": {"count": nodes, "rendezvous": "a:1"}})
        counted: Counter[str] = Counter()
        sys.setprofile(lambda frame, event, value: counted.update((event,)))
        try:
            build_plan(resolved, machine(8))
        finally:
            sys.setprofile(None)
        return counted["call"]

    calls(2)  # what is computed once
    assert calls(4096) < 1.1 * calls(2)
