"""A submitted run of several nodes in an image: every node starts a container of its own, and leaves none."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm

from tests.cluster.engines import IMAGE, Engine, lacking, recipe, skeleton
from tests.cluster.slurm_jobs import Cluster
from trainkit.files import read_json

PROGRAM = """
import os, time
print("rank", os.environ["RANK"], "on", os.uname().nodename, os.environ["SECRET"], flush=True)
open(f"here-{os.environ['RANK']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
"""
NODES = ("tk1", "tk2", "tk3")
SECRET = "hf_never_written_down"


@pytest.fixture
def podman(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with images of its own on each machine, in one place of the file system that they share."""
    if why := lacking("podman"):
        pytest.skip(why)
    # A short name: podman is slow where the paths of its sockets are longer than the kernel takes.
    with tempfile.TemporaryDirectory(prefix="tk-box-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        engine = Engine("podman", Path(folder))
        places = [engine.folder / name for name in ("graph", "run")]
        engine.configure()
        for name, value in engine.environ.items():
            monkeypatch.setenv(name, value)
        try:
            for place in places:
                place.mkdir()
                for node in NODES:
                    own = engine.folder / node / place.name
                    own.mkdir(parents=True)
                    done = slurm.run("mount", "--bind", str(own), str(place), on=node)
                    assert done.returncode == 0, done.stderr
            for node in NODES:
                argv = slurm.machines.argv(node, ["podman", "import", "-", IMAGE])
                subprocess.run(argv, input=skeleton(), env=slurm.environ(), check=True, capture_output=True, timeout=60)
            yield engine
        finally:
            for node in NODES:
                slurm.run("umount", "--recursive", *map(str, places), on=node)


def names(cluster: Cluster, node: str) -> list[str]:
    """Of the containers on a machine, whatever their state."""
    return cluster.slurm.run("podman", "ps", "--all", "--format={{.Names}}", on=node).stdout.split()


def test_nodes_run_in_an_image_and_go_on_without_the_one_that_is_lost(
    cluster: Cluster, podman: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    program: dict[str, object] = {"kind": "torch", "script": "program.py"}
    several = {"strategy": {"kind": "ddp"}, "nodes": {"count": 2, "processes_per_node": 1}, "env_from": ["SECRET"]}
    own = {"cluster": {"kind": "slurm", "time": "10:00"}, "launcher": {"grace_seconds": 3}}
    (cluster.folder / "program.py").write_text(PROGRAM)
    (cluster.folder / "r.yaml").write_text(recipe(podman, program, **several, **own))
    job = cluster.trainkit_submit("r.yaml")
    run = job.folder.name
    here = [cluster.folder / f"here-{rank}" for rank in (0, 1)]
    job.until(lambda: all(each.exists() for each in here), "both ranks")
    assert {node: names(cluster, node) for node in NODES} == {
        "tk1": [f"trainkit-{run}-1-0"], "tk2": [f"trainkit-{run}-1-1"], "tk3": []
    }  # fmt: skip
    assert "another run is doing this" not in job.said, "nodes share a home, and have images of their own"
    commands = "".join(cluster.slurm.run("ps", "-eo", "args", on=node).stdout for node in NODES)
    assert f"trainkit-{run}-1-1" in commands and SECRET not in commands
    pids = read_json(job.folder / "attempts" / "1" / "nodes" / "1.json")["pids"]
    killed = cluster.slurm.run("kill", "-KILL", str(pids["trainkit"]), str(pids["guardian"]), on="tk2")
    assert killed.returncode == 0, killed.stderr
    job.until(lambda: read_json(job.folder / "status.json").get("state") == "requeued", "the queue", 60)
    assert "node 1 (tk2) was lost" in str(read_json(job.folder / "status.json")["why"])
    job.until(lambda: not any(names(cluster, node) for node in NODES), "the end of all containers", 20)
    job.start_now()
    (cluster.folder / "go").touch()
    assert job.end() == 0, job.said
    written = [path for path in job.folder.rglob("*") if path.is_file()]
    logs = {path for path in written if path.suffix in (".out", ".err") and path.name.startswith("rank-")} | {
        job.output
    }
    said = "".join(path.read_text() for path in logs if "attempts/2" in str(path))
    assert sorted(said.splitlines()) == [f"rank 0 on tk1 {SECRET}", f"rank 1 on tk3 {SECRET}"], said
    assert not [path for path in written if path not in logs and SECRET in path.read_text(errors="replace")]
    assert not any(names(cluster, node) for node in NODES)
