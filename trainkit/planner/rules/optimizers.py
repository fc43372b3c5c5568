"""Which optimizers a strategy or a device cannot run, read off their registry."""

from __future__ import annotations

from trainkit.optimizers import OPTIMIZERS, Unsupported
from trainkit.plan.combination import Refusal


def _rule(name: str, found: Unsupported) -> Refusal:
    when: dict[str, tuple[str, ...]] = {"program": ("builtin",), "optimizer": (name,)}
    when |= {"strategy": found.strategies} if found.strategies else {}
    when |= {"device": found.devices} if found.devices else {}
    return Refusal(when, "optimizer.name", found.reason, found.instead)


REFUSALS: tuple[Refusal, ...] = tuple(
    _rule(name, found) for name, each in OPTIMIZERS.items() for found in each.unsupported
)
