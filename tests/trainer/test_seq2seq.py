"""Encoder-decoders: sources with targets, and the same loss, gradients and weights as transformers has of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.trainer.sources import lines
from tests.trainer.tiny_tokenizer import NAMES
from tests.trainer.training import CPU, MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.launch_plan.model import SolvedBatch
from trainkit.trainer.checkpoint.export import export, export_adapters
from trainkit.trainer.data.sampler import SampleOrder
from trainkit.trainer.metrics.predictions import FILE, generate, predict
from trainkit.trainer.metrics.speed import tokens_in
from trainkit.trainer.models.hf import EncoderDecoder
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import first_step, prepared_model, start_record

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
T5: dict[str, Any] = {
    "kind": "hf",
    "architecture": "t5",
    "task": "seq2seq_lm",
    "config": {**SMALL, "dropout_rate": 0.0},
}
BART: dict[str, Any] = {
    "kind": "hf",
    "architecture": "bart",
    "task": "seq2seq_lm",
    "config": {
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "dropout": 0.0,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 300,
        "max_position_embeddings": 64, "pad_token_id": 0,
    },
}  # fmt: skip
ROWS = [
    {"article": "the cat sat on the mat and sat", "summary": "cat sat"},
    {"article": "what is the sum", "summary": "what is the sum of two and two"},
    {"article": "two", "summary": "sum"},
    {"article": "the mat and the cat", "summary": "mat"},
]


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    path, held_out = lines(tmp_path / "pairs.jsonl", ROWS * 10), lines(tmp_path / "held-out.jsonl", ROWS[2:])
    asked = {"kind": "dataset", "path": str(path), "validation_path": str(held_out)}
    columns = {"columns": {"source": "article", "target": "summary"}}
    return {**asked, **columns, "prompt_prefix": "sum: ", "sequence_length": 40, "target_length": 12}


def losses(settings: Settings) -> list[float]:
    return [line[name] for line in trained(settings).lines for name in ("loss", "eval_loss") if name in line]


def test_batches_are_those_of_transformers_own_collator(
    rows: dict[str, Any], make_settings: MakeSettings, make_tokenizer: Callable[..., Path]
) -> None:
    folder = make_tokenizer(bert=True)
    model = {**BART, "config": {**BART["config"], "pad_token_id": NAMES.index("[PAD]")}}
    parts = parts_of(make_settings(model=model, data={**rows, "tokenizer": str(folder)}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    features = []
    for row in ROWS:
        asked = tokenizer("sum: " + row["article"], max_length=40, truncation=True)
        labels = tokenizer(text_target=row["summary"], max_length=12, truncation=True)["input_ids"]
        features.append({"input_ids": asked["input_ids"], "attention_mask": asked["attention_mask"], "labels": labels})
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, parts.model.inner, pad_to_multiple_of=8)
    expected, found = collator(features), parts.source.train[[0, 1, 2, 3]]
    width = found.inputs["labels"].shape[1]
    assert width == 12 < expected["labels"].shape[1], "no wider than a target may be"
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(found.inputs[name], expected[name])
    assert torch.equal(found.inputs["labels"], expected["labels"][:, :width])
    model_ = parts.model
    assert isinstance(model_, EncoderDecoder)
    read = model_.shown(found.inputs)["decoder_input_ids"]
    assert torch.equal(read, expected["decoder_input_ids"][:, :width])
    assert found.counted == int((expected["labels"] != -100).sum())
    assert tokens_in(found) == found.inputs["input_ids"].numel() + found.inputs["labels"].numel()


@pytest.mark.parametrize("asked", [T5, BART], ids=["t5", "bart"])
def test_loss_and_gradients_are_those_of_a_plain_forward_of_transformers(
    asked: dict[str, Any], rows: dict[str, Any], make_settings: MakeSettings
) -> None:
    parts = parts_of(make_settings(model=asked, data=rows))
    batch, inner = parts.source.train[[0, 1, 2, 3, 4]], cast("Any", parts.model.inner)
    assert "attention_mask" in batch.inputs
    loss = parts.model(**batch.inputs) / batch.counted
    loss.backward()
    ours = {name: each.grad.clone() for name, each in inner.named_parameters()}
    inner.zero_grad()
    plain = inner(**batch.inputs).loss
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-7)
    for name, each in inner.named_parameters():
        # Additions in another order round by what is largest in a sum, not by what is left of it.
        torch.testing.assert_close(ours[name], each.grad, rtol=1e-5, atol=2e-6 * each.grad.abs().max().item())


@pytest.mark.e2e
def test_compiled_it_has_the_losses_that_it_has_uncompiled(rows: dict[str, Any], make_settings: MakeSettings) -> None:
    torch.compiler.reset()  # of how often other tests have compiled
    run: dict[str, Any] = {"model": T5, "data": rows, "train": {"steps": 2}, "eval": {"every_steps": 2, "batches": 1}}
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    found = losses(make_settings(**run, efficiency=compiled))
    assert found == pytest.approx(losses(make_settings(**run)), rel=2e-6)


def test_micro_batches_padding_and_recomputing_change_no_loss(
    rows: dict[str, Any], make_settings: MakeSettings
) -> None:
    run: dict[str, Any] = {"model": T5, "train": {"steps": 3}, "eval": {"every_steps": 3, "batches": 2}}
    whole = losses(make_settings(data=rows, **run))
    assert len(whole) == 4
    assert losses(make_settings(data=rows, **run)) == whole
    padded = losses(make_settings(data={**rows, "padding": "max_length"}, **run))
    recomputing = {"efficiency": {"gradient_checkpointing": {"every": 1}}}
    recomputed = losses(make_settings(data=rows, **run, **recomputing))
    workers = losses(make_settings(data={**rows, "workers": 1}, **run))
    assert padded == pytest.approx(whole, rel=2e-6)
    assert recomputed == pytest.approx(whole, rel=2e-6)
    assert workers == whole
    folder = Path(rows["path"]).parent / "set"
    folder.mkdir()
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text(Path(rows["path"]).read_text())
    data = {**rows, "path": str(folder), "validation_path": None}
    assert losses(make_settings(data={**data, "streaming": True}, **run)) == losses(make_settings(data=data, **run))
    at_once = replace(make_settings(data=rows, **run), batch=SolvedBatch(16, 16, 1, 1, eval_micro=8))
    assert losses(at_once)[:3] == pytest.approx(whole[:3], rel=2e-6)


def test_what_is_too_long_is_cut_and_said_and_targets_keep_their_end(
    rows: dict[str, Any], make_settings: MakeSettings, make_tokenizer: Callable[..., Path]
) -> None:
    data = {**rows, "tokenizer": str(make_tokenizer()), "target_length": 3, "sequence_length": 8}
    source = parts_of(make_settings(model=T5, data=data)).source
    labels = source.train[list(range(4))].inputs["labels"]
    assert labels.shape == (4, 3)
    assert [row[row != -100][-1] for row in labels] == [NAMES.index("<|end|>")] * 4
    assert source.train[[0]].inputs["input_ids"].shape == (1, 8)
    assert source.facts["cut"] not in (0, "")
    assert f"({source.facts['cut']} cut at 8 tokens, or a target at 3)" in source.description
    [remark] = [each for each in source.remarks if "of the texts is cut at data.sequence_length 8, or a tar" in each]
    assert "the longest has " in remark
    assert ", the longest target " in remark


def test_a_micro_batch_is_tried_with_samples_as_long_as_any_may_be(
    rows: dict[str, Any], make_settings: MakeSettings
) -> None:
    settings = make_settings(model=T5, data={**rows, "sequence_length": 64, "target_length": 56})
    source = parts_of(settings).source
    order = SampleOrder(0, len(source.train), 16)
    shapes = {name: each.shape for name, each in source.train[order.indices(0, 0, 16)].inputs.items()}
    assert (shapes["input_ids"], shapes["labels"]) == ((16, 40), (16, 32)), "the longest that there are"
    tried = first_step(settings, source, order, World(), CPU).batch
    assert {name: each.shape[1] for name, each in tried.inputs.items()} == {
        "input_ids": 64, "attention_mask": 64, "labels": 56,
    }  # fmt: skip
    assert tried.counted == 16 * 56


@pytest.mark.parametrize(("row", "message"), [
    ({"article": "a", "summary": ""}, "'summary' is empty"),
    ({"article": "a"}, "'summary' is missing"),
    ({"article": 3, "summary": "b"}, "'article' is no text but a number"),
])  # fmt: skip
def test_a_row_without_source_or_target_is_named(
    row: dict[str, Any], message: str, rows: dict[str, Any], make_settings: MakeSettings
) -> None:
    with Path(rows["path"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(TrainingError, match=f"pairs.jsonl:41: field {message}"):
        parts_of(make_settings(model=T5, data=rows))


def test_translations_lie_in_mappings_of_a_data_set(make_settings: MakeSettings, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pairs = [{"id": str(n), "translation": {"en": f"cat {n}", "fr": f"chat {n}"}} for n in range(10)]
    datasets.Dataset.from_list(pairs).to_parquet(tmp_path / "set/train.parquet")
    asked = {"kind": "dataset", "path": str(tmp_path / "set"), "sequence_length": 16}
    columns = {"source": "translation.en", "target": "translation.fr"}
    data = {**asked, "columns": columns, "prompt_prefix": "to French: "}
    inputs = parts_of(make_settings(model=T5, data=data)).source.train[[0]].inputs
    number = bytes(inputs["input_ids"][0, -1:].tolist())
    assert bytes(inputs["input_ids"][0].tolist()) == b"to French: cat " + number
    assert bytes(inputs["labels"][0, :6].tolist()) == b"chat " + number
    streamed = parts_of(make_settings(model=T5, data={**data, "streaming": True, "validation_rows": 2}))
    assert bytes(streamed.source.validation[[1]].inputs["labels"][0, :6].tolist()) == b"chat 1"
    with pytest.raises(TrainingError, match=r"row 0: field 'translation.de' is missing"):
        parts_of(make_settings(model=T5, data={**data, "columns": {**columns, "target": "translation.de"}}))
    with pytest.raises(TrainingError, match=r"there is no column 'traduction.fr' for target"):
        parts_of(make_settings(model=T5, data={**data, "columns": {**columns, "target": "traduction.fr"}}))


def test_random_pairs_are_drawn_for_measuring(make_settings: MakeSettings) -> None:
    data = {"kind": "random", "samples": 16, "sequence_length": 12, "target_length": 5, "high": 300}
    parts = parts_of(make_settings(model=T5, data=data))
    batch = parts.source.train[[3, 1]]
    assert batch.inputs["input_ids"].shape == (2, 12)
    assert batch.inputs["labels"].shape == (2, 5)
    assert (batch.counted, tokens_in(batch)) == (10, 34)
    assert torch.equal(parts.source.train[[1]].inputs["labels"], batch.inputs["labels"][1:])
    assert parts.work.flops_per_token is None
    assert start_record(parts, 0)["tokens_per_step"] == 16 * (12 + 5)


PROGRAM = """
import torch
def pairs():
    return [{"input_ids": torch.arange(6), "labels": torch.tensor([7, 8, -100]),
             "decoder_input_ids": torch.tensor([5, 7, 8])} for _ in range(40)]
"""


def test_data_of_the_users_own_may_bring_what_the_decoder_reads(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_pairs.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    parts = parts_of(make_settings(model=T5, data={"kind": "target", "target": "own_pairs:pairs"}))
    batch = parts.source.train[[0, 1]]
    assert (batch.counted, tokens_in(batch)) == (4, 18)
    with torch.no_grad():
        plain = parts.model.inner(**batch.inputs).loss  # type: ignore[operator]
        assert float(parts.model(**batch.inputs)) == pytest.approx(4 * float(plain), rel=1e-6)
    (tmp_path / "their_pairs.py").write_text(PROGRAM.replace("[7, 8, -100]", "[7, 300, -100]"))
    parts = parts_of(make_settings(model=T5, data={"kind": "target", "target": "their_pairs:pairs"}))
    with pytest.raises(TrainingError, match="sample 1 has labels of 300, and the model has labels from 0 to 299"):
        parts.source.train[[1]]


def test_predictions_are_losses_of_targets_and_a_sample_is_written_for_a_source(
    rows: dict[str, Any], make_settings: MakeSettings, make_tokenizer: Callable[..., Path]
) -> None:
    data = {**rows, "tokenizer": str(make_tokenizer())}
    sample = {"prompt": "the cat sat on the mat and sat", "tokens": 20, "temperature": 0.01}
    learning: dict[str, Any] = {"train": {"steps": 60}, "optimizer": {"lr": 3e-2}, "eval": {"every_steps": 0}}
    settings = make_settings(
        model=T5, data=data, sample=sample, predict={"split": "validation", "tokens": 9}, **learning
    )
    parts = parts_of(settings)
    before = generate(parts)
    trained(parts)
    assert generate(parts) == "cat sat" != before
    predict(parts)
    (first, second) = [json.loads(line) for line in (settings.run_dir / FILE).read_text().splitlines()]
    batch = parts.source.validation[[0]]
    with torch.no_grad():
        expected = float(parts.model.eval()(**batch.inputs)) / batch.counted
    assert first["sample"] == 40
    assert first["loss"] == pytest.approx(expected, abs=2e-6)
    assert first["counted"] == batch.counted
    assert (second["sample"], first["prediction"], second["prediction"]) == (41, "sum", "mat")
    assert {"source", "reference"} <= first.keys()


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # T5 1.1


@pytest.mark.parametrize("asked", [T5, {**T5, "config": {**T5["config"], **GATED}}, BART], ids=["t5", "t5 1.1", "bart"])
def test_from_pretrained_reads_what_was_trained_and_goes_on_with_it(
    asked: dict[str, Any], rows: dict[str, Any], make_settings: MakeSettings
) -> None:
    settings = make_settings(model=asked, data=rows, train={"steps": 2}, checkpoint={"every_steps": 2})
    parts = parts_of(settings)
    trained(parts)
    out = settings.run_dir / "out"
    export(settings.run_dir / "checkpoints/step-00000002", out)
    read, batch = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval(), parts.source.train[[0, 1]]
    onward = prepared_model(make_settings(model={"kind": "hf", "path": str(out), "task": "seq2seq_lm"}, data=rows))
    with torch.no_grad():
        expected = float(parts.model.eval()(**batch.inputs)) / batch.counted
        assert float(read(**batch.inputs).loss) == pytest.approx(expected, rel=1e-6)
        assert float(onward.eval()(**batch.inputs)) / batch.counted == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # as peft calls it
def test_adapters_go_into_encoder_and_decoder_and_peft_reads_them(
    rows: dict[str, Any], make_settings: MakeSettings, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    prepared_model(make_settings(model=T5, data=rows)).inner.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    asked = {"kind": "hf", "path": str(tmp_path / "base"), "task": "seq2seq_lm"}
    learning: dict[str, Any] = {"train": {"steps": 2}, "optimizer": {"lr": 1e-2}, "checkpoint": {"every_steps": 2}}
    settings = make_settings(model=asked, data=rows, peft={"kind": "lora", "rank": 2}, **learning)
    parts = parts_of(settings)
    trained(parts)
    adapted = {name.partition(".lora_")[0] for name, _ in parts.model.named_parameters() if ".lora_" in name}
    # q, k, v and o of two blocks' attention on each side, of the decoder's to the encoder, and two layers beside
    assert len(adapted) == 2 * (4 + 2) + 2 * (4 + 4 + 2)
    export_adapters(settings.run_dir / "checkpoints/step-00000002", tmp_path / "adapters")
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    base = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    read, batch = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval(), parts.source.train[[0, 1]]
    with torch.no_grad():
        expected = float(parts.model.eval()(**batch.inputs)) / batch.counted
        assert float(read(**batch.inputs).loss) == pytest.approx(expected, rel=1e-6)


def test_an_encoder_decoder_says_what_it_lacks(rows: dict[str, Any], make_settings: MakeSettings) -> None:
    remarks = [text for _, text in parts_of(make_settings(model=T5, data=rows)).model.remarks]
    assert any("decoders begin with the padding token" in text for text in remarks)
    begun = {**T5, "config": {**T5["config"], "decoder_start_token_id": 5}}
    model = parts_of(make_settings(model=begun, data=rows)).model
    assert isinstance(model, EncoderDecoder)
    assert model.begin(torch.tensor([[7]])).tolist() == [[5]]
    for config, data, message in (
        ({"pad_token_id": None}, {}, "model.config.pad_token_id is not set"),
        ({"pad_token_id": 7}, {}, "model.config.pad_token_id is 7, and texts are padded with 0"),
    ):
        with pytest.raises(TrainingError, match=message):
            parts_of(make_settings(model={**T5, "config": {**T5["config"], **config}}, data={**rows, **data}))
    with pytest.raises(TrainingError, match="target_length: the model has 64 places, fewer than 65"):
        parts_of(make_settings(model=BART, data={**rows, "target_length": 65}))
    parts_of(make_settings(model={**T5, "config": {**T5["config"]}}, data={**rows, "sequence_length": 2000}))


# Of each the settings that make it small, by their own names.
FAMILIES = ("blenderbot-small", "longt5", "m2m_100", "marian", "mbart", "mt5", "pegasus", "switch_transformers", "umt5")
SIZES = {
    **SMALL, **BART["config"], "dropout_rate": 0.0, "num_experts": 2, "decoder_vocab_size": 300,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 3, "eos_token_id": 1, "router_jitter_noise": 0.0, "bos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_has_blocks_on_both_sides_and_the_loss_of_its_own(
    architecture: str, rows: dict[str, Any], make_settings: MakeSettings
) -> None:
    known = transformers.AutoConfig.for_model(architecture)
    names = {*known.to_dict(), "decoder_start_token_id", "attention_dropout", "activation_dropout"}
    config = {name: value for name, value in SIZES.items() if name in names and name not in known.attribute_map}
    parts = parts_of(make_settings(model={**T5, "architecture": architecture, "config": config}, data=rows))
    sides = {name.partition(".layers.")[0].partition(".block.")[0] for name, each in parts.model.named_modules()
             if each in set(parts.model.blocks)}  # fmt: skip
    assert len(sides) == 2, sides
    batch, model = parts.source.train[[0, 1, 2]], parts.model.eval()
    with torch.no_grad():
        ours, plain = float(model(**batch.inputs)) / batch.counted, model.inner(**batch.inputs).loss  # type: ignore[operator]
    assert ours == pytest.approx(float(plain), rel=1e-6)
