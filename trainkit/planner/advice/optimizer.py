"""Settings that the chosen optimizer ignores, and what a reader may not expect of it."""

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
    ignored = [f"optimizer.{name}" for name in MOMENTS if name not in known(optimizer.name).takes]
    idle = [key for key in ignored if context.resolved.given(key)]
    if idle:
        verb = "does" if len(idle) == 1 else "do"
        hint = "leave it out, or give the class what it takes under optimizer.args"
        yield Notice("warning", f"{' and '.join(idle)} {verb} nothing with {optimizer.name}", hint)
    if warning := known(optimizer.name).warning:
        yield Notice("warning", *warning)
    if ":" in optimizer.name and context.recipe.strategy.kind not in ("single", "ddp"):
        what = f"{context.recipe.strategy.kind} hands {optimizer.name} shards of the parameters, not whole matrices"
        yield Notice("warning", what, "set strategy.kind to ddp for an optimizer that looks at whole matrices")
