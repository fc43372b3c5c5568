"""Files and folders that a run will read: which of them are not there, so that a plan can say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainkit.recipe.layers.paths import Files
from trainkit.recipe.schema import HfModel, Recipe

# Values that are words of the recipe and no paths.
_WORDS: Mapping[str, frozenset[str]] = {
    "data.path": frozenset({"python-stdlib"}),
    "checkpoint.resume": frozenset({"never", "auto"}),
    "model.path": frozenset(),
    "peft.path": frozenset(),
    "program.script": frozenset(),
    "data.tokenizer": frozenset(),
}


def absent_inputs(recipe: Recipe, files: Files, absolute: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """The paths at which nothing stands, by the setting that names them. absolute: from the working folder."""
    if recipe.program.kind != "builtin":
        paths = {"checkpoint.resume": recipe.checkpoint.resume, "program.script": recipe.program.script}
        return {
            key: (path,)
            for key, path in paths.items()
            if path and path not in _WORDS[key] and not files.exists(absolute(path))
        }
    path = getattr(recipe.data, "path", [])  # some sources read no file
    named = path if isinstance(path, list) else [path]
    given = {"data.path": named, "checkpoint.resume": [recipe.checkpoint.resume]}
    if isinstance(recipe.model, HfModel) and recipe.model.path is not None:
        given["model.path"] = [recipe.model.path]
    if recipe.peft.path is not None:
        given["peft.path"] = [recipe.peft.path]
    tokenizer = getattr(recipe.data, "tokenizer", None)
    if tokenizer is not None:
        given["data.tokenizer"] = [tokenizer]
    absent = {
        key: tuple(path for path in paths if path not in _WORDS[key] and not files.exists(absolute(path)))
        for key, paths in given.items()
    }
    return {key: paths for key, paths in absent.items() if paths}
