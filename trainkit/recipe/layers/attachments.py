"""Files that settings name and the plan depends on: read once, with positions, and named by absolute paths after."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.errors import Diagnostic
from trainkit.recipe.layers.layer import page
from trainkit.recipe.layers.merge import Merge
from trainkit.recipe.layers.paths import Files, absolute, seen_from
from trainkit.recipe.resolved import Attachment, Entry
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.yaml.reader import compose_bytes
from trainkit.recipe.yaml.syntax import Mark, Problem


def attach(
    state: Merge, bases: Mapping[int, str], cwd: str, files: Files
) -> tuple[dict[str, Attachment], list[Diagnostic]]:
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
        path = absolute(value, bases[entry.origin.strength])
        read = _read(key, path, seen_from(cwd, path), entry, files)
        if isinstance(read, Attachment):
            attachments[key] = read
        else:
            found += read
        _replace(state, key, path, entry)
    return attachments, found


def _read(key: str, path: str, shown: str, entry: Entry, files: Files) -> Attachment | list[Diagnostic]:
    origin = entry.origin
    try:
        document = compose_bytes(files.read(path))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else f"{error.strerror or 'cannot read'}:"
        why = f"it would be {path}" if path != str(entry.value) else ""
        hint = "check the path; it starts from the file that names it"
        return [Diagnostic("error", f"{key}: {reason} {shown}", key, origin, why, hint)]
    text = page(f"{key} {shown}", origin.strength, shown, document)
    problems = list(document.errors)
    if not problems and not isinstance(document.tree, Mapping):
        problems.append(Problem(Mark(1, 1), f"{key} wants a file that holds a mapping", hint="write a JSON object"))
    if problems:
        return [text.diagnose("error", each) for each in problems]
    return Attachment(path, document.tree, {name: text.at(mark) for name, mark in document.values.items() if name})


def _replace(state: Merge, key: str, path: str, entry: Entry) -> None:
    *sections, name = key.split(".")
    target = state.tree
    for section in sections:
        target = target[section]
    target[name] = path
    state.history[key][-1] = Entry(path, entry.origin, entry.note)
