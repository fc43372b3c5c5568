"""Single values from outside files: a flag's or a variable's text read as YAML, and the layer that such values make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layer import ARGUMENTS, VERBATIM, Layer, normalise
from trainkit.recipe.schema.fields import open_keys, schema, split_key
from trainkit.recipe.secrets import MASK, is_secret_name, mask_line
from trainkit.recipe.validate import accepts, takes_text_only
from trainkit.recipe.yaml_reader import MAX_DEPTH, Dialect, compose


@dataclass(frozen=True)
class Assignment:
    """One value for one key. modifier: `+` appends, `!` replaces a whole mapping."""

    key: str
    value: Any
    origin: Origin
    modifier: str = ""


def read_value(key: str, text: str, origin: Origin) -> tuple[Any, list[Diagnostic]]:
    """The value that a text means for a key: YAML, but a setting that takes any text takes this one as it is."""
    if len(split_key(key)) > MAX_DEPTH:
        what, hint = f"{key[:80]!r} is nested more than {MAX_DEPTH} deep", "a recipe is a few levels deep"
        return None, [Diagnostic("error", what, origin=origin, hint=hint)]
    setting = schema().setting(key)
    if setting is not None and takes_text_only(setting):
        return _as_text(text, nullable=accepts(setting.annotation, type(None))), []
    in_env = key.startswith("env.")
    document = compose(text, Dialect(root=key, modifiers=True, open=open_keys(), verbatim=VERBATIM))
    if document.errors:
        # A value under a name of the user's own is a text that the program reads, whatever YAML thinks of it.
        if in_env or key.startswith(f"{ARGUMENTS}."):
            return text, []
        problem = document.errors[0]
        what = f"the value of {key} cannot be read: {problem.what}"
        return None, [Diagnostic("error", what, key, origin, problem.why, problem.hint)]
    if in_env and not isinstance(document.tree, str):
        return text, []
    traps = [each for each in document.warnings if "read as the number" in each.what]
    value = None if text.strip() in ("", "null", "~") else document.tree
    return value, [Diagnostic("warning", each.what, key, origin, each.why, each.hint) for each in traps]


def _as_text(text: str, *, nullable: bool) -> Any:
    """Quotes around a whole text are YAML's and go; words that mean true or false stay what they are, to be refused."""
    if nullable and text in ("", "null", "~"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        document = compose(text)
        if not document.errors and isinstance(document.tree, str):
            return document.tree
    return text


def layer_of(name: str, strength: int, base: str, assignments: Iterable[Assignment]) -> Layer:
    """One layer with all assignments; a later one for the same key wins."""
    tree: dict[str, Any] = {}
    values: dict[str, Origin] = {}
    for each in assignments:
        path = split_key(each.key)
        target = tree
        for position, part in enumerate(path[:-1]):
            values.setdefault(".".join(path[: position + 1]), each.origin)
            below = target.get(part)
            if not isinstance(below, dict):
                below = target[part] = {}
            target = below
        target[path[-1] + each.modifier] = each.value
        below = [(each.key, each.value)]
        while below:
            key, value = below.pop()
            values[key] = each.origin
            if isinstance(value, dict):
                below += [(f"{key}.{name.rstrip('+!')}", inner) for name, inner in value.items()]
    return Layer(name, strength, base, normalise(tree, values), values, dict(values))


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
