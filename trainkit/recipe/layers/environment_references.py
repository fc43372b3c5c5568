"""`${oc.env:NAME,default}` under `env` and `program.args`, where every other `${…}` is literal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainkit.errors import Diagnostic
from trainkit.recipe.layers.layer import place_of
from trainkit.recipe.layers.merge import Merge, value_at
from trainkit.recipe.layers.secrets import is_secret_name, public_names, why_secret

KEYS = ("env", "program.args")
REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(?:,([^{}]*))?\}")


def names_in(text: str) -> tuple[str, ...]:
    """The variables that a text refers to without a default."""
    return tuple(match[1] for match in REFERENCE.finditer(text) if match[2] is None)


def fill_references(state: Merge, environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Put the values in the place of the references; the errors where there is none, or where it is a secret."""
    public = public_names(state.get("program.public"))
    for key in KEYS:
        above, _, last = key.rpartition(".")
        section = value_at(state.tree, above) if above else state.tree
        if isinstance(section, dict) and last in section:
            section[last], problems = _filled(state, key, section[last], environ, public)
            yield from problems


def _filled(
    state: Merge, key: str, value: Any, environ: Mapping[str, str], public: Collection[str]
) -> tuple[Any, list[Diagnostic]]:
    if isinstance(value, Mapping):
        found = {name: _filled(state, f"{key}.{name}", each, environ, public) for name, each in value.items()}
        return {name: each for name, (each, _) in found.items()}, [one for _, more in found.values() for one in more]
    if isinstance(value, list):
        listed = [_filled(state, key, each, environ, public) for each in value]
        return [each for each, _ in listed], [one for _, more in listed for one in more]
    if not isinstance(value, str):
        return value, []
    problems = []
    for name, default in dict.fromkeys((match[1], match[2]) for match in REFERENCE.finditer(value)):
        by = "name" if is_secret_name(name) else why_secret(name, environ.get(name, default))
        if by and name not in public:
            what = f"{key}: would put the value of {name} into the recipe, and it is a secret by its {by}"
            hint = f"list {name} under env_from; the ranks then find it there; where it is none, under program.public"
        elif name not in environ and default is None:
            what = f"{key}: reads the environment variable {name}, which is not set"
            hint = f"set it, or give a default: ${{oc.env:{name},value}}"
        else:
            continue
        problems.append(Diagnostic("error", what, key, place_of(state.places, key), hint=hint))
    if problems:
        return value, problems
    return REFERENCE.sub(lambda match: environ.get(match[1], (match[2] or "").strip()), value), []
