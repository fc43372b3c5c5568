"""Metrics of an evaluation: the numbers of scikit-learn and sacrebleu on all predictions, on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategy_runs import Case

from tests.trainer.sources import BERT, TINY, lines
from tests.trainer.training import MakeSettings, Trained, parts_of, trained
from tests.warm_ranks import run_case
from trainkit.errors import TrainingError
from trainkit.trainer.metrics import scores
from trainkit.trainer.metrics.evaluation import Best
from trainkit.trainer.metrics.predictions import FILE, predict
from trainkit.trainer.metrics.texts import texts_of
from trainkit.trainer.setup import Parts

sklearn = pytest.importorskip("sklearn.metrics")
sacrebleu = pytest.importorskip("sacrebleu")
MOODS = ("bad", "good", "odd")
T5: dict[str, Any] = {
    "kind": "hf",
    "architecture": "t5",
    "task": "seq2seq_lm",
    "config": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 300,
               "dropout_rate": 0.0},
}  # fmt: skip
LLAMA: dict[str, Any] = {"kind": "hf", "architecture": "llama", "config": {**TINY, "vocab_size": 300}}
OWN = """
import math


def share_of_first(predictions, references):
    return predictions.count(predictions[0]) / len(references)


def several(predictions, references):
    return {"count": len(predictions), "longest": max(map(len, predictions)) if isinstance(predictions[0], str) else 0}


def wrong(predictions, references):
    return "good"


def failing(predictions, references):
    return 1 / 0
"""


def classified(tmp_path: Path, labels: int = 3, count: int = 26) -> dict[str, Any]:
    """Labelled rows; 13 of them are evaluated on, which fill no whole number of passes."""
    rows = [
        {"text": chr(97 + number % 7) * (1 + number % 5), "label": MOODS[number % labels]} for number in range(count)
    ]
    held_out = [{"text": row["text"] + "x", "label": row["label"]} for row in rows[:13]]
    path, other = lines(tmp_path / "rows.jsonl", rows), lines(tmp_path / "held-out.jsonl", held_out)
    return {"kind": "dataset", "path": str(path), "validation_path": str(other), "sequence_length": 8}


def prompted(tmp_path: Path, model: Mapping[str, Any] = T5) -> dict[str, Any]:
    """Prompts with answers; 7 of them are evaluated on."""
    rows = [{"prompt": f"{'ab' * (1 + number % 3)} {number} ", "completion": f"c{number % 5}"} for number in range(40)]
    path, other = lines(tmp_path / "prompts.jsonl", rows), lines(tmp_path / "asked.jsonl", rows[::6])
    lengths = {"sequence_length": 24} | ({"target_length": 8} if model is T5 else {})
    return {"kind": "dataset", "path": str(path), "validation_path": str(other), **lengths}


def evaluations(run: Trained) -> list[dict[str, Any]]:
    return [line for line in run.lines if "eval_loss" in line]


def predictions(parts: Parts) -> list[dict[str, Any]]:
    predict(parts)
    return [json.loads(line) for line in (parts.settings.run_dir / FILE).read_text().splitlines()]


@pytest.mark.parametrize("labels", [2, 3])
def test_a_classifier_has_the_figures_of_scikit_learn_on_all_held_out_samples(
    labels: int, make_settings: MakeSettings, tmp_path: Path
) -> None:
    names = ["accuracy", "balanced_accuracy", "f1", "f1_macro", "f1_micro", "f1_weighted", "precision", "recall",
             "matthews_corrcoef"]  # fmt: skip
    settings = make_settings(
        model=BERT,
        data=classified(tmp_path, labels),
        train={"steps": 4},
        eval={"every_steps": 2, "metrics": names},
        predict={"split": "validation"},
    )
    run = trained(settings)
    last = evaluations(run)[-1]
    found = predictions(run.parts)
    given, wanted = [each["label"] for each in found], [each["target"] for each in found]
    average: dict[str, Any] = {"average": "binary" if labels == 2 else "macro", "zero_division": 0}
    assert len(found) == 13
    expected = {
        "accuracy": sklearn.accuracy_score(wanted, given),
        "balanced_accuracy": sklearn.balanced_accuracy_score(wanted, given),
        "f1": sklearn.f1_score(wanted, given, **average),
        "f1_macro": sklearn.f1_score(wanted, given, average="macro"),
        "f1_micro": sklearn.f1_score(wanted, given, average="micro"),
        "f1_weighted": sklearn.f1_score(wanted, given, average="weighted"),
        "precision": sklearn.precision_score(wanted, given, **average),
        "recall": sklearn.recall_score(wanted, given, **average),
        "matthews_corrcoef": sklearn.matthews_corrcoef(wanted, given),
    }
    assert {name: last[f"eval_{name}"] for name in names} == expected
    assert run.result["metrics"] == expected


def test_without_a_word_a_classifier_has_accuracy_and_f1_and_a_language_model_perplexity(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"train": {"steps": 2}, "eval": {"every_steps": 2}}
    (line,) = evaluations(trained(make_settings(model=BERT, data=classified(tmp_path), **asked)))
    assert [*line] == ["step", "eval_loss", "eval_accuracy", "eval_f1", "eval_seconds"]
    (line,) = evaluations(trained(make_settings(**asked)))
    assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    alone = {**asked, "eval": {"every_steps": 2, "metrics": []}}
    (line,) = evaluations(trained(make_settings(**alone)))
    assert [*line] == ["step", "eval_loss", "eval_seconds"]


def test_the_loss_of_a_classifier_is_what_its_model_says(make_settings: MakeSettings, tmp_path: Path) -> None:
    data = classified(tmp_path)
    asked: tuple[dict[str, Any], ...] = ({"metrics": None}, {"metrics": []})
    parts = [parts_of(make_settings(model=BERT, data=data, eval=each)) for each in asked]
    losses = [each.evaluation.measured(each.strategy, each.eval_autocast)["loss"] for each in parts]
    assert losses[0] == losses[1]


def test_the_accuracy_of_a_language_model_is_the_share_of_its_likeliest_tokens(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(eval={"metrics": ["accuracy"]}))
    found = parts.evaluation.measured(parts.strategy, parts.eval_autocast)["accuracy"]
    right = counted = 0
    with torch.no_grad():
        for numbers in parts.evaluation.passes:
            batch = parts.source.validation[numbers]
            likeliest, targets = parts.model(batch.inputs["tokens"]).argmax(dim=-1), batch.inputs["targets"]
            right += int(((likeliest == targets) & (targets >= 0)).sum())
            counted += batch.counted
    assert found == right / counted


@pytest.mark.parametrize("packing", ["isolated", "none"])
def test_an_answer_is_found_behind_its_prompt_in_every_kind_of_sample(
    packing: str, make_settings: MakeSettings, tmp_path: Path
) -> None:
    data = {**prompted(tmp_path, LLAMA), "packing": packing}
    parts = parts_of(make_settings(model=LLAMA, data=data))
    rows = [json.loads(line) for line in Path(data["validation_path"]).read_text().splitlines()]
    samples, encoder = parts.source.validation, parts.source.encoder
    found = [
        (encoder.decode(text.source.tolist()), encoder.decode(text.reference.tolist()))
        for number in range(len(samples))
        for text in texts_of(samples[[number]].inputs)
    ]
    assert sorted(found) == sorted((row["prompt"], row["completion"]) for row in rows)


@pytest.mark.parametrize("model", [T5, LLAMA], ids=["t5", "llama"])
def test_texts_that_are_written_are_compared_with_their_references(
    model: dict[str, Any], make_settings: MakeSettings, tmp_path: Path
) -> None:
    pytest.importorskip("rouge_score")
    from rouge_score.rouge_scorer import RougeScorer

    names = ["chrf", "bleu", "ter", "rouge", "exact_match"]
    settings = make_settings(
        model=model,
        data=prompted(tmp_path, model),
        train={"steps": 60},
        optimizer={"lr": 3e-2},
        eval={"every_steps": 60, "metrics": names, "tokens": 6},
        predict={"split": "validation", "tokens": 6},
    )
    run = trained(settings)
    (line,) = evaluations(run)
    found = predictions(run.parts)
    given, wanted = [each["prediction"] for each in found], [each["reference"] for each in found]
    rows = [json.loads(line) for line in Path(settings.recipe.data.validation_path).read_text().splitlines()]  # type: ignore[union-attr, arg-type]
    assert sorted((each["source"], each["reference"]) for each in found) == sorted(
        (row["prompt"], row["completion"]) for row in rows
    )
    assert any(given)
    assert line["eval_chrf"] == pytest.approx(sacrebleu.corpus_chrf(given, [wanted]).score)
    assert line["eval_bleu"] == pytest.approx(sacrebleu.corpus_bleu(given, [wanted]).score)
    assert line["eval_ter"] == pytest.approx(sacrebleu.corpus_ter(given, [wanted]).score)
    rouge = [RougeScorer(["rougeL"]).score(to, made)["rougeL"].fmeasure for to, made in zip(wanted, given, strict=True)]
    assert line["eval_rougeL"] == pytest.approx(np.mean(rouge))
    assert {"eval_rouge1", "eval_rouge2", "eval_rougeLsum"} <= line.keys()
    alike = [to == made for to, made in zip(wanted, given, strict=True)]
    assert line["eval_exact_match"] == pytest.approx(np.mean(alike))


def test_what_a_model_writes_is_what_transformers_writes_for_each_prompt_alone(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    predict_ = {"split": "validation", "tokens": 6}
    parts = parts_of(make_settings(model=LLAMA, data=prompted(tmp_path, LLAMA), predict=predict_))
    for each in predictions(parts):
        ids = torch.tensor([[*each["source"].encode()]])
        with torch.no_grad():
            made = parts.model.inner.generate(  # type: ignore[operator, union-attr]
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        assert each["prediction"] == parts.source.encoder.decode(made[0, ids.shape[1] :].tolist())


def test_no_more_is_written_than_a_decoder_has_places_for(make_settings: MakeSettings, tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 300}  # fmt: skip
    bart = {**T5, "architecture": "bart", "config": {**sizes, "max_position_embeddings": 32, "pad_token_id": 0}}
    predict_ = {"split": "validation", "tokens": 40}
    parts = parts_of(make_settings(model=bart, data=prompted(tmp_path, bart), predict=predict_))
    found = predictions(parts)
    assert len(found) == len(parts.source.validation)
    assert all(len(each["prediction"].encode()) < 3 * 32 for each in found)  # a byte that is no text becomes three


def test_an_own_metric_gets_predictions_and_references_and_names_its_numbers(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_metrics.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    asked = {"metrics": ["own_metrics:share_of_first", "own_metrics:several", "accuracy"], "every_steps": 2}
    run = trained(make_settings(model=BERT, data=classified(tmp_path), eval=asked, train={"steps": 2}))
    (line,) = evaluations(run)
    assert line["eval_count"] == 13
    assert 0 < line["eval_share_of_first"] <= 1
    for name, why in {
        "wrong": "gives str for 'wrong', and not a number",
        "failing": "failed: ZeroDivisionError",
    }.items():
        settings = make_settings(
            model=BERT, data=classified(tmp_path), eval={**asked, "metrics": [f"own_metrics:{name}"]}
        )
        with pytest.raises(TrainingError, match=why):
            trained(settings)
    with pytest.raises(TrainingError, match="cannot be imported"):
        parts_of(make_settings(model=BERT, data=classified(tmp_path), eval={"metrics": ["own_metrics:gone"]}))


def test_the_best_evaluation_is_by_the_metric_that_the_recipe_names(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "model": BERT,
        "data": classified(tmp_path),
        "train": {"steps": 8},
        "eval": {"every_steps": 1, "best_metric": "accuracy", "patience": 3},
        "optimizer": {"lr": 3e-3},
    }
    run = trained(make_settings(**changes, checkpoint={"keep_best": True, "at_end": True}))
    figures = {line["step"]: line["eval_accuracy"] for line in evaluations(run)}
    best = max(figures, key=figures.__getitem__)  # the first of equal ones
    outcome = run.result
    assert (outcome["best_metric"], outcome["best_step"], outcome["best_value"]) == ("accuracy", best, figures[best])
    kept = {int(path.name[-8:]) for path in (run.parts.settings.run_dir / "checkpoints").glob("step-*")}
    assert best in kept
    assert run.progress.stopped_early == (len(figures) < 8 or len(figures) - best >= 3)


def test_a_number_that_no_evaluation_gives_cannot_decide(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_numbers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    asked = {"every_steps": 2, "metrics": ["own_numbers:several"], "best_metric": "cuont"}
    settings = make_settings(model=BERT, data=classified(tmp_path), eval=asked, train={"steps": 2})
    with pytest.raises(TrainingError, match="an evaluation gives loss, count, longest, and no cuont"):
        trained(settings)


def test_the_best_goes_on_from_a_checkpoint_by_the_same_metric_alone(caplog: pytest.LogCaptureFixture) -> None:
    best = Best("accuracy", lowest=False)
    best.restore({"metric": "accuracy", "lowest": False, "value": 0.5, "step": 3, "since": 1})
    assert (best.value, best.step, best.since) == (0.5, 3, 1)
    assert best.note(4, 0.6)
    assert not best.note(5, 0.55)
    other = Best("f1", lowest=False)
    other.restore({"metric": "accuracy", "value": 0.5, "step": 3, "since": 1})
    assert other.value is None
    assert "the checkpoint's was by accuracy, and eval.best_metric is f1" in caplog.text
    old = Best()
    old.restore({"loss": 2.5, "step": 7, "since": 2})  # as releases before metrics wrote it
    assert (old.value, old.step, old.since) == (2.5, 7, 2)


def test_what_is_not_installed_is_left_out_or_named_where_the_recipe_asks_for_it(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "find_spec", lambda name: None)
    parts = parts_of(make_settings(model=BERT, data=classified(tmp_path)))
    assert [*parts.evaluation.measured(parts.strategy, parts.eval_autocast)] == ["loss"]
    with pytest.raises(TrainingError, match=r"eval.metrics: f1 needs scikit-learn, which is not installed") as caught:
        parts_of(make_settings(model=BERT, data=classified(tmp_path), eval={"metrics": ["f1"]}))
    assert "pip install 'scikit-learn>=" in caught.value.hints[0]


def test_an_evaluation_that_runs_out_of_memory_says_what_to_lower(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(make_settings(train={"steps": 1}, eval={"every_steps": 1}))

    def full(*_: object, **__: object) -> None:
        torch.empty(1 << 60)  # more than there is anywhere

    monkeypatch.setattr(parts.evaluation, "_samples", _Samples(full))
    with pytest.raises(TrainingError, match="memory ran out in an evaluation, in a pass of 4 samples") as caught:
        trained(parts)
    assert caught.value.hints == ("lower batch.eval_micro (it is 4)",)


class _Samples:
    def __init__(self, full: Callable[..., None]) -> None:
        self._full = full

    def __getitem__(self, numbers: Sequence[int]) -> None:
        self._full()


def test_a_classifier_has_a_rate_in_samples_and_none_in_tokens(make_settings: MakeSettings, tmp_path: Path) -> None:
    run = trained(make_settings(model=BERT, data=classified(tmp_path), train={"steps": 3}))
    assert all("tokens_per_second" not in line for line in run.lines if "loss" in line)
    assert run.result["tokens_per_second"] is None
    assert run.result["samples_per_second"] > 0


RANKS = ("ddp", "fsdp", "zero2", "zero3")


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", RANKS)
@pytest.mark.parametrize("model", [BERT, T5, LLAMA], ids=["bert", "t5", "llama"])
def test_any_number_of_ranks_gives_the_same_figures(
    strategy: str, model: dict[str, Any], corpus_folder: Path, tmp_path: Path
) -> None:
    data = classified(tmp_path) if model is BERT else prompted(tmp_path, model)
    metrics = None if model is BERT else ["chrf", "rougeL", "exact_match"]
    sections: dict[str, Any] = {"model": model, "data": data, "train": {"steps": 6}, "predict": {"split": "validation"}}
    sections["eval"] = {
        "every_steps": 3,
        "metrics": metrics,
        "batches": 9,
        **({} if metrics is None else {"tokens": 5}),
    }
    found = []
    for name, kind, ranks in (("one", "single", 1), ("several", strategy, 4 if strategy == "ddp" else 2)):
        case = Case({"kind": kind}, ranks=ranks).changed(**sections)
        run_case(tmp_path / name, case, corpus_folder)
        lines_ = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        figures = [{key: value for key, value in line.items() if key.startswith("eval_") and key != "eval_seconds"}
                   for line in lines_ if "eval_loss" in line]  # fmt: skip
        written = [json.loads(line) for line in (tmp_path / name / FILE).read_text().splitlines()]
        found.append((figures, [each["prediction"] for each in written]))
    (one, first), (other, second) = found
    assert [*one[0]] == [*other[0]]
    for left, right in zip(one, other, strict=True):
        assert left == pytest.approx(right, rel=1e-5)
    assert first == second
