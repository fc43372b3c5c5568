"""A recipe back as YAML text that reads as the same recipe, for the run directory and for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import open_keys
from trainkit.recipe.schema.launching import OWN_DEFAULTS
from trainkit.recipe.validation.batch_conflicts import yielding_corner
from trainkit.recipe.yaml.scalars import read_scalar

# Characters that end or change the meaning of a plain scalar somewhere; a text with any of them is quoted.
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+-")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def resolved_yaml(resolved: Resolved) -> str:
    """The resolved recipe as text that resolves to the same training again.

    Where three corners of the batch came from several layers, planning lets the weakest give way. In one file the three
    could contradict each other, so that corner is written as `auto`.
    """
    yielding = yielding_corner(resolved.history)
    if yielding is None:
        return recipe_yaml(resolved.recipe)
    name = {"global": "global_"}.get(yielding, yielding)
    batch = resolved.recipe.batch.model_copy(update={name: "auto"})
    return recipe_yaml(resolved.recipe.model_copy(update={"batch": batch}))


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe in the order of the schema; without defaults for a program that keeps its own.

    It holds no secrets: validation lets none in.
    """
    given = recipe.program.kind in OWN_DEFAULTS
    tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=given)
    return "".join(f"{line}\n" for line in _mapping(tree, "", ""))


def _mapping(tree: Mapping[str, Any], key: str, indent: str) -> Iterator[str]:
    for name, value in tree.items():
        below = f"{key}.{name}" if key else name
        word = scalar(name)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{word}:"
            yield from _mapping(value, below, f"{indent}  ")
        else:
            yield f"{indent}{word}: {flow(value, below)}"


def flow(value: Any, key: str) -> str:
    """The value of a key as YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(flow(each, key) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(name)}: {flow(each, key)}' for name, each in value.items())}}}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_verbatim(key):
        return str(value)
    return _text(value, key) if isinstance(value, str) else scalar(value)


def _text(value: str, key: str) -> str:
    # A recipe that has been resolved holds no interpolation any more: what looks like one is a literal text.
    literal = value if _is_verbatim(key) else value.replace("${", "\\${")
    return scalar(literal)


def _is_verbatim(key: str) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in open_keys())


def scalar(value: Any) -> str:
    """One value as YAML: plain where it cannot be misread, in double quotes otherwise."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # YAML 1.1 readers take `1e-08` for a text; with a dot it is a number to all.
        shown = repr(value)
        return shown.replace("e", ".0e", 1) if "e" in shown and "." not in shown else shown
    if isinstance(value, int):
        return str(value)
    text = str(value)
    plain = text and set(text) <= _SAFE and text[0] not in "-+." and _reads_as_text(text)
    return text if plain else f'"{"".join(_escape(char) for char in text)}"'


def _reads_as_text(text: str) -> bool:
    try:
        return isinstance(read_scalar(text), str)
    except ValueError:
        return False


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
