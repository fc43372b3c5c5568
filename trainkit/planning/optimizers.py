"""What is known of each optimizer before it runs: the state that it keeps, the settings that it takes, its warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainkit.planning.context import Context
from trainkit.planning.plan import Notice

MOMENTS = ("beta1", "beta2", "eps")


@dataclass(frozen=True, slots=True)
class Traits:
    """What an optimizer does to memory and speed, and which of MOMENTS it takes.

    state: bytes of optimizer state per parameter with fp32 weights, in words (tests measure them).
    """

    state: str
    speed: str
    takes: tuple[str, ...] = MOMENTS


TRAITS: Mapping[str, Traits] = {
    "adamw_torch": Traits("8 bytes of state per parameter", "PyTorch's choice of implementation"),
    "adamw_torch_fused": Traits("8 bytes of state per parameter", "one kernel for the whole update"),
    "adamw_torch_foreach": Traits(
        "8 bytes of state per parameter, and temporaries as large as the weights", "many tensors in one kernel"
    ),
    "adamw_apex_fused": Traits("8 bytes of state per parameter", "one kernel for the whole update (NVIDIA apex)"),
    "adamw_anyprecision": Traits(
        "8 bytes of state per parameter; 6 with precision.weights bf16, rounding errors included",
        "fused where triton is (optimi)",
    ),
    "adamw_bnb_8bit": Traits(
        "about 2 bytes of state per parameter; 8 for embeddings and for tensors below 4096 elements",
        "quantizes its state in each step",
    ),
    "adafactor": Traits("a row and a column of state per matrix, almost nothing", "slower update, no momentum", ()),
    "adagrad": Traits("4 bytes of state per parameter", "a short update", ("eps",)),
    "sgd": Traits("4 bytes of state per parameter (momentum; none with beta1: 0)", "the shortest update", ("beta1",)),
}
OWN_CLASS = Traits("whatever the class keeps", "that of the class", ())


def traits(name: str) -> Traits:
    """Of a name, or of a class by its import path."""
    return TRAITS.get(name, OWN_CLASS)


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
