"""What resolving takes and gives: the request, one layer's value, an attached file, and the resolved recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.layer import origin_at
from trainkit.recipe.schema import Recipe


@dataclass(frozen=True)
class MadeRecipe:
    """A recipe that is no file, for it was made from a command. title: the command; origins: its words, by key."""

    title: str
    text: str
    origins: Mapping[str, Origin]


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    recipe: path as typed (relative to cwd), or the name of a shipped recipe, or None for presets and flags alone; or
    one that was made from a command.
    presets: names or paths given with ``--with``, in order; they go on top of the file.
    overrides: the words as typed (``batch.micro=8``, ``--fsdp``, ``full_shard auto_wrap``).
    arguments: words for the program, untouched; they follow those of ``program.args``.
    variant: name of the recipe's variant to resolve; None for the recipe without any.
    environ: the caller's environment; only ``TRAINKIT__*`` and what ``${oc.env:}`` names is read.
    """

    recipe: str | MadeRecipe | None
    cwd: str
    presets: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    variant: str | None = None

    @property
    def named(self) -> str | None:
        """The recipe as messages name it."""
        return self.recipe.title if isinstance(self.recipe, MadeRecipe) else self.recipe


@dataclass(frozen=True)
class Entry:
    """One value that a layer gave. note: what merging did with it, in words; dropped: it has no effect any more.

    implied: no layer gave it, and it follows from what the origin gave; the note says why.
    """

    value: Any
    origin: Origin
    note: str = ""
    dropped: bool = False
    implied: bool = False


@dataclass(frozen=True)
class Attachment:
    """The content of a file that a setting names, with positions by dotted key."""

    path: str  # absolute
    tree: Any
    origins: Mapping[str, Origin]


@dataclass(frozen=True, slots=True)
class Described:
    """What is known, without the libraries that will load them, of the model and the tokenizer that a recipe names.

    model: the model's config.json; empty where it is not known. fault: why there is none, with a remedy; None where
    there is one, or nobody knows. chats: whether the tokenizer has a chat template; None where that is not known.
    adapters, misfit: the same of the adapter_config.json of `peft.path`.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    fault: tuple[str, str] | None = None
    chats: bool | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    misfit: tuple[str, str] | None = None


@dataclass(frozen=True)
class Resolved:
    """A recipe with everything that is known of where it came from.

    tree: merged and interpolated, as validated, without defaults.
    history: entries by dotted leaf key, weakest first; the last one is the winner unless it is dropped.
    attachments: by the key of the setting that names the file (``strategy.config``).
    places: the strongest origin of every key, sections and list elements included.
    variants: the variants that the recipe has, in its order, each with its description.
    script: the text of the program's script; empty where it is not known.
    folder: the caller's working folder.
    described: what small files say of the model and the tokenizer.
    absent: by key, the paths without a file that the run will read; another machine may have them.
    """

    recipe: Recipe
    tree: Mapping[str, Any]
    history: Mapping[str, tuple[Entry, ...]]
    attachments: Mapping[str, Attachment] = field(default_factory=dict)
    warnings: tuple[Diagnostic, ...] = ()
    places: Mapping[str, Origin] = field(default_factory=dict)
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    folder: str = ""
    described: Described = field(default_factory=Described)

    def given(self, key: str) -> Origin | None:
        """Where the key's value came from; None where no layer gives it and it is a default."""
        entries = self.history.get(key, ())
        if not entries or entries[-1].dropped or entries[-1].implied:
            return None
        return entries[-1].origin

    def origin(self, key: str) -> Origin | None:
        """Where the key's value came from; for a key that no layer gives, the nearest enclosing mapping's place."""
        return self.given(key) or origin_at(self.places, key)

    def named_variables(self) -> Iterator[tuple[str, str]]:
        """(variable, key) of every environment variable that the recipe names."""
        yield from ((name, f"env.{name}") for name in self.recipe.env)
        yield from ((name, "env_from") for name in self.recipe.env_from)

    def error(self, key: str, what: str, hint: str = "", *, why: str = "", at: Origin | None = None) -> Diagnostic:
        """An error about a key, at the place that gave it."""
        return Diagnostic("error", what, key, at or self.origin(key), why, hint)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known before a device is chosen: the recipe, with what lies at its paths, and packages by version."""

    resolved: Resolved
    packages: Mapping[str, str]
    architectures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # as the machine's facts have it
    seen: Any = None  # of the data (`data.look.SeenData`); None where nobody has looked

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def origin(self, key: str) -> Origin | None:
        """Where the value of a setting comes from."""
        return self.resolved.origin(key)
