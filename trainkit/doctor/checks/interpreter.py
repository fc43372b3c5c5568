"""The interpreter: its version, whether its environment is the active one, and packages that are there twice."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Level, ok
from trainkit.doctor.checks.packages import every_version
from trainkit.doctor.host import Host, Target
from trainkit.machine.versions import at_least

OLDEST = "3.11"


def run(host: Host, target: Target) -> list[Finding]:
    """What is odd, else its version and path."""
    facts, found = host.facts, []
    if not at_least(facts.python, OLDEST):
        what = f"Python {facts.python}; trainkit requires {OLDEST} or newer"
        found.append(Finding("problem", what, (facts.executable,), ("uv venv -p 3.12",)))
    found += [*_reach(host), *_environment(host), *_twice(host)]
    return found or [ok(f"Python {facts.python}", facts.executable)]


def _reach(host: Host) -> Iterator[Finding]:
    """A checkout is imported because it is the working folder; ranks do not look there (python -P)."""
    own = Path(__file__).resolve().parents[3]
    if own == host.folder.resolve() and own not in (Path(each).resolve() for each in host.packages):
        pip = f"{host.pip} install -e {shlex.quote(str(own))}"
        evidence = (f"trainkit is in {own}, the working folder, and not on the search path",)
        fix = (f"export PYTHONPATH={shlex.quote(str(own))}${{PYTHONPATH:+:$PYTHONPATH}}", f"{pip}      # or for good")
        yield Finding("problem", "the ranks of a run could not import trainkit", evidence, fix)


def _environment(host: Host) -> Iterator[Finding]:
    """A shell says that one environment is active, and this is another: `pip install` would not reach this one."""
    executable = Path(host.facts.executable)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = host.environ.get(name)
        if not active or Path(active) in executable.parents:
            continue
        if name == "CONDA_PREFIX" and host.environ.get("VIRTUAL_ENV"):
            continue  # a venv inside a conda environment sets both, and the venv is the active one
        evidence = (f"{name}={active}", f"this interpreter: {executable}")
        fix = (f"{shlex.quote(str(Path(active, 'bin', 'python')))} -m trainkit doctor",)
        yield Finding("note", "another environment is active than the one that trainkit runs in", evidence, fix)


def _twice(host: Host) -> Iterator[Finding]:
    for name, places in every_version(host.packages, host.facts.packages).items():
        if len({version for version, _ in places}) > 1:
            evidence = tuple(f"{version} in {folder}" for version, folder in places)
            in_one = len({folder for _, folder in places}) == 1
            what = f"{name} is there in two versions; " + (
                "one was left behind by an installation that broke off" if in_one else "the first one is imported"
            )
            fix = f"{host.pip} install --force-reinstall {name}"
            hide = f"unset PYTHONPATH      # or remove {name} from {places[0][1]}"
            level: Level = "warning" if in_one else "note"  # environments on top of others are made so on purpose
            yield Finding(level, what, evidence, (fix if in_one else hide,))


INTERPRETER = Check("interpreter", "interpreter", 3.0, run, fast=True)
