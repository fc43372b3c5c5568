"""The files that a recipe is made of: itself, what it extends, presets, and its variants."""

from __future__ import annotations

import errno
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.hub_name import ROWS
from trainkit.recipe.layer import VARIANTS, Layer, SourceText, file_layer, origin_at, read_document, source_text
from trainkit.recipe.paths import FileChecks, absolute, seen_from
from trainkit.recipe.resolved import MadeRecipe
from trainkit.recipe.suggestions import did_you_mean, nearest
from trainkit.recipe.yaml_reader import Document, Mark, Problem

# What the rows of a comparison call the recipe without any variant.
BASE = "base"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,59}$"
_HINT = "write `NAME: {section: {setting: value}}` lines below `variants:`"


@dataclass(frozen=True)
class Variant:
    """What one file says of a variant. base: the folder that relative file names in it start from."""

    name: str
    description: str
    base: str
    page: SourceText
    document: Document

    def layer(self, strength: int) -> Layer:
        """The variant as a layer of a recipe."""
        return file_layer(replace(self.page, name=f"variant {self.name}", strength=strength), self.base, self.document)


def read_variants(document: Document, page: SourceText, base: str) -> tuple[list[Variant], list[Problem]]:
    """The variants that a file gives, in its order, and what is wrong with how they are written."""
    given = document.tree.get(VARIANTS)
    if given is None:
        return [], []
    if not isinstance(given, Mapping):
        return [], [Problem(document.values[VARIANTS], "`variants` must be a mapping", hint=_HINT, key=VARIANTS)]
    found: list[Variant] = []
    problems: list[Problem] = []
    for name, body in given.items():
        if wrong := list(_wrong(name, body, document)):
            problems += wrong
            continue
        # A document of its own: the same lines, keys as if its body were the whole recipe.
        tree = {key: value for key, value in (body or {}).items() if key != "description"}
        inner = Document(
            tree, _below(document.values, name), _below(document.keys, name), document.lines, errors=(), warnings=()
        )
        found.append(Variant(name, (body or {}).get("description", ""), base, page, inner))
    return found, problems


def _wrong(name: str, body: object, document: Document) -> Iterator[Problem]:
    key = f"{VARIANTS}.{name}"

    def problem(marks: Mapping[str, Mark], what: str, hint: str, key: str = key) -> Problem:
        # What came in by `<<` has no mark of its own, and gets that of the variants.
        mark = marks.get(key) or marks.get(key.rpartition(".")[0]) or marks.get(VARIANTS, Mark(1, 1))
        return Problem(mark, what, hint=hint, key=key)

    if not re.match(NAME_PATTERN, name):
        hint = "use letters, digits, dashes and underscores, a letter or digit first"
        yield problem(document.keys, f"{name[:60]!r} cannot name a variant", hint)
    elif name == BASE:
        yield problem(document.keys, f"`{BASE}` is the recipe without a variant", "choose another name")
    elif body is not None and not isinstance(body, Mapping):
        yield problem(document.values, f"the variant {name} must be a mapping", _HINT)
    elif isinstance(body, Mapping):
        for word in ("extends", VARIANTS):
            if word in body:
                what = f"a variant has no `{word}`"
                yield problem(document.keys, what, "write the settings themselves", f"{key}.{word}")
        if not isinstance(body.get("description", ""), str):
            what = f"the description of {name} must be a text"
            yield problem(document.values, what, "put it in quotes", f"{key}.description")


def _below(marks: Mapping[str, Mark], name: str) -> dict[str, Mark]:
    prefix = f"{VARIANTS}.{name}."
    return {key.removeprefix(prefix): mark for key, mark in marks.items() if key.startswith(prefix)}


# Far beyond what people write by hand: they end what would otherwise run on and on.
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
class Sources:
    """The files of a recipe read so far, as layers, weakest first, and what was wrong with them."""

    files: FileChecks
    cwd: str
    layers: list[Layer] = field(default_factory=list)
    errors: list[Diagnostic] = field(default_factory=list)
    warnings: list[Diagnostic] = field(default_factory=list)
    variants: dict[str, list[Variant]] = field(default_factory=dict)  # by name: what each file says, weakest first
    incomplete: bool = False  # whether values are missing because a file or a preset could not be read

    def add_recipe(self, recipe: str) -> None:
        """Add a recipe file as the user typed it, with all that it extends."""
        origin = Origin("command line", 0, recipe, text=recipe)
        source = _Source(absolute(recipe, self.cwd), recipe, f"file {recipe}")
        name, shipped = _without_suffix(recipe), self.files.shipped()
        if not self.files.exists(source.path) and name in shipped:
            source = _Source(shipped[name], recipe, f"shipped {name}")
        self._add(source, (), origin, set())

    def add_made(self, made: MadeRecipe) -> None:
        """Add a recipe that was made from a command: a place is the command's words, and no line of the text."""
        strength, document = len(self.layers), read_document(made.text.encode("utf-8", "surrogateescape"))
        whole = Origin("command line", strength, made.title, length=len(made.title), text=made.title)

        def at(key: str) -> Origin:
            return replace(origin_at(made.origins, key) or whole, strength=strength)

        layer = file_layer(source_text(whole.layer, strength, made.title, document), self.cwd, document)
        values, keys = ({key: at(key) for key in known} for known in (layer.values, layer.keys))
        self.layers.append(replace(layer, values=values, keys=keys))

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
            known = f"its variants are: {', '.join(self.variants)}" if self.variants else "it has none"
            hint = did_you_mean(name, self.variants, known)
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
        return [each.layer(len(self.layers)) for each in others]  # flags are stronger

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
            found = _other_file(word, mark) or self._find(word, posixpath.dirname(source.path), mark)
            problem = found if isinstance(found, Problem) else _chain_problem(found, chain, seen, mark)
            if isinstance(found, _Source):
                seen.add(found.path)
                if problem is None and found.path not in done:
                    at = source_text(source.label, len(self.layers), source.shown, document).at(mark)
                    self._add(found, chain, at, done)
            if problem:
                self.incomplete = True
                problems.append(problem)
        folder = posixpath.dirname(source.path)
        shown = source_text(source.label, len(self.layers), source.shown, document)
        variants, wrong = read_variants(document, shown, folder)
        for each in variants:
            self.variants.setdefault(each.name, []).append(each)
        self.layers.append(file_layer(shown, folder, document))
        self.errors += [shown.diagnose("error", each) for each in (*problems, *wrong)]
        self.warnings += [shown.diagnose("warning", each) for each in document.warnings]

    def _read(self, source: _Source, named: Origin) -> Document | None:
        """The document in a file; None, and an error where it is named, for one that cannot be read."""
        shown = source.shown
        try:
            content = self.files.read(source.path)
            if not ROWS.search(source.path) or source.path.endswith(".json"):  # a recipe may be JSON
                return read_document(content)
            what = f"{shown} is a file of rows, and no recipe"
            made = shlex.join(("trainkit", "config", "--set", f"data.path={shown}"))
            hint = f"`{made}` writes a recipe that learns from it"
        except FileNotFoundError:
            what = f"there is no file {shown}"
            # A name without a file may mean the same with its ending, or a shipped recipe.
            recipes = [name.removeprefix("recipes/") for name in self.files.shipped() if name.startswith("recipes/")]
            close = nearest(_without_suffix(shown), recipes, 0.7)
            meant = f"{shown}.yaml" if self.files.exists(f"{source.path}.yaml") else close
            hint = f"did you mean {meant}?" if meant else "check the path; `trainkit ls` lists what is shipped"
        except IsADirectoryError:
            what, hint = f"{shown} is a folder, not a recipe file", "name the YAML file in it"
        except PermissionError:
            what, hint = f"{shown} may not be read", "check the file's permissions"
        except OSError as error:
            what, hint = f"{shown} cannot be read: {error.strerror or error}", "check the path"
            if error.errno == errno.ENXIO:  # a device, a pipe, a socket
                hint = "name a regular file; what a pipe gives has to be saved in one first"
        self.incomplete = True
        self.errors.append(Diagnostic("error", what, "", named, hint=hint))
        return None

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
                return _problem(mark, f"there is no file {word}", hint, f"it would be {path}")
            shown = seen_from(self.cwd, path)
            return _Source(path, shown, f"file {shown}")
        close = _meant(name, shipped) or nearest(word, shipped)
        if close == f"recipes/{word}":  # by the name by which `run` finds it, where no preset has it too
            return _Source(shipped[close], f"{word}.yaml", f"shipped {word}")
        listed = "start a path with ./ or end it with .yaml"
        close = f"{close}, or recipes/{word}" if f"recipes/{word}" in shipped else close
        why = "it was looked for among what `trainkit ls` lists, and in no folder of yours"
        return _problem(mark, f"there is no preset {word!r}"[:200], f"did you mean {close}?" if close else listed, why)


def _other_file(word: str, mark: Mark) -> Problem | None:
    """What a recipe extends is a recipe: of another file, which a stranger named, messages would show the content."""
    if not word.startswith(("/", "./", "../")) or word.endswith((*_SUFFIXES, ".json")):
        return None
    hint = "name a recipe, or a preset without ./"
    return _problem(mark, f"{word} is not a recipe"[:200], hint, "a file that is extended ends in .yaml, .yml or .json")


def _meant(name: str, shipped: Iterable[str]) -> str | None:
    """The shipped name that a word without its folder means: `fsdp` is strategy/fsdp sooner than recipes/fsdp."""
    found = [each for each in shipped if each == name or each.endswith(f"/{name}")]
    return min(found, key=lambda each: each.startswith("recipes/"), default=None)


def _extends(document: Document, problems: list[Problem]) -> list[tuple[str, Mark]]:
    """What the document extends, each with its mark; what is wrong with it is added to the problems."""
    value = document.tree.get("extends")
    mark = document.values.get("extends", Mark(1, 1))
    if value is None:
        return []
    if not isinstance(value, (str, list)):
        hint = "write `extends: strategy/fsdp`, or a list of presets and paths"
        problems.append(_problem(mark, "`extends` must be a preset, a path, or a list of them", hint))
        return []
    if isinstance(value, str):
        return [(value, mark)]
    marked = [(each, document.values.get(f"extends.{index}", mark)) for index, each in enumerate(value)]
    wrong = [where for each, where in marked if not isinstance(each, str) or not each]
    problems += [_problem(where, "expected a preset or a path", "write a text") for where in wrong]
    return [(each, where) for each, where in marked if where not in wrong]


def _chain_problem(found: _Source, chain: tuple[_Source, ...], seen: set[str], mark: Mark) -> Problem | None:
    paths = [each.path for each in chain]
    if found.path in paths:
        circle = [each.shown for each in chain[paths.index(found.path) :]] + [found.shown]
        return _problem(mark, f"`extends` goes in a circle: {' → '.join(circle)}", "remove one of these")
    if found.path in seen:
        return _problem(mark, f"{found.shown} is extended twice in one list", "keep the one that counts")
    if len(chain) >= MAX_EXTENDS_DEPTH:
        return _problem(mark, f"`extends` is more than {MAX_EXTENDS_DEPTH} files deep", "extend fewer files")
    return None


def _problem(mark: Mark, what: str, hint: str, why: str = "") -> Problem:
    return Problem(mark, what, why, hint, "extends")


def _without_suffix(word: str) -> str:
    return word.removesuffix(".yaml").removesuffix(".yml")
