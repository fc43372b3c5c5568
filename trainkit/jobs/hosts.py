"""Machines without a scheduler, asked before a run starts on them: where ssh goes for them, and what they have."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from trainkit.errors import Diagnostic, MachineError, RecipeError
from trainkit.plan.model import Plan, bind_words
from trainkit.recipe.resolved import Resolved
from trainkit.schedulers import ssh
from trainkit.schedulers.client import ask
from trainkit.schedulers.interface import RefusedError

AT_ONCE = 32  # hosts
SECONDS = 60.0  # for ssh, the login shell, and the import of trainkit from a slow disk
# What ssh or the shell there say -> what to do.
HINTS = {
    "cluster.setup line": "try the line by hand there: ssh {host}",
    "Host key verification failed": "connect once by hand, and compare the key: ssh {host}",
    "Permission denied": "let ssh in without a password: ssh-copy-id {host}",
    "No module named trainkit": "install trainkit for the interpreter there, or name another: cluster.python",
    "cannot execute": "cluster.python names the interpreter there",
    "No such file or directory": "cluster.python names the interpreter there, and cluster.workdir the folder",
    "not found": "cluster.python names the interpreter there",
}


def addresses(plan: Plan, resolved: Resolved, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where ssh goes for each host. RecipeError where two are the same machine, MachineError where ssh is missing."""
    assert plan.job is not None
    words = bind_words(plan.job.submit, {})
    found: list[ssh.Address] = []
    for position, host in enumerate(plan.job.hosts):
        try:
            where = ask(ssh.address(words, host), environ)
        except RefusedError as error:
            raise RecipeError(resolved.error("cluster", f"ssh: {error}")) from error
        if where in found:
            what = f"{host} and {plan.job.hosts[found.index(where)]} are the same machine for ssh, {where.name}"
            raise RecipeError(resolved.error(f"cluster.hosts.{position}", what, "name each machine once"))
        found.append(where)
    return tuple(each.name for each in found)


def commands(plan: Plan) -> Iterator[str]:
    """The script of a node, and the commands that would be run."""
    assert plan.job is not None
    yield f"{plan.job.content}".rstrip()
    for number, host in enumerate(plan.job.hosts):
        yield shlex.join((*bind_words(plan.job.submit, {}), "--", host)) + f" node.sh as node {number}"


def asked(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """What each host has. MachineError with every host that would not do."""
    job = plan.job
    assert job is not None
    words = bind_words(job.submit, {})
    python = plan.commands[0].wrapper[0].bind({})

    def tried(host: str) -> str | Diagnostic:
        try:
            return ask(ssh.rehearsal(words, host, python), environ, SECONDS)
        except RefusedError as error:
            return why_not(host, str(error))
        except MachineError as error:
            return Diagnostic("error", f"{host}: {error}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [*zip(job.hosts, pool.map(tried, job.hosts), strict=True)]
    if wrong := [each for _, each in found if isinstance(each, Diagnostic)]:
        raise MachineError(wrong)
    yield from (f"{host} has {each}" for host, each in found)


def why_not(host: str, said: str) -> Diagnostic:
    """Why a host cannot be used, and what to do. said: by ssh, or the shell there."""
    hint = next((hint for words, hint in HINTS.items() if words in said), "try it by hand: ssh {host}")
    return Diagnostic("error", f"{ssh.bare(host)}: {said}", hint=hint.format(host=host))
