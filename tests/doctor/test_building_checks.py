"""Build tools, DeepSpeed's ops, collectives, cards and plan: found on a prepared machine, silent on a good one."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prepared_machine import GIB, Machine, target_for, text_of

from trainkit.doctor.check import Level
from trainkit.doctor.checks import network
from trainkit.machine.facts import Gpu, GpuProcess, MigInstance

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here")


@pytest.fixture
def real(machine: Machine) -> Machine:
    """With the programs of this very machine on PATH."""
    machine.environ["PATH"] = f"{machine.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    machine.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    return machine


@needs_compiler
def test_real_tools_that_work_pass(real: Machine) -> None:
    real.finds("build-tools", "ok", target=target_for(real, "ddp", "efficiency.compile.enabled=true"))


def test_a_compiler_that_is_missing_or_does_not_compile_is_found(machine: Machine) -> None:
    machine.finds("build-tools", "warning", "there is no C++ compiler: c++", "apt-get install g++")
    machine.environ["CXX"] = "no-such-compiler"
    machine.finds("build-tools", "warning", "unset CXX")
    del machine.environ["CXX"]
    machine.program("usr/bin/c++", "echo 'trial.cpp:1:10: fatal error: vector: No such file or directory' >&2; exit 1")
    target = target_for(machine, "ddp", "efficiency.compile.enabled=true")
    machine.finds("build-tools", "problem", "cannot build a one-line program", "fatal error: vector", target=target)


@needs_compiler
def test_a_ninja_beside_the_interpreter_that_is_not_on_path_is_found(real: Machine) -> None:
    python = real.program("venv/bin/python", f'exec {sys.executable} "$@"')
    beside = real.program("venv/bin/ninja", "echo 1.13")
    real.facts = replace(real.facts, executable=str(python))
    real.program("usr/bin/c++", f'PATH="{os.environ["PATH"]}" exec c++ "$@"')
    real.environ["PATH"] = str(real.bin)
    real.finds("build-tools", "warning", f"export PATH={beside.parent}:$PATH")
    beside.unlink()
    real.finds("build-tools", "warning", f"{python} -m pip install 'ninja>=1.11.1,<2'")
    real.environ["PATH"] += f":{real.folder('venv/bin')}"
    real.program("venv/bin/ninja", "echo 'ninja: bad interpreter' >&2; exit 126")
    real.finds("build-tools", "warning", "bad interpreter")


@needs_compiler
def test_missing_headers_of_the_interpreter_are_found(real: Machine) -> None:
    real.finds("build-tools", "warning", "python3.11-dev", headers=real.folder("no-headers"))


def test_a_plan_that_builds_nothing_needs_no_tools(machine: Machine) -> None:
    for name in ("build-tools", "deepspeed-ops"):
        machine.finds(name, "skipped", target=target_for(machine, "ddp"))


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (
            {"async_io": {"compatible": False, "said": "async_io requires the dev libaio .so object and headers"}},
            0,
            ("cannot build async_io (offload to NVMe)", "requires the dev libaio .so", "apt-get install libaio-dev"),
        ),
        ({}, 1, ("ImportError: broken",)),
    ],
)
def test_an_op_that_deepspeed_cannot_build_is_found(
    machine: Machine, answer: dict[str, object], code: int, words: tuple[str, ...]
) -> None:
    """An interpreter that answers as the real one would elsewhere."""
    machine.finds("deepspeed-ops", "skipped", "DeepSpeed is not installed")
    machine.package("deepspeed", "0.19.8")
    script = f"cat <<'END'\n{json.dumps(answer)}\nEND\necho 'ImportError: broken' >&2; exit {code}"
    machine.environ["PATH"] += ":/usr/bin:/bin"
    machine.facts = replace(machine.facts, executable=str(machine.program("venv/bin/python", script)))
    machine.finds("deepspeed-ops", "warning", *words)


@pytest.mark.e2e
def test_deepspeed_itself_is_asked(real: Machine) -> None:
    real.package("deepspeed", "0.19.8")
    result = real.examine("deepspeed-ops")
    assert result.findings[0].what.startswith("DeepSpeed 0.19.8 can"), text_of(result)


@pytest.mark.e2e
def test_two_real_processes_reduce_a_tensor(real: Machine) -> None:
    real.package("torch", "2.13.0")
    real.finds("collectives", "ok", "with gloo")


@pytest.mark.e2e
def test_processes_that_cannot_talk_are_found_and_leave_nothing(real: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "SECONDS", 3.0)
    real.package("torch", "2.13.0")
    real.environ["GLOO_SOCKET_IFNAME"] = "no-such-card"
    words = "cannot reduce a tensor with gloo", "unset GLOO_SOCKET_IFNAME"
    said = real.finds("collectives", "problem", *words)
    assert "no-such-card" in said or "has reached the store" in said
    assert "enforce fail" not in said


@pytest.mark.e2e
def test_ranks_that_hang_are_ended_by_pid(real: Machine, tmp_path: Path) -> None:
    """Two ranks of which one never starts its part: the other waits, and both are gone afterwards."""
    program = tmp_path / "hanging.py"
    program.write_text(
        "import os, sys, time\n"
        "from trainkit.doctor import all_reduce\n"
        "real = all_reduce.take_part\n"
        "def take_part(rank, *rest):\n"
        "    open(f'{sys.argv[3]}/rank-{rank}', 'w').write(str(os.getpid()))\n"
        "    if rank: time.sleep(60)\n"
        "    return real(rank, *rest)\n"
        "all_reduce.take_part = take_part\n"
        "sys.exit(all_reduce.main())\n"
    )
    begin = time.monotonic()
    done = real.commands((sys.executable, str(program), "gloo", "3", str(tmp_path)), 60, environ=dict(os.environ))
    assert done.code == 1 and time.monotonic() - begin < 50, done
    answer = json.loads(done.output)
    assert not answer["fine"] and answer["stages"][1] == []
    for rank in (0, 1):
        assert not Path(f"/proc/{(tmp_path / f'rank-{rank}').read_text()}").exists()


def test_a_plan_of_one_process_reduces_with_nobody(machine: Machine) -> None:
    machine.finds("collectives", "skipped", target=target_for(machine, "quickstart"))


def cards(machine: Machine, **changes: object) -> Machine:
    first = Gpu(0, "GPU-0a", "NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0), ecc_errors=0, pci_bus_id="0000:17:00.0")
    machine.facts = replace(machine.facts, gpus=(first, replace(first, index=1, uuid="GPU-1b", **changes)))  # type: ignore[arg-type]
    return machine


PART = MigInstance("MIG-7", "1g.10gb", 10 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "GPU"),
        ({"ecc_errors": 3}, "warning", "3 uncorrectable memory errors"),
        ({"pending_repair": True}, "warning", "nvidia-smi --gpu-reset -i 1"),
        ({"throttling": ("heat",), "temperature": 92}, "warning", "92 degrees"),
        ({"power_limit": 200.0, "power_default": 700.0}, "note", "nvidia-smi -i 1 -pl 700"),
        ({"compute_mode": "prohibited"}, "problem", "nvidia-smi -i 1 -c DEFAULT"),
        ({"processes": (GpuProcess(4711, "ada", "python old.py", 10 * GIB),)}, "warning", "pid 4711 ada, 10 GiB"),
        ({"processes": (GpuProcess(99, "ada", "Xorg", GIB, graphics=True),), "memory_free": 70 * GIB}, "ok", "GPU"),
        ({"memory_free": 40 * GIB}, "warning", "40 GiB of GPU 1 (NVIDIA H100) are in use"),
        ({"memory_free": 70 * GIB, "memory_reserved": 9 * GIB}, "ok", "GPU"),
        # A split card has processes of others on other parts; it is judged itself where a part of it is used.
        ({"mig": True, "instances": (PART,), "processes": (GpuProcess(4711),)}, "ok", "GPU"),
        ({"mig": True, "instances": (PART,), "ecc_errors": 1}, "warning", "1 uncorrectable"),
    ],
)
def test_a_card_that_is_not_well_is_found(
    machine: Machine, changes: dict[str, object], level: Level, words: str
) -> None:
    cards(machine, **changes).finds("gpu-health", level, words)


def test_only_the_cards_of_the_plan_are_judged(machine: Machine) -> None:
    machine.finds("gpu-health", "skipped", "there is no GPU here")
    cards(machine, ecc_errors=3)
    levels: dict[str, Level] = {
        "devices.select=[0]": "ok", "devices.select=[1]": "warning", "devices.type=cpu": "skipped"
    }  # fmt: skip
    for words, level in levels.items():
        machine.finds("gpu-health", level, target=target_for(machine, "quickstart", words))


def test_what_blocks_the_plan_is_a_problem(machine: Machine) -> None:
    machine.finds("plan", "skipped")
    install = "-m pip install 'torch>=2.6,<2.14' 'numpy>=1.26,<3' 'safetensors>=0.4.3,<0.9'"
    machine.finds("plan", "problem", install, target=target_for(machine, "quickstart"))
    machine.package("torch", "2.13.0")
    machine.package("numpy", "2.4.0")
    machine.package("safetensors", "0.8.0")
    machine.finds("plan", "ok", target=target_for(machine, "quickstart"))
    install = "-m pip install 'deepspeed>=0.19.4,<0.19.9' 'ninja>=1.11.1,<2'"
    machine.finds("plan", "problem", install, target=target_for(machine, "zero2", "devices.type=cpu"))
