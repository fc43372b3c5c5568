"""The plan's container: what is taken to be in the image, the words around every command, what cannot be."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainkit.errors import Diagnostic, blocker, note
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import EnvironmentDiff, PlannedContainer, Preparation, Text, Variable, text
from trainkit.launch_plan.provenance import Token, texts
from trainkit.lazy import load
from trainkit.machine.facts import Facts
from trainkit.planner.requirements import needed_packages
from trainkit.recipe.paths import inputs
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Image, NoContainer, Recipe
from trainkit.tools.containers.engines import ENGINES, ENGINES_OWN, Mount, cache_folder, doubled, entry, mounts, of

# Libraries whose versions decide words and files of the plan: the image's must be those that it was made for.
DECIDING = ("torch", "accelerate", "transformers", "deepspeed")
# What trainkit's own trainer imports besides what a plan requires (pyproject.toml).
OWN_TRAINER = ("pydantic>=2.9",)


def facts_in_image(recipe: Recipe, facts: Facts) -> Facts:
    """The machine as it is inside: its interpreter and packages are the image's, as far as the recipe says."""
    if not isinstance(recipe.container, Image):
        return facts
    # What a build is for (`+cpu`) says nothing of the image's.
    packages = {name: version.partition("+")[0] for name, version in facts.packages.items()}
    return replace(
        facts,
        executable=recipe.container.python,
        packages=packages | recipe.container.packages,
        torch=None,
        architectures={},
    )


def check_container(resolved: Resolved) -> Iterator[Diagnostic]:
    """Arguments and variables that would override the plan."""
    container = resolved.recipe.container
    if not isinstance(container, Image):
        return
    refused = False
    for place, word in enumerate(container.options):
        key, alone = f"container.options.{place}", not word.startswith("-") and not refused
        refused = _flag(word) in ENGINES[container.kind].sets
        if refused:
            hint = "leave it out: the sections container, devices, env and env_from say what it would"
            yield resolved.error(key, f"container.options has {_flag(word)}, which the plan decides", hint)
        elif alone:  # the engine might take it for the image
            hint = "write an option and its value as one word: --memory=64g"
            yield resolved.error(key, f"container.options has {word!r}, which is not an option", hint)
    for name, key in resolved.named_variables():
        if name in ENGINES_OWN:
            what = f"{key.partition('.')[0]} names {name}, which {container.kind} itself would read on this machine"
            yield resolved.error(key, what, "leave it out: inside, the image's own is in force")


def _flag(word: str) -> str:
    """The flag of a word; of short ones the first letter (`-v/data:/data`)."""
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def wrapped(context: Context, diff: EnvironmentDiff) -> tuple[Token, ...]:
    """The words in front of the launcher; none without a container."""
    if isinstance(context.recipe.container, NoContainer):
        return ()
    return (*_engine(context, diff, ""), *entry(context, _unset(diff)))


def preparations(context: Context, diff: EnvironmentDiff, own: Sequence[Preparation]) -> tuple[Preparation, ...]:
    """A look into the image, then the plan's own preparations, inside as well; these alone without a container."""
    if isinstance(context.recipe.container, NoContainer):
        return tuple(own)
    head = texts(_engine(context, diff, "-prepare"))
    look = (*head, *texts(entry(context, _unset(diff), checks(context))))
    inside = (*head, *texts(entry(context, _unset(diff))))
    title = f"look into the image {of(context).image}"
    first = Preparation(title, look)  # each machine has images of its own: a shared home's lock would have them wait
    return (first, *(replace(each, argv=(*inside, *each.argv)) for each in own))


def planned(context: Context, diff: EnvironmentDiff) -> PlannedContainer | None:
    """What the run must know to start the containers, and to end them."""
    if isinstance(context.recipe.container, NoContainer):
        return None
    container, engine = of(context), ENGINES[context.recipe.container.kind]
    names = [_name(context, tail) for tail in ("", "-prepare")]
    end = (*map(text, engine.end), *names) if engine.end else ()
    caches = text(*cache_folder(context))
    return PlannedContainer(container.kind, container.image, _names(diff), caches, engine.prefix, end)


def checks(context: Context) -> tuple[str, ...]:
    """What the image must have, as `name>=version`; of libraries that decide parts of the plan the very release."""
    newest = load("trainkit.tools.hf.fsdp_config:NEWEST_SEEN")
    found = dict.fromkeys(OWN_TRAINER) if context.recipe.program.kind == "builtin" else {}
    for package, minimum in needed_packages(context):
        assumed = context.facts.packages.get(package) or (newest if package == "transformers" else "")
        exact = package in DECIDING and assumed
        found[f"{package}=={assumed}" if exact else f"{package}>={minimum}"] = None
    # torchrun's flags differ by release, be the program built on torch or not.
    if context.launcher != "python" and not any(each.startswith("torch=") for each in found):
        found = {each: None for each in found if not each.startswith("torch>")}
        torch = context.facts.packages.get("torch")
        found[f"torch=={torch}" if torch else "torch>=2.6"] = None
    return tuple(found) or ("python>=3.11",)


def problems(context: Context) -> Iterator[Diagnostic]:
    """Two folders at one place inside."""
    if isinstance(context.recipe.container, Image):
        for position, place in doubled(context):
            what, hint = f"container.mounts has another folder for {place}", "give each folder a place of its own"
            why = "the working folder, output.root and the caches are at their own paths already, to be written"
            yield context.resolved.error(f"container.mounts.{position}", what, hint, why=why)


def notices(context: Context) -> Iterator[Diagnostic]:
    """What does not go in, and paths that are not seen inside."""
    if isinstance(context.recipe.container, NoContainer):
        return
    what = "of your environment only what env_from names goes into the container, with what the plan sets"
    yield note(what, "name others under env_from, by name alone")
    yield from _not_mounted(context)
    seen = list(mounts(context))
    for key, path in inputs(context.recipe):
        if path.startswith("/") and not _covered(path, seen, context.resolved.folder):
            folder = posixpath.dirname(path) or "/"
            yield blocker(
                f"{key} {path} is not seen inside the container",
                f"add {folder}:{folder}:ro to container.mounts",
            )


def mapped(context: Context, path: str) -> bool:
    """Whether a path is inside a folder that lies elsewhere on the machine, so that nothing is known of it here."""
    container = context.recipe.container
    if not isinstance(container, Image):
        return False
    pairs = (each.split(":")[:2] for each in container.mounts)
    return any(source != target and _below(path, target) for source, target in pairs)


def _not_mounted(context: Context) -> Iterator[Diagnostic]:
    """Folders that the engine cannot be told of."""
    container = of(context)
    apart = ENGINES[container.kind].apart
    for key, path in (("the working folder", context.resolved.folder), ("output.root", context.recipe.output.root)):
        if found := next((each for each in apart if each in path), ""):
            what = f"{key} {path} has a {found} in its name, which ends a path in {container.kind}'s words for folders"
            yield blocker(what, "give it another name, or start in another folder")


def _covered(path: str, seen: Sequence[Mount], folder: str) -> bool:
    known = {text(Variable.WORKING_DIR): folder}
    targets = (known.get(each.target, str(each.target)) for each in seen)
    return any(_below(path, target) for target in targets if target)


def _below(path: str, folder: str) -> bool:
    path, folder = posixpath.normpath(path), posixpath.normpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _engine(context: Context, diff: EnvironmentDiff, tail: str) -> tuple[Token, ...]:
    return ENGINES[context.recipe.container.kind].argv(context, _name(context, tail), _names(diff))


def _name(context: Context, tail: str) -> Text:
    """One name for each start, so that what a crash has left of one is in nobody's way.

    Of several nodes there may be two on this machine, in a test.
    """
    node = ("-", Variable.NODE_RANK) if context.topology.nodes > 1 else ()
    return text("trainkit-", Variable.RUN_ID, "-", Variable.ATTEMPT, *node, tail)


def _names(diff: EnvironmentDiff) -> tuple[str, ...]:
    return tuple(sorted({*(name for name, _ in diff.set), *diff.take}))


def _unset(diff: EnvironmentDiff) -> tuple[str, ...]:
    kept = set(_names(diff))
    return tuple(name for name in diff.unset if name not in kept)
