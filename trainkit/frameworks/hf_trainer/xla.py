"""What torch_xla's FSDP lacks under Trainer, and what it asks of the model."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic
from trainkit.frameworks.base.fields import setting
from trainkit.frameworks.base.fsdp_settings import CHECKPOINTING
from trainkit.frameworks.hf_trainer.fsdp_config import TORCH, XLA
from trainkit.frameworks.hf_trainer.refusals import error
from trainkit.frameworks.hf_trainer.versions import UNTIL, can, version
from trainkit.frameworks.torch_xla import is_spmd, on_xla
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.recipe.schema import Fsdp

OPTIMIZER = "an optimizer for torch_xla's FSDP"
SETTINGS = "strategy.xla_settings"
# Keys of torch's FSDP that reach no other
ABSENT = {field.keys[0] for field in TORCH if field.keys} - {key for field in XLA for key in field.keys}
# Trainer looks these up in torch by name.
DTYPE_KEYS = ("compute_dtype", "buffer_dtype")
DTYPES = ("float32", "float", "bfloat16", "float16", "half", "float64", "double")
OWN = ("auto_wrap_policy", "auto_wrapper_callable")  # Trainer hands these over itself


def problems(context: Context) -> Iterator[Diagnostic]:
    """Settings that torch_xla's FSDP would not get."""
    strategy = context.recipe.strategy
    if not on_xla(context) or not isinstance(strategy, Fsdp):
        return
    for key in sorted(ABSENT):
        if setting(context, key) != Fsdp.model_fields[key.removeprefix("strategy.")].default:
            yield _error(context, key, "Trainer hands torch_xla's FSDP no such setting", f"leave {key} out")
    yield from _settings(context, strategy)
    if context.recipe.efficiency.gradient_checkpointing.every and strategy.auto_wrap == "none":
        why = "torch_xla recomputes wrapped units, and with strategy.auto_wrap none there are none"
        yield _error(context, CHECKPOINTING, why, "set strategy.auto_wrap to transformer or size")


def _settings(context: Context, strategy: Fsdp) -> Iterator[Diagnostic]:
    if strategy.xla_settings and strategy.version == 2:
        why = "Trainer hands xla_fsdp_settings to version 1 alone"
        yield _error(context, SETTINGS, why, f"leave {SETTINGS} out, or set strategy.version to 1, which is one chip")
    for name, value in strategy.xla_settings.items():
        if name in DTYPE_KEYS and value not in DTYPES:
            why = "Trainer looks it up among torch's number formats"
            yield _error(context, f"{SETTINGS}.{name}", why, f"write one of {', '.join(DTYPES)}", value)
        if name in OWN:
            yield _error(context, f"{SETTINGS}.{name}", "Trainer sets it itself", "use strategy.auto_wrap", value)


def notices(context: Context) -> Iterator[Notice]:
    """What torch_xla's FSDP asks of the model, and what it does on one chip."""
    strategy = context.recipe.strategy
    if not on_xla(context) or not isinstance(strategy, Fsdp):
        return
    if not can(OPTIMIZER, context):
        what = f"transformers {version(context)} lacks {OPTIMIZER}; Trainer fails before step 1"
        yield Notice("blocker", what, f"pip install 'transformers<{UNTIL[OPTIMIZER]}'")
    if is_spmd(context):
        what = (
            "Trainer shards the output of a causal language model, or a tensor or tuple of three dimensions; with "
            "other outputs it ends with an error"
        )
        yield Notice("note", what)
    else:
        yield Notice("note", "FSDP's version 1 shards over processes, and one process keeps every shard")
    if strategy.auto_wrap == "transformer" and not strategy.wrap_classes:
        what = "strategy.wrap_classes is empty: a model that does not name its blocks (_no_split_modules) is one unit"
        yield Notice("note", what, "name the class of its blocks")


def _error(context: Context, key: str, why: str, hint: str, value: object = None) -> Diagnostic:
    shown = setting(context, key) if value is None else value
    return error(context, key, f"{key} {shown} cannot reach a program of kind hf on xla", why, hint)
