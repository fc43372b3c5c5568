"""`${…}` in values, resolved by OmegaConf on plain builtins, one value at a time so that every error is reported."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.fields import open_keys, schema
from trainkit.recipe.merge import Merge, value_at
from trainkit.recipe.resolved import Entry
from trainkit.recipe.scalars import read_scalar
from trainkit.recipe.secrets import is_secret_name
from trainkit.recipe.suggest import nearest
from trainkit.recipe.wanted import accepts

MAX_LENGTH = 100_000  # characters of one value, so that values built from one another cannot grow without bound
_MISSING = "???"  # OmegaConf's mark for a value that is not there yet
_RESOLVER = "trainkit_environ"
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_KEY_NOT_FOUND = re.compile(r"Interpolation key '([^']*)' not found")
# OmegaConf keeps resolvers per process; ours is there only while the lock is held.
_LOCK = threading.Lock()


def interpolated(value: Any) -> bool:
    """Whether the value is, or holds, a text with `${`."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(interpolated(each) for each in value.values())
    return isinstance(value, list) and any(interpolated(each) for each in value)


def interpolate(state: Merge, environ: Mapping[str, str], defaults: Mapping[str, Any]) -> list[Diagnostic]:
    """Replace `${…}` in the merged tree by what it means; the errors and warnings that come up.

    `env` and `program.args` are literal. `${oc.env:NAME,default}` reads the given environment. defaults: values that can be
    referred to although no layer gives them.
    """
    found = list(_literal(state))
    pending = list(_paths(state.tree, ()))
    if not pending:
        return found
    with _LOCK:
        return found + _resolve(state, pending, environ, defaults)


@dataclass
class _Reader:
    """The environment as the resolver sees it, and which variables it was asked for."""

    environ: Mapping[str, str]
    asked: list[str]

    def __call__(self, name: str, *default: Any) -> Any:
        self.asked.append(name)
        if name in self.environ:
            return self.environ[name]
        if default:
            return None if default[0] is None else str(default[0])
        raise KeyError(name)


def _literal(state: Merge) -> Iterator[Diagnostic]:
    env = state.tree.get("env")
    if not isinstance(env, Mapping):
        return
    for name, value in env.items():
        if isinstance(value, str) and "${" in value:
            key = f"env.{name}"
            why = "values under env are literal, so a shell's or a recipe's `${…}` is not replaced"
            yield Diagnostic(
                "warning",
                f"{key} is passed on with `${{` in it",
                key,
                _origin(state, key),
                why,
                f"to hand on the caller's own value, list {name} under env_from",
            )


def _paths(tree: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Paths of all texts with `${`, outside the mappings that are literal."""
    if isinstance(tree, str):
        if "${" in tree:
            yield path
    elif ".".join(map(str, path)) not in open_keys() and isinstance(tree, (dict, list)):
        for name, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _paths(each, (*path, name))


def _resolve(
    state: Merge, pending: list[tuple[str | int, ...]], environ: Mapping[str, str], defaults: Mapping[str, Any]
) -> list[Diagnostic]:
    from omegaconf import OmegaConf

    reader = _Reader(environ, [])
    register: Callable[..., Any] = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register(_RESOLVER, reader, replace=True)
    try:
        expressions = {path: _get(state.tree, path) for path in pending}
        config = OmegaConf.create(_container(state.tree, defaults, set(pending)))
        return _rounds(state, config, expressions, reader)
    finally:
        OmegaConf.clear_resolver(_RESOLVER)


def _container(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], pending: set[tuple[str | int, ...]]
) -> dict[str, Any]:
    """Builtins for OmegaConf: defaults below the tree, without what is literal, texts still to be resolved marked missing."""

    def build(value: Any, default: Any, path: tuple[str | int, ...]) -> Any:
        if path in pending:
            return _MISSING
        if isinstance(value, list):
            return [build(each, None, (*path, index)) for index, each in enumerate(value)]
        if not isinstance(value, Mapping):
            return _escape(value)
        below = default if isinstance(default, Mapping) else {}
        names = [name for name in {**below, **value} if ".".join(map(str, (*path, name))) not in open_keys()]
        return {name: build(value.get(name, below.get(name)), below.get(name), (*path, name)) for name in names}

    built = build(tree, defaults, ())
    assert isinstance(built, dict)
    return built


def _rounds(
    state: Merge, config: Any, expressions: dict[tuple[str | int, ...], str], reader: _Reader
) -> list[Diagnostic]:
    """Resolve what refers to known values only, again and again: no value is computed twice, and a circle comes to light."""
    from omegaconf.errors import InterpolationToMissingValueError

    found: list[Diagnostic] = []
    waiting = dict(expressions)
    while waiting:
        progress = False
        for path, expression in list(waiting.items()):
            reader.asked.clear()
            try:
                value = _evaluate(config, path, _ENVIRONMENT.sub(f"${{{_RESOLVER}:", expression))
                found += _settle(state, config, path, expression, value, reader.asked)
            except InterpolationToMissingValueError:
                continue
            except Exception as error:  # noqa: BLE001 - OmegaConf lets through whatever a resolver or its parser raises
                found.append(_explain(state, path, expression, error, reader.asked))
                # The text that cannot be resolved stays, so that what refers to it is not reported as well.
                _set(config, path, "")
            del waiting[path]
            progress = True
        if not progress:
            break
    return found + [_circle(state, path, expression) for path, expression in waiting.items()]


def _evaluate(config: Any, path: tuple[str | int, ...], expression: str) -> Any:
    from omegaconf import OmegaConf

    _set(config, path, expression)
    try:
        parent = _get(config, path[:-1])
        value = parent[path[-1]]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    finally:
        _set(config, path, _MISSING)


def _settle(
    state: Merge, config: Any, path: tuple[str | int, ...], expression: str, value: Any, asked: list[str]
) -> list[Diagnostic]:
    key = ".".join(map(str, path))
    secret = [name for name in asked if is_secret_name(name)]
    if secret:
        _set(config, path, "")
        what = f"{key} would put the value of {secret[0]} into the recipe, and the name says it is a secret"
        return [
            Diagnostic(
                "error",
                what,
                key,
                _origin(state, key),
                hint=f"list {secret[0]} under env_from; ranks then find it in their environment",
            )
        ]
    if isinstance(value, str) and len(value) > MAX_LENGTH:
        raise ValueError(f"the value grows to {len(value):,} characters")
    if isinstance(value, str) and asked and _wants_other_than_text(key):
        value = read_scalar(value)
    _set(config, path, _escape(value))
    _set(state.tree, path, value)
    _note(state, key, expression, asked)
    return []


def _wants_other_than_text(key: str) -> bool:
    setting = schema().enclosing(key)
    return setting is not None and not accepts(setting.annotation, str) and (setting.key == key)


def _note(state: Merge, key: str, expression: str, asked: list[str]) -> None:
    """The winning entry of the leaf says what the value was made from."""
    leaf = key if key in state.history else key.rpartition(".")[0]
    entries = state.history.get(leaf)
    if not entries:
        return
    origin = entries[-1].origin
    if asked:
        names = ", ".join(dict.fromkeys(asked))
        origin = replace(origin, layer=f"{origin.layer}, environment variable {names}")
        state.places[leaf] = origin
    entries[-1] = Entry(value_at(state.tree, leaf), origin, f"from {expression}")


def _explain(
    state: Merge, path: tuple[str | int, ...], expression: str, error: Exception, asked: list[str]
) -> Diagnostic:
    key = ".".join(map(str, path))
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    absent = _KEY_NOT_FOUND.search(message)
    what, hint = (
        f"{key}: {expression[:100]} cannot be resolved: {message[:300]}",
        "write \\${ for a text that is meant literally",
    )
    if absent:
        close = nearest(absent[1], schema().keys)
        what = f"{key} refers to {absent[1]!r}, which is not there"
        hint = f"did you mean ${{{close}}}?" if close else "refer to a key of this recipe by its dotted name"
    elif "KeyError" in message and asked:
        what = f"{key} reads the environment variable {asked[-1]}, which is not set"
        hint = f"set it, or give a default: ${{oc.env:{asked[-1]},value}}"
    elif isinstance(error, RecursionError):
        what = f"{key}: {expression[:100]} is nested too deep"
    return Diagnostic("error", what, key, _origin(state, key), hint=hint)


def _circle(state: Merge, path: tuple[str | int, ...], expression: str) -> Diagnostic:
    key = ".".join(map(str, path))
    what = f"{key}: {expression[:100]} refers to itself in a circle"
    return Diagnostic("error", what, key, _origin(state, key), hint="write one of the values out")


def _escape(value: Any) -> Any:
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _origin(state: Merge, key: str) -> Origin | None:
    while key:
        if key in state.places:
            return state.places[key]
        key = key.rpartition(".")[0]
    return None


def _get(tree: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _set(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    _get(tree, path[:-1])[path[-1]] = value
