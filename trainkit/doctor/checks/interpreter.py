"""Whether the interpreter is the one that the user means: its version, the active environment, packages found twice."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.installed import every_version
from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.verdict import Level, Verdict, ok
from trainkit.machine.versions import at_least

TITLE = "interpreter"
LIMIT = 3.0
FAST = True

OLDEST = "3.11"


def needs(aim: Aim) -> str:
    """Every run starts it."""
    return ""


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """What is odd, else its version and path."""
    facts = surroundings.facts
    found = [*_version(surroundings), *_reach(surroundings), *_environment(surroundings), *_twice(surroundings)]
    return found or [ok(f"Python {facts.python}", facts.executable)]


def _version(surroundings: Surroundings) -> Iterator[Verdict]:
    facts = surroundings.facts
    if not at_least(facts.python, OLDEST):
        evidence = (facts.executable,)
        yield Verdict(
            "problem", f"Python {facts.python}; trainkit needs {OLDEST} or newer", evidence, ("uv venv -p 3.12",)
        )


def _reach(surroundings: Surroundings) -> Iterator[Verdict]:
    """A checkout is imported because it is the working folder; ranks do not look there (python -P)."""
    own = Path(__file__).resolve().parents[3]
    if own == surroundings.folder.resolve() and own not in (Path(each).resolve() for each in surroundings.packages):
        pip = f"{shlex.quote(surroundings.facts.executable)} -m pip install -e {shlex.quote(str(own))}"
        evidence = (f"trainkit lies in {own}, the working folder, and nowhere on the search path",)
        fix = (f"export PYTHONPATH={shlex.quote(str(own))}${{PYTHONPATH:+:$PYTHONPATH}}", f"{pip}      # or for good")
        yield Verdict("problem", "the ranks of a run could not import trainkit", evidence, fix)


def _environment(surroundings: Surroundings) -> Iterator[Verdict]:
    """A shell says that one environment is active, and this is another: `pip install` would not reach this one."""
    executable = Path(surroundings.facts.executable)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = surroundings.environ.get(name)
        if not active or Path(active) in executable.parents or _inside_other(surroundings, name):
            continue
        evidence = (f"{name}={active}", f"this interpreter: {executable}")
        fix = (f"{shlex.quote(str(Path(active, 'bin', 'python')))} -m trainkit doctor",)
        yield Verdict("note", "another environment is active than the one that trainkit runs in", evidence, fix)


def _inside_other(surroundings: Surroundings, name: str) -> bool:
    """A venv that was made inside a conda environment has both names, and the venv is the active one."""
    return name == "CONDA_PREFIX" and bool(surroundings.environ.get("VIRTUAL_ENV"))


def _twice(surroundings: Surroundings) -> Iterator[Verdict]:
    for name, places in every_version(surroundings.packages, surroundings.facts.packages).items():
        if len({version for version, _ in places}) > 1:
            evidence = tuple(f"{version} in {folder}" for version, folder in places)
            in_one = len({folder for _, folder in places}) == 1
            what = f"{name} is there in two versions; " + (
                "one was left behind by an installation that broke off" if in_one else "the first one is imported"
            )
            fix = f"{shlex.quote(surroundings.facts.executable)} -m pip install --force-reinstall {name}"
            hide = f"unset PYTHONPATH      # or remove {name} from {places[0][1]}"
            level: Level = "warning" if in_one else "note"  # environments on top of others are made so on purpose
            yield Verdict(level, what, evidence, (fix if in_one else hide,))
