"""Repositories of the Hub in a plan: pinned to a commit, fetched before the ranks start, uploaded to beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.hub.cache import CachedRepo
from trainkit.hub.references import Download, pinned, repo_refs, revision_without_name
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Preparation, Variable, text
from trainkit.launch_plan.provenance import module, texts
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import NoContainer
from trainkit.recipe.schema.training import PushToHub
from trainkit.schedulers.registry import SCHEDULERS
from trainkit.text import every, format_size

_ROLES = {"model.path": "model", "peft.path": "adapters", "data.tokenizer": "tokenizer", "data.path": "data set"}
_PUSH = "checkpoint.push_to_hub"


def with_repositories(resolved: Resolved, hub: Sequence[CachedRepo]) -> Resolved:
    """The recipe with the known commits of its repositories, whose names are no longer listed as absent folders."""
    named = {(ref.key, ref.name) for ref in repo_refs(resolved.recipe, resolved.absent)}
    named |= {("data.mix", name) for key, name in named if key.startswith("data.mix.")}
    left = {key: tuple(path for path in paths if (key, path) not in named) for key, paths in resolved.absent.items()}
    absent = {key: paths for key, paths in left.items() if paths}
    return replace(resolved, recipe=pinned(resolved.recipe, (repo.ref for repo in hub)), absent=absent)


def problems(resolved: Resolved) -> Iterator[Diagnostic]:
    """Revisions of what is no name of the Hub."""
    for key, path in revision_without_name(resolved.recipe, repo_refs(resolved.recipe, resolved.absent)):
        what = f"{key} is of a repository of the Hub, and {path or 'nothing'} is none"
        yield resolved.error(key, what, "leave it out, or name a repository where no folder has that name")


def _other_cache(context: Context) -> str:
    """The cache of the ranks, where it is another one than this process's; else empty."""
    if not isinstance(context.recipe.container, NoContainer):
        return "the container's cache"
    if context.topology.nodes > 1 or context.recipe.cluster.kind != "none":
        return "the cache of each node"
    return "that machine's cache" if context.facts.origin else ""


def _push(context: Context) -> PushToHub | None:
    """What the built-in trainer is to upload; other programs get the settings, and do it in their own way."""
    push = context.recipe.checkpoint.push_to_hub
    return push if context.recipe.program.kind == "builtin" and push.repo is not None else None


def preparations(context: Context) -> Iterator[Preparation]:
    """What runs on each node before its ranks start."""
    if push := _push(context):  # makes the repository, and asks whether the token may write there
        words = [text(str(push.repo))]
        if context.topology.nodes > 1:
            words += [text("--node"), text(Variable.NODE_RANK)]
        words += [text("--holds"), text("adapters" if context.recipe.peft.kind == "lora" else "weights")]
        if push.private is not None:
            words += [text("--private"), text("yes" if push.private else "no")]
        argv = (*texts(module(context, "trainkit.hub.push", keys=(f"{_PUSH}.repo",))), *words)
        yield Preparation(f"make {push.repo} ready on the Hub", argv, "")
    for repo in context.hub:
        ref, rows = repo.ref, repo.ref.rows
        if not ref.commit or (repo.whole and not _other_cache(context)):
            continue
        given = {"--subset": rows.subset, "--split": rows.split, "--validation-split": rows.validation_split}
        options = [word for option, value in given.items() if value for word in (option, value)]
        fetched = map(text, (ref.key, ref.kind, ref.name, ref.commit, *options))
        argv = (*texts(module(context, "trainkit.hub.fetch", keys=(ref.key,))), *fetched)
        yield Preparation(f"fetch the {_ROLES[ref.role]} {ref.name} from the Hub", argv, f"hub-{ref.folder}")


def repositories(context: Context) -> dict[str, Any]:
    """The plan's parts about them: what they are, how large, and how much of it is still to come."""
    apart = bool(_other_cache(context))
    downloads = (
        Download(repo.ref.key, repo.ref.name, sum(repo.sizes.values()), None if apart else repo.missing_bytes)
        for repo in context.hub
        if repo.sizes is not None
    )
    return {"repositories": tuple(repo.ref for repo in context.hub), "downloads": tuple(downloads)}


def notices(context: Context) -> Iterator[Diagnostic]:
    """What is in the cache, what is fetched, and what is in the way: of a repository once, for all that name it."""
    obstacles: dict[tuple[str, str], list[str]] = {}
    for repo in context.hub:
        ref = repo.ref
        if repo.obstacle or repo.sizes is None:
            obstacles.setdefault((repo.obstacle, repo.remedy), []).append(ref.key)
            continue
        branch = "" if ref.revision == ref.commit else f"{ref.revision}, "
        head = f"{ref.key}: {ref.name} on the Hub ({branch}{ref.commit[:7]})"  # shortened as git does
        part, total = format_size(repo.missing_bytes), format_size(sum(repo.sizes.values()))
        if other := _other_cache(context):
            yield note(f"{head}: {total}, of which {other} gets what it lacks before the ranks start")
        elif repo.whole:
            yield note(f"{head} is in the cache: {repo.folder}")
        else:
            size = part if part == total else f"{part} of {total}"
            yield note(f"{head}: {size} fetched before the ranks start, into {repo.folder}")
        if repo.closed:
            yield from _without_token(context, ref.key)
    for (obstacle, remedy), keys in obstacles.items():
        yield blocker(f"{', '.join(keys)}: {obstacle}", remedy)


def _without_token(context: Context, key: str) -> Iterator[Diagnostic]:
    """A warning where the ranks run in a container that does not get the token that a setting needs."""
    scheduler = SCHEDULERS.get(context.recipe.cluster.kind)
    pods = scheduler is not None and not scheduler.shares_folder
    apart = pods or not isinstance(context.recipe.container, NoContainer)
    if apart and "HF_TOKEN" not in context.recipe.env_from:
        hint = "list HF_TOKEN under env_from, unless a mounted home has the file of `hf auth login`"
        yield warning(f"{key}: your token for the Hub does not get into the {'pod' if pods else 'container'}", hint)


def push_notices(context: Context) -> Iterator[Diagnostic]:
    """What is uploaded, where to and when; and a token that the run will not find."""
    recipe, push = context.recipe, _push(context)
    if push is None:
        return
    weights = "adapters (as peft reads them)" if recipe.peft.kind == "lora" else "weights"
    saves = every(recipe.checkpoint.every_steps) if recipe.checkpoint.every_steps else "at the end"
    what = {
        "end": f"the {weights} that the run ends with",
        "every_save": f"the {weights} of each checkpoint ({saves})",
        "checkpoint": f"{weights} of each checkpoint ({saves}), and the newest one whole as last-checkpoint",
        "all": f"{weights} of each checkpoint ({saves}), and each checkpoint whole",
    }[push.strategy]
    seen = {None: "", True: " (private)", False: " (public)"}[push.private]
    page = f"{push.repo}{seen} on the Hub, with config and model card, in the background of the training"
    yield note(f"{_PUSH}: {what}: to {page}; the end of the run waits for it")
    yield from _without_token(context, _PUSH)
