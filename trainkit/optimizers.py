"""What is known of each optimizer before it runs: the state that it keeps, the settings that it takes, its warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
