"""What a reader of the recipe may not expect of the optimizer that it names."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.optimizers import MOMENTS, traits
from trainkit.plan.context import Context
from trainkit.plan.model import Notice


def optimizer_notices(context: Context) -> Iterator[Notice]:
    """What a reader of the recipe may not expect of the optimizer that it names."""
    optimizer = context.recipe.optimizer
    if context.recipe.program.kind != "builtin":
        return
    idle = [
        f"optimizer.{name}" for name in MOMENTS if _given(context, name) and name not in traits(optimizer.name).takes
    ]
    if idle:
        verb = "does" if len(idle) == 1 else "do"
        hint = "Leave it out, or give the class what it takes under optimizer.args."
        yield Notice("warning", f"{' and '.join(idle)} {verb} nothing with {optimizer.name}.", hint)
    if optimizer.name == "adafactor":
        yield Notice(
            "warning",
            "adafactor can converge slower than AdamW, or unstably. Its optimizer.lr is relative to the size of the "
            "weights (torch.optim.Adafactor), so that of an AdamW recipe means something else.",
            "Start from lr 1e-2, PyTorch's default, and compare losses; adamw_bnb_8bit is small too and acts as AdamW.",
        )
    if ":" in optimizer.name and context.recipe.strategy.kind not in ("single", "ddp"):
        what = f"{context.recipe.strategy.kind} hands {optimizer.name} shards of the parameters, not whole matrices."
        yield Notice("warning", what, "An optimizer that looks at whole matrices needs strategy.kind: ddp.")


def _given(context: Context, name: str) -> bool:
    return context.resolved.given(f"optimizer.{name}") is not None
