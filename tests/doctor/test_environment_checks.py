"""Interpreter, packages, CUDA libraries and stale settings: found on a prepared machine, silent on a good one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prepared_machine import Machine, target_for, text_of

from trainkit.doctor.check import Level
from trainkit.planner.env import LEAKS

ON_CPU = ("ddp", "devices.type=cpu")


def test_a_good_environment_passes(machine: Machine) -> None:
    machine.package("torch", "2.11.0+cpu", "numpy>=1.26")
    machine.package("torchvision", "0.26.0", "torch==2.11.0")  # which a local version is
    machine.package("numpy", "2.4.0")
    machine.package("unrelated", "1.0", "missing-thing")  # which training does not use
    machine.package("nvidia-nccl-cu12", "2.27.3", files=("nvidia/nccl/lib/libnccl.so.2",))
    machine.package("nvidia-cublas-cu12", "12.8.4.1", files=("nvidia/cublas/lib/libcublas.so.12",))
    for name in ("interpreter", "packages", "cuda-libraries", "settings"):
        machine.finds(name, "ok")


def test_a_version_that_a_package_does_not_take_is_found(machine: Machine) -> None:
    machine.package("torch", "2.5.1")
    machine.package("torchvision", "0.26.0", "torch==2.11.0")
    machine.finds(
        "packages",
        "problem",
        "torchvision 0.26.0 requires torch==2.11.0, and 2.5.1 is installed",
        "pip install 'torchvision' 'torch==2.11.0'",
        "torch 2.5.1 is too old: trainkit requires 2.6",
    )


def test_a_package_that_another_needs_and_nobody_installed_is_found(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.package("accelerate", "1.15.0", "psutil", 'sagemaker ; extra == "sagemaker"', 'x ; python_version < "3"')
    (finding,) = machine.examine("packages").findings
    assert finding.what == "accelerate 1.15.0 requires psutil, which is not installed"


def test_only_packages_that_the_plan_imports_are_judged(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    machine.package("bitsandbytes", "0.50.2", "torch<2")
    machine.package("transformers", "5.23.0", "tokenizers>=1")
    machine.package("deepspeed", "0.19.8", "hjson")
    plans = {
        ON_CPU: "",
        (*ON_CPU, "optimizer.name=adamw_bnb_8bit"): "bitsandbytes",
        ("zero2", "devices.type=cpu"): "deepspeed",
        (*ON_CPU, "peft.kind=lora"): "transformers",
    }
    for words, judged in plans.items():
        result = machine.examine("packages", target_for(machine, *words))
        wrong = [each.what.split(" ")[0] for each in result.findings if each.level != "ok"]
        assert wrong == [judged] * bool(judged), text_of(result)
    assert len(machine.examine("packages").findings) == 3


def test_a_machine_without_torch_is_told_so(machine: Machine) -> None:
    machine.finds("packages", "warning", "-m pip install 'torch>=2.6,<2.14' 'numpy>=1.26,<3' 'safetensors>=0.4.3,<0.9'")


def test_the_deprecated_pynvml_is_found(machine: Machine) -> None:
    for name, version in {"torch": "2.13.0", "pynvml": "11.5.0", "nvidia-ml-py": "13.0"}.items():
        machine.package(name, version)
    machine.finds("packages", "warning", "pip uninstall -y pynvml")


def test_two_cuda_runtimes_are_found(machine: Machine) -> None:
    machine.package("nvidia-cublas-cu12", "12.8.4.1", files=("nvidia/cublas/lib/libcublas.so.12",))
    machine.package("nvidia-cuda-runtime-cu12", "12.8.90")
    machine.package("cupy-cuda11x", "13.3.0")
    machine.finds(
        "cuda-libraries", "warning", "CUDA 11: cupy-cuda11x 13.3.0", "pip uninstall -y cupy-cuda11x"
    )  # fmt: skip
    machine.finds("cuda-libraries", "skipped", target=target_for(machine, *ON_CPU))


def test_libraries_of_two_versions_in_one_file_are_a_problem(machine: Machine) -> None:
    machine.package("nvidia-nccl-cu12", "2.27.3", files=("nvidia/nccl/lib/libnccl.so.2",))
    machine.package("nvidia-nccl-cu13", "2.28.9", files=("nvidia/nccl/lib/libnccl.so.2",))
    machine.package("nvidia-cuda-runtime", "13.0.96")
    words = "nvidia/nccl/lib/libnccl.so.2", "pip uninstall -y nvidia-nccl-cu12"
    machine.finds("cuda-libraries", "problem", *words)


def test_another_active_environment_is_found(machine: Machine) -> None:
    machine.environ["VIRTUAL_ENV"] = "/home/ada/other"
    machine.finds("interpreter", "note", "/home/ada/other/bin/python -m trainkit doctor")
    machine.environ["VIRTUAL_ENV"] = str(Path(machine.facts.executable).parent.parent)
    machine.finds("interpreter", "ok")


def test_a_checkout_that_ranks_cannot_import_is_found(machine: Machine) -> None:
    checkout = Path(__file__).resolve().parents[2]
    machine.finds("interpreter", "problem", f"export PYTHONPATH={checkout}", folder=checkout)
    machine.finds("interpreter", "ok", folder=checkout, packages=(str(checkout),))


def test_an_old_interpreter_is_found(machine: Machine) -> None:
    machine.facts = replace(machine.facts, python="3.10.4")
    machine.finds("interpreter", "problem")


def test_a_package_that_is_there_twice_is_found(machine: Machine) -> None:
    machine.package("torch", "2.13.0")
    other = machine.file("home/ada/old/torch-2.5.1.dist-info/METADATA").parents[1]
    machine.finds(
        "interpreter", "note", "the first one is imported", packages=(str(other), str(machine.site))
    )  # fmt: skip
    machine.file("site-packages/torch-2.5.1.dist-info/METADATA", "Name: torch\nVersion: 2.5.1\n")
    machine.finds("interpreter", "warning", "-m pip install --force-reinstall 'torch>=2.6,<2.14'")


@pytest.mark.parametrize("name", ["PET_NNODES", "ACCELERATE_MIXED_PRECISION", "RANK", "MASTER_PORT", "FSDP_OFFLOAD"])
def test_settings_that_no_plan_hands_on_are_named_as_harmless_here(machine: Machine, name: str) -> None:
    machine.environ[name] = "4"
    machine.finds("settings", "note", f"{name}=4", "trainkit does not hand it on", f"unset {name}")


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
def test_settings_that_reach_the_ranks_are_named(machine: Machine, name: str, value: str, level: Level) -> None:
    machine.environ[name] = value
    assert (f"{name}={value}" in machine.finds("settings", level)) == (level != "ok")


def test_settings_of_cards_do_not_concern_a_run_on_the_cpu(machine: Machine) -> None:
    machine.environ["NCCL_P2P_DISABLE"] = "1"
    machine.file("etc/nccl.conf", "NCCL_P2P_DISABLE=1\n")
    machine.finds("settings", "warning", "NCCL_P2P_DISABLE=1", "etc/nccl.conf")
    machine.finds("settings", "ok", target=target_for(machine, *ON_CPU))


def test_what_the_recipe_sets_itself_is_not_stale(machine: Machine) -> None:
    machine.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    machine.finds("settings", "warning", target=target_for(machine, "ddp"))
    machine.finds("settings", "ok", target=target_for(machine, "ddp", "env.GLOO_SOCKET_IFNAME=lo"))
    machine.finds("settings", "ok", target=target_for(machine, "ddp", "env_from=[GLOO_SOCKET_IFNAME]"))


def test_secrets_are_not_shown(machine: Machine) -> None:
    machine.environ["ACCELERATE_API_TOKEN"] = "hunter2"
    assert "hunter2" not in machine.finds("settings", "note")


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
    machine.finds("settings", "note", f"mv {file} {file}.off")
