"""What the doctor says of a plan's container: engine, image, folders, and what the image's CUDA wants of the driver.

The engine is a shell script that prints what docker 20.10 and podman 4.3 were seen to print.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from prepared_machine import Machine, target_for, text_of

from trainkit.doctor.check import Level, Target
from trainkit.doctor.checks.containers import image_cuda
from trainkit.doctor.examine import checks_for
from trainkit.machine.facts import Gpu

CARD = Gpu(0, "GPU-1", "NVIDIA A100", 80 * 2**30, 80 * 2**30, (8, 0))
REQUIRED = "cuda>=12.4 brand=tesla,driver>=470,driver<471"


def boxed(machine: Machine, kind: str = "docker", *words: str) -> Target:
    return target_for(machine, "quickstart", f"container.kind={kind}", "container.image=team/pytorch:2", *words)


def answers(machine: Machine, kind: str, output: str = "[]", errors: str = "", code: int = 0) -> None:
    machine.program(
        f"usr/bin/{kind}", f"/bin/echo '{output}'\n[ -z '{errors}' ] || /bin/echo '{errors}' >&2\nexit {code}"
    )


def test_an_engine_that_is_not_installed_is_a_problem(machine: Machine) -> None:
    machine.finds("container", "problem", "podman is not on PATH", target=boxed(machine, "podman"))


@pytest.mark.parametrize(
    ("kind", "errors", "said"),
    [
        ("docker", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "daemon does not answer"),
        ("docker", "Error: No such image: team/pytorch:2", "the image team/pytorch:2 is not on this machine"),
        ("podman", "Error: inspecting object: team/pytorch:2: image not known", "is not on this machine"),
        ("podman", "Error: something else", "podman cannot describe the image"),
    ],
)
def test_what_an_engine_says_becomes_one_problem(machine: Machine, kind: str, errors: str, said: str) -> None:
    answers(machine, kind, errors=errors, code=1)
    found = machine.examine("container", boxed(machine, kind))
    assert [each.level for each in found.findings] == ["problem"] and said in text_of(found)


def test_an_image_that_will_be_downloaded_is_a_note(machine: Machine) -> None:
    answers(machine, "docker", errors="Error: No such image: team/pytorch:2", code=1)
    machine.finds("container", "note", target=boxed(machine, "docker", "container.pull=missing"))


def test_a_folder_that_is_missing_is_named(machine: Machine) -> None:
    answers(machine, "podman")
    machine.folder("data")
    target = boxed(machine, "podman", 'container.mounts=["/data:/data", "/absent:/absent"]')
    assert "/data," not in machine.finds("container", "problem", "container.mounts names /absent", target=target)


@pytest.mark.parametrize(
    ("variables", "driver", "newest", "level", "said"),
    [
        ('["CUDA_VERSION=13.0.1"]', "570.86.15", "12.8", "problem", "requires 580 or newer"),
        ('["CUDA_VERSION=12.9.1"]', "570.86.15", "12.8", "warning", "newer than the driver"),
        (f'["NVIDIA_REQUIRE_CUDA={REQUIRED}"]', "520.61.05", "11.8", "problem", "requires 525.60.13 or newer"),
        ('["CUDA_VERSION=12.4.1"]', "570.86.15", "12.8", "ok", "docker has the image"),
        ('["PATH=/usr/bin"]', "520.61.05", "11.8", "ok", "docker has the image"),
    ],
)
def test_the_driver_is_held_against_the_cuda_of_the_image(
    machine: Machine, variables: str, driver: str, newest: str, level: Level, said: str
) -> None:
    answers(machine, "docker", variables)
    machine.facts = replace(machine.facts, gpus=(CARD,), driver=driver, cuda_driver=newest)
    machine.finds("container", level, said, target=boxed(machine, "docker", "devices.type=cuda"))


def test_pyxis_is_known_by_the_words_that_srun_takes(machine: Machine) -> None:
    machine.program("usr/bin/srun", "/bin/echo '  --container-image=[USER@][REGISTRY#]IMAGE'")
    machine.finds("container", "ok", target=boxed(machine, "pyxis"))
    machine.program("usr/bin/srun", "/bin/echo 'Usage: srun [OPTIONS…]'")
    machine.finds("container", "problem", "pyxis is not installed", target=boxed(machine, "pyxis"))


def test_an_apptainer_image_that_is_no_file_is_a_problem(machine: Machine) -> None:
    answers(machine, "apptainer")
    machine.finds("container", "problem", "there is no image", target=boxed(machine, "apptainer"))


def test_a_recipe_without_a_container_has_no_such_check(machine: Machine) -> None:
    assert "container" not in {each.name for each in checks_for(target_for(machine, "quickstart"))}
    assert "container" in {each.name for each in checks_for(boxed(machine))}


def test_the_cuda_of_an_image_is_read_off_its_variables() -> None:
    assert image_cuda(f"A=b\nNVIDIA_REQUIRE_CUDA={REQUIRED}") == "12.4"
    assert image_cuda("CUDA_VERSION=12.8.1\nX=y") == "12.8"
    assert not image_cuda("A=b")
