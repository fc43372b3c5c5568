"""The loader: workers, reading ahead, errors, and the time that the training waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.planning.plan import BatchArithmetic
from trainkit.recipe.schema import TextData
from trainkit.train.data.loader import training_batches
from trainkit.train.data.sampler import Order
from trainkit.train.data.source import Batch
from trainkit.train.data.waiting import complaint, timed


class Numbers:
    """Samples that are their own numbers; each takes a while, and number 13 cannot be read."""

    def __init__(self, seconds: float, size: int = 12) -> None:
        self._seconds, self._size = seconds, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        time.sleep(self._seconds)
        if 13 in indices:
            raise TrainingError("sample 13 is broken", hint="mend it")
        return Batch({"tokens": torch.tensor(indices)}, len(indices))


def seen(samples: Numbers, steps: int, busy: float = 0.0, **settings: int) -> tuple[list[list[int]], float]:
    """The numbers of each step, and the seconds that a loop busy for a while in each step waited for them."""
    waits: list[float] = []
    batches = training_batches(
        samples,
        Order(0, len(samples), 4),
        BatchArithmetic(4, 2, 2, 1, 2),
        0,
        steps=range(steps),
        data=TextData.model_validate(settings),
        pin=False,
    )
    found = []
    for batch in timed(batches, waits.append):
        time.sleep(busy)
        found.append(batch.inputs["tokens"].tolist())
    return found, sum(waits)


def test_workers_hide_a_slow_data_set_and_change_no_sample() -> None:
    alone, waited = seen(Numbers(0.1), 8, busy=0.1)
    shared, waited_less = seen(Numbers(0.1), 8, busy=0.1, workers=2, prefetch_factor=4)
    assert shared == alone
    assert waited > 0.79
    assert waited_less < 0.5 * waited


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_one_error_wherever_it_was_read(workers: int) -> None:
    with pytest.raises(TrainingError) as caught:
        seen(Numbers(0.0, size=16), 4, workers=workers)
    assert str(caught.value) == "sample 13 is broken"
    assert caught.value.diagnostics[0].hint == "mend it"


def test_waiting_is_complained_of_with_figures_where_it_matters() -> None:
    assert complaint(0.35, 20.0, workers=0) == (
        "35% of the training went by waiting for data (7.0 s of 20.0 s); set data.workers to 2 or more"
    )
    assert "prefetch_factor" in complaint(0.35, 20.0, workers=2)
    assert complaint(0.35, 2.0, workers=0) == ""
    assert complaint(0.15, 100.0, workers=0) == ""


def test_reading_ahead_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch_factor 4 is for loader processes, and workers is 0"):
        TextData(prefetch_factor=4)
