"""The loader: workers, reading ahead, errors, and the time that the training waits."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.launch_plan.model import SolvedBatch
from trainkit.recipe.schema import TextData
from trainkit.trainer.data.loader import training_batches
from trainkit.trainer.data.sampler import SampleOrder
from trainkit.trainer.data.source import Batch, Samples
from trainkit.trainer.metrics.speed import DataWaiting, slow_data_warning, timed


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


def batches(samples: Numbers, steps: int, **settings: int) -> Generator[Batch, None, None]:
    """One batch of four for each step."""
    found = training_batches(
        Samples(len(samples), samples.__getitem__),
        SampleOrder(0, len(samples), 4),
        SolvedBatch(4, 2, 2, 1, 2),
        0,
        steps=range(steps),
        data=TextData.model_validate(settings),
        pin=False,
    )
    assert isinstance(found, Generator)
    return found


def seen(samples: Numbers, steps: int, **settings: int) -> list[list[int]]:
    """The numbers of each step."""
    return [batch.inputs["tokens"].tolist() for batch in batches(samples, steps, **settings)]


class Noted(Numbers):
    """Numbers that note in a folder, which all processes see, that a batch was begun."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0.0)
        self._folder = folder

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        (self._folder / uuid.uuid4().hex).touch()
        return super().__getitem__(indices)


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder below which no socket finds place."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    earlier = config.pop("tempdir", None)
    yield folder
    config.pop("tempdir", None)
    config |= {} if earlier is None else {"tempdir": earlier}


@pytest.mark.timeout(60)
def test_workers_find_a_place_for_their_sockets(long_folder: Path) -> None:
    assert seen(Numbers(0.0), 3, workers=1) == seen(Numbers(0.0), 3)
    assert tempfile.gettempdir() == str(long_folder) and list(long_folder.iterdir()) == []


def test_where_no_place_is_left_for_sockets_the_folder_is_named(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(TrainingError, match="too long for the sockets"):
        next(batches(Numbers(0.0), 3, workers=1))


def test_workers_change_no_sample() -> None:
    assert seen(Numbers(0.0), 8, workers=2, prefetch_factor=4) == seen(Numbers(0.0), 8)


def test_workers_hide_a_slow_data_set_by_making_batches_while_the_loop_is_busy(tmp_path: Path) -> None:
    with closing(batches(Noted(tmp_path), 12, workers=2, prefetch_factor=4)) as shared:
        next(shared)  # and now the loop is busy with it
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(tmp_path.iterdir())) >= 8


def test_without_workers_nothing_is_made_before_it_is_asked_for(tmp_path: Path) -> None:
    with closing(batches(Noted(tmp_path), 12)) as alone:
        for taken in (1, 2, 3):
            next(alone)
            assert len(list(tmp_path.iterdir())) == taken


def test_the_time_that_a_batch_took_to_arrive_is_measured() -> None:
    waiting = DataWaiting(None)
    waits = [0.0, *(waiting.seconds for _ in timed(batches(Numbers(0.05), 3), waiting))]
    assert len(waits) == 4
    assert min(late - early for early, late in pairwise(waits)) >= 0.05  # a sleep is never shorter


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_one_error_wherever_it_was_read(workers: int) -> None:
    with pytest.raises(TrainingError) as caught:
        seen(Numbers(0.0, size=16), 4, workers=workers)
    assert str(caught.value) == "sample 13 is broken"
    assert caught.value.diagnostics[0].hint == "mend it"


def test_waiting_is_complained_of_with_figures_where_it_matters() -> None:
    assert slow_data_warning(0.35, 20.0, workers=0) == (
        "35% of the training time was spent waiting for data (7.0 s of 20.0 s); set data.workers to 2 or more"
    )
    assert "prefetch_factor" in slow_data_warning(0.35, 20.0, workers=2)
    assert slow_data_warning(0.35, 20.0, workers=0, packed=True).endswith("set data.workers to 1")
    assert "input_ids" in slow_data_warning(0.35, 20.0, workers=1, packed=True)
    assert slow_data_warning(0.35, 2.0, workers=0) == ""
    assert slow_data_warning(0.15, 100.0, workers=0) == ""


def test_reading_ahead_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="prefetch_factor 4 is for loader processes, and workers is 0"):
        TextData(prefetch_factor=4)
