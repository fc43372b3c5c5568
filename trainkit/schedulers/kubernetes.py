"""Kubernetes: the manifest of a plan and its ConfigMap, and what kubectl is asked and prints.

Sources: the API reference of batch/v1 Job and core/v1 (kubernetes.io/docs/reference/kubernetes-api), and of
jobset.x-k8s.io/v1alpha2 (jobset.sigs.k8s.io, api/jobset/v1alpha2/jobset_types.go and pkg/constants of JobSet 0.9).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from trainkit.errors import Diagnostic, MachineError
from trainkit.files import publish
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text, Variable, text
from trainkit.launch_plan.provenance import Source, SourcedJob, Token, sourced_job, token
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Kubernetes as Section
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.cluster import Cluster
from trainkit.recipe.suggestions import did_you_mean
from trainkit.recipe.yaml_writer import manifest, scalar
from trainkit.schedulers.base import (
    DryRun,
    Job,
    JobRequest,
    JobState,
    NoAnswerError,
    Output,
    Place,
    Query,
    RefusedError,
    Scheduler,
    hosts_in,
    number_in,
)
from trainkit.schedulers.client import answer_or, ask

WORKLOAD, CONFIG_MAP = "workload.yaml", "configmap.yaml"
FOLDER = "/etc/trainkit"  # in the pods, with the recipe and the plan
FILES = ("recipe.yaml", "plan.json")
RESTARTED = ("node_failure", "hang", "failure")  # after what a JobSet starts all pods again
# What trainkit's manifests tell a pod: host names of all pods in Slurm's short form, the name of this start, how often
# the pods were started before, and the job.
POD_HOSTS, POD_START = "TRAINKIT_POD_HOSTS", "TRAINKIT_POD_START"
RESTARTS, POD_JOB = "TRAINKIT_POD_RESTARTS", "TRAINKIT_POD_JOB"
MARGIN_SECONDS = 30  # beyond the grace time, until the kubelet kills what is left of a pod
PART = "node"  # the replicated job
# A pod of a jobset is <name>-node-0-<index>, and has five more characters behind a dash; a host name has at most 63
# (JobSet's webhook counts them so).
LONGEST_NAME = 63 - len(f"-{PART}-0-99999-abcde")
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^:\n]*")  # a claim (RFC 1123 subdomain), and a path
DRY_RUN = "20000101-000000-000000"  # stands for the id of a run that is not submitted
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
# Fields of PodSpec and Container (Kubernetes 1.37, api/openapi-spec: io.k8s.api.core.v1), each with the kind of its
# value: {} a mapping, [{}] a list of mappings, [] a list, without a sign a single value.
_POD = """
    activeDeadlineSeconds affinity{} automountServiceAccountToken containers[{}] dnsConfig{} dnsPolicy
    enableServiceLinks ephemeralContainers[{}] evictionResponders[{}] hostAliases[{}] hostIPC hostNetwork hostPID
    hostUsers hostname hostnameOverride imagePullSecrets[{}] initContainers[{}] nodeName nodeSelector{} os{}
    overhead{} preemptionPolicy priority priorityClassName readinessGates[{}] resourceClaims[{}] resources{}
    restartPolicy runtimeClassName schedulerName schedulingGates[{}] schedulingGroup{} securityContext{}
    serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain
    terminationGracePeriodSeconds tolerations[{}] topologySpreadConstraints[{}] volumes[{}]
"""
_CONTAINER = """
    args[] command[] env[{}] envFrom[{}] image imagePullPolicy lifecycle{} livenessProbe{} name ports[{}]
    readinessProbe{} resizePolicy[{}] resources{} restartPolicy restartPolicyRules[{}] securityContext{}
    startupProbe{} stdin stdinOnce terminationMessagePath terminationMessagePolicy tty volumeDevices[{}]
    volumeMounts[{}] workingDir
"""
FieldPath = tuple[str, ...]  # of a field, from the top of an object or of the template
KINDS = {"{}": "a mapping", "[{}]": "a list of mappings", "[]": "a list", "": "a single value"}
FIELDS: Mapping[FieldPath, Mapping[str, str]] = {
    place: dict(re.findall(r"(\w+)(\S*)", names))
    for place, names in {
        (): "metadata{} spec{}",
        ("metadata",): "labels{} annotations{}",
        ("spec",): _POD,
        ("spec", "containers", "0"): _CONTAINER,
    }.items()
}
TEXTS = {("metadata", "labels"), ("metadata", "annotations"), ("spec", "nodeSelector")}  # have texts alone
# Lists that may be longer than trainkit makes them, and by what their items differ.
LONGER = {"env": "name", "volumes": "name", "volumeMounts": "mountPath"}
# Fields that are left as they are by default, because the run needs that; of `resources.limits`, what keys ask for.
LEFT: Mapping[str, str | tuple[str, ...]] = {
    **dict.fromkeys(
        ("subdomain", "hostname", "hostnameOverride", "setHostnameAsFQDN"), "pods find node 0 by its host name"
    ),
    **dict.fromkeys(("restartPolicy", "restartPolicyRules"), WHY["restartPolicy"]),
    "args": "trainkit is what the container runs; the program's words are program.args",
    "name": "the container's name is trainkit",
    "cpu": ("cluster.cpus_per_node",),
    "memory": ("cluster.memory_per_node",),
}
# Kind of workload in a job's id -> its resource, with its group: others have jobs, too.
RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "job": "jobs.batch"}
GONE = "NotFound"
INDEX = "batch.kubernetes.io/job-completion-index"  # on pods of an indexed job
# Reasons of a pod's condition DisruptionTarget (Kubernetes, "Disruptions") that are of its node; others are preemption.
OF_NODE = ("DeletionByTaintManager", "DeletionByPodGC", "TerminationByKubelet")
# What kubectl says where it finds no API server (client-go, kubectl's own messages).
UNREACHABLE = ("connection refused", "was refused", "Unable to connect to the server", "no such host", "i/o timeout")
LABEL = "trainkit/run"  # on all that is made for a run
LARGEST = 1_000_000  # bytes that a ConfigMap may have: 1 MiB, with its metadata
# What kubectl and the API server say of what is not there -> the key that asks for it.
MISSING = {
    'namespaces "': "cluster.namespace",
    'in the namespace "': "cluster.namespace",
    'no matches for kind "JobSet"': "cluster.workload",
    "exceeded quota": "nodes.count",
}


class Kubernetes(Scheduler):
    """Pods of a jobset or a job, which find recipe and plan in a ConfigMap, and the run directory on a volume."""

    kind, title = "kubernetes", "Kubernetes"
    job_id = r"[a-z0-9][a-z0-9-]{0,62}/(jobset|job)/[a-z0-9][a-z0-9.-]{0,252}"  # namespace/kind/name (RFC 1123)
    shares_folder: ClassVar[bool] = False
    one_console: ClassVar[bool] = False
    stays: ClassVar[bool] = True

    def problems(self, context: Context) -> Iterator[Diagnostic]:
        recipe, section, error = context.recipe, _section(context.recipe), context.resolved.error
        if not section.image:
            hint = "name one that has trainkit and what the recipe needs: cluster.image=registry/name:tag"
            yield error("cluster.image", "cluster.image is missing", hint, why="pods are made of an image")
        if recipe.container.kind != "none":
            hint = "leave container out; cluster.image names the image"
            yield error(
                "container", f"container.kind is {recipe.container.kind}", hint, why="pods are containers already"
            )
        for volume in section.volumes:
            if not VOLUME.fullmatch(volume):
                hint = "write the claim and the folder where pods see it: claim:/data"
                yield error(
                    "cluster.volumes", f"cluster.volumes has {volume!r}", hint, why="a claim, a colon and a folder"
                )
        paths = [path for _, path in mounts(section)]
        if doubled := next((path for path in paths if paths.count(path) > 1), None):
            yield error(
                "cluster.volumes", f"cluster.volumes mounts two claims at {doubled}", "give each a path of its own"
            )
        if section.workload == "indexed-job" and section.max_restarts:
            what = f"cluster.max_restarts is {section.max_restarts}, and an indexed-job is never started again"
            yield error("cluster.max_restarts", what, "leave it out, or set cluster.workload=jobset")
        if recipe.nodes.rendezvous != "auto":
            what = f"nodes.rendezvous is {recipe.nodes.rendezvous}, and pods meet where their cluster calls node 0"
            yield error("nodes.rendezvous", what, "leave it out")
        if isinstance(recipe.devices.select, list):
            what = "devices.select names GPUs, and Kubernetes chooses those of a pod"
            yield error("devices.select", what, "write how many: devices.select=2")
        root = recipe.output.root
        if not any(root == path or root.startswith(f"{path.rstrip('/')}/") for path in paths):
            hint = "mount a claim that all pods share (cluster.volumes=[claim:/data]), and set output.root=/data/runs"
            yield error(
                "output.root", f"output.root is {root}, which is on no claim of cluster.volumes", hint, why=LOST
            )
        if recipe.env_from and not section.secret:
            hint = "name a Secret of the namespace that has them by these names: cluster.secret"
            yield error("env_from", f"env_from names {', '.join(recipe.env_from)}, and pods have no caller", hint)
        for key, what, hint, why in template(context, section, object_name(recipe.name)).problems:
            yield error(key, what, hint, why=why)

    def job(self, context: Context) -> SourcedJob:
        """The workload, kubectl, and nothing that starts it on the nodes: Kubernetes does."""
        section = _section(context.recipe)
        lines: list[Token] = []
        added = template(context, section, object_name(context.recipe.name)).keys
        for number, each in enumerate(objects(context, section)):
            lines += [token("---", rule="objects are kept apart")] if number else []
            where = TEMPLATE_IN.get(each["kind"])
            lines += written(each, {(*where, *path): key for path, key in added.items()} if where else {})
        rule = "submits to Kubernetes, under the context that kubectl has"
        submit = [token(word, rule=rule) for word in ("kubectl", "create", "-o", "name")]
        submit += [token("-n", keys=("cluster.namespace",)), token(section.namespace, keys=("cluster.namespace",))]
        for file in (CONFIG_MAP, WORKLOAD):
            what = (
                "the recipe and the plan, for the pods" if file == CONFIG_MAP else "the workload, in the run directory"
            )
            submit += [token("-f", rule=what), token(Variable.RUN_DIR, f"/{file}", rule=what)]
        again = RESTARTED if section.workload == "jobset" and section.max_restarts else ()
        terms = {"requeue": again, "start_seconds": section.start_seconds}
        return sourced_job(self.kind, WORKLOAD, lines, submit, (), **terms)

    def cores(self, context: Context) -> tuple[int, tuple[str, ...]] | None:
        """None where the namespace decides."""
        asked = _section(context.recipe).cpus_per_node
        return (asked, ("cluster.cpus_per_node",)) if asked else None

    def restarts_after(self, section: Cluster) -> Sequence[str]:
        assert isinstance(section, Section)
        return RESTARTED if section.restarts else ()

    def place(self, environ: Mapping[str, str]) -> Place | None:
        if (node := number_in(environ, "JOB_COMPLETION_INDEX")) is None:
            return None
        hosts = hosts_in(environ.get(POD_HOSTS, ""))
        return Place(node, len(hosts) or None, hosts, environ.get(POD_START, "") if hosts else "")

    def own_job(self, environ: Mapping[str, str]) -> str:
        return environ.get(POD_JOB, "")

    def restarts(self, environ: Mapping[str, str]) -> int:
        return number_in(environ, RESTARTS) or 0

    def files(self, request: JobRequest) -> Mapping[str, str]:
        """MachineError where recipe and plan are more than a ConfigMap holds."""
        values = {Variable.RUN_ID: request.run_id}
        namespace, _, name = self.expected_job(request).split("/")
        content = config_map(namespace, name, {each: request.record[each] for each in FILES})
        if len(content.encode()) > LARGEST:
            what = f"recipe and plan take {len(content.encode()):,} bytes, and a ConfigMap holds {LARGEST:,}"
            raise MachineError(what, hint="shorten the words of the recipe: name files in the image instead")
        return {CONFIG_MAP: content, request.job.file: request.job.content.bind(values)}

    def expected_job(self, request: JobRequest) -> str:
        """`namespace/kind/name` of the workload of a run."""
        argv = request.argv
        kind = "jobset" if "kind: JobSet" in str(request.job.content).splitlines() else "job"
        name = object_name(request.plan.name).bind({Variable.RUN_ID: request.run_id})
        return f"{argv[argv.index('-n') + 1]}/{kind}/{name}"

    def dry_run(self, request: JobRequest, resolved: Resolved) -> DryRun:
        """The API server knows the schemas, the namespace, its quotas and webhooks; no claim, secret or image."""
        for name, content in self.files(replace(request, run_id=DRY_RUN)).items():
            publish(f"{request.run_dir}/{name}", content)
        try:
            argv = request.argv
            return DryRun(ask(Query((*argv[:2], "--dry-run=server", *argv[2:]), accepted), request.environ))
        except RefusedError as error:
            hint = "`kubectl auth can-i create` and `kubectl explain` say what the cluster takes"
            what = f"Kubernetes refuses the job: {error}"
            return DryRun("", refused=(resolved.error(self.blamed(str(error)), what, hint),))

    def submit(self, request: JobRequest) -> Job:
        """Leaves nothing in the cluster where there is no job."""
        number = self.expected_job(request)
        namespace, _, name = number.split("/")
        try:
            return Job(ask(Query(request.argv, lambda output: f"{namespace}/{submitted(output)}"), request.environ))
        except (RefusedError, MachineError) as error:
            silent = isinstance(error, NoAnswerError)
            if silent:
                found = answer_or(self.state(Job(number)), JobState("unknown", "no answer"), request.environ)
                if found.state in ("queued", "running", "ended"):
                    return Job(number)
                if found.state != "gone":
                    what = f"{error}, and whether there is {number} is not known ({found.reason}): {request.run_dir} "
                    hint = "`trainkit status` asks again, `trainkit cancel` removes it"
                    raise NoAnswerError(f"{what}stays", hint=hint) from error
            # The ConfigMap is made before the workload is refused.
            answer_or(_removal(namespace, "services,configmaps", name), (), request.environ)
            if silent:
                raise MachineError(f"{error}, and there is no {number}", hint="submit again") from error
            raise

    def blamed(self, words: str) -> str:
        """Of a refusal that names a field, or what is missing."""
        for said, key in MISSING.items():
            if said in words:
                return key
        for name in re.findall(r"[A-Za-z]+(?:\[[^\]]*\])?(?:\.[\w/-]+(?:\[[^\]]*\])?)+", words):
            path = [part for part in re.split(r"[.\[\]]+", name) if part]
            if (source := source_of(path)).keys:
                return source.keys[0]
            if source.rule == OBJECT and not FIELDS["spec",].keys().isdisjoint(path):  # which trainkit does not set
                return "cluster.pod"
        return "cluster"

    def state(self, job: Job) -> Query[JobState]:
        """Of the workload and its pods."""
        namespace, kind, name = job.id.split("/")
        kinds = f"{RESOURCES[kind]},pods"
        return Query(("kubectl", "get", kinds, "-n", namespace, "-l", f"{LABEL}={name}", "-o", "json"), job_state)

    def cancel(self, job: Job, *, now: bool) -> Query[tuple[str, ...]]:
        """Remove all that was made for a run, and name it. Its pods are told to end; now: killed in a second."""
        namespace, kind, name = job.id.split("/")
        kinds = f"{RESOURCES[kind]},services,configmaps" + (",pods" if now else "")
        return _removal(namespace, kinds, name, *(("--now",) if now else ()))

    def save(self, job: Job, nodes: Sequence[str], python: str) -> Query[None]:
        """Tell trainkit, which is the first process of node 0's pod. The image needs no shell for it."""
        if not nodes:
            raise MachineError(f"no pod of {job.id} runs", hint="`trainkit status` says why")
        program = "import os, signal; os.kill(1, signal.SIGUSR1)"
        return Query(_exec(job.id, nodes[0], (python, "-c", program), terminal=False), nothing)

    def attach(
        self,
        job: Job,
        host: str,
        argv: Sequence[str],
        *,
        terminal: bool,
        section: Callable[[], Cluster],
        environ: Mapping[str, str],
    ) -> tuple[tuple[str, ...], Mapping[str, str]]:
        return _exec(job.id, host, argv, terminal=terminal), environ

    def logs(self, job: Job, node: int | None, *, follow: bool) -> tuple[str, ...]:
        """Of all pods each line with its pod. No line is left out."""
        namespace, _, name = job.id.split("/")
        one = f",batch.kubernetes.io/job-completion-index={node}" if node is not None else ""
        argv = ("kubectl", "logs", "-n", namespace, "-l", f"{LABEL}={name}{one}", "--tail=-1")
        many = ("--prefix", "--max-log-requests=10000") if node is None else ()
        return (*argv, *many, *(("--follow",) if follow else ()))


SCHEDULER = Kubernetes()


def _removal(namespace: str, kinds: str, name: str, *words: str) -> Query[tuple[str, ...]]:
    which = ("-n", namespace, "-l", f"{LABEL}={name}")
    return Query(("kubectl", "delete", kinds, *which, "-o", "name", "--wait=false", *words), removed)


def _exec(job_id: str, pod: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """Runs a command in a pod of a running job."""
    flags = ("-i", "-t") if terminal else ("-i",)
    return ("kubectl", "exec", *flags, "-n", job_id.partition("/")[0], pod, "--", *argv)


LOST = "what a pod writes elsewhere is lost with it"


@dataclass
class Template:
    """The template of the pods, with what cluster.pod adds to it.

    keys: of the recipe, by the path of what they add. problems: key, what, hint and why of what is refused.
    """

    tree: dict[str, Any]
    gpu_resource: str
    keys: dict[FieldPath, str] = field(default_factory=dict)
    problems: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, ours: Any, more: Any, path: FieldPath = (), key: str = "cluster.pod") -> Any:
        """Two values at a path as one. key: of the addition."""
        if path == ("spec", "containers"):
            return [self.add(ours[0], self._container(more, key), (*path, "0"), f"{key}.0")]
        if isinstance(ours, Mapping) and isinstance(more, Mapping):
            return self._mapping(ours, more, path, key)
        if isinstance(ours, list) and isinstance(more, list) and path[-1] in LONGER:
            return self._list(ours, more, path, key)
        if isinstance(ours, Mapping) or (isinstance(ours, list) and path[-1] in LONGER):
            kind = "mapping" if isinstance(ours, Mapping) else "list"
            self._refuse(path, key, f"must be a {kind}", f"write a {kind}")
        else:
            self._taken(path, key)
        return ours

    def _mapping(self, ours: Mapping[str, Any], more: Mapping[str, Any], path: FieldPath, key: str) -> dict[str, Any]:
        found, known = dict(ours), FIELDS.get(path)
        for name, value in more.items():
            here, below = (*path, name), f"{key}.{name}"
            if known is not None and name not in known:
                hint = did_you_mean(name, known, "see `kubectl explain pod.spec`")
                self._refuse(here, below, "is no field of a pod's template", hint)
            elif path in TEXTS and not isinstance(value, str):
                self._refuse(here, below, f"must be a text, not {value!r}", "write it in quotes")
            elif name in ours:
                found[name] = self.add(ours[name], value, here, below)
            elif self._is_left(here):
                self._taken(here, below)
            elif known is None or self._fits(known[name], value, here, below):
                self.keys[here] = below
                if isinstance(value, Mapping):
                    found[name] = self._mapping({}, value, here, below)
                else:
                    found[name] = value
                    self._check(value, here, below)
        return found

    def _list(self, ours: list[Any], more: list[Any], path: FieldPath, key: str) -> list[Any]:
        by = LONGER[path[-1]]
        if not self._fits("[{}]", more, path, key):
            return ours
        self._check(more, path, key)
        for position, item in enumerate(more):
            name, below = item.get(by), f"{key}.{position}"
            if any(name == each[by] for each in ours):
                self._refuse(path, below, f"has {name}, which trainkit makes itself", "give it another name")
            self.keys[*path, str(len(ours) + position)] = below
        return [*ours, *more]

    def _container(self, more: Any, key: str) -> Mapping[str, Any]:
        """What is added to trainkit's container."""
        if isinstance(more, list) and len(more) == 1 and isinstance(more[0], Mapping):
            return {name: value for name, value in more[0].items() if (name, value) != ("name", "trainkit")}
        hint = "write what starts beside it under initContainers, with restartPolicy: Always"
        self._refuse(("spec", "containers"), key, "must be a list of one mapping, for trainkit's own container", hint)
        return {}

    def _fits(self, kind: str, value: Any, path: FieldPath, key: str) -> bool:
        """Whether a value is of its field's kind, or null; what is not is refused at its place, never shown."""
        sign = "[" if isinstance(value, list) else "{" if isinstance(value, Mapping) else ""
        wrong: dict[FieldPath, str] = {}
        if value is not None and sign != kind[:1]:
            wrong = {(): KINDS[kind]}
        elif kind == "[{}]":
            wrong = {(str(at),): KINDS["{}"] for at, each in enumerate(value or ()) if not isinstance(each, Mapping)}
        for at, what in wrong.items():
            hint = f"see `kubectl explain pod.{'.'.join(name for name in path if name != '0')}`"
            self._refuse((*path, *at), ".".join((key, *at)), f"must be {what}", hint)
        return not wrong

    def _check(self, value: Any, path: FieldPath, key: str) -> None:
        """Refuse a list that no field of Kubernetes is: of lists or nulls, or of mappings and others."""
        inside: Iterable[tuple[object, Any]] = value.items() if isinstance(value, Mapping) else ()
        if isinstance(value, list):
            inside, shapes = enumerate(value), {isinstance(each, Mapping) for each in value}
            if len(shapes) > 1 or any(isinstance(each, list) or each in ({}, None) for each in value):
                what = "must be a list of mappings, or of single values, none of them empty"
                self._refuse(path, key, what, "write it as that")
                return
        for name, each in inside:
            self._check(each, (*path, str(name)), f"{key}.{name}")

    def _is_left(self, path: FieldPath) -> bool:
        """Whether a field that trainkit does not write must stay so."""
        if path[-2:-1] in (("limits",), ("requests",)):
            return path[-1] == self.gpu_resource or (path[-2] == "limits" and path[-1] in LEFT)
        return path[-1] in LEFT and path[:-1] in (("spec",), ("spec", "containers", "0"))

    def _taken(self, path: FieldPath, key: str) -> None:
        why: str | tuple[str, ...] = LEFT.get(path[-1], "")
        source = source_of(path) if not why or isinstance(why, tuple) else Source(rule=why)
        keys = ("cluster.gpu_resource", "devices.select") if path[-1] == self.gpu_resource else source.keys
        hint = f"leave it out, and set {' or '.join(keys)}" if keys else "leave it out"
        self._refuse(path, key, "is what trainkit sets", hint, source.rule)

    def _refuse(self, path: FieldPath, key: str, what: str, hint: str, why: str = "") -> None:
        self.problems.append((key, f"cluster.pod: {'.'.join(path)} {what}", hint, why))


def template(context: Context, section: Section, name: Text) -> Template:
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
    made = Template({"metadata": {"labels": {LABEL: name}}, "spec": pod}, section.gpu_resource)
    made.tree = made.add(made.tree, section.pod)
    spec = made.tree["spec"]
    if spec.get("hostNetwork") and context.recipe.nodes.count > 1 and spec.get("dnsPolicy") != CLUSTER_FIRST:
        what = "cluster.pod: spec.hostNetwork keeps the names of the cluster from the pods, and they find node 0 by one"
        made.problems.append(("cluster.pod.spec.hostNetwork", what, f"set spec.dnsPolicy: {CLUSTER_FIRST} too", ""))
    return made


CLUSTER_FIRST = "ClusterFirstWithHostNet"  # kubernetes.io: DNS for Services and Pods, Pod's DNS Policy


def mounts(section: Section) -> list[tuple[str, str]]:
    """Claims, and where each is mounted."""
    return [(claim, path) for claim, _, path in (each.partition(":") for each in section.volumes)]


def object_name(name: str) -> Text:
    """The name of all objects of a run, of the recipe's name: a DNS label that begins with a letter (RFC 1035)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return text(plain[: LONGEST_NAME - len(DRY_RUN) - 1].rstrip("-") + "-", Variable.RUN_ID)


def written(tree: Mapping[str, Any], added: Mapping[FieldPath, str]) -> Iterator[Token]:
    """An object as lines of YAML, each with what made it. added: recipe keys by the path of what they add."""

    def leaf(value: Any) -> str:
        if isinstance(value, Text):  # no character of it needs quotes: the stand-in for a variable has none, either
            return "".join(part if isinstance(part, str) else _STAND_IN for part in value.parts)
        return scalar(value)

    for path, line in manifest(tree, leaf):
        before, *behind = line.split(_STAND_IN)
        parts: list[str | Variable] = [before]
        for part in behind:
            parts += [Variable.RUN_ID, part]
        key = next((added[path[:length]] for length in range(len(path) + 1) if path[:length] in added), "")
        source = Source((key,)) if key else source_of(path)
        yield token(*parts, keys=source.keys, rule=source.rule)


# Where the template of the pods is in an object.
TEMPLATE_IN = {
    "Job": ("spec", "template"),
    "JobSet": ("spec", "replicatedJobs", "0", "template", "spec", "template"),
}
_STAND_IN = "\0"  # which nothing that is written has: scalars escape it


def source_of(path: Sequence[str]) -> Source:
    """What made a field: of the deepest name on the way to it that says it."""
    why = next((WHY[name] for name in reversed(path) if name in WHY), OBJECT)
    return Source(rule=why) if isinstance(why, str) else Source(keys=why)


def objects(context: Context, section: Section) -> Iterator[dict[str, Any]]:
    """What is submitted beside the ConfigMap: a jobset; or a job, and the service that names its pods."""
    recipe, name = context.recipe, object_name(context.recipe.name)
    labels = {LABEL: name}
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


def job_spec(context: Context, section: Section, name: Text) -> dict[str, Any]:
    """A job whose pods are the nodes of the plan."""
    nodes = context.recipe.nodes.count
    codes = {"containerName": "trainkit", "operator": "In", "values": [2, 4]}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": codes}, {"action": "Ignore", "onPodConditions": disrupted}]
        },
        "template": template(context, section, name).tree,
    }


def container(context: Context, section: Section, name: Text) -> dict[str, Any]:
    """What runs in each pod: trainkit as its first process, which has the signals of the kubelet."""
    python = section.python.replace("$(", "$$(")  # which the kubelet would take for a variable
    argv = [python, "-P", "-m", "trainkit", "job", "node", FOLDER, "--run-id", text(Variable.RUN_ID)]
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


def variables(context: Context, section: Section, name: Text) -> list[dict[str, Any]]:
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
    metadata = {"name": name, "namespace": namespace, "labels": {LABEL: name}}
    tree = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": files}
    return "".join(f"{line}\n" for _, line in manifest(tree, scalar))


def _section(recipe: Recipe) -> Section:
    assert isinstance(recipe.cluster, Section)
    return recipe.cluster


def _refused(output: Output) -> RefusedError | MachineError:
    """Why a command has failed, in its words: the job is refused, or nobody was there to say."""
    if any(each in output.words for each in UNREACHABLE):
        what = f"kubectl reaches no API server: {output.words.partition('; ')[0]}"
        kind = NoAnswerError if "timeout" in output.words or "deadline" in output.words else MachineError
        return kind(what, hint="`kubectl cluster-info` and `kubectl config get-contexts` say which it asks")
    return RefusedError(output.words)


def submitted(output: Output) -> str:
    """`kind/name` of the workload, of `kubectl create -o name`."""
    if output.code:
        raise _refused(output)
    for line in output.out.split():
        resource, _, name = line.partition("/")
        if resource.partition(".")[0] in RESOURCES and name:
            return f"{resource.partition('.')[0]}/{name}"
    raise NoAnswerError(f"kubectl names no workload: {output.out.strip() or 'nothing'}")


def accepted(output: Output) -> str:
    """What the API server would make, of `kubectl create --dry-run=server -o name`."""
    if output.code:
        raise _refused(output)
    kinds = (line.partition("/")[0].partition(".")[0] for line in output.out.split())
    return f"Kubernetes would take it: {', '.join(kinds)}"


def removed(output: Output) -> tuple[str, ...]:
    """What was there to be removed, of `kubectl delete -o name`."""
    if output.code:
        raise _refused(output)
    return tuple(line for line in output.out.splitlines() if "/" in line)


def nothing(output: Output) -> None:
    """Of commands whose words are for nobody when they have done it."""
    if output.code:
        raise _refused(output)


def job_state(output: Output) -> JobState:
    """Of a workload and its pods, by `kubectl get -o json`. Unknown where the API server does not answer."""
    if output.code:
        return JobState("gone" if GONE in output.words else "unknown", output.words)
    try:
        items = json.loads(output.out)["items"]
        pods = sorted((each for each in items if each["kind"] == "Pod"), key=_index)
        work = next((each for each in items if each["kind"] != "Pod"), None)
        return _of(work, pods) if work else JobState("gone", GONE)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return JobState("unknown", f"kubectl prints what is no list of objects: {error!r}")


def _of(work: Mapping[str, Any], pods: list[Mapping[str, Any]]) -> JobState:
    spec, status = work.get("spec", {}), work.get("status", {})
    true = {each["type"]: each for each in status.get("conditions", ()) if each.get("status") == "True"}
    restarts = int(status.get("restarts") or 0)
    # Those of an earlier start may still be ending.
    nodes = ",".join(each["metadata"]["name"] for each in pods if "deletionTimestamp" not in each["metadata"])
    if "Complete" in true or "Completed" in true:
        return JobState("ended", "Completed", nodes, restarts, 0)
    if "Failed" in true:
        reason = ": ".join(filter(None, (true["Failed"].get("reason"), true["Failed"].get("message"))))
        return JobState("ended", reason, nodes, restarts, exit_code(pods), why=_why(pods))
    if spec.get("suspend"):
        return JobState("queued", "suspended, as by a queue that has not admitted it yet", nodes, restarts)
    if pods and all(each.get("status", {}).get("phase") != "Pending" for each in pods):
        return JobState("running", "", nodes, restarts)
    return JobState("queued", _waiting(pods), nodes, restarts)


def _index(pod: Mapping[str, Any]) -> int:
    found = {**pod["metadata"].get("annotations", {}), **pod["metadata"].get("labels", {})}.get(INDEX, "")
    return int(found) if found.isdecimal() else -1


def _ends(pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """How the containers have ended, by the number of the node."""
    found = (status.get("state", {}).get("terminated") for pod in pods for status in _containers(pod))
    return [each for each in found if each]


def _containers(pod: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return pod.get("status", {}).get("containerStatuses") or ()


def exit_code(pods: Iterable[Mapping[str, Any]]) -> int | None:
    """The run's: node 0's, whose verdict is over all nodes, unless only another one has failed."""
    codes = [int(each.get("exitCode", 0)) for each in _ends(pods)]
    return next((code for code in codes if code), None)


def _why(pods: list[Mapping[str, Any]]) -> Any:
    if any(each.get("reason") == "OOMKilled" for each in _ends(pods)):
        return "out_of_memory"
    conditions = [each for pod in pods for each in pod.get("status", {}).get("conditions") or ()]
    reasons = [each.get("reason") for each in conditions if each.get("type") == "DisruptionTarget"]
    if reasons:
        return "node_failure" if any(each in OF_NODE for each in reasons) else "preemption"
    return ""


def _waiting(pods: list[Mapping[str, Any]]) -> str:
    """Why pods are not running yet: an image that cannot be pulled, no node that has room."""
    for pod in pods:
        for status in _containers(pod):
            waiting = status.get("state", {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
        for each in pod.get("status", {}).get("conditions") or ():
            if each.get("type") == "PodScheduled" and each.get("status") == "False":
                return ": ".join(filter(None, (each.get("reason"), each.get("message"))))
    return "waiting for its pods" if pods else "no pods yet"
