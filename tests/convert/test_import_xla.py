"""What other tools say of TPUs: recipe keys where there are some, else a comment or an error that names it."""

from __future__ import annotations

import pytest

from tests.convert.reading import comments, imported, settings
from trainkit.errors import RecipeError

SPMD = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True, "transformer_layer_cls_to_wrap": ["Block"]}
TPU_FILE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\ndowncast_bf16: 'yes'\nmain_training_function: main\n"
    "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\ntpu_name: mine\ntpu_use_cluster: false\nuse_cpu: false\n"
)


def test_a_command_line_of_trainer_on_a_tpu_is_one_process_there() -> None:
    line = "PJRT_DEVICE=TPU XLA_USE_SPMD=1 XLA_USE_BF16=1 python train.py --do_train --fsdp full_shard --fsdp_config f"
    text = imported(line, {"f": SPMD})
    found = settings(text, {"f": SPMD})
    wanted = {
        "devices.type": "xla",
        "strategy.kind": "fsdp",
        "strategy.version": 2,
        "strategy.auto_wrap": "transformer",
        "strategy.wrap_classes": ["Block"],
        "efficiency.gradient_checkpointing.every": True,
        "env.XLA_USE_BF16": "1",
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert "env.XLA_USE_SPMD" not in found
    assert "XLA_USE_SPMD is not taken over" in comments(text)
    assert "one for each GPU" not in comments(text)


def test_a_word_for_yes_is_yes_to_trainer_and_one_for_no_is_refused_which_would_be_yes_too() -> None:
    line = "python train.py --do_train --fsdp full_shard --fsdp_config f"
    worded = SPMD | {"xla": "True", "xla_fsdp_v2": "on", "xla_fsdp_grad_ckpt": 1}
    assert settings(imported(line, {"f": worded}), {"f": worded}) == settings(imported(line, {"f": SPMD}), {"f": SPMD})
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
        with pytest.raises(RecipeError, match=f"{name}: 'False' cannot be taken over"):
            imported(line, {"f": SPMD | {name: "False"}})


@pytest.mark.parametrize("kind", ["XLA", "TPU"])
def test_a_config_of_accelerate_for_a_tpu_is_one_chip_and_says_what_it_leaves(kind: str) -> None:
    files = {"a.yaml": TPU_FILE.format(kind=kind)}
    with pytest.raises(RecipeError, match="xla"):  # which the built-in trainer does not run on
        imported("a.yaml", files)
    text = imported("a.yaml", files, program=("train.py",), kind="accelerate")
    found, said = settings(text), comments(text)
    assert (found["devices.type"], found["precision.dtype"]) == ("xla", "bf16")
    assert not {"nodes.processes_per_node", "launcher.kind", "strategy.kind"} & found.keys()
    assert "once for each chip" in said
    assert f"num_processes 8 does nothing under distributed_type {kind}" in said
    assert "downcast_bf16 yes in the file is never applied" in said
    assert "tpu_name mine is not taken over: it is for pods" in said


def test_flags_for_a_tpu_leave_the_launcher_to_the_plan() -> None:
    text = imported("accelerate launch --tpu --mixed_precision bf16 --downcast_bf16 --vm one train.py --x 1")
    found = settings(text)
    assert (found["program.kind"], found["devices.type"]) == ("accelerate", "xla")
    assert found["env.ACCELERATE_DOWNCAST_BF16"] == "true"
    assert "launcher.kind" not in found
    assert "vm one is not taken over" in comments(text)


def test_another_runtime_of_torch_xla_is_kept() -> None:
    found = settings(imported("PJRT_DEVICE=CPU python train.py"))
    assert (found["devices.type"], found["env.PJRT_DEVICE"]) == ("xla", "CPU")


def test_a_script_that_starts_another_for_each_chip_is_an_error() -> None:
    with pytest.raises(RecipeError) as caught:
        imported("python xla_spawn.py --num_cores 8 train.py --do_train", {"xla_spawn.py": ""})
    (found,) = caught.value.diagnostics
    assert "xla_spawn.py" in found.what and "python SCRIPT" in found.hint
