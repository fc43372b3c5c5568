"""The guides' dummy data set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.training import MakeSettings, parts_of
from trainkit.errors import TrainingError
from trainkit.recipe.schema import RandomData, Recipe
from trainkit.trainer.data.random import labelled_batch, open_source
from trainkit.trainer.data.vocabulary import fitting_source
from trainkit.trainer.models.gpt import build_gpt


def test_random_data_is_the_guides_dummy_set_unless_told_otherwise() -> None:
    batch = labelled_batch(RandomData(), 0, 0, range(512))
    assert batch.inputs["input_ids"].shape == (512, 512)
    assert 100 <= int(batch.inputs["input_ids"].min()) < 105
    assert 29990 < int(batch.inputs["input_ids"].max()) < 30000
    assert batch.inputs["labels"].tolist() == [0] * 512
    assert batch.counted == 512
    two = labelled_batch(RandomData(classes=2), 0, 0, range(512)).inputs["labels"]
    assert 200 < int(two.sum()) < 312


def test_a_sample_is_a_function_of_the_seed_and_its_number() -> None:
    recipe = Recipe.model_validate(
        {"model": {"kind": "gpt", "vocab_size": 30000}, "data": {"kind": "random", "samples": 16}}
    )
    source, again = (open_source(recipe, Path()) for _ in range(2))
    assert torch.equal(source.train[[3, 5]].inputs["tokens"], again.train[[9, 3, 5]].inputs["tokens"][1:])
    assert not torch.equal(source.train[[0]].inputs["tokens"], source.validation[[0]].inputs["tokens"])
    batch = source.train[[0, 1]]
    assert torch.equal(batch.inputs["tokens"][:, 1:], batch.inputs["targets"][:, :-1])
    assert batch.counted == 2 * 512


def test_the_native_model_trains_on_it_as_on_language(make_settings: MakeSettings) -> None:
    data = {"kind": "random", "samples": 32, "low": 0, "high": 200, "sequence_length": 32}
    parts = parts_of(make_settings(data=data))
    assert parts.evaluation.measured(parts.strategy, parts.eval_autocast)["loss"] == pytest.approx(
        5.5, abs=0.2
    )  # ln 256


def test_ids_outside_the_vocabulary_are_refused_before_the_start() -> None:
    recipe = Recipe.model_validate({"data": {"kind": "random"}})
    with pytest.raises(TrainingError, match=r"a vocabulary of 256 is too small for token 29999 of data\.high"):
        fitting_source(open_source(recipe, Path()), build_gpt(recipe), recipe)


def test_an_empty_range_of_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="low 500 and below high 500"):
        RandomData(low=500, high=500)
