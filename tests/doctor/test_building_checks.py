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

from trainkit.doctor.check import Target
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
    found = real.examine("build-tools", target_for(real, "ddp", "efficiency.compile.enabled=true"))
    assert found.level == "ok", text_of(found)


def test_a_missing_compiler_is_found(machine: Machine) -> None:
    result = machine.examine("build-tools")
    assert result.level == "warning" and "there is no C++ compiler: c++" in text_of(result)
    assert "apt-get install g++" in text_of(result)


def test_a_cxx_that_leads_nowhere_is_found(machine: Machine) -> None:
    machine.environ["CXX"] = "no-such-compiler"
    assert "unset CXX" in text_of(machine.examine("build-tools"))


def test_a_compiler_that_does_not_compile_is_found(machine: Machine) -> None:
    machine.program("usr/bin/c++", "echo 'trial.cpp:1:10: fatal error: vector: No such file or directory' >&2; exit 1")
    result = machine.examine("build-tools", target_for(machine, "ddp", "efficiency.compile.enabled=true"))
    assert result.level == "problem"
    assert "cannot build a one-line program" in text_of(result) and "fatal error: vector" in text_of(result)


@needs_compiler
def test_a_libaio_that_cannot_be_linked_is_found(real: Machine) -> None:
    """The real compiler, behind a script that takes libaio's header away as a machine without it would."""
    real.program(
        "usr/bin/c++",
        f'for word; do [ "$word" = -laio ] && {{ echo "trial.cpp:1:10: fatal error: libaio.h" >&2; exit 1; }}; done\n'
        f'exec {shutil.which("c++")} "$@"',
    )
    result = real.examine("build-tools")
    assert result.level == "warning"
    assert "libaio cannot be linked" in text_of(result) and "apt-get install libaio-dev" in text_of(result)


@needs_compiler
def test_a_ninja_beside_the_interpreter_that_is_not_on_path_is_found(real: Machine) -> None:
    python = real.program("venv/bin/python", f'exec {sys.executable} "$@"')
    beside = real.program("venv/bin/ninja", "echo 1.13")
    real.facts = replace(real.facts, executable=str(python))
    real.program("usr/bin/c++", f'PATH="{os.environ["PATH"]}" exec c++ "$@"')
    real.environ["PATH"] = str(real.bin)
    said = text_of(real.examine("build-tools"))
    assert f"export PATH={beside.parent}:$PATH" in said
    beside.unlink()
    assert f"{python} -m pip install ninja" in text_of(real.examine("build-tools"))
    real.environ["PATH"] += f":{real.folder('venv/bin')}"
    real.program("venv/bin/ninja", "echo 'ninja: bad interpreter' >&2; exit 126")
    assert "bad interpreter" in text_of(real.examine("build-tools"))


@needs_compiler
def test_missing_headers_of_the_interpreter_are_found(real: Machine) -> None:
    result = real.examine("build-tools", headers=real.folder("no-headers"))
    assert result.level == "warning" and "python3.11-dev" in text_of(result)


def test_a_plan_that_builds_nothing_needs_no_tools(machine: Machine) -> None:
    target = target_for(machine, "ddp")
    assert [machine.examine(name, target).level for name in ("build-tools", "deepspeed-ops")] == [
        "skipped",
        "skipped",
    ]


def fake_python(machine: Machine, answer: str, code: int = 0) -> None:
    """An interpreter that answers as the real one would elsewhere."""
    machine.package("deepspeed", "0.19.8")
    machine.package("torch", "2.13.0")
    script = f"cat <<'END'\n{answer}\nEND\necho 'ImportError: broken' >&2; exit {code}"
    python = machine.program("venv/bin/python", script)
    machine.environ["PATH"] += ":/usr/bin:/bin"
    machine.facts = replace(machine.facts, executable=str(python))


def test_an_op_that_deepspeed_cannot_build_is_found(machine: Machine) -> None:
    said = "async_io requires the dev libaio .so object and headers but these were not found."
    fake_python(machine, json.dumps({"async_io": {"compatible": False, "said": said}}))
    result = machine.examine("deepspeed-ops")
    assert result.level == "warning" and said in text_of(result) and "libaio-dev" in text_of(result)


def test_a_deepspeed_that_cannot_be_imported_is_found(machine: Machine) -> None:
    fake_python(machine, "", code=1)
    result = machine.examine("deepspeed-ops")
    assert result.level == "warning" and "ImportError: broken" in text_of(result)


def test_without_deepspeed_there_are_no_ops(machine: Machine) -> None:
    assert machine.examine("deepspeed-ops").level == "skipped"


@pytest.mark.e2e
def test_deepspeed_itself_is_asked(real: Machine) -> None:
    real.package("deepspeed", "0.19.8")
    result = real.examine("deepspeed-ops", target_for(real, "ddp"))
    assert result.level == "skipped"
    result = real.examine("deepspeed-ops")
    assert result.findings[0].what.startswith("DeepSpeed 0.19.8 can"), text_of(result)


@pytest.mark.e2e
def test_two_real_processes_reduce_a_tensor(real: Machine) -> None:
    real.package("torch", "2.13.0")
    result = real.examine("collectives")
    assert result.level == "ok" and "with gloo" in text_of(result), text_of(result)


@pytest.mark.e2e
def test_processes_that_cannot_talk_are_found_and_leave_nothing(real: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "SECONDS", 3.0)
    real.package("torch", "2.13.0")
    real.environ["GLOO_SOCKET_IFNAME"] = "no-such-card"
    result = real.examine("collectives")
    said = text_of(result)
    assert result.level == "problem" and "cannot reduce a tensor with gloo" in said
    assert "no-such-card" in said or "has reached the store" in said
    assert "unset GLOO_SOCKET_IFNAME" in said and "enforce fail" not in said


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
    assert machine.examine("collectives", target_for(machine, "quickstart")).level == "skipped"


def cards(machine: Machine, **changes: object) -> Machine:
    first = Gpu(0, "GPU-0a", "NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0), ecc_errors=0, pci_bus_id="0000:17:00.0")
    machine.facts = replace(machine.facts, gpus=(first, replace(first, index=1, uuid="GPU-1b", **changes)))  # type: ignore[arg-type]
    return machine


def test_cards_in_good_order_pass(machine: Machine) -> None:
    assert machine.examine("gpu-health").level == "skipped"
    assert cards(machine).examine("gpu-health").level == "ok"


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"ecc_errors": 3}, "warning", "3 uncorrectable memory errors"),
        ({"pending_repair": True}, "warning", "nvidia-smi --gpu-reset -i 1"),
        ({"throttling": ("heat",), "temperature": 92}, "warning", "92 degrees"),
        ({"power_limit": 200.0, "power_default": 700.0}, "note", "nvidia-smi -i 1 -pl 700"),
        ({"compute_mode": "prohibited"}, "problem", "nvidia-smi -i 1 -c DEFAULT"),
        ({"processes": (GpuProcess(4711, "ada", "python old.py", 10 * GIB),)}, "warning", "pid 4711 ada, 10 GiB"),
        ({"processes": (GpuProcess(99, "ada", "Xorg", GIB, graphics=True),), "memory_free": 70 * GIB}, "ok", "card"),
        ({"memory_free": 40 * GIB}, "warning", "40 GiB of card 1 (NVIDIA H100) are in use"),
        ({"memory_free": 70 * GIB, "memory_reserved": 9 * GIB}, "ok", "card"),
    ],
)
def test_a_card_that_is_not_well_is_found(machine: Machine, changes: dict[str, object], level: str, words: str) -> None:
    result = cards(machine, **changes).examine("gpu-health")
    assert result.level == level and words in text_of(result)


def test_only_the_cards_of_the_plan_are_judged(machine: Machine) -> None:
    cards(machine, ecc_errors=3)
    assert machine.examine("gpu-health", target_for(machine, "quickstart", "devices.select=[0]")).level == "ok"
    assert machine.examine("gpu-health", target_for(machine, "quickstart", "devices.select=[1]")).level == "warning"
    assert machine.examine("gpu-health", target_for(machine, "quickstart", "devices.type=cpu")).level == "skipped"


def test_a_split_card_is_judged_where_a_part_of_it_is_used(machine: Machine) -> None:
    part = MigInstance("MIG-7", "1g.10gb", 10 * GIB, 10 * GIB)
    others = (GpuProcess(4711, "ada", "python other.py", 10 * GIB),)
    cards(machine, mig=True, instances=(part,), processes=others)
    assert machine.examine("gpu-health").level == "ok"
    cards(machine, mig=True, instances=(part,), ecc_errors=1)
    assert machine.examine("gpu-health").level == "warning"


def test_what_blocks_the_plan_is_a_problem(machine: Machine) -> None:
    assert machine.examine("plan", Target()).level == "skipped"
    result = machine.examine("plan", target_for(machine, "quickstart"))
    assert result.level == "problem" and "pip install 'trainkit[train]'" in text_of(result)
    machine.package("torch", "2.13.0")
    machine.package("numpy", "2.4.0")
    assert machine.examine("plan", target_for(machine, "quickstart")).level == "ok"
