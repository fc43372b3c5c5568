"""The environment as a layer: `TRAINKIT__SECTION__KEY=value`."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.assignment import Assignment, layer_of, read_value
from trainkit.recipe.layers.layer import Layer
from trainkit.recipe.layers.secrets import MASK, is_secret_name, mask_line
from trainkit.recipe.schema.fields import open_keys

PREFIX = "TRAINKIT__"


def environment_layer(environ: Mapping[str, str], strength: int, cwd: str) -> tuple[Layer, list[Diagnostic]]:
    """The layer that the caller's variables make (possibly without values), with errors and warnings.

    Names are matched in lower case, except for the user's own words (``TRAINKIT__ENV__NCCL_DEBUG``).
    """
    assignments: list[Assignment] = []
    found: list[Diagnostic] = []
    named: dict[str, str] = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        key = _key(variable)
        secret = is_secret_name(key.rpartition(".")[2])
        text = mask_line(f"{variable}={MASK if secret else environ[variable]}")
        origin = Origin("environment", strength, variable, length=len(variable), text=text[:200])
        problem = _problem(key, variable, named)
        if problem:
            found.append(Diagnostic("error", problem[0], key, origin, hint=problem[1]))
            continue
        named[key] = variable
        value, diagnostics = read_value(key, environ[variable], origin)
        found += diagnostics
        if not any(each.severity == "error" for each in diagnostics):
            assignments.append(Assignment(key, value, origin))
    return layer_of("environment", strength, cwd, assignments), found


def without_layer(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables but for those that are settings of a recipe."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def _key(variable: str) -> str:
    # Names of variables have no dots, so `__` separates; below `env` they are the user's own and keep their case.
    parts = variable.removeprefix(PREFIX).split("__")
    for prefix in open_keys():
        depth = prefix.count(".") + 1
        if ".".join(parts[:depth]).lower() == prefix and len(parts) > depth:
            return f"{prefix}.{'__'.join(parts[depth:])}"
    return ".".join(parts).lower()


def _problem(key: str, variable: str, named: Mapping[str, str]) -> tuple[str, str] | None:
    if not key or ".." in f".{key}.":
        return f"{variable} names no setting", "write TRAINKIT__SECTION__KEY, for example TRAINKIT__BATCH__MICRO=8"
    if key == "extends":
        return "a variable cannot extend presets", "use --with, or `extends:` in the recipe"
    if key in named:
        return f"{variable} and {named[key]} set the same key", "unset one of them"
    return None
