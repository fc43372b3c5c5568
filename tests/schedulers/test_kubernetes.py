"""Manifests of Kubernetes: as golden files, by the schemas of the API, and what kubectl answers about them."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainkit.errors import RecipeError
from trainkit.jobs import pods
from trainkit.machine.facts import Facts
from trainkit.plan.model import Planned, Variable
from trainkit.plan.render import explain
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.runner.rundir.making import plan_text
from trainkit.schedulers import kubectl, kubernetes
from trainkit.schedulers.interface import JobState, Output, RefusedError
from trainkit.schedulers.kubernetes_answers import job_state, rehearsed, submitted
from trainkit.schedulers.place import Place, place_in

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
RENEW = "TRAINKIT_RENEW_GOLDEN=1 python -m pytest tests/schedulers/test_kubernetes.py"
SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())["kinds"]
RUN = "20261123-012042-abcdef"

CLUSTER = {
    "kind": "kubernetes", "image": "registry.example.org/team/trainkit:1", "namespace": "training",
    "volumes": ["datasets:/datasets", "shared:/data"],
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "name": "Demo.run_1",
    "program": {"kind": "torch", "script": "train.py"},
    "strategy": {"kind": "ddp"},
    "nodes": {"count": 4, "processes_per_node": 2},
    "output": {"root": "/data/runs"},
    "cluster": CLUSTER,
}
FULL: dict[str, Any] = {
    **PLAIN,
    "env_from": ["HF_TOKEN"],
    "launcher": {"grace_seconds": 45},
    "cluster": {
        **CLUSTER, "queue": "team", "secret": "tokens", "cpus_per_node": 96, "memory_per_node": "900Gi",
        "max_restarts": 5, "python": "/opt/venv/bin/python",
    },
}  # fmt: skip
INDEXED: dict[str, Any] = {**FULL, "cluster": {**FULL["cluster"], "workload": "indexed-job"}}
del INDEXED["cluster"]["max_restarts"]
ALONE: dict[str, Any] = {**INDEXED, "nodes": {"processes_per_node": 2}}
RECIPES = {"jobset": FULL, "jobset-plain": PLAIN, "indexed-job": INDEXED, "indexed-job-alone": ALONE}


@pytest.fixture
def planned(layered: Layered, machine: Machine) -> Callable[[dict[str, Any]], Planned]:
    """The plan of a recipe for a machine of two cards."""
    return lambda recipe: build_plan(layered(recipe), machine(2))


Plans = Callable[[dict[str, Any]], Planned]


def manifests(found: Planned) -> dict[str, str]:
    """What is submitted, by the names of its files."""
    return pods.files(found.plan, "version: 1\nname: demo\n", RUN)


def objects(found: Planned) -> list[dict[str, Any]]:
    return [each for content in manifests(found).values() for each in yaml.safe_load_all(content)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_manifest_is_as_written_down(planned: Plans, name: str) -> None:
    path, found = GOLDEN / f"{name}.yaml", manifests(planned(RECIPES[name]))
    config_map = re.sub(r"(  plan.json: \|\n)(    .*\n)+", r"\1    {}\n", found[kubernetes.CONFIG_MAP])
    text = f"{config_map}---\n{found[kubernetes.WORKLOAD]}"
    if os.environ.get("TRAINKIT_RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{name} differs; if the change is meant, renew it with: {RENEW}"


@pytest.mark.parametrize("name", RECIPES)
def test_every_object_satisfies_the_schema_of_its_kind(planned: Plans, name: str) -> None:
    found = objects(planned(RECIPES[name]))
    assert {each["kind"] for each in found} >= {"ConfigMap", "JobSet" if name.startswith("jobset") else "Job"}
    for each in found:
        jsonschema.Draft202012Validator.check_schema(SCHEMAS[each["kind"]])
        assert [*complaints(each)] == []


def complaints(tree: dict[str, Any]) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(SCHEMAS[tree["kind"]]).iter_errors(tree):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def mappings(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in an object but those whose names are anybody's: labels, data, limits."""
    if isinstance(tree, dict):
        yield tree
        for name, value in tree.items():
            if name not in ("labels", "data", "limits", "selector"):
                yield from mappings(value)
    elif isinstance(tree, list):
        for each in tree:
            yield from mappings(each)


@pytest.mark.parametrize("name", RECIPES)
def test_a_wrong_key_anywhere_fails(planned: Plans, name: str) -> None:
    for tree in objects(planned(RECIPES[name])):
        count = len([*mappings(tree)])
        assert count > 1
        for position in range(count):
            spoiled = copy.deepcopy(tree)
            [*mappings(spoiled)][position]["backofLimit"] = 0
            assert [*complaints(spoiled)], f"{tree['kind']}: mapping {position} takes any key"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "parallelism"), "2"),
        (("spec", "backoffLimit"), None),
        (("spec", "template", "spec", "containers", 0, "command"), "python"),
        (("spec", "template", "spec", "containers", 0, "image"), 7),
        (("spec", "podFailurePolicy", "rules", 0, "onExitCodes", "values"), ["2"]),
        (("spec", "template", "spec", "restartPolicy"), True),
    ],
)
def test_a_value_of_the_wrong_type_fails(planned: Plans, path: tuple[Any, ...], value: Any) -> None:
    jobset = next(each for each in objects(planned(FULL)) if each["kind"] == "JobSet")
    inside = jobset["spec"]["replicatedJobs"][0]["template"]
    assert [*complaints(jobset)] == []
    for part in path[:-1]:
        inside = inside[part]
    inside[path[-1]] = value
    assert [*complaints(jobset)]


def test_the_pods_find_the_recipe_and_the_plan_as_they_were_submitted(planned: Plans) -> None:
    found = planned(FULL)
    recipe = 'version: 1\nname: "x: #y"\n\nenv: {A: "\\ttab", B: \'é\'}   \n'
    content = pods.files(found.plan, recipe, RUN)[kubernetes.CONFIG_MAP]
    data = yaml.safe_load(content)["data"]
    assert data == {"recipe.yaml": recipe, "plan.json": plan_text(found.plan)}


def test_a_name_becomes_one_that_kubernetes_takes() -> None:
    for name in ("Demo.run_1", "3d", "x" * 100, "a" * 21 + "--b", "UPPER", "7"):
        made = kubernetes.object_name(name).bind({Variable.RUN_ID: RUN})
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made)
        assert len(f"{made}-node-0-9999-abcde") <= 63
        assert made.endswith(f"-{RUN}")


def test_every_line_says_what_made_it(planned: Plans) -> None:
    found = planned(FULL)
    assert found.plan.job is not None
    lines = str(found.plan.job.content).splitlines()
    known = {**found.provenance.parts, **found.provenance.rules}
    assert all(f"job.content.{number}" in known for number in range(len(lines)))
    for line, key in (("completions: 4", "nodes.count"), ("maxRestarts: 5", "cluster.max_restarts"),
                      ("terminationGracePeriodSeconds: 75", "launcher.grace_seconds"),
                      ("cpu: 96", "cluster.cpus_per_node"), ("nvidia.com/gpu: 2", "cluster.gpu_resource"),
                      ("claimName: shared", "cluster.volumes"),
                      ("namespace: training", "cluster.namespace")):  # fmt: skip
        number = next(position for position, each in enumerate(lines) if each.strip() == line)
        assert key in found.provenance.parts[f"job.content.{number}"], line
    submitted_with = [f"job.submit.{position}" for position in range(len(found.plan.job.submit))]
    assert all(each in known for each in submitted_with)


def test_the_explanation_of_a_line_names_the_key(layered: Layered, machine: Machine) -> None:
    resolved = layered(FULL)
    page = explain.render("completions:", resolved, build_plan(resolved, machine(2)))
    assert "nodes.count" in page


def test_a_pod_knows_the_others_by_the_names_that_its_manifest_gives(planned: Plans) -> None:
    """$(VAR) is replaced by the kubelet, and a label is handed in; the index is the job controller's."""
    name = f"demo-run-1-{RUN}"
    for recipe, part in ((FULL, "-node-0"), (INDEXED, "")):
        work = next(each for each in objects(planned(recipe)) if each["kind"] in ("Job", "JobSet"))
        job = work["spec"]["replicatedJobs"][0]["template"]["spec"] if part else work["spec"]
        pod = job["template"]["spec"]
        told = {each["name"]: each.get("value", "2") for each in pod["containers"][0]["env"]}
        told["TRAINKIT_POD_START"] = told["TRAINKIT_POD_START"].replace("$(TRAINKIT_POD_RESTARTS)", "2")
        place = place_in({**told, "JOB_COMPLETION_INDEX": "1"})
        hosts = tuple(f"{name}{part}-{index}.{name}" for index in range(4))
        assert place == Place(1, 4, hosts, f"{name}.2")
        assert part or pod["subdomain"] == name  # a jobset's controller sets it


def test_secrets_are_named_and_never_written(planned: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_seen")
    content = "".join(manifests(planned(FULL)).values())
    assert "hf_not_to_be_seen" not in content
    assert "secretKeyRef" in content


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"cluster": {**CLUSTER, "image": None}}, "cluster.image"),
        ({"output": {"root": "runs"}}, "output.root"),
        ({"output": {"root": "/database"}}, "output.root"),
        ({"cluster": {**CLUSTER, "volumes": ["a:/data", "b:/data"]}}, "cluster.volumes"),
        ({"cluster": {**CLUSTER, "volumes": ["shared:/data", "x:data"]}}, "cluster.volumes"),
        ({"container": {"kind": "docker", "image": "other"}}, "container"),
        ({"env_from": ["HF_TOKEN"]}, "env_from"),
        ({"cluster": {**CLUSTER, "workload": "indexed-job", "max_restarts": 3}}, "cluster.max_restarts"),
        ({"nodes": {"count": 4, "rendezvous": "node0:29400"}}, "nodes.rendezvous"),
        ({"devices": {"select": [1, 0]}}, "devices.select"),
    ],
)
def test_what_no_cluster_could_run_is_refused_at_its_key(planned: Plans, change: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as raised:
        planned({**PLAIN, **change})
    assert [each.key for each in raised.value.diagnostics] == [key]


# In the words of kubectl and of an API server of Kubernetes 1.32 (apimachinery's field errors, apiserver's messages).
REFUSALS = {
    'Error from server (NotFound): error when creating "w.yaml": namespaces "nosuch" not found': "cluster.namespace",
    'Error from server (Forbidden): error when creating "w.yaml": jobsets.jobset.x-k8s.io is forbidden: User "me" '
    'cannot create resource "jobsets" in API group "jobset.x-k8s.io" in the namespace "training"': "cluster.namespace",
    'error: resource mapping not found for name: "x" namespace: "" from "w.yaml": no matches for kind "JobSet" in '
    'version "jobset.x-k8s.io/v1alpha2"; ensure CRDs are installed first': "cluster.workload",
    'The Job "x" is invalid: spec.template.spec.containers[0].resources.limits[cpu]: Invalid value: "0": must be '
    "greater than or equal to 0": "cluster.cpus_per_node",
    'The Job "x" is invalid: spec.template.spec.containers[0].resources.limits[nvidia.com/gpux]: Invalid value: "1"':
    "cluster.gpu_resource",
    'The Job "x" is invalid: spec.template.spec.containers[0].image: Required value': "cluster.image",
    'The Job "x" is invalid: spec.template.spec.volumes[2].persistentVolumeClaim.claimName: Required value':
    "cluster.volumes",
    'The JobSet "x" is invalid: spec.failurePolicy.maxRestarts: Invalid value: -1': "cluster.max_restarts",
    "something else": "cluster",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSALS)
def test_a_refusal_stands_at_the_key_that_it_names(words: str) -> None:
    assert kubernetes.blamed(words) == REFUSALS[words]
    with pytest.raises(RefusedError, match=re.escape(words)):
        rehearsed(Output(1, "", words))


def test_the_workload_is_what_was_submitted() -> None:
    out = f"configmap/demo-{RUN}\nservice/demo-{RUN}\njob.batch/demo-{RUN}\n"
    assert submitted(Output(0, out, "")) == f"job/demo-{RUN}"
    argv = ("kubectl", "create", "-o", "name", "-n", "training", "-f", "w.yaml")
    query = kubectl.submission(argv)
    assert query.read(Output(0, f"jobset.jobset.x-k8s.io/demo-{RUN}", "")) == f"training/jobset/demo-{RUN}"
    assert kubectl.rehearsal(argv).argv == ("kubectl", "create", "--dry-run=server", *argv[2:])
    with pytest.raises(RefusedError, match="names no workload: configmap/x"):
        submitted(Output(0, "configmap/x\n", ""))


def test_commands_for_a_job_name_its_namespace_and_its_label() -> None:
    job = f"training/jobset/demo-{RUN}"
    tail = ("-n", "training", "-l", f"trainkit/run=demo-{RUN}")
    resource = "jobsets.jobset.x-k8s.io"
    assert kubectl.state(job).argv == ("kubectl", "get", f"{resource},pods", *tail, "-o", "json")
    assert kubectl.cancel(job).argv == (
        "kubectl", "delete", f"{resource},services,configmaps", *tail, "-o", "name", "--wait=false"
    )  # fmt: skip
    assert kubectl.cancel(job, now=True).argv == (
        "kubectl", "delete", f"{resource},services,configmaps,pods", *tail, "-o", "name", "--wait=false", "--now"
    )  # fmt: skip
    read = kubectl.cancel(job).read
    removed = "jobset.jobset.x-k8s.io/demo", "configmap/demo"
    assert read(Output(0, "\n".join(removed), "")) == removed
    assert read(Output(0, "No resources found\n", "")) == ()
    assert kubectl.attach(job, "p-1", ("sh",), terminal=True) == (
        "kubectl", "exec", "-i", "-t", "-n", "training", "p-1", "--", "sh"
    )  # fmt: skip


# Lists as `kubectl get KIND,pods -o json` prints them, cut to the fields that are read; their shape is that of the API
# reference (JobStatus, PodStatus, ContainerStatus of v1.32; JobSetStatus of v1alpha2). None is of a real cluster.
def pod(index: int, phase: str, *, restart: str = "0", **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(index), "jobset.sigs.k8s.io/restart-attempt": restart}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"demo-node-0-{index}-x{index}", "labels": labels},
        "status": {"phase": phase, **status},
    }  # fmt: skip


def ended(code: int, reason: str = "Error") -> list[dict[str, Any]]:
    return [{"name": "trainkit", "ready": False, "state": {"terminated": {"exitCode": code, "reason": reason}}}]


def condition(kind: str, **more: str) -> dict[str, Any]:
    return {"type": kind, "status": "True", "lastTransitionTime": "2026-11-23T01:20:42Z", **more}


def disrupted(reason: str) -> dict[str, Any]:
    return condition("DisruptionTarget", reason=reason)


def listed(work: dict[str, Any] | None, *found: dict[str, Any]) -> Output:
    items = [*([{"apiVersion": "x", "kind": "JobSet", "metadata": {"name": "demo"}, **work}] if work else []), *found]
    return Output(0, json.dumps({"apiVersion": "v1", "kind": "List", "items": items}), "")


NODES = "demo-node-0-0-x0,demo-node-0-1-x1"
UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}  # fmt: skip
PULLED = [{"name": "trainkit", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}}]
FAILED = {"conditions": [condition("Failed", reason="FailedJobs", message="jobset failed due to one or more jobs")]}


@pytest.mark.parametrize(
    ("output", "state"),
    [
        (
            listed({"spec": {"suspend": True}, "status": {"restarts": 0}}),
            JobState("queued", "suspended, as by a queue that has not admitted it yet"),
        ),
        (listed({"spec": {}, "status": {}}), JobState("queued", "no pods yet")),
        (
            listed({"status": {}}, pod(1, "Pending", conditions=[UNSCHEDULABLE]), pod(0, "Running")),
            JobState("queued", "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", NODES),
        ),
        (
            listed({"status": {}}, pod(0, "Pending", containerStatuses=PULLED), pod(1, "Running")),
            JobState("queued", "ImagePullBackOff: Back-off pulling", NODES),
        ),
        (
            listed({"status": {"restarts": 2}}, pod(1, "Running"), pod(0, "Running")),
            JobState("running", "", NODES, 2),
        ),
        (
            listed({"status": {"conditions": [condition("Completed")], "terminalState": "Completed"}}),
            JobState("ended", "Completed", exit_code=0),
        ),
        (
            listed({"status": {"conditions": [condition("SuccessCriteriaMet"), condition("Complete")]}}),
            JobState("ended", "Completed", exit_code=0),
        ),
        (listed(None), JobState("unknown", "NotFound")),
        (
            Output(1, "", "The connection to the server 127.0.0.1:8080 was refused"),
            JobState("unknown", "The connection to the server 127.0.0.1:8080 was refused"),
        ),
    ],
)
def test_the_state_of_a_job_is_read_of_its_objects(output: Output, state: JobState) -> None:
    assert job_state(output) == state


@pytest.mark.parametrize(
    ("first", "second", "code", "why"),
    [
        ({"containerStatuses": ended(7)}, {"containerStatuses": ended(137)}, 7, ""),
        ({"containerStatuses": ended(143)}, {"conditions": [disrupted("PreemptionByScheduler")]}, 143, "preemption"),
        ({"containerStatuses": ended(1)}, {"conditions": [disrupted("DeletionByTaintManager")]}, 1, "node_failure"),
        ({"containerStatuses": ended(1)}, {"containerStatuses": ended(137, "OOMKilled")}, 1, "out_of_memory"),
    ],
)
def test_how_a_failed_job_has_ended_is_read_of_its_pods(
    first: dict[str, Any], second: dict[str, Any], code: int, why: Any
) -> None:
    reason = "FailedJobs: jobset failed due to one or more jobs"
    found = job_state(listed({"status": FAILED}, pod(1, "Failed", **second), pod(0, "Failed", **first)))
    assert found == JobState("ended", reason, NODES, exit_code=code, why=why)


@pytest.mark.parametrize("out", ["", "[]", "{}", '{"items": 3}', '{"items": [{}]}', "nonsense"])
def test_what_is_no_list_of_objects_is_unknown(out: str) -> None:
    assert job_state(Output(0, out, "")).state == "unknown"
