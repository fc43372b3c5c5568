"""What a reader of the recipe may not expect of the optimizer that it names."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.optimizers import MOMENTS
from trainkit.optimizers import optimizer as known
from trainkit.plan.context import Context
from trainkit.plan.model import Notice


def optimizer_notices(context: Context) -> Iterator[Notice]:
    """What a reader of the recipe may not expect of the optimizer that it names."""
    optimizer = context.recipe.optimizer
    if context.recipe.program.kind != "builtin":
        return
    idle = [
        f"optimizer.{name}" for name in MOMENTS if _given(context, name) and name not in known(optimizer.name).takes
    ]
    if idle:
        verb = "does" if len(idle) == 1 else "do"
        hint = "Leave it out, or give the class what it takes under optimizer.args."
        yield Notice("warning", f"{' and '.join(idle)} {verb} nothing with {optimizer.name}.", hint)
    if warning := known(optimizer.name).warning:
        yield Notice("warning", *warning)
    if ":" in optimizer.name and context.recipe.strategy.kind not in ("single", "ddp"):
        what = f"{context.recipe.strategy.kind} hands {optimizer.name} shards of the parameters, not whole matrices."
        yield Notice("warning", what, "An optimizer that looks at whole matrices needs strategy.kind: ddp.")


def _given(context: Context, name: str) -> bool:
    return context.resolved.given(f"optimizer.{name}") is not None
