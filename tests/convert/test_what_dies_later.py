"""What would end a program of the user's after its start is said in the plan: values, names, strategies of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.convert.reading import HERE, comments, context, imported, read, settings
from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved

Machine = Callable[..., Facts]
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\nHfArgumentParser(TrainingArguments)"


def planned(line: str, machine: Machine, source: str = TRAINER, **packages: str) -> Plan:
    """The plan of a launch line for a script."""
    files = {"train.py": source}
    has = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", **packages}
    facts = machine(2, packages={name: each for name, each in has.items() if each})
    return build_plan(read(imported(line, files), files), facts).plan


def said(plan: Plan, severity: str) -> str:
    return " ".join(f"{each.what} {each.hint}" for each in plan.notices if each.severity == severity)


@pytest.mark.parametrize(
    ("words", "severity", "what"),
    [
        ("--torch_compile_backend nvfuser", "blocker", "nvfuser, which is gone: PyTorch no longer has nvFuser"),
        ("--torch_compile_backend aot_cudagraphs", "blocker", "write cudagraphs"),
        ("--optim adamw_hf", "blocker", "write adamw_torch"),
        ("--use_ipex", "warning", "--use_ipex, which TrainingArguments of transformers 5.23.0 no longer have"),
        ("--jit_mode_eval", "warning", "--jit_mode_eval, which TrainingArguments"),
        ("--xpu_backend ccl", "note", "reaches it as --ddp_backend ccl"),
    ],
)
def test_a_dead_value_is_known_for_a_script_on_trainer(words: str, severity: str, what: str, machine: Machine) -> None:
    assert what in said(planned(f"python train.py {words}", machine), severity)
    assert what not in said(planned("python train.py --optim adamw_torch", machine), severity)


def test_the_package_of_an_optimizer_is_asked_for_where_trainer_makes_it(machine: Machine) -> None:
    own = ("program.kind=hf", "program.script=train.py", "optimizer.name=adamw_apex_fused")
    has = {"torch": "2.13.0", "transformers": "4.57.6", "accelerate": "1.12.0"}

    def blockers(asked: tuple[str, ...], **more: str) -> str:
        return said(build_plan(recipe(asked, {}), machine(1, packages={**has, **more})).plan, "blocker")

    assert "requires apex" in blockers(own)
    assert "apex" not in blockers(own, apex="0.1")
    assert "apex" not in blockers(own[:2])


@pytest.mark.parametrize("word", ["deepspeed='ds.json'", "fsdp='full_shard auto_wrap'"])
def test_a_strategy_in_the_source_is_named(word: str, machine: Machine) -> None:
    source = f"from transformers import Trainer, TrainingArguments\nargs = TrainingArguments({word})\n"
    plan = planned("torchrun --nproc_per_node 2 train.py", machine, source)
    assert f"line 2 of train.py says {word}: Trainer sets that strategy up" in said(plan, "warning")
    assert "Trainer sets that" not in said(planned("python train.py", machine, source.replace(word, "")), "warning")


def recipe(overrides: tuple[str, ...], files: dict[str, Any]) -> Resolved:
    there = context({"r.yaml": "train: {steps: 3}\n", **files})
    return resolve(Request(recipe=f"{HERE}/r.yaml", cwd=HERE, overrides=overrides), there.files)


def test_a_file_of_deepspeeds_means_the_same_as_flag_and_import(machine: Machine) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "overlap_comm": True}
    files = {"z.json": json.dumps({"zero_optimization": zero})}
    by_flag = recipe(("--deepspeed", "z.json"), files)
    assert [each.severity for each in by_flag.warnings] == ["warning"]
    assert "gather_16bit True is left out, for it cannot reach a program of kind builtin" in by_flag.warnings[0].what
    text = imported("z.json", files)
    one, other = by_flag.recipe.strategy.model_dump(), read(text, files).recipe.strategy.model_dump()
    assert all(one[name] == other[name] for name in ("kind", "gather_16bit", "overlap_comm"))
    assert "strategy.gather_16bit True is left out" in comments(text)
    build_plan(by_flag, machine(2))


def test_no_shard_is_said_to_be_ddp() -> None:
    found = recipe(("--fsdp", "no_shard"), {})
    assert found.recipe.strategy.kind == "ddp"
    assert "--fsdp no_shard shards nothing: the strategy is ddp" in [each.what for each in found.warnings]


def test_a_class_that_the_own_model_does_not_have_is_refused(machine: Machine) -> None:
    named = (
        "model.kind=gpt",
        "strategy.kind=fsdp",
        "strategy.auto_wrap=transformer",
        "strategy.wrap_classes=[Block, BertLayer]",
    )
    with pytest.raises(RecipeError, match="the model has no module of class BertLayer") as caught:
        build_plan(recipe(named, {}), machine(2))
    assert "MoeBlock" in caught.value.diagnostics[0].hint
    build_plan(recipe((*named[:3], "strategy.wrap_classes=[Block]"), {}), machine(2))


def test_a_hostfile_gives_its_nodes() -> None:
    files = {"hosts": "# mine\nn1 slots=4\n\nn2 slots=4\n", "uneven": "n1 slots=4\nn2 slots=2\n", "one": "n1 slots=2"}
    found = settings(imported("deepspeed --hostfile hosts train.py", files))
    assert (found["nodes.count"], found["nodes.processes_per_node"], found["nodes.rendezvous"]) == (2, 4, "n1:29500")
    assert found["launcher.kind"] == "torchrun"
    named = "deepspeed --hostfile hosts --num_nodes 2 --num_gpus 2 --master_addr h --master_port 1 train.py"
    assert settings(imported(named, files))["nodes.rendezvous"] == "h:1"
    alone = settings(imported("deepspeed --hostfile one train.py", files))
    assert ("nodes.count" not in alone, alone["nodes.processes_per_node"]) == (True, 2)
    with pytest.raises(RecipeError, match="different numbers of slots"):
        imported("deepspeed --hostfile uneven train.py", files)
    assert "are not known here" in comments(imported("deepspeed --hostfile gone train.py"))


@pytest.mark.parametrize("value", [{}, [1]])
def test_a_value_of_the_wrong_type_in_a_file_is_named(value: Any, machine: Machine) -> None:
    file = json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": value}})
    with pytest.raises(RecipeError, match=r"reduce_bucket_size in the DeepSpeed file is .*, and one value is expected"):
        build_plan(recipe(("--deepspeed", "z.json"), {"z.json": file}), machine(2))
    with pytest.raises(RecipeError, match="and one value is expected"):
        imported("z.json", {"z.json": file})
