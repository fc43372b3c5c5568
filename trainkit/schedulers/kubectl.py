"""What kubectl prints, read: names of objects, and objects as the API reference describes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainkit.errors import MachineError
from trainkit.schedulers.base import JobState, NoAnswerError, Output, Query, RefusedError

# Kind of workload in a job's id -> its resource, with its group: others have jobs, too.
RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "job": "jobs.batch"}
GONE = "NotFound"
INDEX = "batch.kubernetes.io/job-completion-index"  # on pods of an indexed job
# Reasons of a pod's condition DisruptionTarget (Kubernetes, "Disruptions") that are of its node; others are preemption.
OF_NODE = ("DeletionByTaintManager", "DeletionByPodGC", "TerminationByKubelet")


# What kubectl says where it finds no API server (client-go, kubectl's own messages).
UNREACHABLE = ("connection refused", "was refused", "Unable to connect to the server", "no such host", "i/o timeout")


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


def rehearsed(output: Output) -> str:
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


LABEL = "trainkit/run"  # on all that is made for a run


def rehearsal(argv: Sequence[str]) -> Query[str]:
    """Asks the API server whether it would take the objects; answers what it would make."""
    return Query((*argv[:2], "--dry-run=server", *argv[2:]), rehearsed)


def submission(argv: Sequence[str]) -> Query[str]:
    """Submits; answers `namespace/kind/name` of the workload."""
    namespace = argv[argv.index("-n") + 1]
    return Query(tuple(argv), lambda output: f"{namespace}/{submitted(output)}")


def state(job_id: str) -> Query[JobState]:
    """What Kubernetes knows of a workload and its pods."""
    namespace, kind, name = job_id.split("/")
    kinds = f"{RESOURCES[kind]},pods"
    return Query(("kubectl", "get", kinds, "-n", namespace, "-l", f"{LABEL}={name}", "-o", "json"), job_state)


def cancel(job_id: str, *, now: bool = False) -> Query[tuple[str, ...]]:
    """Removes all that was made for a run, and names it. Its pods are told to end; now: killed in a second."""
    namespace, kind, name = job_id.split("/")
    kinds = f"{RESOURCES[kind]},services,configmaps" + (",pods" if now else "")
    return _removal(namespace, kinds, name, *(("--now",) if now else ()))


def leftovers(namespace: str, name: str) -> Query[tuple[str, ...]]:
    """Removes what was made for a run whose workload was refused."""
    return _removal(namespace, "services,configmaps", name)


def _removal(namespace: str, kinds: str, name: str, *words: str) -> Query[tuple[str, ...]]:
    which = ("-n", namespace, "-l", f"{LABEL}={name}")
    return Query(("kubectl", "delete", kinds, *which, "-o", "name", "--wait=false", *words), removed)


def save(job_id: str, pod: str, python: str) -> Query[None]:
    """Tells trainkit, which is a pod's first process, to have a checkpoint saved. The image needs no shell for it."""
    program = "import os, signal; os.kill(1, signal.SIGUSR1)"
    return Query(attach(job_id, pod, (python, "-c", program), terminal=False), nothing)


def attach(job_id: str, pod: str, argv: Sequence[str], *, terminal: bool) -> tuple[str, ...]:
    """Runs a command in a pod of a running job, beside it."""
    flags = ("-i", "-t") if terminal else ("-i",)
    return ("kubectl", "exec", *flags, "-n", job_id.partition("/")[0], pod, "--", *argv)


def logs(job_id: str, node: int | None, *, follow: bool) -> tuple[str, ...]:
    """Prints what a node's pod has said, or all pods, each line with its pod. Nothing is left out."""
    namespace, _, name = job_id.split("/")
    one = f",batch.kubernetes.io/job-completion-index={node}" if node is not None else ""
    argv = ("kubectl", "logs", "-n", namespace, "-l", f"{LABEL}={name}{one}", "--tail=-1")
    many = ("--prefix", "--max-log-requests=10000") if node is None else ()
    return (*argv, *many, *(("--follow",) if follow else ()))
