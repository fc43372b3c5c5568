"""Repositories of the Hub in a plan: pinned to a commit, fetched before the ranks start, told of in notices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.hub.cache import Copy
from trainkit.hub.names import Download, named_by, pinned, revision_without_name
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Preparation, Variable, text
from trainkit.launch_plan.provenance import module, texts
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import NoContainer
from trainkit.text import format_size

_ROLES = {"model.path": "model", "peft.path": "adapters", "data.tokenizer": "tokenizer", "data.path": "data set"}
_SHOWN = 7  # digits of a commit, as git shows them


def with_repositories(resolved: Resolved, hub: Sequence[Copy]) -> Resolved:
    """The recipe with the commits of what it names on the Hub, where these are known; those are no absent folders."""
    named = {(each.key, each.name) for each in named_by(resolved.recipe, resolved.absent)}
    named |= {("data.mix", name) for key, name in named if key.startswith("data.mix.")}
    left = {key: tuple(path for path in paths if (key, path) not in named) for key, paths in resolved.absent.items()}
    absent = {key: paths for key, paths in left.items() if paths}
    return replace(resolved, recipe=pinned(resolved.recipe, (each.named for each in hub)), absent=absent)


def problems(resolved: Resolved) -> Iterator[Diagnostic]:
    """Revisions of what is no name of the Hub."""
    for key, path in revision_without_name(resolved.recipe, named_by(resolved.recipe, resolved.absent)):
        what = f"{key} is of a repository of the Hub, and {path or 'nothing'} is none"
        yield resolved.error(key, what, "leave it out, or name a repository where no folder has that name")


def preparations(context: Context) -> tuple[Preparation, ...]:
    """What fetches them on each node. Nothing where this machine alone runs, and has them."""
    return tuple(
        _fetching(context, each)
        for each in context.hub
        if each.named.commit and (_elsewhere(context) or not each.whole)
    )


def repositories(context: Context) -> dict[str, Any]:
    """The plan's parts about them: what they are, how large, and how much of it is still to come."""
    apart = bool(_elsewhere(context))
    downloads = (
        Download(each.named.key, each.named.name, sum(each.sizes.values()), None if apart else _missing(each))
        for each in context.hub
        if each.sizes is not None
    )
    return {"repositories": tuple(each.named for each in context.hub), "downloads": tuple(downloads)}


def _missing(copy: Copy) -> int:
    """Bytes that are not in the cache."""
    return sum((copy.sizes or {})[name] for name in copy.missing)


def _elsewhere(context: Context) -> str:
    """Where ranks have another cache than this process; empty where it is the same."""
    if not isinstance(context.recipe.container, NoContainer):
        return "the container's cache"
    if context.topology.nodes > 1 or context.recipe.cluster.kind != "none":
        return "the cache of each node"
    return "that machine's cache" if context.facts.origin else ""


def _fetching(context: Context, copy: Copy) -> Preparation:
    named = copy.named
    asked = {
        "--subset": named.rows.subset,
        "--split": named.rows.split,
        "--validation-split": named.rows.validation_split,
    }
    options = [word for option, value in asked.items() if value for word in (option, value)]
    words = map(text, (named.key, named.kind, named.name, named.commit, *options))
    argv = (*texts(module(context, "trainkit.hub.fetch", keys=(named.key,))), *words)
    return Preparation(f"fetch the {_ROLES[named.role]} {named.name} from the Hub", argv, f"hub-{named.folder}")


def notices(context: Context) -> Iterator[Diagnostic]:
    """What is in the cache, what is fetched, and what is in the way: of a repository once, for all that name it."""
    obstacles: dict[tuple[str, str], list[str]] = {}
    for copy in context.hub:
        if copy.obstacle or copy.sizes is None:
            obstacles.setdefault((copy.obstacle, copy.remedy), []).append(copy.named.key)
        else:
            yield note(_told(context, copy, copy.sizes))
            if copy.closed:
                yield from without_token(context, copy.named.key)
    for (obstacle, remedy), keys in obstacles.items():
        yield blocker(f"{', '.join(keys)}: {obstacle}", remedy)


def without_token(context: Context, key: str) -> Iterator[Diagnostic]:
    """A warning where the ranks' place does not get the token that a setting needs."""
    pods = context.recipe.cluster.kind == "kubernetes"
    apart = pods or not isinstance(context.recipe.container, NoContainer)
    if apart and "HF_TOKEN" not in context.recipe.env_from:
        hint = "list HF_TOKEN under env_from, unless a mounted home has the file of `hf auth login`"
        where = "pod" if pods else "container"
        yield warning(f"{key}: your token for the Hub does not get into the {where}", hint)


def _told(context: Context, copy: Copy, sizes: Mapping[str, int]) -> str:
    named = copy.named
    at = named.commit[:_SHOWN] if named.revision == named.commit else f"{named.revision}, {named.commit[:_SHOWN]}"
    head = f"{named.key}: {named.name} on the Hub ({at})"
    total = sum(sizes.values())
    if place := _elsewhere(context):
        return f"{head}: {format_size(total)}, of which {place} gets what it lacks before the ranks start"
    if copy.whole:
        return f"{head} is in the cache: {copy.folder}"
    part, whole = format_size(_missing(copy)), format_size(total)
    size = part if part == whole else f"{part} of {whole}"
    return f"{head}: {size} fetched before the ranks start, into {copy.folder}"


_KEY = "checkpoint.push_to_hub"


def is_pushing(context: Context) -> bool:
    """Whether the built-in trainer uploads; other programs are told to, and do it in their own way."""
    return context.recipe.program.kind == "builtin" and context.recipe.checkpoint.push_to_hub.repo is not None


def push_preparations(context: Context) -> tuple[Preparation, ...]:
    """The repository, and a token that may write there: without them no rank starts."""
    asked = context.recipe.checkpoint.push_to_hub
    if not is_pushing(context) or asked.repo is None:
        return ()
    words = [text(asked.repo)]
    if context.topology.nodes > 1:
        words += [text("--node"), text(Variable.NODE_RANK)]
    words += [text("--holds"), text("adapters" if context.recipe.peft.kind == "lora" else "weights")]
    if asked.private is not None:
        words += [text("--private"), text("yes" if asked.private else "no")]
    argv = (*texts(module(context, "trainkit.hub.push", keys=(f"{_KEY}.repo",))), *words)
    return (Preparation(f"make {asked.repo} ready on the Hub", argv, ""),)


def push_notices(context: Context) -> Iterator[Diagnostic]:
    """What is uploaded, where to and when; and a token that the run will not find."""
    if not is_pushing(context):
        return
    recipe = context.recipe
    asked = recipe.checkpoint.push_to_hub
    weights = "adapters (as peft reads them)" if recipe.peft.kind == "lora" else "weights"
    saves = f"every {recipe.checkpoint.every_steps} steps" if recipe.checkpoint.every_steps else "at the end"
    what = {
        "end": f"the {weights} that the run ends with",
        "every_save": f"the {weights} of each checkpoint ({saves})",
        "checkpoint": f"{weights} of each checkpoint ({saves}), and the newest one whole as last-checkpoint",
        "all": f"{weights} of each checkpoint ({saves}), and each checkpoint whole",
    }[asked.strategy]
    seen = {None: "", True: " (private)", False: " (public)"}[asked.private]
    page = f"{asked.repo}{seen} on the Hub, with config and model card, in the background of the training"
    yield note(f"{_KEY}: {what}: to {page}; the end of the run waits for it")
    yield from without_token(context, _KEY)
