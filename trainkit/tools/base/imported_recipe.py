"""The recipe that an import builds: its values with their places in the imported file or command."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.errors import Diagnostic, Origin, RecipeError, UsageError
from trainkit.machine.selection import ORDER
from trainkit.recipe.assignment import Assignment, layer_of
from trainkit.recipe.flags import flags
from trainkit.recipe.interpolation import REFERENCE, interpolated
from trainkit.recipe.layer import SourceText, source_text
from trainkit.recipe.paths import FileChecks, absolute
from trainkit.recipe.secrets import mask_line
from trainkit.recipe.short_flags import ParsedFlag
from trainkit.recipe.validate import validate_layer
from trainkit.recipe.yaml_reader import MAX_BYTES, Mark, compose_bytes

SUFFIXES = (".json", ".yaml", ".yml")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".ipynb")  # files with shell text that holds a command
_SHELLS = ("bash", "sh")
_PLAIN = re.compile(r"[\w./=:,@+-]+(?: +[\w./=:,@+-]+)*")  # words that a shell takes as they stand


def shell_script(words: Sequence[str]) -> list[str]:
    """The shell script that the words are, or that a shell starts, and its arguments; empty where there is none.

    words: may be one that holds them all, as a quoted line does.
    """
    parts = words[0].split() if len(words) == 1 and _PLAIN.fullmatch(words[0]) else list(words)
    named = parts[1:] if parts[0] in _SHELLS else parts if parts[0].endswith(SCRIPTS) else list(words)
    return named if named and named[0].endswith(SCRIPTS) else []


@dataclass(frozen=True)
class ForeignFile:
    """A mapping read from a file. path: as the user named it; program: a script and its words, where one is named."""

    path: str
    tree: Mapping[str, Any]
    values: Mapping[str, Mark]
    page: SourceText
    program: tuple[str, ...] = ()

    def at(self, key: str) -> Origin:
        """The place of the value at a dotted key, or of the nearest mapping around it."""
        while key and key not in self.values:
            key = key.rpartition(".")[0]
        return self.page.at(self.values.get(key, Mark(1, 1)))


def open_foreign_file(context: ImportContext, path: str, program: Sequence[str] = ()) -> ForeignFile:
    """Read a file to import. Raises UsageError where there is none, and RecipeError for what cannot be read."""
    file = read_mapping(context, path, f"file {path}", 1)
    if not file.tree:
        raise UsageError(f"{path} holds no mapping", hint="name a settings file of another tool")
    return replace(file, program=tuple(program))


def read_mapping(context: ImportContext, path: str, layer: str, strength: int) -> ForeignFile:
    """A JSON or YAML file as a part of a layer. Raises UsageError and RecipeError."""
    document = compose_bytes(_read(context, path))
    text = source_text(layer, strength, path, document)
    if document.errors:
        raise RecipeError([text.diagnose("error", each) for each in document.errors])
    if not isinstance(document.tree, Mapping):
        raise UsageError(f"{path} holds no mapping", hint="write a JSON object or YAML mapping")
    return ForeignFile(path, document.tree, document.values, text)


def script_text(context: ImportContext, path: str) -> str:
    """A shell script, in which bytes that are not UTF-8 stay known. Raises UsageError where there is none."""
    content = _read(context, path)
    if len(content) > MAX_BYTES:  # it has been read no further
        raise UsageError(f"{path} has more than {MAX_BYTES:,} bytes", hint="name a script that starts the program")
    return content.decode("utf-8", "surrogateescape")


def _read(context: ImportContext, path: str) -> bytes:
    if reference := REFERENCE.fullmatch(path):
        if reference[2] is None:
            raise UsageError(f"the file is {path}, and nothing sets {reference[1]}", hint="give --set NAME=VALUE")
        path = reference[2]
    try:
        return context.files.read(absolute(path, context.cwd))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else "cannot read"
        raise UsageError(f"{reason} {path}", hint="check the path; it starts from the current folder") from error


LAYER = "command line"
CUDA_ORDER = "as CUDA numbers GPUs where CUDA_DEVICE_ORDER is not set; pci numbers them as nvidia-smi does"


@dataclass(frozen=True, slots=True)
class ImportContext:
    """Where an import reads. cwd: absolute folder from which relative paths start.

    environ: the caller's variables, which say where tools keep files of their own. public: names of arguments whose
    values are none, whatever they sound like. library: absolute folders in which packages are installed. own: names of
    arguments that stay the program's, even where a setting of the recipe says the like.
    """

    files: FileChecks
    cwd: str
    environ: Mapping[str, str] = field(default_factory=dict)
    public: Collection[str] = ()
    library: Sequence[str] = ()
    own: Collection[str] = ()


@dataclass
class ImportedRecipe:
    """What has been understood so far.

    replicas: whether several processes are started, which hold replicas unless something says otherwise.
    settings: by recipe key. reasons: a comment by key. remarks: what was ignored, misread or has no recipe key.
    variants: settings by recipe key in which further commands differ, by a name.
    problems: errors, with the place in the source; with one of them no recipe is written.
    """

    title: str = ""
    name: str = "run"
    replicas: bool = False
    settings: dict[str, Assignment] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Diagnostic] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """The value at a key, None where nothing has set it."""
        found = self.settings.get(key)
        return found.value if found else None

    def put(self, assignment: Assignment, reason: str = "") -> None:
        """Set a key; a later source wins, and says so. A new kind of a section resets the section."""
        key, old = assignment.key, self.settings.get(assignment.key)
        if old and old.value != assignment.value:
            self.remark(f"{key} {old.value} ({old.origin.place}) gives way to {assignment.value}.")
            if key.endswith(".kind"):
                self.forget(f"{key.removesuffix('kind')}")
        self.settings[key] = assignment
        if reason:
            self.reasons[key] = reason

    def set(self, key: str, value: Any, origin: Origin, reason: str = "") -> None:
        """Set a key to a value."""
        self.put(Assignment(key, value, origin), reason)

    def forget(self, prefix: str) -> None:
        """Take back every setting whose key begins so."""
        for key in [key for key in self.settings if key.startswith(prefix)]:
            del self.settings[key]
            self.reasons.pop(key, None)

    def remark(self, text: str) -> None:
        """Note something for the head of the recipe; what is noted again is said once."""
        self.remarks.append(text)

    def put_all(self, assignments: Iterable[Assignment], problems: Iterable[Diagnostic]) -> None:
        """Set what a part of the source says, and note what is wrong in it."""
        self.problems += problems
        for each in assignments:
            self.put(each)

    def put_checked(self, assignment: Assignment, reason: str = "") -> None:
        """Set a key, or note what is wrong with the type or bounds of its value."""
        problems = wrong_values([assignment], self)
        self.problems += problems
        if not problems:
            self.put(assignment, reason)

    def fail(self, what: str, origin: Origin, hint: str, why: str = "") -> None:
        """Note an error."""
        self.problems.append(Diagnostic("error", what, origin=origin, why=why, hint=hint))


def argv_origin(*words: str) -> Origin:
    """Words of a command as the place of a value; what is secret in them is not shown."""
    shown = mask_line(" ".join(words))[:200]
    return Origin(LAYER, 1, shown, length=max(len(shown), 1), text=shown)


@dataclass(frozen=True, slots=True)
class ImportedFlag:
    """One flag as it was used. name: with underscores; value: None for a bare switch."""

    name: str
    value: str | None
    origin: Origin


def read_flag(
    draft: ImportedRecipe, context: ImportContext, flag: ImportedFlag
) -> tuple[list[Assignment], list[Diagnostic]]:
    """What trainkit's own flag of this name makes of a value; nothing is set yet. The errors include wrong types."""
    current: Callable[[str], Any] = draft.get
    use = ParsedFlag(flag.name, flag.value, flag.origin, context.cwd, context.files, current, frozenset())
    assignments, found = flags()[flag.name].read(use)
    kept = [each for each in found if each.severity == "error"]
    return assignments, kept or wrong_values(assignments, draft)


def apply_flag(draft: ImportedRecipe, context: ImportContext, name: str, value: str | None, origin: Origin) -> None:
    """Set what trainkit's own flag of this name makes of a value, or note why it cannot."""
    assignments, problems = read_flag(draft, context, ImportedFlag(name, value, origin))
    draft.put_all(assignments, problems)


def wrong_values(assignments: list[Assignment], draft: ImportedRecipe) -> list[Diagnostic]:
    """Errors in the types and bounds of values."""
    plain = [replace(each, modifier="") for each in assignments]
    given = {each.key: each.value for each in assignments}
    usual = {"strategy": "single", "model": "gpt", "data": "text"}
    kinds = {name: str(given.get(f"{name}.kind") or draft.get(f"{name}.kind") or kind) for name, kind in usual.items()}
    return validate_layer(layer_of(LAYER, 1, "", plain), kinds, interpolated)


def number_of(value: Any) -> int | None:
    """A whole number; of a reference to the environment its default. None where it is not known."""
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    shown = str(value if found is None else found[2] or "").strip()
    return int(shown) if shown.isdecimal() else None


def number_cards(draft: ImportedRecipe, context: ImportContext) -> None:
    """Say how a list of GPUs counts, which no launcher sets: as CUDA_DEVICE_ORDER says, else by CUDA itself."""
    if isinstance(draft.get("devices.select"), list) and draft.get("devices.order") is None:
        exported = context.environ.get("CUDA_DEVICE_ORDER")
        order = next((ours for ours, (theirs, _) in ORDER.items() if theirs == exported), "")
        reason = "as the exported CUDA_DEVICE_ORDER numbers GPUs" if order else CUDA_ORDER
        draft.set("devices.order", order or "fastest", draft.settings["devices.select"].origin, reason)


def card(word: str) -> int | str:
    """A GPU as devices.select names it: an index, or the id as it is."""
    return int(word) if word.isdecimal() else word
