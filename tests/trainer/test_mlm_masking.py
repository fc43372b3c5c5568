"""Masked language models: which tokens are hidden, and that nothing but seed and place decides it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.sources import lines
from tests.trainer.tiny_tokenizer import NAMES
from tests.trainer.training import MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.launch_plan.model import SolvedBatch
from trainkit.trainer.data.loader import training_batches
from trainkit.trainer.data.source import Batch
from trainkit.trainer.setup import Parts

CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
CONFIG |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 300}  # type: ignore[dict-item]
BERT: dict[str, Any] = {"kind": "hf", "architecture": "bert", "task": "masked_lm", "config": CONFIG}
RANDOM = {"kind": "random", "samples": 64, "sequence_length": 32, "low": 0, "high": 256}
MASK = NAMES.index("[MASK]")


def batches(parts: Parts, steps: range, ranks: int = 1, rank: int = 0, workers: int = 0) -> list[Batch]:
    shape = SolvedBatch(16, 2, 8 // ranks, ranks, eval_micro=4)
    data = parts.settings.recipe.data.model_copy(update={"workers": workers})
    return list(training_batches(parts.source.train, parts.order, shape, rank, steps=steps, data=data, pin=False))


def test_an_eighth_is_hidden_a_tenth_of_it_replaced_and_a_tenth_left(make_settings: MakeSettings) -> None:
    data = {**RANDOM, "samples": 512, "sequence_length": 256}
    parts = parts_of(make_settings(model={**BERT, "mask_token": 299}, data=data))
    [plain] = [parts.source.train[list(range(512))].inputs]
    chosen = plain["labels"] != -100
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.005)
    shown, truth = plain["input_ids"][chosen], plain["labels"][chosen]
    assert (shown == 299).float().mean() == pytest.approx(0.8, abs=0.015)
    assert (shown == truth).float().mean() == pytest.approx(0.1, abs=0.015)
    assert len(set(shown[(shown != 299) & (shown != truth)].tolist())) > 200, "replaced by any token"


def test_special_tokens_and_padding_are_never_hidden(
    make_tokenizer: Callable[..., Path], make_settings: MakeSettings, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": f"{text}{number}"} for number in range(50)
                                        for text in ("the cat sat", "what is the sum of two")])  # fmt: skip
    data = {"kind": "dataset", "path": str(path), "tokenizer": str(make_tokenizer(bert=True)), "sequence_length": 12}
    model = {**BERT, "config": {**CONFIG, "pad_token_id": NAMES.index("[PAD]")}, "mask_share": 0.9}
    inputs = parts_of(make_settings(model=model, data={**data, "packing": "none"})).source.train[range(90)].inputs
    ids, labels = inputs["input_ids"], inputs["labels"]
    assert ids[:, 0].eq(NAMES.index("[CLS]")).all()
    assert (labels == -100).logical_or(labels >= len(NAMES)).all()
    assert labels[inputs["attention_mask"] == 0].eq(-100).all()
    ends = (inputs["attention_mask"].sum(dim=1) - 1)[:, None]
    assert ids.gather(1, ends).eq(NAMES.index("[SEP]")).all()
    assert (ids == MASK).any()


def test_ranks_workers_and_resuming_hide_the_same_tokens(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(model={**BERT, "mask_token": 299}, data=RANDOM))
    whole = batches(parts, range(4), workers=1)
    assert all(
        torch.equal(each.inputs["labels"], batches(parts, range(4))[n].inputs["labels"]) for n, each in enumerate(whole)
    )
    resumed = batches(parts, range(3, 4))[0]
    assert torch.equal(resumed.inputs["input_ids"], whole[3].inputs["input_ids"])
    halves = [batches(parts, range(3, 4), ranks=2, rank=rank)[0] for rank in (0, 1)]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([half.inputs[name] for half in halves]), whole[3].inputs[name])
    again = parts.order.indices(4, 0, 16)  # 64 samples: the second epoch
    assert sorted(again + [each for step in (5, 6, 7) for each in parts.order.indices(step, 0, 16)]) == list(range(64))
    assert sum(batch.counted for batch in batches(parts, range(4, 8))) != sum(batch.counted for batch in whole)


def test_the_loss_is_a_mean_over_the_hidden_tokens_of_the_global_batch(make_settings: MakeSettings) -> None:
    settings = make_settings(model={**BERT, "mask_token": 299}, data=RANDOM, train={"steps": 1}, optimizer={"lr": 0.0})
    parts = parts_of(settings)
    batch = batches(parts, range(1))[0]
    inputs = {name: values for name, values in batch.inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = parts.model(**inputs).flatten(0, 1)
    mean = torch.nn.functional.cross_entropy(logits, batch.inputs["labels"].flatten(), ignore_index=-100)
    assert trained(parts).progress.loss == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "model.mask_token: the id of the mask token is unknown"),
        ({"mask_token": 300}, "model.mask_token: 300 is not a token id of the model, whose ids are 0 to 299"),
    ],
)
def test_a_mask_token_must_be_known(model: dict[str, Any], message: str, make_settings: MakeSettings) -> None:
    with pytest.raises(TrainingError, match=message):
        parts_of(make_settings(model={**BERT, **model}, data=RANDOM))


def test_text_files_can_be_masked_too(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(model={**BERT, "mask_token": 299}))
    batch = parts.source.train[[0, 1]]
    assert batch.counted == int((batch.inputs["labels"] != -100).sum()) > 0
    last = parts.source.train[[len(parts.source.train) - 1]].inputs
    assert last["labels"][last["attention_mask"] == 0].eq(-100).all()
