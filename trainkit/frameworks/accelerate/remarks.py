"""What a plan for `Accelerator()` has to say: what stays the script's own, and what accelerate does by itself."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.frameworks.accelerate.setting import given
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.schema import Fsdp


def notices(context: Context) -> Iterator[Notice]:
    """Every remark."""
    batch = context.batch
    what = (
        "Model, data, optimizer and the loop are the script's own; its DataLoader decides the micro batch, and the "
        f"sizes in this plan only count with {batch.micro}."
    )
    yield Notice("note", what, "Pass the script's own settings in program.args.")
    strategy = context.recipe.strategy
    if isinstance(strategy, Fsdp) and strategy.auto_wrap == "transformer" and not strategy.wrap_classes:
        what = "strategy.wrap_classes is empty: a model that does not name its blocks (_no_split_modules) is one unit."
        yield Notice("note", what, "Name the class of its blocks.")
    if context.zero and not given(context, "train.max_grad_norm"):
        base = context.resolved.attachments.get("strategy.config")
        said = value_at(base.tree, "gradient_clipping") if base else None
        norm = "1, which accelerate fills in" if said in (None, "auto") else f"{said}, as its file says"
        what = f"DeepSpeed scales gradients down to a norm of {norm}: clip_grad_norm_ does nothing then."
        yield Notice("note", what, "Set train.max_grad_norm to the script's own.")
    if context.zero and context.topology.device == "cpu" and context.topology.world_size > 1:
        what = (
            "On a CPU, Accelerator() counts one process under DeepSpeed unless it is told the backend: the run would "
            "end with `Check batch related parameters`."
        )
        hint = 'In the script: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]).'
        yield Notice("warning", what, hint)
    chosen = context.recipe.efficiency.compile
    if chosen.enabled and chosen.dynamic is None:
        what = "accelerate compiles for the sizes that it sees (dynamic=False): other sizes are compiled anew."
        yield Notice("note", what, "Set efficiency.compile.dynamic to true where sizes change.")
