"""Uploads to the Hub in a plan: the repository is made ready before the ranks start, and notices tell of the rest."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.plan.context import Context
from trainkit.plan.model import Notice, Preparation, Variable, text
from trainkit.plan.provenance import module, texts
from trainkit.planner.hub import without_token

_KEY = "checkpoint.push_to_hub"


def is_pushing(context: Context) -> bool:
    """Whether the built-in trainer uploads; other programs are told to, and do it in their own way."""
    return context.recipe.program.kind == "builtin" and context.recipe.checkpoint.push_to_hub.repo is not None


def preparations(context: Context) -> tuple[Preparation, ...]:
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


def notices(context: Context) -> Iterator[Notice]:
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
    yield Notice("note", f"{_KEY}: {what}: to {page}; the end of the run waits for it")
    yield from without_token(context, _KEY)
