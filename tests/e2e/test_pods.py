"""The command that a manifest has for pods, run as processes: they meet, and make the run directory on their volume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from trainkit.cli.pipeline import plan_recipe, resolve_request
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.rundir.create import plan_text
from trainkit.schedulers import kubernetes
from trainkit.schedulers.base import JobRequest

RUN = "20261123-012042-abcdef"


def test_both_starts_of_a_jobset_are_attempts_of_one_run(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    """What a pod has of its cluster is made up here: the completion index, host names that lead to it, the label."""
    volume = tmp_path / "volume"
    volume.mkdir()
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], os.environ['HF_TOKEN'])\n")
    recipe = {
        "version": 1, "name": "demo", "program": {"kind": "torch", "script": str(script)}, "strategy": {"kind": "ddp"},
        "devices": {"type": "cpu"}, "nodes": {"count": 2, "processes_per_node": 1}, "env_from": ["HF_TOKEN"],
        "output": {"root": str(volume / "runs")},
        "cluster": {
            "kind": "kubernetes", "image": "x", "secret": "tokens", "volumes": [f"shared:{volume}"],
            "python": sys.executable,
        },
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    resolved = resolve_request(str(tmp_path / "r.yaml"), environ={})
    plan = plan_recipe(resolved).plan
    record = {"recipe.yaml": resolved_yaml(resolved), "plan.json": plan_text(plan)}
    files = kubernetes.SCHEDULER.files(JobRequest(plan, record, str(tmp_path), RUN, {}))
    for name, content in yaml.safe_load(files[kubernetes.CONFIG_MAP])["data"].items():
        (tmp_path / name).write_text(content)
    jobset = yaml.safe_load(files[kubernetes.WORKLOAD])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    words = job["template"]["spec"]["containers"][0]["command"]
    argv = [str(tmp_path) if word == kubernetes.FOLDER else word for word in words]
    for restarts in ("0", "1"):
        made_up = {
            "HF_TOKEN": "hf_hidden", "TRAINKIT_POD_HOSTS": "127.0.0.1,127.0.0.1", "TRAINKIT_POD_RESTARTS": restarts,
            "TRAINKIT_POD_START": f"{tmp_path}.{restarts}", "TRAINKIT_POD_JOB": f"default/jobset/demo-{RUN}",
        }  # fmt: skip
        nodes = [
            subprocess.Popen(
                argv, cwd="/", env={**clean_environment, **made_up, "JOB_COMPLETION_INDEX": str(node)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for node in (0, 1)
        ]  # fmt: skip
        said = [node.communicate(timeout=100)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
    root = volume / "runs" / "demo" / RUN
    status = json.loads((root / "status.json").read_text())
    assert (status["attempt"], status["outcome"], status["job"]) == (2, "done", f"default/jobset/demo-{RUN}")
    assert json.loads((root / "code.json").read_text())["script"] == str(script)
    logs = [(root / "attempts" / str(number) / "logs" / "rank-1.out").read_text() for number in (1, 2)]
    assert logs == ["rank 1 hf_hidden\n"] * 2
    assert all("hf_hidden" not in path.read_text() for path in (root / "plan.json", root / "env.txt"))
