"""Token ids and labels that the model does not know."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.trainer.data.source import Batch, Samples, Source
from trainkit.trainer.data.vocabulary import checked


def labelled(indices: Sequence[int]) -> Batch:
    """The id and the label of a sample is its number, but for sample 0, which has no label."""
    numbers = torch.tensor(indices)
    labels = torch.where(numbers == 0, -100, numbers)
    return Batch({"input_ids": numbers[:, None], "labels": labels}, len(indices))


TEN = Samples(10, labelled)
SOURCE = Source(TEN, TEN, "ten samples")


def test_a_label_out_of_range_is_named_with_its_sample() -> None:
    source = checked(SOURCE, vocabulary=100, labels=4)
    assert len(source.train) == 10
    assert source.train[[0, 3]].counted == 2
    with pytest.raises(TrainingError, match="data: sample 6 has labels of 6, and the model has labels from 0 to 3"):
        source.train[[1, 6, 7]]
    with pytest.raises(TrainingError, match="sample 4 has labels of 4"):
        source.validation[[4]]


def test_a_token_id_out_of_range_is_named_with_its_sample() -> None:
    source = checked(SOURCE, vocabulary=8, labels=None)
    with pytest.raises(TrainingError, match="data: sample 9 has input_ids of 9, and the model has token ids from 0"):
        source.train[[1, 9]]


def test_a_target_that_is_neither_a_token_nor_ignored_is_named_with_its_sample() -> None:
    def next_tokens(indices: Sequence[int]) -> Batch:
        numbers = torch.tensor(indices)[:, None]
        targets = torch.where(numbers == 0, -100, numbers - 5)
        return Batch({"tokens": numbers, "targets": targets}, len(indices))

    ten = Samples(10, next_tokens)
    source = checked(Source(ten, ten, "ten samples"), vocabulary=10, labels=None)
    assert source.train[[0, 6]].counted == 2
    with pytest.raises(TrainingError, match="data: sample 4 has targets of -1, and the model has token ids from 0"):
        source.train[[0, 4]]


def test_what_was_looked_through_before_is_not_checked_again() -> None:
    known = Source(TEN, TEN, "ten samples", highest=9)
    assert checked(known, vocabulary=10, labels=None) is known
