"""Kubernetes: the manifest of a plan, and its ConfigMap. Pure; `kubectl` has the commands.

Sources: the API reference of batch/v1 Job and core/v1 (kubernetes.io/docs/reference/kubernetes-api), and of
jobset.x-k8s.io/v1alpha2 (jobset.sigs.k8s.io, api/jobset/v1alpha2/jobset_types.go and pkg/constants of JobSet 0.9).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.errors import Diagnostic
from trainkit.plan.context import Context
from trainkit.plan.model import Text, Variable, text
from trainkit.plan.provenance import Source, SourcedJob, Token, sourced_job, token
from trainkit.recipe.schema import Kubernetes, Recipe
from trainkit.recipe.yaml.writer import manifest, scalar
from trainkit.schedulers import kubectl
from trainkit.schedulers.interface import JobState, Query
from trainkit.schedulers.place import POD_HOSTS, POD_START

WORKLOAD, CONFIG_MAP = "workload.yaml", "configmap.yaml"
FOLDER = "/etc/trainkit"  # in the pods, with the recipe and the plan
FILES = ("recipe.yaml", "plan.json")
RESTARTED = ("node_failure", "hang", "failure")  # after what a JobSet starts all pods again
RESTARTS, POD_JOB = "TRAINKIT_POD_RESTARTS", "TRAINKIT_POD_JOB"
MARGIN_SECONDS = 30  # beyond the grace time, until the kubelet kills what is left of a pod
PART = "node"  # the replicated job
# A pod of a jobset is <name>-node-0-<index>, and has five more characters behind a dash; a host name has at most 63
# (JobSet's webhook counts them so).
LONGEST_NAME = 63 - len(f"-{PART}-0-99999-abcde")
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\n]*")  # a claim (RFC 1123 subdomain), and a path
REHEARSED_RUN = "20000101-000000-000000"  # stands for the id of a run that is only rehearsed
# Field of the API -> what made it: recipe keys, or a rule. What has none here is as the field above it.
WHY: Mapping[str, str | tuple[str, ...]] = {
    "apiVersion": ("cluster.workload",),
    "kind": ("cluster.workload",),
    "metadata": "all that is made for a run has its label, by which it is found and removed",
    "name": ("name",),
    "namespace": ("cluster.namespace",),
    "kueue.x-k8s.io/queue-name": ("cluster.queue",),
    "network": "pods find node 0 by its host name, before they are ready",
    "failurePolicy": ("cluster.max_restarts",),
    "rules": "what is wrong with the recipe or the image is so at the next start as well",
    "replicas": "one job, whose pods are the nodes",
    "completions": ("nodes.count",),
    "parallelism": ("nodes.count",),
    "completionMode": "the completion index is the number of the node",
    "backoffLimit": "nodes end together: one that starts again alone would meet nobody",
    "podFailurePolicy": "exit codes 2 and 4 are of the recipe and the machine; an evicted pod is no failure of the run",
    "restartPolicy": "nodes end together: one that starts again alone would meet nobody",
    "terminationGracePeriodSeconds": ("launcher.grace_seconds",),
    "containers": ("cluster.image",),
    "image": ("cluster.image",),
    "command": ("cluster.python",),
    "env": "tells a pod which node of which start it is",
    "valueFrom": "tells a pod which node of which start it is",
    "secretKeyRef": ("env_from", "cluster.secret"),
    "resources": ("cluster.gpu_resource", "devices.select", "nodes.processes_per_node"),
    "cpu": ("cluster.cpus_per_node",),
    "memory": ("cluster.memory_per_node",),
    "volumeMounts": ("cluster.volumes",),
    "volumes": ("cluster.volumes",),
    "persistentVolumeClaim": ("cluster.volumes",),
    "configMap": "the pods start from the recipe and the plan that were submitted",
    "emptyDir": "ranks and data loaders share memory; containers have 64 MiB of it by default",
    "clusterIP": "a service without an address: pods find node 0 by its host name",
    "publishNotReadyAddresses": "pods find node 0 by its host name, before they are ready",
    "selector": "a service without an address: pods find node 0 by its host name",
}
OBJECT = "an object that Kubernetes is given"


def problems(context: Context) -> Iterator[Diagnostic]:
    """What is wrong with the section, whatever Kubernetes says."""
    recipe, section, error = context.recipe, _section(context.recipe), context.resolved.error
    if not section.image:
        hint = "name one that has trainkit and what the recipe needs: cluster.image=registry/name:tag"
        yield error("cluster.image", "cluster.image is missing", hint, why="pods are made of an image")
    if recipe.container.kind != "none":
        hint = "leave container out; cluster.image names the image"
        yield error("container", f"container.kind is {recipe.container.kind}", hint, why="pods are containers already")
    for volume in section.volumes:
        if not VOLUME.fullmatch(volume):
            hint = "write the claim and the folder where pods see it: claim:/data"
            yield error("cluster.volumes", f"cluster.volumes has {volume!r}", hint, why="a claim, a colon and a folder")
    paths = [path for _, path in mounts(section)]
    if doubled := next((path for path in paths if paths.count(path) > 1), None):
        yield error("cluster.volumes", f"cluster.volumes mounts two claims at {doubled}", "give each a path of its own")
    if section.workload == "indexed-job" and section.max_restarts:
        what = f"cluster.max_restarts is {section.max_restarts}, and an indexed-job is never started again"
        yield error("cluster.max_restarts", what, "leave it out, or set cluster.workload=jobset")
    if recipe.nodes.rendezvous != "auto":
        what = f"nodes.rendezvous is {recipe.nodes.rendezvous}, and pods meet where their cluster calls node 0"
        yield error("nodes.rendezvous", what, "leave it out")
    if isinstance(recipe.devices.select, list):
        what = "devices.select names cards, and Kubernetes chooses those of a pod"
        yield error("devices.select", what, "write how many: devices.select=2")
    root = recipe.output.root
    if not any(root == path or root.startswith(f"{path.rstrip('/')}/") for path in paths):
        hint = "mount a claim that all pods share (cluster.volumes=[claim:/data]), and set output.root=/data/runs"
        yield error("output.root", f"output.root is {root}, which is on no claim of cluster.volumes", hint, why=LOST)
    if recipe.env_from and not section.secret:
        hint = "name a Secret of the namespace that has them by these names: cluster.secret"
        yield error("env_from", f"env_from names {', '.join(recipe.env_from)}, and pods have no caller", hint)


LOST = "what a pod writes elsewhere is lost with it"


def _section(recipe: Recipe) -> Kubernetes:
    assert isinstance(recipe.cluster, Kubernetes)
    return recipe.cluster


def cores(context: Context) -> tuple[int, tuple[str, ...]] | None:
    """Processors of each pod; None where the namespace decides."""
    asked = _section(context.recipe).cpus_per_node
    return (asked, ("cluster.cpus_per_node",)) if asked else None


def mounts(section: Kubernetes) -> list[tuple[str, str]]:
    """Claims, and where each is mounted."""
    return [(claim, path) for claim, _, path in (each.partition(":") for each in section.volumes)]


def object_name(name: str) -> Text:
    """The name of all objects of a run, of the recipe's name: a DNS label that begins with a letter (RFC 1035)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return text(plain[: LONGEST_NAME - len(REHEARSED_RUN) - 1].rstrip("-") + "-", Variable.RUN_ID)


def job(context: Context) -> SourcedJob:
    """The workload, kubectl, and nothing that starts it on the nodes: Kubernetes does."""
    section = _section(context.recipe)
    lines: list[Token] = []
    for number, each in enumerate(objects(context, section)):
        lines += [token("---", rule="objects are kept apart")] if number else []
        lines += written(each)
    rule = "submits to Kubernetes, under the context that kubectl has"
    submit = [token(word, rule=rule) for word in ("kubectl", "create", "-o", "name")]
    submit += [token("-n", keys=("cluster.namespace",)), token(section.namespace, keys=("cluster.namespace",))]
    for file in (CONFIG_MAP, WORKLOAD):
        what = "the recipe and the plan, for the pods" if file == CONFIG_MAP else "the workload, in the run directory"
        submit += [token("-f", rule=what), token(Variable.RUN_DIR, f"/{file}", rule=what)]
    again = RESTARTED if section.workload == "jobset" and section.max_restarts else ()
    terms = {"requeue": again, "start_seconds": section.start_seconds}
    return sourced_job("kubernetes", WORKLOAD, lines, submit, (), **terms)


def state(job_id: str) -> Query[JobState]:
    """What Kubernetes knows of a workload and its pods."""
    return kubectl.state(job_id)


def written(tree: Mapping[str, Any]) -> Iterator[Token]:
    """An object as lines of YAML, each with what made it."""

    def leaf(value: Any) -> str:
        if isinstance(value, Text):  # no character of it needs quotes: the stand-in for a variable has none, either
            return "".join(part if isinstance(part, str) else _STAND_IN for part in value.parts)
        return scalar(value)

    for path, line in manifest(tree, leaf):
        before, *behind = line.split(_STAND_IN)
        parts: list[str | Variable] = [before]
        for part in behind:
            parts += [Variable.RUN_ID, part]
        source = source_of(path)
        yield token(*parts, keys=source.keys, rule=source.rule)


_STAND_IN = "\0"  # which nothing that is written has: scalars escape it


def source_of(path: Sequence[str]) -> Source:
    """What made a field: of the deepest name on the way to it that says it."""
    why = next((WHY[name] for name in reversed(path) if name in WHY), OBJECT)
    return Source(rule=why) if isinstance(why, str) else Source(keys=why)


def objects(context: Context, section: Kubernetes) -> Iterator[dict[str, Any]]:
    """What is submitted beside the ConfigMap: a jobset; or a job, and the service that names its pods."""
    recipe, name = context.recipe, object_name(context.recipe.name)
    labels = {kubectl.LABEL: name}
    queue = {"kueue.x-k8s.io/queue-name": section.queue} if section.queue else {}
    metadata = {"name": name, "namespace": section.namespace, "labels": {**labels, **queue}}
    spec = job_spec(context, section, name)
    if section.workload == "indexed-job":
        if recipe.nodes.count > 1:
            spec["template"]["spec"] = {"subdomain": name, **spec["template"]["spec"]}
            service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
            plain = {**metadata, "labels": labels}
            yield {"apiVersion": "v1", "kind": "Service", "metadata": plain, "spec": service}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
        return
    rules = [{"name": "notAsPlanned", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    yield {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": section.restarts, "rules": rules},
            "replicatedJobs": [{"name": PART, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def job_spec(context: Context, section: Kubernetes, name: Text) -> dict[str, Any]:
    """A job whose pods are the nodes of the plan."""
    nodes = context.recipe.nodes.count
    codes = {"containerName": "trainkit", "operator": "In", "values": [2, 4]}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    grace = round(context.recipe.launcher.grace_seconds) + MARGIN_SECONDS
    claims = [
        {"name": f"claim-{position}", "persistentVolumeClaim": {"claimName": claim}}
        for position, (claim, _) in enumerate(mounts(section))
    ]
    own = [{"name": "plan", "configMap": {"name": name}}, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "containers": [container(context, section, name)],
        "volumes": [*own, *claims],
    }
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": codes}, {"action": "Ignore", "onPodConditions": disrupted}]
        },
        "template": {"metadata": {"labels": {kubectl.LABEL: name}}, "spec": pod},
    }


def container(context: Context, section: Kubernetes, name: Text) -> dict[str, Any]:
    """What runs in each pod: trainkit as its first process, which has the signals of the kubelet."""
    argv = [section.python, "-P", "-m", "trainkit", "job", "node", FOLDER, "--run-id", text(Variable.RUN_ID)]
    limits: dict[str, Any] = {}
    if context.topology.device == "cuda":
        limits[section.gpu_resource] = len(context.devices)
    limits |= {"cpu": section.cpus_per_node} if section.cpus_per_node else {}
    limits |= {"memory": section.memory_per_node} if section.memory_per_node else {}
    # A mount of a single file is no link, as the files in a mounted ConfigMap are.
    inside = [{"name": "plan", "mountPath": f"{FOLDER}/{file}", "subPath": file} for file in FILES]
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108  a mount in the pod
    claims = [{"name": f"claim-{position}", "mountPath": path} for position, (_, path) in enumerate(mounts(section))]
    found: dict[str, Any] = {"name": "trainkit", "image": section.image or "", "command": argv}
    found["env"] = variables(context, section, name)
    if limits:
        found["resources"] = {"limits": limits}  # requests are the same where only limits are given
    return found | {"volumeMounts": [*inside, shared, *claims]}


def variables(context: Context, section: Kubernetes, name: Text) -> list[dict[str, Any]]:
    """What a pod is told: which start, who the others are, and secrets by reference alone."""
    last = context.recipe.nodes.count - 1
    index, part = f"[0-{last}]" if last else "0", f"-{PART}-0" if section.workload == "jobset" else ""
    restarts: dict[str, Any] = {"name": RESTARTS, "value": "0"}
    if section.workload == "jobset":
        label = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
        restarts = {"name": RESTARTS, "valueFrom": {"fieldRef": {"fieldPath": label}}}
    kind = "jobset" if section.workload == "jobset" else "job"
    secrets = [
        {"name": each, "valueFrom": {"secretKeyRef": {"name": section.secret or "", "key": each}}}
        for each in dict.fromkeys(context.recipe.env_from)
    ]
    return [
        {"name": POD_HOSTS, "value": text(*name.parts, f"{part}-{index}.", *name.parts)},
        restarts,
        {"name": POD_START, "value": text(*name.parts, f".$({RESTARTS})")},
        {"name": POD_JOB, "value": text(f"{section.namespace}/{kind}/", *name.parts)},
        *secrets,
    ]


def config_map(namespace: str, name: str, files: Mapping[str, str]) -> str:
    """The files that the pods start from, as an object."""
    metadata = {"name": name, "namespace": namespace, "labels": {kubectl.LABEL: name}}
    tree = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": files}
    return "".join(f"{line}\n" for _, line in manifest(tree, scalar))


def blamed(words: str) -> str:
    """The recipe key of what the API server refuses, where it names a field, or what is missing."""
    for said, key in MISSING.items():
        if said in words:
            return key
    for field in re.findall(r"[A-Za-z]+(?:\[[^\]]*\])?(?:\.[\w/-]+(?:\[[^\]]*\])?)+", words):
        path = [part for part in re.split(r"[.\[\]]+", field) if part]
        if keys := source_of(path).keys:
            return keys[0]
    return "cluster"


# What kubectl and the API server say of what is not there -> the key that asks for it.
MISSING = {
    'namespaces "': "cluster.namespace",
    'in the namespace "': "cluster.namespace",
    'no matches for kind "JobSet"': "cluster.workload",
    "exceeded quota": "nodes.count",
}
