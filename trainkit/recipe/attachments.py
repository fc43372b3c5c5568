"""Files that settings name and the plan depends on: read once, with positions, and named by absolute paths from then on."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.compose import compose_bytes
from trainkit.recipe.fields import schema
from trainkit.recipe.files import Files
from trainkit.recipe.layer import at, diagnose, shown_lines
from trainkit.recipe.merge import Merge
from trainkit.recipe.resolved import Attachment, Entry
from trainkit.recipe.text import Mark, Problem


def attach(state: Merge, bases: Mapping[int, str], files: Files) -> tuple[dict[str, Attachment], list[Diagnostic]]:
    """Read every file that the merged tree names in a setting declared with ``file=True``.

    bases: folder that relative paths of a layer start from, by the layer's strength. The tree gets absolute paths.
    """
    attachments: dict[str, Attachment] = {}
    found: list[Diagnostic] = []
    for key, declared in schema().settings.items():
        value = state.get(key)
        if not declared[0].file or not isinstance(value, str) or not value:
            continue
        entry = state.history[key][-1]
        path = posixpath.normpath(posixpath.join(bases[entry.origin.strength], value))
        attachment = _read(key, path, value, entry.origin, files, found)
        if attachment:
            attachments[key] = attachment
        _replace(state, key, path, entry)
    return attachments, found


def _read(key: str, path: str, shown: str, origin: Origin, files: Files, found: list[Diagnostic]) -> Attachment | None:
    try:
        document = compose_bytes(files.read(path))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else f"{error.strerror or 'cannot read'}:"
        why = f"it would be {path}" if path != shown else ""
        found.append(
            Diagnostic(
                "error",
                f"{key}: {reason} {shown}",
                key,
                origin,
                why,
                "check the path; it starts from the file that names it",
            )
        )
        return None
    layer, lines = f"{key} {shown}", shown_lines(document)
    problems = list(document.errors)
    if not problems and not isinstance(document.tree, Mapping):
        problems.append(
            Problem(Mark(1, 1), f"{key} wants a file that holds a mapping", hint="write a JSON object", key=key)
        )
    found += [diagnose("error", each, layer, origin.strength, shown, lines) for each in problems]
    origins = {name: at(layer, origin.strength, shown, mark, lines) for name, mark in document.values.items() if name}
    return None if problems else Attachment(path, document.tree, origins)


def _replace(state: Merge, key: str, path: str, entry: Entry) -> None:
    *sections, name = key.split(".")
    target = state.tree
    for section in sections:
        target = target[section]
    target[name] = path
    state.history[key][-1] = Entry(path, entry.origin, entry.note)
