"""The interpreter: its version, whether its environment is the active one, and packages that are there twice."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Check, Finding, ok
from trainkit.doctor.host import Host, Target
from trainkit.machine.probes.packages import distributions
from trainkit.machine.versions import at_least

OLDEST = "3.11"


def run(host: Host, target: Target) -> list[Finding]:
    """What is odd, else its version and path."""
    python, executable = host.facts.python, host.facts.executable
    found = [*_reach(host), *_environment(host), *_twice(host)]
    if not at_least(python, OLDEST):
        what = f"Python {python}; trainkit requires {OLDEST} or newer"
        found.insert(0, Finding("problem", what, (executable,), ("uv venv -p 3.12",)))
    return found or [ok(f"Python {python}", executable)]


def _reach(host: Host) -> Iterator[Finding]:
    """A checkout is imported because it is the working folder; ranks do not look there (python -P)."""
    own = Path(__file__).resolve().parents[3]
    if own == host.folder.resolve() and own not in (Path(each).resolve() for each in host.packages):
        quoted = shlex.quote(str(own))
        evidence = (f"trainkit is in {own}, the working folder, and not on the search path",)
        install = f"{host.pip} install -e {quoted}      # or for good"
        fix = (f"export PYTHONPATH={quoted}${{PYTHONPATH:+:$PYTHONPATH}}", install)
        yield Finding("problem", "the ranks of a run could not import trainkit", evidence, fix)


def _environment(host: Host) -> Iterator[Finding]:
    """A shell says that one environment is active, and this is another: `pip install` would not reach this one."""
    # A venv inside a conda environment sets both variables, and the venv is the active one.
    name = "VIRTUAL_ENV" if host.environ.get("VIRTUAL_ENV") else "CONDA_PREFIX"
    executable, active = Path(host.facts.executable), host.environ.get(name)
    if active and Path(active) not in executable.parents:
        evidence = (f"{name}={active}", f"this interpreter: {executable}")
        fix = (f"{shlex.quote(str(Path(active, 'bin', 'python')))} -m trainkit doctor",)
        yield Finding("note", "another environment is active than the one that trainkit runs in", evidence, fix)


def _twice(host: Host) -> Iterator[Finding]:
    places: dict[str, list[tuple[str, str]]] = {}
    for folder in dict.fromkeys(host.packages):
        for name, version in sorted(distributions(folder)):
            if name in host.facts.packages:
                places.setdefault(name, []).append((version, folder))
    for name, found in places.items():
        if len({version for version, _ in found}) == 1:
            continue
        evidence = tuple(f"{version} in {folder}" for version, folder in found)
        if len({folder for _, folder in found}) == 1:
            what = f"{name} is there in two versions; one was left behind by an installation that broke off"
            yield Finding("warning", what, evidence, (f"{host.pip} install --force-reinstall {name}",))
        else:  # environments on top of others are made so on purpose
            what = f"{name} is there in two versions; the first one is imported"
            yield Finding("note", what, evidence, (f"unset PYTHONPATH      # or remove {name} from {found[0][1]}",))


INTERPRETER = Check("interpreter", "interpreter", 3.0, run, fast=True)
