"""What every engine's container is given: folders, variables, the interpreter, and the words that start the rest."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text, Variable, text
from trainkit.launch_plan.provenance import SourcedVariable, Token, token, variable
from trainkit.lazy import Registry
from trainkit.recipe.schema import Image

PACKAGE = "/opt/trainkit/trainkit"  # where trainkit's own code is seen inside
ENTRY = f"{PACKAGE}/runner/inside.py"
SAME = "the same path inside and outside, so that what the plan names is found"
OWN_CODE = "trainkit's own code, for the ranks' wrapper; the image needs none"
STARTS = "looks after the environment inside, and becomes the launcher"
HOST_NUMBERS = "the run's processes keep the machine's numbers, by which they are watched and ended"
HOST_NETWORK = "ranks meet on the machine's own network, and nodes by its name"
# What the engine's own command reads on the machine: inside, the image's is used.
ENGINES_OWN = ("PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the machine that is seen inside."""

    source: Text
    target: Text
    readonly: bool
    keys: tuple[str, ...] = ()
    rule: str = ""


class Engine(Protocol):
    """What an engine's module offers; every function is pure."""

    SETS: frozenset[str]  # flags that the plan sets or that would undo it, so that `options` must not
    PREFIX: str  # see PlannedContainer
    APART: str  # characters that end a path in its words for folders

    def argv(self, context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
        """The engine's words up to and with the image. name: of the container; names: of variables handed in."""

    def end(self, names: Sequence[Text]) -> tuple[Text, ...]:
        """The command that ends these containers; empty where their processes descend from the engine's command."""

    def inspect(self, image: str) -> tuple[str, ...]:
        """The command that describes an image of this machine and asks whether the engine works; empty without one."""


def of(context: Context) -> Image:
    """The recipe's container. Only for plans that have one."""
    assert isinstance(context.recipe.container, Image), "the plan has no container"
    return context.recipe.container


def cache_folder(context: Context, *below: str) -> tuple[str | Variable, ...]:
    """The folder of the machine for what outlives a container, and something below it."""
    caches = of(context).caches
    tail = "".join(f"/{each}" for each in below)
    return (caches + tail,) if caches is not None else (Variable.CACHE_DIR, tail)


def mounts(context: Context) -> Iterator[Mount]:
    """Folders that are seen inside, each once: engines refuse a second one at the same place."""
    named = (_mount(each) for each in of(context).mounts)
    found: set[tuple[str, ...]] = set()
    for each in (*own_mounts(context), *named):
        what = (*place_of(context, each), str(each.readonly))
        if what not in found:
            found.add(what)
            yield each


def own_mounts(context: Context) -> Iterator[Mount]:
    """Those that need not be named."""
    output = context.recipe.output.root
    for folder, keys in ((text(Variable.WORKING_DIR), ()), (text(Variable.RUN_DIR), ("output.root",))):
        yield Mount(folder, folder, False, keys, SAME)
    if output.startswith("/"):  # checkpoints of earlier runs lie there too
        yield Mount(text(output), text(output), False, ("output.root",), SAME)
    caches = text(*cache_folder(context))
    yield Mount(caches, caches, False, ("container.caches",), SAME)
    yield Mount(text(Variable.PACKAGE), text(PACKAGE), True, rule=OWN_CODE)


def doubled(context: Context) -> Iterator[tuple[int, str]]:
    """Folders of the recipe that are to be seen where another one is: position, and place inside."""
    own = {place_of(context, each)[1]: (*place_of(context, each), each.readonly) for each in own_mounts(context)}
    for position, word in enumerate(of(context).mounts):
        each = _mount(word)
        what = (*place_of(context, each), each.readonly)
        if own.setdefault(what[1], what) != what:
            yield position, what[1]


def place_of(context: Context, mount: Mount) -> tuple[str, str]:
    """Folder of the machine, and place inside, as far as they are known."""
    folder = context.resolved.folder or str(mount.source)
    paths = (folder if each.parts == (Variable.WORKING_DIR,) else str(each) for each in (mount.source, mount.target))
    source, target = map(posixpath.normpath, paths)
    return source, target


def _mount(word: str) -> Mount:
    source, target, *mode = word.split(":")
    return Mount(text(source), text(target), mode == ["ro"], ("container.mounts",))


def workdir(context: Context) -> Token:
    """Where the program starts."""
    chosen = of(context).workdir
    if chosen is not None:
        return token(chosen, keys=("container.workdir",))
    return token(Variable.WORKING_DIR, rule="where trainkit was started, from which the recipe's paths start")


def entry(context: Context, unset: Sequence[str], checks: Sequence[str] = ()) -> tuple[Token, ...]:
    """The first command inside, up to the one that it becomes. checks: of packages, which need none behind it."""
    python = of(context).python
    home = token(
        "--home=", *cache_folder(context, "home"), keys=("container.caches",), rule="a home that can be written"
    )
    return (
        token(python, keys=("container.python",)),
        token(ENTRY, rule=STARTS),
        home,
        *(() if checks else _log(context)),
        *((token(f"--unset={','.join(unset)}", rule="what the image sets must not leak in"),) if unset else ()),
        *(token(f"--package={each}", rule="what the plan needs, and was made for") for each in checks),
        *(() if checks else (token("--", rule=STARTS),)),
    )


def _log(context: Context) -> tuple[Token, ...]:
    """Where the launcher writes, as it does outside: the engine would show its output once more."""
    rule = "the launcher's log, where a run has one"
    name = ("node-", Variable.NODE_RANK, ".") if context.topology.nodes > 1 else ()
    return (token("--log=", Variable.ATTEMPT_DIR, "/logs/", *name, "launcher.log", rule=rule),)


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """Where libraries keep what they have downloaded or compiled: for compiled code a folder of its own per image."""
    rule, keys = "outlives the container", ("container.caches",)
    own = f"images/{slug(of(context).image)}"
    folders = {
        "HF_HOME": "huggingface",
        "TORCH_HOME": "torch",
        "TRITON_CACHE_DIR": f"{own}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{own}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{own}/torch_extensions",
    }
    return tuple(variable(name, *cache_folder(context, place), keys=keys, rule=rule) for name, place in folders.items())


def slug(image: str) -> str:
    """An image's name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", image).strip("-.") or "image"


def options(context: Context) -> tuple[Token, ...]:
    """The recipe's own words for the engine."""
    return tuple(token(word, keys=("container.options",)) for word in of(context).options)


def words(values: Mapping[str, str], rule: str = "", keys: tuple[str, ...] = ()) -> tuple[Token, ...]:
    """`--name=value` for each."""
    return tuple(token(f"--{name}={value}", rule=rule, keys=keys) for name, value in values.items())


def joined(items: Sequence[Text], between: str) -> Text:
    """Texts in one."""
    parts: list[str | Variable] = []
    for place, item in enumerate(items):
        parts += [between] if place else []
        parts += item.parts
    return text(*parts)


_HERE = "trainkit.tools.containers"
ENGINES: Registry[Engine] = Registry({name: f"{_HERE}.{name}" for name in ("docker", "podman", "apptainer", "pyxis")})
