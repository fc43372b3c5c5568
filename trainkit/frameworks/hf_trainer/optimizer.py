"""Optimizer and schedule of Trainer: which settings each of its optimizers takes, and what the recipe makes of them."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.frameworks.hf_trainer.row import Row, Unfit, Value, given, plain, setting, version
from trainkit.frameworks.hf_trainer.versions import can
from trainkit.frameworks.torch_xla import on_xla
from trainkit.plan.context import Context

_CLASS = "Trainer makes optimizers by name only"
_ADAM = ("beta1", "beta2", "eps")
# Optimizers that Trainer has under the same name, and the settings of the recipe's that its class is given.
TAKES: Mapping[str, tuple[str, ...]] = {
    "adamw_torch": _ADAM,
    "adamw_torch_fused": _ADAM,
    "adamw_bnb_8bit": _ADAM,
    "adafactor": (),
    "adagrad": ("eps",),
    "sgd": ("beta1",),
}
UNKNOWN: Mapping[str, Unfit] = {
    "adamw_torch_foreach": Unfit("adamw_torch is foreach on CUDA by itself", "Set optimizer.name to adamw_torch."),
    "adamw_apex_fused": Unfit("transformers 5 has it no more", "Set optimizer.name to adamw_torch_fused."),
    "adamw_anyprecision": Unfit(
        "transformers takes it from torchdistx, which is not maintained any more", "Set optimizer.name to adamw_torch."
    ),
}
# What torch's own optimizers get through --optim_args: setting -> name there.
BY_ARGS: Mapping[str, Mapping[str, str]] = {"sgd": {"beta1": "momentum"}, "adagrad": {"eps": "eps"}}
FIELDS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}


def _name(context: Context) -> Value | Unfit:
    name = context.recipe.optimizer.name
    if name in TAKES:
        return name
    known = ", ".join(TAKES)
    return UNKNOWN.get(name, Unfit(_CLASS, f"Choose one of {known}, or make the optimizer in your script."))


def _moment(which: str) -> Row:
    """The settings of Adam's moments, for the optimizers that read them."""

    def value(context: Context) -> Value | Unfit:
        name = context.recipe.optimizer.name
        if which in TAKES.get(name, _ADAM):
            return None if which in BY_ARGS.get(name, {}) else setting(context, f"optimizer.{which}")
        return Unfit(f"Trainer's {name} has no such setting", f"Leave optimizer.{which} out.")

    return Row(FIELDS[which], (f"optimizer.{which}",), value)


def _args(context: Context) -> Value | Unfit:
    """`name=value,…` for the optimizers that read it."""
    optimizer = context.recipe.optimizer
    found: dict[str, object] = {
        there: setting(context, f"optimizer.{ours}")
        for ours, there in BY_ARGS.get(optimizer.name, {}).items()
        if given(context, f"optimizer.{ours}")
    }
    if optimizer.args and optimizer.name not in BY_ARGS:
        return Unfit(f"Trainer's {optimizer.name} takes no further arguments", "Leave optimizer.args out.")
    found |= optimizer.args
    if found and not can("optim_args reach torch's optimizers", version(context)):
        what = f"transformers {version(context)} gives {optimizer.name} no further arguments"
        return Unfit(what, f"Leave {', '.join(found)} out, or install a newer transformers.")
    if any(isinstance(each, list) or "," in str(each) or "=" in str(each) for each in found.values()):
        return Unfit("Trainer splits these arguments at commas and equals signs", "Make the optimizer in your script.")
    return ",".join(f"{name}={each}" for name, each in found.items()) or None


def _schedule(context: Context) -> Value | Unfit:
    name, floor = context.recipe.schedule.name, _floor(context)
    if not floor or name in ("constant", "constant_with_warmup"):
        return name
    return {"cosine": "cosine_with_min_lr", "linear": "polynomial"}[name]


def _schedule_settings(context: Context) -> Value | Unfit:
    """A floor: of the cosine as a share, of the line as a polynomial of power 1 that ends there."""
    name, floor = context.recipe.schedule.name, _floor(context)
    if floor and name in ("constant", "constant_with_warmup"):
        return Unfit(f"{name} never falls", "Leave schedule.min_lr_ratio out.")
    if floor and name == "linear" and not given(context, "optimizer.lr"):
        return Unfit("Trainer takes the end of the line as a rate, not as a share", "Set optimizer.lr too.")
    if not floor:
        return None
    return {"min_lr_rate": floor} if name == "cosine" else {"lr_end": context.recipe.optimizer.lr * floor, "power": 1.0}


def _floor(context: Context) -> float:
    """What the recipe asks for; its default is the built-in trainer's, not the script's."""
    return context.recipe.schedule.min_lr_ratio if given(context, "schedule.min_lr_ratio") else 0.0


OPTIMIZER: tuple[Row, ...] = (
    # Trainer's own default is adamw_torch_fused, which has no step for XLA
    Row("optim", ("optimizer.name",), _name, always=on_xla),
    plain("learning_rate", "optimizer.lr"),
    plain("weight_decay", "optimizer.weight_decay"),
    _moment("beta1"),
    _moment("beta2"),
    _moment("eps"),
    Row("optim_args", ("optimizer.args", "optimizer.beta1", "optimizer.eps"), _args),
    Row("lr_scheduler_type", ("schedule.name", "schedule.min_lr_ratio"), _schedule),
    Row("lr_scheduler_kwargs", ("schedule.min_lr_ratio",), _schedule_settings),
    plain("warmup_steps", "schedule.warmup_steps"),
)
