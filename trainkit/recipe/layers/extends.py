"""Which files make up a recipe: `extends` followed, presets found, cycles and missing files reported, weakest first."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layers.layer import Layer, file_layer, page, read_document
from trainkit.recipe.layers.paths import Files, absolute, seen_from
from trainkit.recipe.layers.variants import Variant, read_variants
from trainkit.recipe.validation.suggestions import nearest
from trainkit.recipe.yaml.reader import Document
from trainkit.recipe.yaml.syntax import Mark, Problem

MAX_EXTENDS_DEPTH = 32
MAX_FILES = 500
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class _Source:
    """A file that takes part. shown: how it is named in messages; label: the layer's name as a person would say it."""

    path: str
    shown: str
    label: str


@dataclass
class Stack:
    """Files read so far, weakest first, and what was wrong with them."""

    files: Files
    cwd: str
    layers: list[Layer] = field(default_factory=list)
    errors: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)
    variants: dict[str, list[Variant]] = field(default_factory=dict)  # by name: what each file says, weakest first
    incomplete: bool = False  # whether values are missing because a file or a preset could not be read

    def add_recipe(self, recipe: str) -> None:
        """Add a recipe file as the user typed it, with all that it extends."""
        origin = Origin("command line", 0, recipe, text=recipe)
        path = absolute(recipe, self.cwd)
        name = _without_suffix(recipe)
        if not self.files.exists(path) and name in self.files.shipped():
            self._add(_Source(self.files.shipped()[name], recipe, f"shipped {name}"), (), origin, set())
        else:
            self._add(_Source(path, recipe, f"file {recipe}"), (), origin, set())

    def add_preset(self, word: str) -> None:
        """Add what ``--with`` names, on top of everything so far."""
        origin = Origin("flag", len(self.layers), f"--with {word}", text=f"--with {word}")
        found = self._find(word, self.cwd, Mark(0, 0))
        if isinstance(found, Problem):
            self.incomplete = True
            self.errors.append(Diagnostic("error", found.what, "", origin, found.why, found.hint))
        else:
            self._add(found, (), origin, set())

    def add_variant(self, name: str) -> None:
        """Add what the files say of one variant, on top of everything so far."""
        if name in self.variants:
            for each in self.variants[name]:
                self.layers.append(each.layer(len(self.layers)))
        elif not self.incomplete:
            origin = Origin("command line", len(self.layers), f"--variant {name}", text=f"--variant {name}")
            close = nearest(name, self.variants)
            known = f"its variants are: {', '.join(self.variants)}" if self.variants else "it has none"
            hint = f"did you mean {close}?" if close else known
            self.errors.append(Diagnostic("error", f"the recipe has no variant {name!r}", "", origin, hint=hint))

    def descriptions(self) -> dict[str, str]:
        """Every variant with its description, the strongest file's that gives one."""
        return {
            name: next((each.description for each in reversed(given) if each.description), "")
            for name, given in self.variants.items()
        }

    def other_variants(self, chosen: str | None) -> list[Layer]:
        """The variants that do not take part, to be looked over for mistakes alone."""
        others = (each for name, given in self.variants.items() if name != chosen for each in given)
        return [each.layer(len(self.layers) + 2) for each in others]

    def _add(self, source: _Source, chain: tuple[_Source, ...], named: Origin, done: set[str]) -> None:
        """Add a file behind what it extends. What several others extend counts once, where it comes first."""
        document = self._read(source, named)
        if document is None:
            return
        done.add(source.path)
        if len(done) > MAX_FILES:
            self.errors.append(Diagnostic("error", f"more than {MAX_FILES} files are extended", "extends", named))
            return
        problems = list(document.errors)
        self.incomplete |= bool(problems) and not document.tree
        chain = (*chain, source)
        seen: set[str] = set()
        for word, mark in _extends(document, problems):
            found = self._find(word, posixpath.dirname(source.path), mark)
            if isinstance(found, _Source):
                trouble = _chain_problem(found, chain, seen, mark)
                seen.add(found.path)
                if trouble is None:
                    if found.path not in done:
                        at = page(source.label, len(self.layers), source.shown, document).at(mark)
                        self._add(found, chain, at, done)
                    continue
                found = trouble
            self.incomplete = True
            problems.append(found)
        self._place(source, document, problems)

    def _place(self, source: _Source, document: Document, problems: list[Problem]) -> None:
        shown = page(source.label, len(self.layers), source.shown, document)
        folder = posixpath.dirname(source.path)
        variants, wrong = read_variants(document, shown, folder)
        problems += wrong
        for each in variants:
            self.variants.setdefault(each.name, []).append(each)
        self.layers.append(file_layer(shown, folder, document))
        self.errors += [shown.diagnose("error", each) for each in problems]
        self.warnings += [shown.diagnose("warning", each) for each in document.warnings]

    def _read(self, source: _Source, named: Origin) -> Document | None:
        try:
            return read_document(self.files.read(source.path))
        except OSError as error:
            self.incomplete = True
            what, hint = _unreadable(error, source.shown, self._meant_file(source))
            self.errors.append(Diagnostic("error", what, "", named, hint=hint))
            return None

    def _meant_file(self, source: _Source) -> str | None:
        """What a name without a file may mean: the same with its ending, or a shipped recipe."""
        if self.files.exists(f"{source.path}.yaml"):
            return f"{source.shown}.yaml"
        recipes = [name.removeprefix("recipes/") for name in self.files.shipped() if name.startswith("recipes/")]
        return nearest(_without_suffix(source.shown), recipes, 0.7)

    def _find(self, word: str, base: str, mark: Mark) -> _Source | Problem:
        """The file that a word of `extends` means: a shipped name, or a path from the folder of the file."""
        shipped = self.files.shipped()
        name = _without_suffix(word)
        if word in shipped:
            return _Source(shipped[word], f"{word}.yaml", f"preset {word}")
        if word.startswith(("/", "./", "../")) or word.endswith(_SUFFIXES):
            path = absolute(word, base)
            if not self.files.exists(path) and (known := _meant(name, shipped)):
                hint = f"the preset is named `{known}`, without ending"
                return Problem(mark, f"there is no file {word}", f"it would be {path}", hint, "extends")
            shown = seen_from(self.cwd, path)
            return _Source(path, shown, f"file {shown}")
        close = _meant(name, shipped) or nearest(word, shipped)
        hint = (
            f"did you mean {close}?" if close else "a file is named with ./ or .yaml; `trainkit ls` lists the presets"
        )
        return Problem(mark, f"there is no preset {word!r}"[:200], hint=hint, key="extends")


def _meant(name: str, shipped: Iterable[str]) -> str | None:
    """The shipped name that a word without its folder means: `fsdp` is strategy/fsdp sooner than recipes/fsdp."""
    found = [each for each in shipped if each == name or each.endswith(f"/{name}")]
    return min(found, key=lambda each: each.startswith("recipes/"), default=None)


def _extends(document: Document, problems: list[Problem]) -> list[tuple[str, Mark]]:
    value = document.tree.get("extends")
    mark = document.values.get("extends", Mark(1, 1))
    at = document.keys.get("extends", mark)
    modified = [raw for raw in ("extends+", "extends!") if raw in document.tree]
    problems += [Problem(at, f"`{raw}` means nothing", hint="write `extends`", key="extends") for raw in modified]
    if value is None:
        return []
    if isinstance(value, str):
        return [(value, mark)]
    if isinstance(value, list):
        marks = [document.values.get(f"extends.{index}", mark) for index in range(len(value))]
        wrong = [index for index, each in enumerate(value) if not isinstance(each, str) or not each]
        problems += [
            Problem(marks[index], "a preset or a path is wanted here", hint="write a text", key="extends")
            for index in wrong
        ]
        return [(each, marks[index]) for index, each in enumerate(value) if index not in wrong]
    hint = "write `extends: strategy/fsdp`, or a list of presets and paths"
    problems.append(Problem(mark, "`extends` must be a preset, a path, or a list of them", hint=hint, key="extends"))
    return []


def _chain_problem(found: _Source, chain: tuple[_Source, ...], seen: set[str], mark: Mark) -> Problem | None:
    paths = [each.path for each in chain]
    if found.path in paths:
        circle = [each.shown for each in chain[paths.index(found.path) :]] + [found.shown]
        return Problem(
            mark, f"`extends` goes in a circle: {' → '.join(circle)}", hint="remove one of these", key="extends"
        )
    if found.path in seen:
        return Problem(
            mark, f"{found.shown} is extended twice in one list", hint="keep the one that shall count", key="extends"
        )
    if len(chain) >= MAX_EXTENDS_DEPTH:
        return Problem(
            mark, f"`extends` is more than {MAX_EXTENDS_DEPTH} files deep", hint="extend fewer files", key="extends"
        )
    return None


def _unreadable(error: OSError, shown: str, meant: str | None) -> tuple[str, str]:
    if isinstance(error, FileNotFoundError):
        hint = f"did you mean {meant}?" if meant else "check the path; `trainkit ls` lists what is shipped"
        return f"there is no file {shown}", hint
    if isinstance(error, IsADirectoryError):
        return f"{shown} is a folder, not a recipe file", "name the YAML file in it"
    if isinstance(error, PermissionError):
        return f"{shown} may not be read", "check the file's permissions"
    return f"{shown} cannot be read: {error.strerror or error}", "check the path"


def _without_suffix(word: str) -> str:
    return next((word[: -len(suffix)] for suffix in _SUFFIXES if word.endswith(suffix)), word)
