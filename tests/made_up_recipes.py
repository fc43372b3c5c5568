"""Resolving recipes that are written in the test, without a file system."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

import pytest

from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request, Resolved

PRESETS = {
    "strategy/fsdp": "strategy: {kind: fsdp}\n",
    "strategy/zero2": "strategy: {kind: zero2}\n",
    "strategy/zero3-offload": "strategy: {kind: zero3, offload_optimizer: cpu, offload_param: cpu}\n",
    "precision/bf16": "precision: {dtype: bf16}\n",
    "length/short": "train: {steps: 3}\n",
}


class MemoryFiles:
    """Files held in a dictionary: absolute path to content."""

    def __init__(self, contents: Mapping[str, str | bytes], shipped: Mapping[str, str] | None = None) -> None:
        self._contents = {posixpath.normpath(path): content for path, content in contents.items()}
        self._shipped = dict(shipped or {})

    def read(self, path: str) -> bytes:
        """The content; FileNotFoundError where there is none."""
        content = self._contents.get(posixpath.normpath(path))
        if content is None:
            raise FileNotFoundError(path)
        return content.encode() if isinstance(content, str) else content

    def exists(self, path: str) -> bool:
        """Whether the dictionary has the path, or one below it."""
        wanted = posixpath.normpath(path)
        return any(each == wanted or each.startswith(f"{wanted}/") for each in self._contents)

    def holds(self, folder: str, pattern: str) -> bool:
        """Whether a path below the folder matches; True of what is no folder."""
        top = f"{posixpath.normpath(folder)}/"
        below = [each.removeprefix(top) for each in self._contents if each.startswith(top)]
        return not below or any(fnmatch(each, pattern.removeprefix("**/")) for each in below)

    def shipped(self) -> Mapping[str, str]:
        """The names given at construction."""
        return self._shipped


def _resolve(files: Mapping[str, str | bytes] | str, recipe: str | None = "r.yaml", **request: Any) -> Resolved:
    texts = {"r.yaml": files} if isinstance(files, str) else files
    contents = {path if path.startswith("/") else f"/w/{path}": text for path, text in texts.items()}
    contents |= {f"/shipped/{name}.yaml": text for name, text in PRESETS.items()}
    shipped = {name: f"/shipped/{name}.yaml" for name in PRESETS}
    return resolve(Request(recipe, "/w", **request), MemoryFiles(contents, shipped))


@pytest.fixture
def solve() -> Callable[..., Resolved]:
    """Resolve texts by path (from /w), or one text as r.yaml. Keywords are Request's."""
    return _resolve


@pytest.fixture
def refuse() -> Callable[..., list[Diagnostic]]:
    """The errors of texts that must not resolve."""

    def errors(*args: Any, **request: Any) -> list[Diagnostic]:
        with pytest.raises(RecipeError) as caught:
            _resolve(*args, **request)
        return [each for each in caught.value.diagnostics if each.severity == "error"]

    return errors


@pytest.fixture
def places(refuse: Callable[..., list[Diagnostic]]) -> Callable[..., list[tuple[str, str]]]:
    """(place, what) of the errors of texts that must not resolve."""

    def found(*args: Any, **request: Any) -> list[tuple[str, str]]:
        return [(each.origin.place if each.origin else "", each.what) for each in refuse(*args, **request)]

    return found
