"""Predictions for single samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_runs import Case

from tests.trainer.sources import BERT, TINY, lines
from tests.trainer.training import MakeSettings, parts_of
from tests.warm_ranks import run_case
from trainkit.trainer.metrics.predictions import FILE, predict
from trainkit.trainer.settings import Settings


def predicted(settings: Settings) -> list[dict[str, Any]]:
    predict(parts_of(settings))
    return [json.loads(line) for line in (settings.run_dir / FILE).read_text().splitlines()]


def rows(tmp_path: Path, count: int) -> dict[str, Any]:
    """The last third of them is evaluated on."""
    moods = [{"text": chr(97 + number) * 3, "mood": "good" if number % 2 else "bad"} for number in range(count)]
    trains = count - round(0.3 * count)
    path, held_out = lines(tmp_path / "a.jsonl", moods[:trains]), lines(tmp_path / "b.jsonl", moods[trains:])
    asked = {"kind": "dataset", "path": str(path), "validation_path": str(held_out)}
    return {**asked, "columns": {"text": "text"}, "packing": "none", "sequence_length": 8}


def test_every_sample_gets_its_label_by_name_with_all_probabilities(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    data = {**rows(tmp_path, 11), "columns": {"label": "mood"}}
    found = predicted(make_settings(model=BERT, data=data, predict={"split": "all"}))
    assert [each["sample"] for each in found] == list(range(11))
    assert [each["target"] for each in found] == [number % 2 for number in range(11)]
    for each in found:
        assert sum(each["probabilities"]) == pytest.approx(1, abs=1e-5)
        assert each["probabilities"][each["label"]] == max(each["probabilities"])
        assert each["prediction"] == ["bad", "good"][each["label"]]
        assert each["reference"] == ["bad", "good"][each["target"]]
        assert each["source"] == chr(97 + each["sample"]) * 3
    held_out = predicted(make_settings(model=BERT, data=data, predict={"split": "validation"}))
    assert [each["sample"] for each in held_out] == [8, 9, 10]


def test_predictions_are_not_written_through_a_link(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(predict={"split": "validation"})
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    (tmp_path / "victim").write_text("precious")
    (settings.run_dir / f".{FILE}.tmp").symlink_to(tmp_path / "victim")
    assert predicted(settings)
    assert (tmp_path / "victim").read_text() == "precious"


class OnMps(torch.Tensor):
    """A tensor as on MPS: all that is made of it is too, until it is copied to the host, and nothing has 64 bits."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func is torch.Tensor.cpu:
            return made.as_subclass(torch.Tensor)
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return made


def test_nothing_is_computed_in_64_bits_on_the_device(make_settings: MakeSettings) -> None:
    settings = make_settings(predict={"split": "validation"})
    expected = predicted(settings)
    parts = parts_of(settings)
    parts.model.register_forward_hook(lambda module, inputs, output: output.as_subclass(OnMps))
    predict(parts)
    assert [json.loads(line) for line in (settings.run_dir / FILE).read_text().splitlines()] == expected


@pytest.mark.parametrize("own", [False, True])
def test_every_sample_of_a_language_model_gets_its_loss(
    own: bool, make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"kind": "hf", "architecture": "llama", "config": TINY}
    program = "from torch.nn.functional import cross_entropy\n\ndef loss(outputs, inputs):\n    "
    program += "return cross_entropy(outputs.logits.flatten(0, 1), inputs['targets'].flatten())\n"
    name = f"loss_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    train = {"loss": f"{name}:loss"} if own else {}
    settings = make_settings(model=model, data=rows(tmp_path, 7), train=train, predict={"split": "all"})
    found = predicted(settings)
    parts = parts_of(settings)
    for each, number in zip(found, range(7), strict=True):
        samples, first = (parts.source.train, 0) if number < 5 else (parts.source.validation, 5)
        batch = samples[[number - first]]
        with torch.no_grad():
            alone = float(parts.model.eval()(**batch.inputs)) / batch.counted
        shown = {"source": "", "reference": chr(97 + number) * 3}  # a text alone has no source
        assert each == {"sample": number, **shown, "loss": pytest.approx(alone, abs=1e-5), "counted": 2}


@pytest.mark.e2e
def test_ranks_write_each_sample_once_and_in_order_after_training(corpus_folder: Path, tmp_path: Path) -> None:
    found = []
    for name, strategy, ranks in (("one", "single", 1), ("two", "fsdp", 2)):
        case = Case({"kind": strategy}, ranks=ranks).changed(
            data={**rows(tmp_path, 15)}, predict={"split": "all"}, train={"steps": 0}
        )
        run_case(tmp_path / name, case, corpus_folder)
        found.append([json.loads(line) for line in next((tmp_path / name).rglob(FILE)).read_text().splitlines()])
    assert [each["sample"] for each in found[1]] == list(range(15))
    for one, two in zip(*found, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=2e-6)
