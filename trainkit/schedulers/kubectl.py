"""The words of kubectl, and what reads their answers. Pure; the client runs commands."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.schedulers import kubernetes_answers as read
from trainkit.schedulers.interface import JobState, Query

LABEL = "trainkit/run"  # on all that is made for a run


def rehearsal(argv: Sequence[str]) -> Query[str]:
    """Asks the API server whether it would take the objects; answers what it would make."""
    return Query((*argv[:2], "--dry-run=server", *argv[2:]), read.rehearsed)


def submission(argv: Sequence[str]) -> Query[str]:
    """Submits; answers `namespace/kind/name` of the workload."""
    namespace = argv[argv.index("-n") + 1]
    return Query(tuple(argv), lambda output: f"{namespace}/{read.submitted(output)}")


def state(job_id: str) -> Query[JobState]:
    """What Kubernetes knows of a workload and its pods."""
    namespace, kind, name = job_id.split("/")
    kinds = f"{read.RESOURCES[kind]},pods"
    return Query(("kubectl", "get", kinds, "-n", namespace, "-l", f"{LABEL}={name}", "-o", "json"), read.job_state)


def cancel(job_id: str, *, now: bool = False) -> Query[tuple[str, ...]]:
    """Removes all that was made for a run, and names it. Its pods are told to end; now: killed in a second."""
    namespace, kind, name = job_id.split("/")
    kinds = f"{read.RESOURCES[kind]},services,configmaps" + (",pods" if now else "")
    return _removal(namespace, kinds, name, *(("--now",) if now else ()))


def leftovers(namespace: str, name: str) -> Query[tuple[str, ...]]:
    """Removes what was made for a run whose workload was refused."""
    return _removal(namespace, "services,configmaps", name)


def _removal(namespace: str, kinds: str, name: str, *words: str) -> Query[tuple[str, ...]]:
    which = ("-n", namespace, "-l", f"{LABEL}={name}")
    return Query(("kubectl", "delete", kinds, *which, "-o", "name", "--wait=false", *words), read.removed)


def save(job_id: str, pod: str, python: str) -> Query[None]:
    """Tells trainkit, which is a pod's first process, to have a checkpoint saved. The image needs no shell for it."""
    program = "import os, signal; os.kill(1, signal.SIGUSR1)"
    return Query(attach(job_id, pod, (python, "-c", program), terminal=False), read.nothing)


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
