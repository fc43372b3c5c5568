"""Interpreter, packages, CUDA libraries and stale settings: found on a prepared machine, silent on a good one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prepared_machine import Machine, target_for, text_of

from trainkit.planner.env import LEAKS


def test_a_good_environment_passes(machine: Machine) -> None:
    machine.package("torch", "2.13.0", "numpy>=1.26")
    machine.package("numpy", "2.4.0")
    machine.package("nvidia-nccl-cu12", "2.27.3", files=("nvidia/nccl/lib/libnccl.so.2",))
    machine.package("nvidia-cublas-cu12", "12.8.4.1", files=("nvidia/cublas/lib/libcublas.so.12",))
    for name in ("interpreter", "packages", "cuda-libraries", "settings"):
        result = machine.examine(name)
        assert result.level == "ok", text_of(result)


def test_a_version_that_a_package_does_not_take_is_found(machine: Machine) -> None:
    machine.package("torch", "2.5.1")
    machine.package("torchvision", "0.26.0", "torch==2.11.0")
    result = machine.examine("packages")
    assert result.level == "problem"
    said = text_of(result)
    assert "torchvision 0.26.0 requires torch==2.11.0, and 2.5.1 is installed" in said
    assert "pip install 'torchvision' 'torch==2.11.0'" in said
    assert "torch 2.5.1 is too old: trainkit requires 2.6" in said


def test_a_local_version_is_that_version(machine: Machine) -> None:
    machine.package("torch", "2.11.0+cpu")
    machine.package("torchvision", "0.26.0", "torch==2.11.0")
    assert machine.examine("packages").level == "ok"


def test_a_package_that_another_needs_and_nobody_installed_is_found(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.package("accelerate", "1.15.0", "psutil", 'sagemaker ; extra == "sagemaker"', 'x ; python_version < "3"')
    result = machine.examine("packages")
    assert [finding.what for finding in result.findings] == [
        "accelerate 1.15.0 requires psutil, which is not installed"
    ]


def test_only_packages_that_the_plan_imports_are_judged(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.package("bitsandbytes", "0.50.2", "torch<2")
    machine.package("transformers", "5.23.0", "tokenizers>=1")
    machine.package("deepspeed", "0.19.8", "hjson")
    plans = {
        "ddp": ("ddp", "devices.type=cpu"),
        "bnb": ("ddp", "devices.type=cpu", "optimizer.name=adamw_bnb_8bit"),
        "zero": ("zero2", "devices.type=cpu"),
        "lora": ("ddp", "devices.type=cpu", "peft.kind=lora"),
    }
    found = {name: machine.examine("packages", target_for(machine, *words)) for name, words in plans.items()}
    assert found["ddp"].level == "ok", text_of(found["ddp"])
    assert [finding.what.split(" ")[0] for name in ("bnb", "zero", "lora") for finding in found[name].findings] == [
        "bitsandbytes",
        "deepspeed",
        "transformers",
    ]
    assert len(machine.examine("packages").findings) == 3


def test_a_machine_without_torch_is_told_so(machine: Machine) -> None:
    result = machine.examine("packages")
    assert result.level == "warning" and "pip install 'trainkit[train]'" in text_of(result)


def test_packages_that_training_does_not_use_are_not_judged(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.package("unrelated", "1.0", "missing-thing")
    assert machine.examine("packages").level == "ok"


def test_the_deprecated_pynvml_is_found(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.package("pynvml", "11.5.0")
    machine.package("nvidia-ml-py", "13.0")
    result = machine.examine("packages")
    assert result.level == "warning" and "pip uninstall -y pynvml" in text_of(result)


def test_two_cuda_runtimes_are_found(machine: Machine) -> None:
    machine.package("nvidia-cublas-cu12", "12.8.4.1", files=("nvidia/cublas/lib/libcublas.so.12",))
    machine.package("nvidia-cuda-runtime-cu12", "12.8.90")
    machine.package("cupy-cuda11x", "13.3.0")
    result = machine.examine("cuda-libraries")
    assert result.level == "warning"
    assert "CUDA 11: cupy-cuda11x 13.3.0" in text_of(result)
    assert "pip uninstall -y cupy-cuda11x" in text_of(result)


def test_libraries_of_two_versions_in_one_file_are_a_problem(machine: Machine) -> None:
    machine.package("nvidia-nccl-cu12", "2.27.3", files=("nvidia/nccl/lib/libnccl.so.2",))
    machine.package("nvidia-nccl-cu13", "2.28.9", files=("nvidia/nccl/lib/libnccl.so.2",))
    machine.package("nvidia-cuda-runtime", "13.0.96")
    result = machine.examine("cuda-libraries")
    assert result.level == "problem"
    assert "nvidia/nccl/lib/libnccl.so.2" in text_of(result)
    assert "pip uninstall -y nvidia-nccl-cu12" in text_of(result)


def test_cuda_libraries_do_not_concern_a_run_on_the_cpu(machine: Machine) -> None:
    machine.package("nvidia-nccl-cu12", "2.27.3")
    machine.package("nvidia-nccl-cu13", "2.28.9")
    assert machine.examine("cuda-libraries", target_for(machine, "ddp", "devices.type=cpu")).level == "skipped"


def test_another_active_environment_is_found(machine: Machine) -> None:
    machine.environ["VIRTUAL_ENV"] = "/home/ada/other"
    result = machine.examine("interpreter")
    assert result.level == "note" and "/home/ada/other/bin/python -m trainkit doctor" in text_of(result)
    machine.environ["VIRTUAL_ENV"] = str(Path(machine.facts.executable).parent.parent)
    assert machine.examine("interpreter").level == "ok"


def test_a_checkout_that_ranks_cannot_import_is_found(machine: Machine) -> None:
    checkout = Path(__file__).resolve().parents[2]
    result = machine.examine("interpreter", folder=checkout)
    assert result.level == "problem" and f"export PYTHONPATH={checkout}" in text_of(result)
    assert machine.examine("interpreter", folder=checkout, packages=(str(checkout),)).level == "ok"


def test_an_old_interpreter_is_found(machine: Machine) -> None:
    machine.facts = replace(machine.facts, python="3.10.4")
    assert machine.examine("interpreter").level == "problem"


def test_a_package_that_is_there_twice_is_found(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.file("site-packages/torch-2.5.1.dist-info/METADATA", "Name: torch\nVersion: 2.5.1\n")
    result = machine.examine("interpreter")
    assert result.level == "warning" and "-m pip install --force-reinstall torch" in text_of(result)


def test_a_package_that_is_hidden_by_another_folder_is_found(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    other = machine.folder("home/ada/old")
    machine.file("home/ada/old/torch-2.5.1.dist-info/METADATA", "")
    result = machine.examine("interpreter", packages=(str(other), str(machine.site)))
    assert result.level == "note" and "the first one is imported" in text_of(result)


@pytest.mark.parametrize("name", ["PET_NNODES", "ACCELERATE_MIXED_PRECISION", "RANK", "MASTER_PORT", "FSDP_OFFLOAD"])
def test_settings_that_no_plan_hands_on_are_named_as_harmless_here(machine: Machine, name: str) -> None:
    machine.environ[name] = "4"
    result = machine.examine("settings")
    assert result.level == "note"
    assert f"{name}=4" in text_of(result) and "trainkit does not hand it on" in text_of(result)
    assert f"unset {name}" in text_of(result)


def test_every_variable_that_plans_remove_is_known_to_the_doctor(machine: Machine) -> None:
    machine.environ |= {pattern.replace("*", "X"): "1" for pattern in LEAKS}
    assert len(machine.examine("settings").findings) == len(LEAKS)


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_DEBUG", "INFO", "note"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok"),
        ("CUDA_VISIBLE_DEVICES", "2,3", "note"),
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "note"),
        ("OMP_NUM_THREADS", "1", "note"),
        ("TORCHDYNAMO_DISABLE", "1", "warning"),
        ("TRAINKIT__BATCH__MICRO", "2", "note"),
        ("EDITOR", "vi", "ok"),
    ],
)
def test_settings_that_reach_the_ranks_are_named(machine: Machine, name: str, value: str, level: str) -> None:
    machine.environ[name] = value
    result = machine.examine("settings")
    assert result.level == level
    assert (f"{name}={value}" in text_of(result)) == (level != "ok")


def test_settings_of_cards_do_not_concern_a_run_on_the_cpu(machine: Machine) -> None:
    machine.environ["NCCL_P2P_DISABLE"] = "1"
    assert machine.examine("settings", target_for(machine, "ddp", "devices.type=cpu")).level == "ok"


def test_what_the_recipe_sets_itself_is_not_stale(machine: Machine) -> None:
    machine.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    assert machine.examine("settings", target_for(machine, "ddp")).level == "warning"
    assert machine.examine("settings", target_for(machine, "ddp", "env.GLOO_SOCKET_IFNAME=lo")).level == "ok"
    assert machine.examine("settings", target_for(machine, "ddp", "env_from=[GLOO_SOCKET_IFNAME]")).level == "ok"


def test_secrets_are_not_shown(machine: Machine) -> None:
    machine.environ["ACCELERATE_API_TOKEN"] = "hunter2"
    assert "hunter2" not in text_of(machine.examine("settings"))


@pytest.mark.parametrize(
    ("path", "environ"),
    [
        ("home/ada/.cache/huggingface/accelerate/default_config.yaml", {}),
        ("cache/huggingface/accelerate/default_config.json", {"XDG_CACHE_HOME": "cache"}),
        ("hf/accelerate/default_config.yaml", {"HF_HOME": "hf"}),
        ("home/ada/.deepspeed_env", {}),
        ("work/.deepspeed_env", {}),
    ],
)
def test_files_that_launchers_read_unasked_are_found(machine: Machine, path: str, environ: dict[str, str]) -> None:
    machine.environ |= {name: str(machine.root / folder) for name, folder in environ.items()}
    file = machine.file(path)
    result = machine.examine("settings")
    assert result.level == "note" and f"mv {file} {file}.off" in text_of(result)


def test_a_file_that_nccl_reads_is_a_warning_where_cards_are_used(machine: Machine) -> None:
    machine.file("etc/nccl.conf", "NCCL_P2P_DISABLE=1\n")
    assert machine.examine("settings").level == "warning"
    assert machine.examine("settings", target_for(machine, "ddp", "devices.type=cpu")).level == "ok"
