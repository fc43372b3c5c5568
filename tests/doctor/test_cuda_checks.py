"""Driver, toolkits and compilers, with fake but real executables: nvcc and gcc are shell scripts under the root."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prepared_machine import GIB, Machine, target_for

from trainkit.doctor.check import Level
from trainkit.doctor.checks.compilers import NEWEST
from trainkit.machine.facts import Gpu, TorchBuild

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (builder)  Tue Aug 2026\n"


def install_torch(machine: Machine, cuda: str | None = "12.8") -> None:
    machine.facts = replace(machine.facts, torch=TorchBuild("2.13.0", cuda))


def install_toolkit(machine: Machine, version: str, root: str = "", gcc: int | None = None) -> Path:
    """A toolkit with an nvcc that tells its version, headers, a library, and the limit that its headers set."""
    root = root or f"usr/local/cuda-{version}"
    machine.program(
        f"{root}/bin/nvcc",
        f"echo 'Cuda compilation tools, release {version}, V{version}.61'; echo 'Build cuda_{version}'",
    )
    machine.file(f"{root}/include/cuda_runtime.h")
    machine.file(f"{root}/lib64/libcudart.so.{version}.57")
    if gcc is not None:
        machine.file(f"{root}/include/crt/host_config.h", f"#if __GNUC__ > {gcc}\n#error\n#endif\n")
    return machine.root / root


def install_gcc(machine: Machine, version: str, suffix: str = "") -> None:
    words = f"{{}} (Debian {version}-14+deb12u1) {version}\\nCopyright (C) Free Software Foundation, Inc."
    for name in ("gcc", "g++"):
        machine.program(f"usr/bin/{name}{suffix}", f"printf '{words.format(name)}\\n'")


def use(machine: Machine, toolkit: Path) -> None:
    """As the exports that the doctor gives."""
    machine.environ |= {
        "CUDA_HOME": str(toolkit),
        "PATH": f"{toolkit}/bin:{machine.bin}",
        "LD_LIBRARY_PATH": f"{toolkit}/lib64",
    }


@pytest.fixture
def good(machine: Machine) -> Machine:
    """torch, driver, toolkit and compiler that fit together."""
    machine.file("proc/driver/nvidia/version", DRIVER.format(version="580.65.06"))
    install_torch(machine)
    install_gcc(machine, "12.2.0")
    use(machine, install_toolkit(machine, "12.8"))
    return machine


@pytest.mark.parametrize("name", ["driver", "toolkits", "toolkit-version", "host-compiler"])
def test_what_fits_together_passes_and_does_not_concern_a_run_on_the_cpu(good: Machine, name: str) -> None:
    good.finds(name, "ok")
    good.finds(name, "skipped", target=target_for(good, "ddp", "devices.type=cpu"))


@pytest.mark.parametrize("name", ["toolkits", "toolkit-version", "host-compiler"])
def test_a_torch_for_cpus_needs_no_toolkit(good: Machine, name: str) -> None:
    install_torch(good, cuda=None)
    use(good, install_toolkit(good, "13.0"))
    assert good.examine(name).level in ("ok", "skipped")


@pytest.mark.parametrize(
    ("driver", "cuda", "level"),
    [
        ("550.54.15", "13.0", "problem"),
        ("550.54.15", "12.8", "ok"),
        ("520.61.05", "12.1", "problem"),
        ("470.10", "11.8", "ok"),
        ("580.65.06", "99.1", "skipped"),
    ],
)
def test_a_driver_that_is_too_old_is_found(machine: Machine, driver: str, cuda: str, level: Level) -> None:
    machine.file("proc/driver/nvidia/version", DRIVER.format(version=driver))
    install_torch(machine, cuda)
    machine.finds("driver", level, driver)


def test_libraries_of_a_newer_driver_may_make_up_for_an_old_one(machine: Machine) -> None:
    machine.file("proc/driver/nvidia/version", DRIVER.format(version="535.129.03"))
    install_torch(machine, "13.0")
    machine.finds("driver", "problem")
    library = machine.file("usr/local/cuda-13.0/compat/libcuda.so.580.65.06")
    machine.finds("driver", "warning", str(library))


def test_a_torch_for_cpus_beside_a_driver_is_named(good: Machine) -> None:
    install_torch(good, cuda=None)
    good.finds("driver", "warning", "pip install 'torch>=2.6,<2.14'")


def test_a_card_without_a_driver_is_found(machine: Machine) -> None:
    machine.finds("driver", "skipped")
    machine.file("sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de\n")
    machine.file("sys/bus/pci/devices/0000:17:00.0/class", "0x030200\n")
    machine.finds("driver", "problem", "0000:17:00.0", "modprobe nvidia")


@pytest.mark.parametrize(
    ("name", "note", "level"),
    [
        ("nvidia", "the NVIDIA driver sees no GPU", "warning"),
        ("gpus", "NVMLError_LibRmVersionMismatch: Driver/library version mismatch", "problem"),
    ],
)
def test_a_driver_that_sees_no_card_or_does_not_answer_is_found(
    good: Machine, name: str, note: str, level: Level
) -> None:
    good.facts = replace(good.facts, notes={name: note})
    good.finds("driver", level, note, "580.65.06")


def test_a_toolkit_of_another_major_version_is_found_and_the_right_one_exported(good: Machine) -> None:
    right = good.root / "usr/local/cuda-12.8"
    use(good, install_toolkit(good, "11.8"))
    exports = f"export CUDA_HOME={right}\nexport PATH={right}/bin:$PATH"
    good.finds("toolkit-version", "warning", "built with CUDA 12.8 and refuses to build with toolkit 11.8", exports)


def test_the_exports_work_as_pasted(good: Machine) -> None:
    use(good, install_toolkit(good, "11.8"))
    fix = "; ".join(good.examine("toolkit-version").findings[0].fix)
    script = f'{fix}; echo "$CUDA_HOME"; nvcc --version; echo "$LD_LIBRARY_PATH"'
    done = subprocess.run(
        ["/bin/sh", "-c", script], env=good.environ, capture_output=True, text=True, timeout=30, check=True
    )
    right = good.root / "usr/local/cuda-12.8"
    lines = done.stdout.splitlines()
    assert lines[0] == str(right) and "release 12.8" in lines[1]
    assert lines[-1] == f"{right}/lib64:{good.root}/usr/local/cuda-11.8/lib64"


def test_where_no_toolkit_fits_it_is_said_how_to_get_one(machine: Machine) -> None:
    install_torch(machine)
    machine.finds("toolkits", "skipped")
    machine.finds("toolkit-version", "warning", "no CUDA toolkit is found")
    use(machine, install_toolkit(machine, "11.8"))
    machine.finds("toolkit-version", "warning", "cuda-toolkit-12-8")


@pytest.mark.parametrize(
    ("cuda", "toolkit", "level"),
    [("12.8", "12.4", "ok"), ("13.0", "13.0", "ok"), ("13.1", "13.0", "warning"), ("13.0", "12.8", "warning")],
)
def test_minor_versions_mix_where_deepspeed_takes_them(machine: Machine, cuda: str, toolkit: str, level: Level) -> None:
    install_torch(machine, cuda)
    use(machine, install_toolkit(machine, toolkit))
    machine.finds("toolkit-version", level)


@pytest.mark.torch
def test_deepspeed_says_the_same_of_minor_versions() -> None:
    import deepspeed.ops.op_builder.builder as builder

    from trainkit.doctor.checks.compilers import MINORS_MIX

    assert frozenset(builder.cuda_minor_mismatch_ok) == MINORS_MIX


def test_several_toolkits_are_listed_with_what_picks_which(good: Machine) -> None:
    old, new = install_toolkit(good, "11.8"), good.root / "usr/local/cuda-12.8"
    link = good.root / "usr/local/cuda"
    link.symlink_to("cuda-11.8")
    good.finds("toolkits", "note", f"CUDA 11.8: {old} (also {link})", f"CUDA 12.8: {new}")
    good.environ["CUDA_HOME"] = str(link)
    good.environ["LD_LIBRARY_PATH"] = f"{old}/lib64:{new}/lib64"
    said = good.finds(
        "toolkits",
        "warning",
        "pick different CUDA toolkits",
        f"PATH picks {new}/bin/nvcc (CUDA 12.8)",
        f"CUDA_HOME picks {link} (CUDA 11.8)",
        f"LD_LIBRARY_PATH picks {old}/lib64/libcudart.so.11.8.57 (CUDA 11.8)",
        f"export CUDA_HOME={new}",
    )
    assert "export PATH=" not in said  # which picks the right one already
    good.environ["CUDA_HOME"] = str(new)
    assert "export CUDA_HOME" not in good.finds("toolkits", "warning", f"export LD_LIBRARY_PATH={new}/lib64")


def test_a_cuda_home_that_leads_nowhere_is_found(good: Machine) -> None:
    good.environ["CUDA_HOME"] = "/nowhere"
    good.finds("toolkits", "warning", "CUDA_HOME picks /nowhere (no toolkit there)")


@pytest.mark.parametrize("cuda", ["12.8", None])
def test_a_folder_of_ld_library_path_that_is_not_there_is_named(good: Machine, cuda: str | None) -> None:
    install_torch(good, cuda)
    there = good.environ["LD_LIBRARY_PATH"]
    good.environ["LD_LIBRARY_PATH"] = f"/nowhere/lib64:{there}:"
    what = "LD_LIBRARY_PATH names folders that are not there"
    good.finds("toolkits", "note", what, f"export LD_LIBRARY_PATH={there}  ")


@pytest.mark.parametrize("kind", ["script", "link"])
def test_an_nvcc_outside_of_its_toolkit_is_found(machine: Machine, kind: str) -> None:
    """torch takes the folder above the one on PATH, and follows no links."""
    install_torch(machine)
    toolkit = install_toolkit(machine, "12.8")
    if kind == "script":
        machine.program("usr/local/bin/nvcc", f'exec {toolkit}/bin/nvcc "$@"')
    else:
        machine.folder("usr/local/bin")
        (machine.root / "usr/local/bin/nvcc").symlink_to(toolkit / "bin/nvcc")
    machine.environ["PATH"] = f"{machine.root}/usr/local/bin"
    missing = f"missing: {machine.root}/usr/local/include/cuda_runtime.h"
    machine.finds("toolkits", "warning", missing, f"export CUDA_HOME={toolkit}")


def test_the_layout_of_debian_is_no_problem(machine: Machine) -> None:
    install_torch(machine)
    machine.program("usr/lib/nvidia-cuda-toolkit/bin/nvcc", "echo 'release 12.8, V12.8.61'")
    (machine.bin / "nvcc").symlink_to(machine.root / "usr/lib/nvidia-cuda-toolkit/bin/nvcc")
    machine.file("usr/include/cuda_runtime.h")
    for name in ("toolkits", "toolkit-version"):
        machine.finds(name, "ok")


def test_an_nvcc_that_fails_or_hangs_is_named(good: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    good.program("usr/local/cuda-12.8/bin/nvcc", "echo 'nvcc: cannot execute: bad file' >&2; exit 126")
    good.finds("toolkits", "warning", "bad file")
    monkeypatch.setattr("trainkit.doctor.checks.compilers.VERSION_SECONDS", 0.3)
    good.program("usr/local/cuda-12.8/bin/nvcc", "exec /bin/sleep 60")
    good.finds("toolkits", "warning", "did not end within 0.3 s")


def test_a_compiler_that_is_too_new_is_found_and_an_older_one_shown(good: Machine) -> None:
    install_gcc(good, "15.1.0")
    good.finds("host-compiler", "warning", "apt-get install gcc-14 g++-14")
    install_gcc(good, "13.3.0", "-13")
    install_gcc(good, "14.2.0", "-14")
    good.finds(
        "host-compiler",
        "warning",
        "gcc 15.1.0 is too new for CUDA 12.8, which accepts 14 at most",
        "docs.nvidia.com/cuda/cuda-installation-guide-linux",
        f"export CC={good.bin}/gcc-14 CXX={good.bin}/g++-14",
        f"sudo ln -s {good.bin}/gcc-14 {good.root}/usr/local/cuda-12.8/bin/gcc",
    )


def test_what_the_doctor_says_of_the_compiler_works(good: Machine) -> None:
    install_gcc(good, "15.1.0")
    install_gcc(good, "14.2.0", "-14")
    for name in ("gcc", "g++"):  # the second way: the toolkit's bin stands first on PATH
        (good.root / f"usr/local/cuda-12.8/bin/{name}").symlink_to(good.bin / f"{name}-14")
    good.finds("host-compiler", "ok")
    for name in ("gcc", "g++"):
        (good.root / f"usr/local/cuda-12.8/bin/{name}").unlink()
    good.finds("host-compiler", "warning")
    good.environ |= {"CC": f"{good.bin}/gcc-14", "CXX": f"{good.bin}/g++-14"}
    good.finds("host-compiler", "ok")


def test_the_toolkits_own_header_counts_more_than_the_table(good: Machine) -> None:
    install_gcc(good, "15.1.0")
    install_toolkit(good, "12.8", gcc=15)
    good.finds("host-compiler", "ok")
    install_toolkit(good, "12.8", gcc=11)
    good.finds("host-compiler", "warning", f"{good.root}/usr/local/cuda-12.8/include/crt/host_config.h")


def test_clang_has_a_limit_of_its_own(good: Machine) -> None:
    good.program("usr/bin/clang", "echo 'Ubuntu clang version 20.1.2 (0ubuntu1)'")
    good.environ["CC"] = "ccache clang"
    good.finds("host-compiler", "warning", "clang 20.1.2 is too new for CUDA 12.8, which accepts 19")


def test_nothing_is_claimed_of_versions_that_are_not_known(good: Machine) -> None:
    use(good, install_toolkit(good, "99.0"))
    good.finds("host-compiler", "skipped")


def test_a_plan_that_compiles_for_cards_makes_it_a_problem(good: Machine) -> None:
    use(good, install_toolkit(good, "11.8"))
    install_gcc(good, "15.1.0")
    good.facts = replace(good.facts, gpus=(Gpu(0, "GPU-0a", "NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0)),))
    target = target_for(
        good, "zero3", "strategy.offload_optimizer=nvme", "strategy.nvme_path=/nvme", "devices.select=[0]"
    )
    assert "async_io" in target.ops
    for name in ("toolkit-version", "host-compiler"):
        good.finds(name, "warning")
        good.finds(name, "problem", target=target)


@pytest.mark.torch
def test_the_table_is_that_of_the_installed_torch() -> None:
    """torch's has been taken from the toolkits' headers, which in places allow a clang less or a gcc more."""
    from torch.utils.cpp_extension import CUDA_CLANG_VERSIONS, CUDA_GCC_VERSIONS

    for version in NEWEST.keys() & CUDA_GCC_VERSIONS.keys():
        assert abs(NEWEST[version][0] - (CUDA_GCC_VERSIONS[version][1][0] - 1)) <= 1, version
    for version in NEWEST.keys() & CUDA_CLANG_VERSIONS.keys():
        assert abs(NEWEST[version][1] - (CUDA_CLANG_VERSIONS[version][1][0] - 1)) <= 1, version


@pytest.mark.skipif(not Path("/usr/bin/gcc").exists(), reason="there is no gcc here")
def test_the_real_compiler_is_known(good: Machine) -> None:
    good.environ |= {"CC": "/usr/bin/gcc", "PATH": f"{good.environ['PATH']}:{os.environ['PATH']}"}
    assert "gcc" in good.examine("host-compiler").findings[0].what
