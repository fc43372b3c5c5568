"""Interpolation: `${key}` and `${oc.env:NAME,default}` in a recipe's values, resolved by omegaconf."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic
from trainkit.recipe.layer import origin_at
from trainkit.recipe.merge import Merge, value_at
from trainkit.recipe.resolved import Entry
from trainkit.recipe.schema.fields import open_keys, path_keys, schema
from trainkit.recipe.secrets import is_secret_name, public_names, why_secret
from trainkit.recipe.suggestions import nearest
from trainkit.recipe.validate import accepts
from trainkit.recipe.yaml_reader import read_scalar

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
        problems.append(Diagnostic("error", what, key, origin_at(state.places, key), hint=hint))
    if problems:
        return value, problems
    return REFERENCE.sub(lambda match: environ.get(match[1], (match[2] or "").strip()), value), []


MAX_LENGTH = 100_000  # characters of one value, so that values built from one another cannot grow without bound
_MISSING = "???"  # OmegaConf's mark for a value that is not there yet
_RESOLVER = "oc.env"  # whose own reads the process's environment, and knows of no secrets
_KEY_NOT_FOUND = re.compile(r"Interpolation key '([^']*)' not found")
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")  # `${model.layers}`, with no more to it than a name
_HOME = re.compile(r"^~(?=/|$)")
Path = tuple[str | int, ...]
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

    `${oc.env:NAME,default}` reads the given environment; under `env` and `program.args` all else is literal.
    defaults: values that can be referred to although no layer gives them.
    """
    for key in path_keys():
        _spell_home(state, key)
    found = [*fill_references(state, environ), *_literal(state)]
    pending = list(_paths(state.tree, ()))
    if not pending:
        return found
    from omegaconf import OmegaConf, __version__
    from omegaconf.resolvers.oc import env

    session = _Session(state, OmegaConf.create(_container(state.tree, defaults, set(pending))), environ)
    # 2.4 renamed it; the method that bears the new name in 2.3 is an older one, with other arguments.
    name = "register_new_resolver" if __version__.startswith("2.3") else "register_resolver"
    register: Callable[..., Any] = getattr(OmegaConf, name)
    with _LOCK:
        # In its place, not beside it: a text may make up the name that it asks for, `${oc.${name}:…}`.
        register(_RESOLVER, session.read_variable, replace=True)
        try:
            return found + session.resolve({path: _get(state.tree, path) for path in pending})
        finally:
            register(_RESOLVER, env, replace=True)


def _spell_home(state: Merge, key: str) -> None:
    """`~/x` in a setting that names a file means what a shell would make of it."""
    value, (section, _, name) = state.get(key), key.rpartition(".")
    below = state.get(section)
    if isinstance(value, str | list) and isinstance(below, dict):
        below[name] = _with_home(value)


def _with_home(value: Any) -> Any:
    """The same for a path, a list of them, or mappings that have one."""
    if isinstance(value, list):
        return [_with_home(each) for each in value]
    if isinstance(value, dict) and "path" in value:
        return {**value, "path": _with_home(value["path"])}
    return _HOME.sub("${oc.env:HOME}", value) if isinstance(value, str) else value


def _literal(state: Merge) -> Iterator[Diagnostic]:
    env = state.tree.get("env")
    if not isinstance(env, Mapping):
        return
    for name, value in env.items():
        if isinstance(value, str) and "${" in value:
            key = f"env.{name}"
            why = "values under env are literal, so a shell's or a recipe's `${…}` is not replaced"
            hint = f"to hand on the caller's own value, list {name} under env_from"
            origin = origin_at(state.places, key)
            yield Diagnostic("warning", f"{key} is passed on with `${{` in it", key, origin, why, hint)


def _paths(tree: Any, path: Path) -> Iterator[Path]:
    """Paths of all texts with `${`, outside the mappings that are literal."""
    if isinstance(tree, str):
        if "${" in tree:
            yield path
    elif isinstance(tree, (dict, list)) and _dotted(path) not in open_keys():
        for name, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _paths(each, (*path, name))


def _container(tree: Mapping[str, Any], defaults: Mapping[str, Any], pending: set[Path]) -> dict[str, Any]:
    """Builtins for OmegaConf: defaults below the tree, nothing literal, texts still to be resolved marked missing."""

    def build(value: Any, default: Any, path: Path) -> Any:
        if path in pending:
            return _MISSING
        if isinstance(value, list):
            return [build(each, None, (*path, index)) for index, each in enumerate(value)]
        if not isinstance(value, Mapping):
            return _escape(value)
        below = default if isinstance(default, Mapping) else {}
        names = [name for name in {**below, **value} if _dotted((*path, name)) not in open_keys()]
        return {name: build(value.get(name, below.get(name)), below.get(name), (*path, name)) for name in names}

    built = build(tree, defaults, ())
    assert isinstance(built, dict)
    return built


@dataclass
class _Session:
    """One pass over all `${…}` of a recipe."""

    state: Merge
    config: Any
    environ: Mapping[str, str]
    asked: list[str] = field(default_factory=list)  # variables that the text being resolved reads
    # OmegaConf takes most of a millisecond to parse a text: what many texts refer to is asked for once.
    known: dict[str, Any] = field(default_factory=dict)

    def read_variable(self, name: str, *default: Any) -> Any:
        """What `${oc.env:NAME,default}` means."""
        self.asked.append(name)
        if name in self.environ:
            return self.environ[name]
        if default:
            return None if default[0] is None else str(default[0])
        raise KeyError(name)

    def resolve(self, expressions: Mapping[Path, str]) -> list[Diagnostic]:
        """Resolve what refers to known values only, round by round: nothing is computed twice, and circles show."""
        from omegaconf.errors import InterpolationToMissingValueError

        found: list[Diagnostic] = []
        waiting = dict(expressions)
        progress = True
        while waiting and progress:
            progress = False
            for path, expression in list(waiting.items()):
                self.asked.clear()
                try:
                    found += self._settle(path, expression, self._evaluate(path, expression))
                except InterpolationToMissingValueError:
                    continue
                except Exception as error:  # noqa: BLE001 - OmegaConf lets through whatever its parser or a resolver raises
                    found.append(self._explain(path, expression, error))
                    # So that what refers to this value is not reported as well.
                    _set(self.config, path, "")
                del waiting[path]
                progress = True
        return found + [self._explain(path, expression, None) for path, expression in waiting.items()]

    def _evaluate(self, path: Path, expression: str) -> Any:
        literals, keys = _REFERENCE.split(expression)[::2], _REFERENCE.findall(expression)
        if any("$" in each or "\\" in each for each in literals):
            return self._ask(path, expression)
        values = [self._refer(path, key) for key in keys]
        if literals == ["", ""]:  # the reference is the whole text, and its value may be of any type
            return values[0]
        if any(isinstance(each, (dict, list)) for each in values):
            return self._ask(path, expression)
        return literals[0] + "".join(f"{value}{text}" for value, text in zip(values, literals[1:], strict=True))

    def _refer(self, path: Path, key: str) -> Any:
        """The value at a key. Only a final one is remembered: OmegaConf raises while it is still to be resolved."""
        if key in self.known:
            return self.known[key]
        value = self._ask(path, f"${{{key}}}")
        if not isinstance(value, (dict, list)):
            self.known[key] = value
        return value

    def _ask(self, path: Path, expression: str) -> Any:
        """What OmegaConf makes of a text at the path."""
        from omegaconf import OmegaConf

        _set(self.config, path, expression)
        try:
            value = _get(self.config, path)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        finally:
            _set(self.config, path, _MISSING)

    def _settle(self, path: Path, expression: str, value: Any) -> list[Diagnostic]:
        for name in self.asked:
            if by := "name" if is_secret_name(name) else why_secret(name, self.environ.get(name)):
                _set(self.config, path, "")
                what = f"would put the value of {name} into the recipe, and it is a secret by its {by}"
                return [self._error(path, what, f"list {name} under env_from; the ranks then find it there")]
        if isinstance(value, str) and len(value) > MAX_LENGTH:
            raise ValueError(f"the value grows to {len(value):,} characters")
        if isinstance(value, Mapping) and _dotted(path) in schema().sections:
            _set(self.config, path, "")
            hint = f"refer to single values below it, as in {_dotted(path)}: {{name: ${{section.name}}}}"
            return [self._error(path, "is a section, and another one cannot be put in its place", hint)]
        setting = schema().setting(_dotted(path))
        if isinstance(value, str) and self.asked and setting and not accepts(setting.annotation, str):
            value = read_scalar(value)
        _set(self.config, path, _escape(value))
        _set(self.state.tree, path, value)
        self._note(_dotted(path), expression)
        return []

    def _note(self, key: str, expression: str) -> None:
        """The winning entry of the leaf says what the value was made from."""
        leaf = key if key in self.state.history else key.rpartition(".")[0]
        entries = self.state.history.get(leaf)
        if not entries:
            return
        origin = entries[-1].origin
        if self.asked:
            names = ", ".join(dict.fromkeys(self.asked))
            origin = replace(origin, layer=f"environment variable {names}, named in {origin.layer}")
            self.state.places[leaf] = origin
        entries[-1] = Entry(value_at(self.state.tree, leaf), origin, f"from {expression}")

    def _explain(self, path: Path, expression: str, error: Exception | None) -> Diagnostic:
        """What an exception of OmegaConf's means. error: None for what waits for itself, and so for ever."""
        message = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        absent, asked = _KEY_NOT_FOUND.search(message), self.asked
        if absent:
            close = nearest(absent[1], schema().keys)
            hint = f"did you mean ${{{close}}}?" if close else "refer to a key of this recipe by its dotted name"
            return self._error(path, f"refers to {absent[1]!r}, which is not there", hint)
        if "KeyError" in message and asked:
            hint = f"set it, or give a default: ${{oc.env:{asked[-1]},value}}"
            return self._error(path, f"reads the environment variable {asked[-1]}, which is not set", hint)
        if error is None or "Recursive interpolation" in message:
            return self._error(path, f"{expression[:100]} refers to itself in a circle", "write one of the values out")
        what = f"{expression[:100]} cannot be resolved: {message}"
        return self._error(path, what, "write \\${ for a text that is meant literally")

    def _error(self, path: Path, what: str, hint: str) -> Diagnostic:
        key = _dotted(path)
        return Diagnostic("error", f"{key}: {what}", key, origin_at(self.state.places, key), hint=hint)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _escape(value: Any) -> Any:
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _get(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _set(tree: Any, path: Path, value: Any) -> None:
    _get(tree, path[:-1])[path[-1]] = value
