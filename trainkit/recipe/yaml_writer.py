"""The one YAML writer: scalars, flow and block layout, comments; and whole recipes as text that reads as the same.

What is written by hand here keeps keys in order, one section a line and a comment above: no library lays YAML out so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from trainkit.recipe.layer import VERBATIM
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.rules import yielding_corner
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.fields import lies_in, open_keys, schema, short_forms, tagged_sections
from trainkit.recipe.yaml_reader import read_scalar
from trainkit.text import strip_control, wrapped

# Other characters end or change the meaning of a plain scalar somewhere: a text with any of them is quoted.
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+-")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_LITERAL = re.compile(r"\$\{(?!oc\.env:)")
# A text that reads as the same below `|`: it ends in one line end, and its first line is not indented.
_BLOCK = re.compile(r"(?!\s)[^\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]+(?<!\n)\n")
Leaf = Callable[[Any, str], str]  # how the value at a dotted key is written on one line


def resolved_yaml(resolved: Resolved) -> str:
    """The resolved recipe as text from which the same plan is made again.

    For a program that keeps its own defaults, only what a layer gives: whatever is written down counts as given.
    """
    recipe = consistent(resolved)
    if recipe.program.kind == "builtin":
        return recipe_yaml(recipe)
    tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for section in tagged_sections() & tree.keys():
        if not resolved.given(f"{section}.kind"):  # validation has filled it in
            del tree[section]["kind"]
    return _text(tree)


def consistent(resolved: Resolved) -> Recipe:
    """The recipe for one file: where three corners of the batch came from several layers, the weakest is `auto`.

    Planning lets that one give way; in one file the three could contradict each other.
    """
    batch = resolved.recipe.batch
    corners = {"accumulation": batch.accumulation, "global": batch.global_, "micro": batch.micro}
    origins = {name: resolved.given(f"batch.{name}") for name, value in corners.items() if type(value) is int}
    yielding = yielding_corner({name: origin.strength for name, origin in origins.items() if origin})
    if yielding is None:
        return resolved.recipe
    batch = batch.model_copy(update={{"global": "global_"}.get(yielding, yielding): "auto"})
    return resolved.recipe.model_copy(update={"batch": batch})


def recipe_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, in the order of the schema. It holds no secrets: validation lets none in."""
    return _text(recipe.model_dump(mode="json", by_alias=True))


def _text(tree: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in block(tree))


def flow(value: Any, key: str) -> str:
    """The value of a recipe's key as YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(flow(each, key) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(name)}: {flow(each, key)}' for name, each in value.items())}}}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and lies_in(key, VERBATIM):
        return str(value)
    if isinstance(value, str) and not lies_in(key, open_keys()):
        # In a recipe that has been resolved, and in words of a command, what looks like an interpolation is a literal
        # text. A reference to the environment is none: an import makes it of a variable that nothing sets.
        value = _LITERAL.sub("\\\\${", value)
    return scalar(value)


def block(tree: Mapping[str, Any], leaf: Leaf | None = None, key: str = "", indent: str = "") -> Iterator[str]:
    """The lines of a mapping: mappings in it below their names, everything else on a line."""
    for name, value in tree.items():
        below = f"{key}.{name}" if key else name
        if isinstance(value, Mapping) and value:
            yield f"{indent}{scalar(name)}:"
            yield from block(value, leaf, below, f"{indent}  ")
        else:
            yield f"{indent}{scalar(name)}: {(leaf or flow)(value, below)}"


def manifest(
    tree: Mapping[str, Any], leaf: Callable[[Any], str], path: tuple[str, ...] = (), indent: str = ""
) -> Iterator[tuple[tuple[str, ...], str]]:
    """The lines of a mapping as manifests are written, each with its path: an item of a list of mappings at a dash.

    leaf: how a single value is written on one line. A text of several lines stands below its name, where it can.
    """
    for name, value in tree.items():
        here, start = (*path, name), f"{indent}{scalar(name)}:"
        if isinstance(value, Mapping) and value:
            yield here, start
            yield from manifest(value, leaf, here, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield here, start
            for position, item in enumerate(value):
                (first, line), *rest = manifest(item, leaf, (*here, str(position)), f"{indent}  ")
                yield first, f"{indent}- {line.lstrip()}"
                yield from rest
        elif isinstance(value, list):
            yield here, f"{start} [{', '.join(map(leaf, value))}]"
        elif isinstance(value, str) and _BLOCK.fullmatch(value):
            yield here, f"{start} |"
            yield from ((here, f"{indent}  {line}") for line in value.removesuffix("\n").split("\n"))
        else:
            yield here, f"{start} {leaf(value) if not isinstance(value, Mapping) else '{}'}"


def fitted(
    name: str, value: Any, width: int, leaf: Leaf | None = None, *, key: str = "", indent: str = ""
) -> Iterator[str]:
    """One entry of a mapping: on a line where it fits the width, else what it holds on lines below."""
    below = f"{key}.{name}" if key else name
    write = leaf or flow
    line = f"{indent}{scalar(name)}: {write(value, below)}"
    if len(line) <= width or not value or not isinstance(value, (Mapping, list)):
        yield line
        return
    yield f"{indent}{scalar(name)}:"
    if isinstance(value, list):
        yield from (f"{indent}  - {write(each, below)}" for each in value)
        return
    for inner, each in value.items():
        yield from fitted(inner, each, width, leaf, key=below, indent=f"{indent}  ")


def recipe_name(text: str) -> str:
    """A name that a recipe may have, made of any text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100] or "run"


def opening(name: str, modeline: str, remarks: Iterable[str], width: int) -> list[str]:
    """The first lines of a recipe: remarks as comments, version and name. modeline: for editors, or empty."""
    lines = [modeline] if modeline else []
    for remark in remarks:
        lines += comment(remark, width)
    return [*lines, "version: 1", f"name: {flow(name, 'name')}"]


def comment(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a comment; what is in it may come from another's file."""
    return wrapped(strip_control(text), width, f"{indent}# ", f"{indent}#   ")


def shortened(value: Any, key: str) -> Any:
    """The value of a recipe's key with its sections in their short forms (`{dtype: bf16}` as `bf16`)."""
    if not isinstance(value, Mapping) or key in schema().settings:
        return value
    if set(value) == {short_forms().get(key)}:
        return next(iter(value.values()))
    return {name: shortened(below, f"{key}.{name}") for name, below in value.items()}


def scalar(value: Any, quote: str = '"') -> str:
    """One value as YAML: plain where it cannot be misread, in quotes otherwise."""
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
    if text and set(text) <= _SAFE and text[0] not in "-+.":
        with suppress(ValueError):  # a number of absurd length
            if isinstance(read_scalar(text), str):
                return text
    if quote == "'" and text.isprintable():  # single quotes have no escapes
        return "'" + text.replace("'", "''") + "'"
    return f'"{"".join(_escape(char) for char in text)}"'


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
