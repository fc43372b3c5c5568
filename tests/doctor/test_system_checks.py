"""Limits, disks, ports and names: each check finds what is wrong with a prepared machine, and nothing on a good one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prepared_machine import GIB, MIB, Machine, target_for

from trainkit.doctor.check import Level, Space, Target
from trainkit.doctor.checks import limits, network
from trainkit.doctor.checks.limits import obstacle
from trainkit.text import format_size

SHARED = "shared-memory"


@pytest.mark.parametrize("name", ["shared-memory", "limits", "disk-space", "write-speed", "ports", "host-names"])
def test_a_good_machine_passes(machine: Machine, name: str) -> None:
    machine.finds(name, "ok")


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [(64 * MIB, 64 * MIB, "problem"), (8 * GIB, MIB, "problem"), (GIB, GIB // 2, "warning"), (8 * GIB, GIB, "ok")],
)
def test_small_or_full_shared_memory_is_found(machine: Machine, total: int, free: int, level: Level) -> None:
    shm = machine.root / "dev/shm"
    machine.spaces[shm] = Space(total, free)
    words = (f"{shm}: {format_size(total)}, {format_size(free)} free", "--shm-size") if level != "ok" else ()
    machine.finds(SHARED, level, *words)


def test_shared_memory_is_needed_by_loader_processes_and_by_ranks_on_cards_or_with_deepspeed(machine: Machine) -> None:
    machine.spaces[machine.root / "dev/shm"] = Space(MIB, MIB)
    for words in (("quickstart",), ("ddp", "devices.type=cpu")):
        machine.finds(SHARED, "skipped", target=target_for(machine, *words))
    for words in (("quickstart", "data.workers=2"), ("ddp", "devices.select=[0, 1]"), ("zero2", "devices.type=cpu")):
        machine.finds(SHARED, "problem", target=target_for(machine, *words))


def test_a_plan_may_do_with_what_a_container_has(machine: Machine) -> None:
    machine.spaces[machine.root / "dev/shm"] = Space(64 * MIB, 64 * MIB)
    machine.finds(SHARED, "warning", target=target_for(machine, "quickstart", "data.workers=1"))


@pytest.mark.parametrize(("soft", "level"), [(50, "problem"), (1000, "warning"), (1024, "ok"), (-1, "ok")])
def test_a_low_limit_of_open_files_is_found(machine: Machine, soft: int, level: Level) -> None:
    machine.limits = {"open files": (soft, 4096)}
    assert ("ulimit -n 4096" in machine.finds("limits", level)) == (level != "ok")


def test_a_low_limit_of_processes_is_found(machine: Machine) -> None:
    machine.limits = {"processes": (10, -1)}
    machine.finds("limits", "problem", "ulimit -u unlimited")


def test_a_container_that_allows_few_processes_is_found(machine: Machine) -> None:
    machine.file("proc/self/cgroup", "0::/box\n")
    machine.file("sys/fs/cgroup/box/pids.max", "100\n")
    machine.file("sys/fs/cgroup/box/pids.current", "88\n")
    machine.finds("limits", "problem", "only 12 processes", "sys/fs/cgroup/box/pids.max")
    machine.file("sys/fs/cgroup/box/pids.max", "max\n")
    machine.finds("limits", "ok")


def test_a_temporary_folder_whose_path_leaves_no_room_for_sockets_is_found(machine: Machine) -> None:
    machine.environ["TMPDIR"] = "/" + "x" * 69
    machine.finds("limits", "ok")
    machine.environ["TMPDIR"] += "y" * 30
    machine.finds("limits", "warning", "characters too long", "TMPDIR=/tmp")


def test_memory_that_cannot_be_locked_matters_only_beside_infiniband(machine: Machine) -> None:
    machine.limits = {"locked memory": (8 * 2**20, -1)}
    machine.finds("limits", "ok")
    machine.folder("sys/class/infiniband/mlx5_0")
    machine.finds("limits", "warning", "mlx5_0")


@pytest.mark.parametrize(
    ("space", "level", "word"),
    [
        (Space(100 * GIB, MIB), "problem", "almost no room"),
        (Space(100 * GIB, 50 * GIB, files=3), "problem", "3 more files"),
        (Space(100 * GIB, 5 * GIB), "warning", "little room"),
    ],
)
def test_a_full_disk_is_found(machine: Machine, space: Space, level: Level, word: str) -> None:
    machine.spaces[machine.work] = space
    machine.finds("disk-space", level, word, "trainkit runs prune")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_run_root_without_write_permission_is_found(machine: Machine) -> None:
    machine.work.chmod(0o500)
    try:
        machine.finds("disk-space", "problem")
    finally:
        machine.work.chmod(0o700)


def test_a_run_root_below_a_file_is_found(machine: Machine) -> None:
    (machine.work / "runs").write_text("not a folder")
    machine.finds("disk-space", "problem", f"{machine.work}/runs cannot be written to: Not a directory")


def test_a_disk_that_is_read_only_is_told_from_one_that_is_another_users(tmp_path: Path) -> None:
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; exec "$2" -c "$3" "$1"'
    ask = f"import sys, pathlib; from {obstacle.__module__} import obstacle; print(obstacle(pathlib.Path(sys.argv[1])))"
    argv = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, ask]
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "Read-only file system\n")
    assert obstacle(tmp_path) == ""


def test_the_trial_of_the_disk_leaves_nothing_and_spares_a_full_one(machine: Machine) -> None:
    machine.finds("write-speed", "ok")
    assert list(machine.work.iterdir()) == []
    machine.spaces[machine.work] = Space(GIB, GIB // 2)
    machine.finds("write-speed", "skipped")


def test_a_slow_disk_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW", 2**60)
    machine.finds("write-speed", "warning", "slow:")


def meeting(machine: Machine, address: str) -> Target:
    return target_for(machine, "ddp", f"nodes.rendezvous={address}", "nodes.count=2")


def test_a_rendezvous_port_that_is_taken_is_found_on_node_0(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        target = meeting(machine, f"127.0.0.1:{port}")
        used = f"port {port} of nodes.rendezvous cannot be used: address already in use"
        machine.finds("ports", "problem", used, f"ss -ltnp 'sport = :{port}'", target=target)
        machine.finds("ports", "ok", target=replace(target, node_rank=1))
        assert machine.examine("ports", meeting(machine, f"192.0.2.1:{port}")).level != "problem"  # another machine's
    assert machine.examine("ports", target).level in ("ok", "note")


def test_a_rendezvous_port_among_those_of_outgoing_connections_is_named(machine: Machine) -> None:
    machine.file("proc/sys/net/ipv4/ip_local_port_range", "20000\t60999\n")
    machine.finds("ports", "note", "20000 to 60999", target=meeting(machine, "192.0.2.1:29500"))


def test_too_few_ports_for_connections_are_found(machine: Machine) -> None:
    machine.file("proc/sys/net/ipv4/ip_local_port_range", "60000\t60009\n")
    machine.finds("ports", "problem", "only 10 ports")


def test_a_name_that_does_not_resolve_is_found(machine: Machine) -> None:
    target = meeting(machine, "node0.invalid:29500")
    machine.finds("host-names", "problem", "node 0 is called node0.invalid", target=target)
    machine.facts = replace(machine.facts, hostname="no-such-host.invalid")
    machine.finds("host-names", "problem", "echo '127.0.0.1 no-such-host.invalid' | sudo tee -a /etc/hosts")


def test_a_name_service_that_hangs_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "NAMES_LIMIT", 0.3)
    hanging = machine.program("usr/bin/python-that-hangs", "exec sleep 60")
    machine.facts = replace(machine.facts, executable=str(hanging))
    machine.environ["PATH"] += ":/usr/bin:/bin"
    machine.finds("host-names", "problem", "did not end within 0.3 s")


def test_one_process_needs_neither_ports_nor_names(machine: Machine) -> None:
    for name in ("ports", "host-names"):
        machine.finds(name, "skipped", target=target_for(machine, "quickstart"))


def test_what_the_system_refuses_is_a_finding(machine: Machine) -> None:
    def refuse(path: Path) -> Space:
        raise OSError(5, "Input/output error", str(path))

    machine.finds(SHARED, "warning", "Input/output error", space=refuse)
