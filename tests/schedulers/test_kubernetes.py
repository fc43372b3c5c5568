"""Manifests of Kubernetes: as golden files, by the schemas of the API, and what kubectl answers about them."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.conftest import Trainkit
from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Planned, Variable
from trainkit.launch_plan.render import explain
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Kubernetes
from trainkit.recipe.yaml_writer import resolved_yaml
from trainkit.runner.rundir.create import plan_text
from trainkit.schedulers import kubernetes
from trainkit.schedulers.base import Job, JobRequest, JobState, NoAnswerError, Output, Place, Query, RefusedError
from trainkit.schedulers.kubernetes import LABEL, accepted, job_state, submitted
from trainkit.schedulers.kubernetes import SCHEDULER as KUBERNETES
from trainkit.schedulers.registry import place_in

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
RENEW = "TRAINKIT_RENEW_GOLDEN=1 python -m pytest tests/schedulers/test_kubernetes.py"
OF_KUBERNETES = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())
SCHEMAS = OF_KUBERNETES["kinds"]
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
POD: dict[str, Any] = {
    "metadata": {
        "labels": {"team": "nlp"},
        "annotations": {"k8s.v1.cni.cncf.io/networks": "roce-a,roce-b", "sidecar.istio.io/inject": "false"},
    },
    "spec": {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": {"app": "other"}}, "topologyKey": "kubernetes.io/hostname"}
                ]
            }
        },
        "imagePullSecrets": [{"name": "regcred"}],
        "priorityClassName": "high",
        "serviceAccountName": "trainer",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "volumes": [{"name": "scratch", "hostPath": {"path": "/mnt/nvme", "type": "Directory"}}],
        "containers": [
            {
                "name": "trainkit",
                "imagePullPolicy": "Always",
                "resources": {"limits": {"rdma/hca": 1}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            }
        ],
    },
}
PODS: dict[str, Any] = {**PLAIN, "cluster": {**CLUSTER, "pod": POD}}
RECIPES = {
    "jobset-pod": PODS,
    "jobset": FULL,
    "jobset-plain": PLAIN,
    "indexed-job": INDEXED,
    "indexed-job-alone": ALONE,
}


@pytest.fixture
def planned(layered: Layered, machine: Machine) -> Callable[[dict[str, Any]], Planned]:
    """The plan of a recipe for a machine of two GPUs."""
    return lambda recipe: build_plan(layered(recipe), machine(2))


Plans = Callable[[dict[str, Any]], Planned]


def manifests(found: Planned, recipe: str = "version: 1\nname: demo\n") -> Mapping[str, str]:
    """What is submitted, by the names of its files."""
    record = {"recipe.yaml": recipe, "plan.json": plan_text(found.plan)}
    return KUBERNETES.files(JobRequest(found.plan, record, "/record", RUN, {}))


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
            if name not in ("labels", "matchLabels", "annotations", "nodeSelector", "data", "limits", "selector"):
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
    content = manifests(found, recipe)[kubernetes.CONFIG_MAP]
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


def with_pod(spec: Any = None, **template: Any) -> dict[str, Any]:
    """What changes a recipe to one with cluster.pod."""
    return {"cluster": {**CLUSTER, "pod": template if spec is None else {"spec": spec}}}


def with_container(**fields: Any) -> dict[str, Any]:
    """The same for trainkit's container."""
    return with_pod({"containers": [fields]})


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
        (with_pod({"hostNetwork": True}), "cluster.pod.spec.hostNetwork"),
    ],
)
def test_what_no_cluster_could_run_is_refused_at_its_key(planned: Plans, change: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as raised:
        planned({**PLAIN, **change})
    assert [each.key for each in raised.value.diagnostics] == [key]


def template_of(found: Planned) -> dict[str, Any]:
    """The template of the pods of a jobset."""
    work = next(each for each in objects(found) if each["kind"] == "JobSet")
    made: dict[str, Any] = work["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return made


def test_what_the_recipe_has_for_pods_is_in_their_template_beside_all_that_trainkit_makes(planned: Plans) -> None:
    plain, made = template_of(planned(PLAIN)), template_of(planned(PODS))
    (ours,), (more,) = plain["spec"].pop("containers"), made["spec"].pop("containers")
    volumes = made["spec"].pop("volumes")
    assert volumes == [*plain["spec"].pop("volumes"), *POD["spec"]["volumes"]]
    rest = {name: value for name, value in POD["spec"].items() if name not in ("containers", "volumes")}
    assert made["spec"] == plain["spec"] | rest
    assert made["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "nlp"}
    assert made["metadata"]["annotations"] == POD["metadata"]["annotations"]
    added = POD["spec"]["containers"][0]
    assert more.pop("env") == [*ours.pop("env"), *added["env"]]
    assert more.pop("volumeMounts") == [*ours.pop("volumeMounts"), *added["volumeMounts"]]
    assert more.pop("resources") == {"limits": ours.pop("resources")["limits"] | {"rdma/hca": 1}}
    assert more == ours | {name: added[name] for name in ("imagePullPolicy", "securityContext")}


VALUES = ["a\nb", "a\nb\n", " a\nb\n", "\n", "a\n\n", "a\x85b\n", "a\r\nb\n", "\ta\n", "12", "yes", "- a", "${RUN}"]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_added_reaches_kubernetes_as_it_was_written(planned: Plans, value: str) -> None:
    spec = {
        "volumes": [{"name": "x", "emptyDir": {}}],
        "initContainers": [{"name": "i", "env": [{"name": "A", "value": value}], "command": [value, "b"]}],
        "tolerations": [],
        "runtimeClassName": None,
        "dnsConfig": {},
    }
    change = {"cluster": {**CLUSTER, "pod": {"metadata": {"annotations": {"a.b/c": value}}, "spec": spec}}}
    made = template_of(planned({**PLAIN, **change}))
    assert made["metadata"]["annotations"] == {"a.b/c": value}
    assert made["spec"]["volumes"][-1:] == spec.pop("volumes")
    assert {name: made["spec"][name] for name in spec} == spec


def test_each_line_that_the_recipe_adds_says_which_key_did(planned: Plans) -> None:
    found = planned(PODS)
    assert found.plan.job is not None
    lines = [line.strip() for line in str(found.plan.job.content).splitlines()]
    for line, key in (
        ("team: nlp", "metadata.labels.team"), ("annotations:", "metadata.annotations"),
        ("- key: nvidia.com/gpu", "spec.tolerations"), ("topologyKey: kubernetes.io/hostname", "spec.affinity"),
        ("hostNetwork: true", "spec.hostNetwork"), ("rdma/hca: 1", "spec.containers.0.resources.limits.rdma/hca"),
        ("add: [IPC_LOCK]", "spec.containers.0.securityContext"), ("value: mlx5", "spec.containers.0.env.0"),
        ("- name: scratch", "spec.containers.0.volumeMounts.0"), ("type: Directory", "spec.volumes.0"),
    ):  # fmt: skip
        assert found.provenance.parts[f"job.content.{lines.index(line)}"] == (f"cluster.pod.{key}",), line
    assert found.provenance.parts[f"job.content.{lines.index('nvidia.com/gpu: 2')}"][0] == "cluster.gpu_resource"


def test_what_is_added_is_explained_by_key_and_by_word_with_its_place(
    solve: Callable[..., Resolved], machine: Machine
) -> None:
    resolved = solve(
        "program: {kind: torch, module: t}\noutput: {root: /data}\ncluster:\n  kind: kubernetes\n  image: x\n"
        "  volumes: ['a:/data']\n  pod:\n    spec:\n      volumes:\n      - {name: scratch, emptyDir: {}}\n"
        "      nodeSelector: {a.b/c: d}\n"
    )
    planned = build_plan(resolved, machine(1))
    by_key = explain.render("cluster.pod", resolved, planned).splitlines()
    assert 'cluster.pod.spec.nodeSelector.a.b/c = "d"' in by_key
    assert by_key[by_key.index('cluster.pod.spec.nodeSelector.a.b/c = "d"') + 1].endswith("yaml:11:29")
    (by_word,) = [line for line in explain.render("scratch", resolved, planned).splitlines() if "from" in line]
    assert by_word.split()[1] == "cluster.pod.spec.volumes.0"
    assert by_word.endswith("yaml:10:9")


def test_the_fields_that_are_known_are_those_of_kubernetes() -> None:
    for place, kind in ((("spec",), "PodSpec"), (("spec", "containers", "0"), "Container")):
        found = " ".join(f"{name}{sign}" for name, sign in kubernetes.FIELDS[place].items())
        assert found == OF_KUBERNETES["fields"][kind]
        assert {*kubernetes.FIELDS[place].values()} <= kubernetes.KINDS.keys()


# What is added -> the key below cluster.pod, words of the refusal, and of what to do instead.
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    (with_pod(nodeSelector={}), "nodeSelector", "no field", "kubectl explain"),
    (with_pod(metadata={"name": "x"}), "metadata.name", "no field", ""),
    (with_pod({"tolerationz": []}), "spec.tolerationz", "no field", "tolerations"),
    (with_container(enw=[]), "spec.containers.0.enw", "no field", "env"),
    (with_pod(metadata={"labels": {LABEL: "x"}}), f"metadata.labels.{LABEL}", "trainkit sets", "leave"),
    (with_pod(metadata={"labels": {"a": 1}}), "metadata.labels.a", "must be a text", "in quotes"),
    (with_pod({"nodeSelector": {"fast": True}}), "spec.nodeSelector.fast", "must be a text", "in quotes"),
    (with_pod({"restartPolicy": "Always"}), "spec.restartPolicy", "trainkit sets", "leave"),
    (with_pod({"subdomain": "x"}), "spec.subdomain", "trainkit sets", "leave"),
    (with_pod({"terminationGracePeriodSeconds": 9}), "spec.terminationGracePeriodSeconds", "", "grace_seconds"),
    (with_container(image="x"), "spec.containers.0.image", "trainkit sets", "cluster.image"),
    (with_container(name="other"), "spec.containers.0.name", "trainkit sets", "leave"),
    (with_container(command=["sh"]), "spec.containers.0.command", "trainkit sets", "cluster.python"),
    (with_container(args=["x"]), "spec.containers.0.args", "trainkit sets", "leave"),
    (with_container(resources={"limits": {"cpu": 3}}), "spec.containers.0.resources.limits.cpu", "", "cpus_per_node"),
    (
        with_container(resources={"requests": {"nvidia.com/gpu": 8}}),
        "spec.containers.0.resources.requests.nvidia.com/gpu", "trainkit sets", "devices.select",
    ),
    (with_container(env=[{"name": "TRAINKIT_POD_JOB"}]), "spec.containers.0.env.0", "makes itself", "another name"),
    (with_container(volumeMounts=[{"mountPath": "/data"}]), "spec.containers.0.volumeMounts.0", "makes itself", ""),
    (with_pod({"volumes": [{"name": "plan"}]}), "spec.volumes.0", "makes itself", "another name"),
    (with_pod({"volumes": {"name": "x"}}), "spec.volumes", "must be a list", "write a list"),
    (with_pod(metadata=[]), "metadata", "must be a mapping", "write a mapping"),
    (with_pod({"containers": [{}, {}]}), "spec.containers", "one mapping", "initContainers"),
    (with_pod({"tolerations": [{}]}), "spec.tolerations", "list of mappings", ""),
    (with_pod({"affinity": {"nodeAffinity": {"x": [["a"]]}}}), "spec.affinity.nodeAffinity.x", "list of mappings", ""),
    (with_pod({"tolerations": [{"key": "a"}, "b"]}), "spec.tolerations.1", "must be a mapping", "explain pod.spec.tol"),
    (with_pod({"tolerations": [None, {"key": "a"}]}), "spec.tolerations.0", "must be a mapping", "explain pod.spec"),
    (with_pod({"tolerations": {"key": "a"}}), "spec.tolerations", "must be a list of mappings", "explain pod.spec.tol"),
    (with_pod({"imagePullSecrets": ["regcred"]}), "spec.imagePullSecrets.0", "must be a mapping", "explain pod.spec"),
    (with_pod({"affinity": "x"}), "spec.affinity", "must be a mapping", "explain pod.spec.affinity"),
    (with_pod({"priorityClassName": ["x"]}), "spec.priorityClassName", "must be a single value", "explain pod.spec"),
    (with_pod({"affinity": {"x": [None]}}), "spec.affinity.x", "list of mappings", ""),
    (with_pod({"volumes": ["emptyDir"]}), "spec.volumes.0", "must be a mapping", "explain pod.spec.volumes`"),
    (with_pod({"volumes": [[]]}), "spec.volumes.0", "must be a mapping", "explain pod.spec.volumes`"),
    (with_container(env=[None]), "spec.containers.0.env.0", "must be a mapping", "explain pod.spec.containers.env`"),
    (with_container(env=[{"name": "A"}, "HF_TOKEN=hf_1"]), "spec.containers.0.env.1", "must be a mapping", ""),
    (with_container(env={"HF_TOKEN": "hf_1"}), "spec.containers.0.env", "must be a list", "write a list"),
    (with_container(ports=[80]), "spec.containers.0.ports.0", "must be a mapping", "explain pod.spec.containers.ports"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "key", "what", "hint"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_pods_cannot_have_is_refused_with_the_reason(
    planned: Plans, change: dict[str, Any], key: str, what: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        planned({**PLAIN, **change})
    (found,) = raised.value.diagnostics
    assert found.key == f"cluster.pod.{key}"
    assert what in found.what
    assert hint in found.hint


def test_a_pod_of_several_files_is_merged_recorded_and_named_at_its_line(solve: Callable[..., Resolved]) -> None:
    weak = "train: {steps: 1}\ncluster: {kind: kubernetes, pod: {spec: {tolerations: [{key: a.b/c}], hostIPC: true}}}\n"
    strong = (
        "extends: ./weak.yaml\ncluster:\n  pod:\n    spec:\n      tolerations+:\n      - {key: d, operator: Exists}\n"
        "      nodeSelector: {a.b/c: '1'}\n      hostIPC: false\n"
    )
    resolved = solve({"weak.yaml": weak, "r.yaml": strong})
    assert isinstance(resolved.recipe.cluster, Kubernetes)
    assert resolved.recipe.cluster.pod == {
        "spec": {
            "tolerations": [{"key": "a.b/c"}, {"key": "d", "operator": "Exists"}],
            "hostIPC": False,
            "nodeSelector": {"a.b/c": "1"},
        }
    }
    assert solve(resolved_yaml(resolved)).recipe.cluster == resolved.recipe.cluster
    origin = resolved.origin("cluster.pod.spec.tolerations.1.operator")
    assert origin is not None
    assert origin.place == "r.yaml:6:28"


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
    'The Job "x" is invalid: spec.template.spec.tolerations[0].operator: Unsupported value: "x"': "cluster.pod",
    'The JobSet "x" is invalid: spec.failurePolicy.maxRestarts: Invalid value: -1': "cluster.max_restarts",
    "something else": "cluster",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSALS)
def test_a_refusal_stands_at_the_key_that_it_names(words: str) -> None:
    assert KUBERNETES.blamed(words) == REFUSALS[words]
    with pytest.raises(RefusedError, match=re.escape(words)):
        accepted(Output(1, "", words))


def test_the_workload_is_what_was_submitted(
    planned: Plans, layered: Layered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = f"configmap/demo-{RUN}\nservice/demo-{RUN}\njob.batch/demo-{RUN}\n"
    assert submitted(Output(0, out, "")) == f"job/demo-{RUN}"
    asked: list[tuple[str, ...]] = []

    def answer(query: Query[Any], _: object) -> Any:
        asked.append(query.argv)
        return query.read(Output(0, f"jobset.jobset.x-k8s.io/demo-{RUN}", ""))

    monkeypatch.setattr(kubernetes, "ask", answer)
    plan = planned(PLAIN).plan
    request = JobRequest(plan, {"recipe.yaml": "", "plan.json": ""}, str(tmp_path), RUN, {})
    assert KUBERNETES.submit(request) == Job(f"training/jobset/demo-{RUN}")
    assert KUBERNETES.dry_run(request, layered(PLAIN)).said == "Kubernetes would take it: jobset"
    files = [word for file in ("configmap.yaml", "workload.yaml") for word in ("-f", f"{tmp_path}/{file}")]
    words = ("-o", "name", "-n", "training", *files)
    assert asked == [("kubectl", "create", *words), ("kubectl", "create", "--dry-run=server", *words)]
    with pytest.raises(NoAnswerError, match="names no workload: configmap/x"):
        submitted(Output(0, "configmap/x\n", ""))


def test_commands_for_a_job_name_its_namespace_and_its_label() -> None:
    job = Job(f"training/jobset/demo-{RUN}")
    tail = ("-n", "training", "-l", f"trainkit/run=demo-{RUN}")
    resource = "jobsets.jobset.x-k8s.io"
    assert KUBERNETES.state(job).argv == ("kubectl", "get", f"{resource},pods", *tail, "-o", "json")
    assert KUBERNETES.cancel(job, now=False).argv == (
        "kubectl", "delete", f"{resource},services,configmaps", *tail, "-o", "name", "--wait=false"
    )  # fmt: skip
    assert KUBERNETES.cancel(job, now=True).argv == (
        "kubectl", "delete", f"{resource},services,configmaps,pods", *tail, "-o", "name", "--wait=false", "--now"
    )  # fmt: skip
    read = KUBERNETES.cancel(job, now=False).read
    removed = "jobset.jobset.x-k8s.io/demo", "configmap/demo"
    assert read(Output(0, "\n".join(removed), "")) == removed
    assert read(Output(0, "No resources found\n", "")) == ()
    argv, _ = KUBERNETES.attach(job, "p-1", ("sh",), terminal=True, section=Kubernetes, environ={})
    assert argv == ("kubectl", "exec", "-i", "-t", "-n", "training", "p-1", "--", "sh")


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
        (listed(None), JobState("gone", "NotFound")),
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


# Keeps what it is given, and answers that all of it was made and runs.
KUBECTL = """#!/bin/sh
echo "$@" >>"$STAND_IN/calls"
case $1 in
create)
    for word; do case $word in *.yaml) cp "$word" "$STAND_IN";; esac; done
    echo configmap/llama
    echo jobset.jobset.x-k8s.io/llama;;
get) cat "$STAND_IN/objects.json";;
logs) echo "step 1/10000";;
esac
"""


@pytest.mark.cli
def test_the_documented_job_of_64_gpus_is_eight_pods_and_its_commands_reach_kubectl(
    trainkit: Trainkit, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "outgrowing.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^<!-- file kubernetes.yaml -->\n```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (commands,) = re.findall(r"^```sh kubernetes\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "kubernetes.yaml").write_text(recipe)
    stand_in = tmp_path / "bin" / "kubectl"
    stand_in.parent.mkdir()
    stand_in.write_text(KUBECTL)
    stand_in.chmod(0o755)
    (tmp_path / "objects.json").write_text(listed({"status": {}}, *(pod(each, "Running") for each in range(8))).out)
    environ = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "STAND_IN": str(tmp_path)}
    told = []
    for line in commands.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "trainkit"
        done = trainkit(*words, environ=environ)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        told.append(done.stdout)
    assert "step 1/10000" in told[-1]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("--dry-run=server" in call for call in calls) == 1 + 1  # by itself, and before it is submitted
    assert {call.partition(" ")[0] for call in calls} == {"create", "get", "logs"}
    made = [tree for name in ("configmap", "workload") for tree in
            yaml.safe_load_all((tmp_path / f"{name}.yaml").read_text())]  # fmt: skip
    assert [each for tree in made for each in complaints(tree)] == []
    (jobset,) = [tree for tree in made if tree["kind"] == "JobSet"]
    (node,) = jobset["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert node["template"]["spec"]["completions"] == node["template"]["spec"]["parallelism"] == 8
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "1000Gi"}
    plan = json.loads(made[0]["data"]["plan.json"])
    assert {"--nnodes=8", "--nproc-per-node=8"} <= {
        each for each in plan["commands"][0]["argv"] if isinstance(each, str)
    }
