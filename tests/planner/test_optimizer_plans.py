"""What a plan says of an optimizer: refusals, missing packages, warnings; and names that people bring along."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest

from tests.made_up_recipes import MemoryFiles
from trainkit.errors import RecipeError, TrainingError
from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Facts
from trainkit.optimizers import MOMENTS, OPTIMIZERS, OTHER_NAMES
from trainkit.planner.build import build_plan
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved
from trainkit.recipe.schema.training import OptimizerName

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
NAMES: tuple[str, ...] = get_args(OptimizerName)
EVERYTHING = {
    "torch": "2.13.0",
    "numpy": "2.4.0",
    "safetensors": "0.8.0",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "torch-optimi": "0.3",
}


def notices(layered: Layered, facts: Facts, **optimizer: Any) -> tuple[Notice, ...]:
    return build_plan(layered({"precision": {"dtype": "auto"}, "optimizer": optimizer}), facts).plan.notices


def test_everything_is_known_of_every_name() -> None:
    assert set(OPTIMIZERS) == set(NAMES)


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_and_the_trainer_say_the_same_of_the_settings_that_an_optimizer_takes(name: str) -> None:
    torch_side = pytest.importorskip("trainkit.trainer.optim")
    from trainkit.recipe.schema import Optimizer

    def handed(**settings: float) -> dict[str, Any]:
        try:
            made: dict[str, Any] = torch_side.optimizer_class(Optimizer.model_validate({"name": name, **settings}))[1]
        except TrainingError as error:
            pytest.skip(f"its class is not installed: {error}")
        return made

    taken = tuple(moment for moment in MOMENTS if handed() != handed(**{moment: 0.5}))
    assert taken == OPTIMIZERS[name].takes


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("adamw_bnb_8bit", "bitsandbytes", "/opt/python -m pip install 'bitsandbytes>=0.50,<0.51'"),
        ("adamw_anyprecision", "torch-optimi", "/opt/python -m pip install 'torch-optimi>=0.2,<0.4'"),
        (
            "adamw_apex_fused",
            "apex",
            "/opt/python -m pip install --no-build-isolation git+https://github.com/NVIDIA/apex",
        ),
    ],
)
def test_a_missing_package_blocks_the_run_with_the_command_that_installs_it(
    layered: Layered, machine: Machine, name: str, package: str, remedy: str
) -> None:
    (found,) = notices(layered, machine(1), name=name)
    assert found.severity == "blocker"
    assert f"optimizer.name {name} requires {package}" in found.what
    assert remedy in found.hint
    assert not notices(layered, machine(1, packages={**EVERYTHING, "apex": "0.1"}), name=name)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"name": "adafactor"}, "adafactor can converge slower than AdamW, or unstably"),
        ({"name": "adafactor", "beta1": 0.8}, "optimizer.beta1 does nothing with adafactor"),
        ({"name": "sgd", "beta2": 0.9, "eps": 1e-6}, "optimizer.beta2 and optimizer.eps do nothing with sgd"),
        ({"name": "torch.optim:Adam", "eps": 1e-6}, "optimizer.eps does nothing with torch.optim:Adam"),
    ],
)
def test_a_plan_warns_of_what_the_recipe_may_not_expect(
    layered: Layered, machine: Machine, optimizer: dict[str, Any], words: str
) -> None:
    found = [notice for notice in notices(layered, machine(), **optimizer) if words in notice.what]
    assert [notice.severity for notice in found] == ["warning"]


@pytest.mark.parametrize("name", [*NAMES, "torch.optim:Adam"])
def test_a_program_of_the_users_own_hears_nothing_of_the_optimizer(
    layered: Layered, machine: Machine, name: str
) -> None:
    program = {"kind": "torch", "script": "t.py", "reads_recipe": True}
    recipe = {"program": program, "strategy": {"kind": "fsdp"}, "optimizer": {"name": name}}
    assert [notice.severity for notice in build_plan(layered(recipe), machine()).plan.notices] == ["note"]


@pytest.mark.parametrize(
    ("strategy", "name", "facts", "reason"),
    [
        ("fsdp", "adafactor", {}, "norms of whole matrices"),
        ("zero2", "adafactor", {}, "no rows and columns"),
        ("fsdp", "adamw_bnb_8bit", {}, "whole tensors"),
        ("zero1", "adamw_bnb_8bit", {}, "embeddings cannot be kept in 32-bit"),
        ("zero3", "adagrad", {}, "without its parameter groups"),
        ("zero3", "adamw_anyprecision", {}, "bias correction"),
        ("single", "adamw_apex_fused", {}, "on CUDA only"),
        ("fsdp", "adamw_apex_fused", {"gpus": 2}, "whole tensors"),
        ("single", "adamw_bnb_8bit", {"mps": True}, "MPS"),
    ],
)
def test_an_optimizer_is_refused_where_it_cannot_do_its_work(
    layered: Layered, machine: Machine, strategy: str, name: str, facts: dict[str, Any], reason: str
) -> None:
    recipe = {"strategy": {"kind": strategy}, "optimizer": {"name": name}}
    with pytest.raises(RecipeError) as caught:
        build_plan(layered(recipe), machine(packages=EVERYTHING, **facts))
    (found,) = caught.value.diagnostics
    assert (found.key, reason in found.why) == ("optimizer.name", True)
    assert found.hint.startswith("closest supported choice: optimizer.name: ")


@pytest.mark.parametrize(
    ("words", "what", "why", "hint"),
    [
        (("--optim", "adamw_hf"), "optimizer.name must be adamw_torch, ", "removed in transformers 5", "adamw_torch"),
        (("optimizer.name=galore_adamw",), "optimizer.name must be", "projects the gradients", "adamw_bnb_8bit"),
        (("--optim", "adamw_torch_xla"), "optimizer.name must be", "on devices.type: xla", "adamw_torch"),
        (("--optim", "adamw_multi_tensor"), "optimizer.name must be", "calls it foreach", "adamw_torch_foreach"),
        (("--optim", "adamw_hf_multi_tensor"), "optimizer.name must be", "calls it foreach", "adamw_torch_foreach"),
        (("optimizer.name=adamw_torhc",), "or an import path pkg.mod:Class, not", "", "did you mean adamw_torch?"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_reason_and_what_to_write(
    words: tuple[str, ...], what: str, why: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(Request("r.yaml", "/w", overrides=words), MemoryFiles({"/w/r.yaml": "train: {steps: 1}\n"}))
    (found,) = caught.value.diagnostics
    assert what in found.what
    assert why in found.why
    assert hint in found.hint


@pytest.mark.parametrize(("flag", "name"), [("adamw_8bit", "adamw_bnb_8bit"), ("torch.optim:Adam", "torch.optim:Adam")])
def test_the_flag_takes_hf_s_other_name_and_an_import_path(flag: str, name: str) -> None:
    files = MemoryFiles({"/w/r.yaml": "train: {steps: 1}\n"})
    assert resolve(Request("r.yaml", "/w", overrides=(f"--optim={flag}",)), files).recipe.optimizer.name == name


@pytest.mark.e2e
def test_every_name_of_the_installed_transformers_is_taken_or_refused_with_a_reason() -> None:
    """In a process of its own: importing TrainingArguments takes seconds and warns."""
    pytest.importorskip("transformers")
    code = "from transformers.training_args import OptimizerNames; print(*(name.value for name in OptimizerNames))"
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=True,
    )
    known = {*NAMES, *OTHER_NAMES}
    assert set(done.stdout.split()) <= known


@pytest.mark.torch
def test_the_classes_that_refusals_recommend_exist() -> None:
    for package in ("bitsandbytes", "optimi"):
        pytest.importorskip(package)
    from trainkit.trainer.user_code import imported

    for _, hint in OTHER_NAMES.values():
        for word in hint.replace(",", " ").split():
            if ":" in word and not word.startswith(("pkg.mod", "torchao")) and word != "optimizer.name:":
                assert inspect.isclass(imported(word, "optimizer.name")), word


@pytest.mark.parametrize(("transformers", "refused"), [("4.57.6", False), ("5.0.0", True)])
def test_trainer_has_apexs_adam_until_transformers_5(
    layered: Layered, machine: Machine, transformers: str, refused: bool
) -> None:
    program = {"kind": "hf", "script": "t.py"}
    recipe = {"program": program, "strategy": {"kind": "single"}, "optimizer": {"name": "adamw_apex_fused"}}
    facts = machine(1, packages={**EVERYTHING, "apex": "0.1", "transformers": transformers})
    if refused:
        with pytest.raises(RecipeError, match="adamw_apex_fused"):
            build_plan(layered(recipe), facts)
    else:
        (command,) = build_plan(layered(recipe), facts).plan.commands
        assert "adamw_apex_fused" in [str(word) for word in command.argv]
