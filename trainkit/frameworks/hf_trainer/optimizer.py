"""Optimizer and schedule of Trainer: what a recipe makes of the fields that depend on one another, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.frameworks.base.fields import UNSET, Settings, Unsupported, chosen, said
from trainkit.frameworks.hf_trainer.versions import can, version
from trainkit.machine.versions import at_least
from trainkit.optimizers import OPTIMIZERS, optimizer
from trainkit.plan.context import Context
from trainkit.recipe.yaml.reader import compose

FLAT = ("constant", "constant_with_warmup")  # schedules that never fall
FLOORED = {"cosine": "cosine_with_min_lr", "linear": "polynomial"}  # what Trainer calls them where they end above 0


def encode_name(context: Context) -> Any:
    """`optim`: an optimizer that Trainer has under the recipe's name."""
    name = context.recipe.optimizer.name
    if name not in OPTIMIZERS:
        known = ", ".join(name for name, each in OPTIMIZERS.items() if each.hf_unsupported is None)
        hint = f"set optimizer.name to one of {known}, or make the optimizer in your script"
        return Unsupported("Trainer makes optimizers by name only", hint)
    refused, until = OPTIMIZERS[name].hf_unsupported, OPTIMIZERS[name].hf_until
    return Unsupported(*refused) if refused and (not until or at_least(version(context), until)) else name


def has_moment(name: str, which: str) -> bool:
    """Whether Trainer hands an optimizer a setting of AdamW's."""
    known = optimizer(name)
    return which in known.hf or bool(known.hf_unsupported)


def encode_moment(context: Context, which: str) -> Any:
    """`adam_beta1` and its like, for the optimizers that Trainer hands them to."""
    known = optimizer(context.recipe.optimizer.name)
    if not has_moment(context.recipe.optimizer.name, which):
        what = f"Trainer's {context.recipe.optimizer.name} has no such setting"
        return Unsupported(what, f"leave optimizer.{which} out")
    return UNSET if which in known.hf_args else chosen(context, f"optimizer.{which}")


def encode_arguments(context: Context) -> Any:
    """`optim_args`: `name=value,…` for the optimizers that read it."""
    name, args = context.recipe.optimizer.name, context.recipe.optimizer.args
    by_args = optimizer(name).hf_args
    if args and not by_args:
        return Unsupported(f"Trainer's {name} takes no further arguments", "leave optimizer.args out")
    found: dict[str, Any] = {
        theirs: chosen(context, f"optimizer.{ours}")
        for ours, theirs in by_args.items()
        if said(context, f"optimizer.{ours}")
    }
    found |= args
    if found and not can("optim_args reach torch's optimizers", context):
        what = f"transformers {version(context)} gives {name} no further arguments"
        return Unsupported(what, f"leave {', '.join(found)} out, or install a newer transformers")
    if any(isinstance(each, list) or "," in str(each) or "=" in str(each) for each in found.values()):
        why = "Trainer splits these arguments at commas and equals signs"
        return Unsupported(why, "make the optimizer in your script")
    return ",".join(f"{name}={each}" for name, each in found.items()) or UNSET


def decode_arguments(value: Any, name: str) -> Settings | Unsupported:
    """The arguments of an optimizer; those that the recipe has a key for by that key."""
    ours = {theirs: key for key, theirs in OPTIMIZERS[name].hf_args.items()} if name in OPTIMIZERS else {}
    found: dict[str, Any] = {}
    for part in str(value).split(","):
        argument, equals, text = (word.strip() for word in part.partition("="))
        document = compose(text)
        if not ours or not equals or not argument.isidentifier() or argument in found or document.errors:
            return Unsupported(f"{part!r} is no argument of {name}", "write it as name=value,name=value")
        found[argument] = document.tree
    return {f"optimizer.{ours.get(each, f'args.{each}')}": value for each, value in found.items()}


def _floor(context: Context) -> float:
    """What the recipe asks for; its default is the built-in trainer's, not the script's."""
    return context.recipe.schedule.min_lr_ratio if said(context, "schedule.min_lr_ratio") else 0.0


def encode_schedule(context: Context) -> Any:
    """`lr_scheduler_type`: one that ends above 0 has a name of its own in Trainer."""
    name = context.recipe.schedule.name
    return FLOORED[name] if _floor(context) and name not in FLAT else name


def encode_schedule_settings(context: Context) -> Any:
    """`lr_scheduler_kwargs`: the floor of the cosine as a share, that of the line as a polynomial's last rate."""
    name, floor = context.recipe.schedule.name, _floor(context)
    if not floor:
        return UNSET
    if name in FLAT:
        return Unsupported(f"{name} never falls", "leave schedule.min_lr_ratio out")
    if name == "cosine":
        return {"min_lr_rate": floor}
    if not said(context, "optimizer.lr"):
        return Unsupported("Trainer takes the end of the line as a rate, not as a share", "set optimizer.lr too")
    return {"lr_end": context.recipe.optimizer.lr * floor, "power": 1.0}


def decode_schedule(name: str, settings: Mapping[str, Any], peak: float | None) -> Settings:
    """Schedule and floor out of both fields; nothing where they say something that a recipe cannot."""
    ratio: Any = None
    if name == FLOORED["cosine"] and settings.keys() == {"min_lr_rate"}:
        ratio = settings["min_lr_rate"]
    elif name == FLOORED["cosine"] and settings.keys() == {"min_lr"}:
        ratio = _share(settings["min_lr"], peak)
    elif name == FLOORED["linear"] and settings.keys() == {"lr_end", "power"} and settings["power"] == 1:
        ratio = _share(settings["lr_end"], peak)
    if not isinstance(ratio, int | float):
        return {}
    shape = next(ours for ours, theirs in FLOORED.items() if theirs == name)
    return {"schedule.name": shape, "schedule.min_lr_ratio": ratio}


def _share(rate: Any, peak: float | None) -> float | None:
    """A rate over the peak, without the last digits that the division of two decimal fractions adds."""
    return float(f"{rate / peak:.12g}") if peak and isinstance(rate, int | float) else None
