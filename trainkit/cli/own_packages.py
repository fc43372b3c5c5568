"""The packages that trainkit itself requires: which of them are missing, or of a release that it does not take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from trainkit.errors import Diagnostic
from trainkit.machine.versions import at_least, release

_REQUIREMENT = re.compile(r"([\w.-]+)\s*\(?([^;)]*)\)?\s*(;.*)?")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def unmet(error: Exception) -> tuple[Diagnostic, ...]:
    """What is wrong with trainkit's own requirements, where that explains an error; empty where they are met."""
    found = tuple(_unmet())
    if not found and isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("trainkit"):
        what = f"the module {error.name} is not installed, and trainkit needs it"
        return (Diagnostic("error", what, hint="install trainkit with what it requires: pip install trainkit"),)
    return found


def _unmet() -> Iterator[Diagnostic]:
    try:
        requirements = metadata.requires("trainkit") or []
    except metadata.PackageNotFoundError:  # it runs from a checkout that nobody installed
        return
    for each in requirements:
        match = _REQUIREMENT.match(each)
        if match is None or match[3]:  # a marker: of an extra
            continue
        name, bounds = match[1], match[2].strip()
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = ""
        if not installed or not all(_fits(installed, *bound) for bound in _BOUND.findall(bounds)):
            state = f"{installed} is installed" if installed else "it is not installed"
            yield Diagnostic(
                "error", f"trainkit requires {name}{bounds}; {state}", hint=f"pip install '{name}{bounds}'"
            )


def _fits(installed: str, operator: str, bound: str) -> bool:
    return at_least(installed, bound) if operator == ">=" else release(installed) < release(bound)
