"""The lowest evaluation loss so far: which checkpoint to keep for it, and when to stop waiting for a lower one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Best:
    """loss: in nats, None before the first evaluation; step: of that evaluation; since: evaluations after it."""

    loss: float | None = None
    step: int = 0
    since: int = 0

    def note(self, step: int, loss: float) -> bool:
        """Take one more evaluation; whether it is the lowest so far. What is no number never is."""
        lowest = math.isfinite(loss) and (self.loss is None or loss < self.loss)
        if lowest:
            self.loss, self.step, self.since = loss, step, 0
        else:
            self.since += 1
        return lowest

    def as_data(self) -> dict[str, Any]:
        """What a checkpoint's manifest keeps of it."""
        return asdict(self)

    def restore(self, data: Mapping[str, Any]) -> None:
        """The inverse of :meth:`as_data`; nothing known is nothing evaluated."""
        self.loss, self.step, self.since = data.get("loss"), data.get("step", 0), data.get("since", 0)
