"""Trained models answer alike from a checkpoint, an export and adapters; chats through their template, to its stop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.sources import lines
from tests.trainer.tiny_llama import SIZES, save_llama
from tests.trainer.tiny_tokenizer import CHATML, NAMES, save_tokenizer
from tests.trainer.training import CPU, MakeSettings, trained
from trainkit.data.tokenizer import Encoder, open_encoder
from trainkit.errors import TrainingError
from trainkit.trainer import generate as module
from trainkit.trainer.checkpoint.export import export, export_adapters
from trainkit.trainer.data.source import sample_length
from trainkit.trainer.generate import Answerer, Drawing, Sampling, open_checkpoint, open_folder
from trainkit.trainer.metrics.predictions import uses
from trainkit.trainer.prompts import PromptError, TextStream, prompt_ids, stop_ids
from trainkit.trainer.settings import Settings

transformers = pytest.importorskip("transformers")
GREEDY = Sampling(tokens=24, temperature=0)
CHATS = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
    for asked, answer in (("the cat", "sat on the mat"), ("two and two", "the sum ✓"))
]
LEARNING: dict[str, Any] = {"optimizer": {"lr": 1e-2}, "schedule": {"warmup_steps": 2}, "eval": {"every_steps": 0}}


def steps(number: int) -> dict[str, Any]:
    return {"train": {"steps": number}, "checkpoint": {"every_steps": number}}


def saved(settings: Settings) -> Path:
    return next((settings.run_dir / "checkpoints").iterdir())


def written(model: Answerer, row: Mapping[str, Any], sampling: Sampling = GREEDY, **options: Any) -> str:
    """The answer, which is also what was written piece by piece."""
    pieces: list[str] = []
    answer = model.answer(model.ids(row, **options), sampling, pieces.append)
    assert "".join(pieces) == answer.text
    return answer.text


def on_chats(folder: Path, base: Path) -> dict[str, Any]:
    path = lines(folder / "chats.jsonl", CHATS * 8)
    return {"kind": "dataset", "path": str(path), "tokenizer": str(base),
            "sequence_length": 64, "packing": "none"}  # fmt: skip


def test_a_chat_model_answers_what_it_was_taught_in_its_sample_from_its_checkpoint_and_its_export(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base")
    settings = make_settings(
        model={"kind": "hf", "path": str(base)},
        data=on_chats(tmp_path, base),
        sample={"prompt": "the cat", "tokens": 30, "temperature": 0.01},
        **LEARNING,
        **steps(30),
    )
    assert trained(settings).result["sample"] == "sat on the mat"
    export(saved(settings), tmp_path / "out")
    opened = [open_checkpoint(saved(settings), CPU), open_folder(tmp_path / "out", CPU), open_folder(base, CPU)]
    for model in opened:
        assert model.is_chat(plain=False)
        answers = [written(model, {"prompt": "the cat"}), written(model, {"messages": CHATS[1]["messages"][:1]})]
        assert (answers == ["sat on the mat", "the sum ✓"]) == (model is not opened[-1])
    ids = opened[1].ids({"prompt": "the cat"})
    assert opened[1].answer(ids, GREEDY).ended
    short = opened[1].answer(ids, Sampling(tokens=2, temperature=0))
    assert (short.tokens, short.ended) == (2, False)
    assert opened[1].answer(opened[1].ids({"prompt": "the cat"}, plain=True), GREEDY).text != "sat on the mat"


def test_prompts_of_several_lengths_are_answered_together_as_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_folder(save_llama(tmp_path / "base"), CPU)
    texts = ["the cat", "a", "two and two and two and two", "sat on the mat ✓", "mat" * 9, "on"]
    prompts = [model.ids({"prompt": each}, plain=True) for each in texts]
    alone = [model.answer(each, GREEDY) for each in prompts]
    sizes, generate = list[int](), model.inner.generate

    def seen(**given: Any) -> Any:
        sizes.append(len(given["input_ids"]))
        return generate(**given)

    monkeypatch.setattr(model.inner, "generate", seen)
    monkeypatch.setattr(module, "TOGETHER", 4)
    assert list(model.answers(prompts, GREEDY)) == alone
    assert sizes == [4, 2]
    middle = alone[0].text and model.encoder.plain(alone[0].text)[3]  # an id that ends only some of them
    monkeypatch.setattr(model.inner.generation_config, "eos_token_id", middle)
    alone = [model.answer(each, GREEDY) for each in prompts]
    assert len({each.tokens for each in alone}) > 1
    assert list(model.answers(prompts, GREEDY)) == alone
    sizes.clear()
    monkeypatch.setattr(model.inner.generation_config, "repetition_penalty", 1.3)
    list(model.answers(prompts, GREEDY))
    assert sizes == [1] * 6


def test_adapters_answer_alike_in_the_checkpoint_the_export_and_on_their_base(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base")
    model = {"kind": "hf", "path": str(base)}
    settings = make_settings(model=model, data=on_chats(tmp_path, base), peft={"kind": "lora"}, **LEARNING, **steps(5))
    trained(settings)
    export(saved(settings), tmp_path / "out")
    export_adapters(saved(settings), tmp_path / "adapters")
    folders = [open_folder(tmp_path / name, CPU) for name in ("out", "adapters", "base")]
    answers = [written(each, {"prompt": "the cat"}) for each in (open_checkpoint(saved(settings), CPU), *folders)]
    assert answers[0] == answers[1] == answers[2] != answers[3]
    seeds = [Sampling(16, 1.0, seed=seed) for seed in (1, 1, 2)]
    drawn = [written(each, {"prompt": "the cat"}, seed) for each in folders for seed in seeds]
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]


def test_a_native_model_reads_the_last_tokens_that_it_has_places_for(make_settings: MakeSettings) -> None:
    settings = make_settings(sample={"prompt": "the quick", "tokens": 50, "temperature": 0.5}, **LEARNING, **steps(3))
    run = trained(settings)
    places = sample_length(settings.recipe)
    model = open_checkpoint(saved(settings), CPU)
    ids = list(b"the quick")
    while len(ids) < places + 20:
        with torch.no_grad():
            ids.append(int(run.parts.model.eval()(torch.tensor([ids[-places:]]))[0, -1].argmax()))
    text = bytes(ids).decode("utf-8", "replace")
    assert "the quick" + written(model, {"prompt": "the quick"}, Sampling(places + 11, 0)) == text
    assert run.result["sample"].startswith("the quick")
    assert len(written(model, {"prompt": "\n"}, Sampling(8))) > 0


def test_experts_are_read_from_their_own_format(make_settings: MakeSettings, tmp_path: Path) -> None:
    model = {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 32, "moe": {"experts": 2}}
    settings = make_settings(model=model, **LEARNING, **steps(2))
    trained(settings)
    export(saved(settings), tmp_path / "out")
    expected = written(open_checkpoint(saved(settings), CPU), {"prompt": "the "})
    assert written(open_folder(tmp_path / "out", CPU), {"prompt": "the "}) == expected


@pytest.mark.parametrize("architecture", ["t5", pytest.param("bart", marks=pytest.mark.e2e)])
def test_encoder_decoders_write_the_target_of_a_source(
    architecture: str, make_settings: MakeSettings, tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", bert=True)
    path = lines(
        tmp_path / "pairs.jsonl", [{"article": "the cat", "summary": "sat"}, {"article": "two", "summary": "sum"}] * 8
    )
    sizes: dict[str, dict[str, Any]] = {
        "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0},
        "bart": {
            "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "dropout": 0.0,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
        },
    }  # fmt: skip
    config = {**sizes[architecture], "vocab_size": 300, "pad_token_id": NAMES.index("[PAD]")}
    data = {"kind": "dataset", "path": str(path), "columns": {"source": "article", "target": "summary"}}
    settings = make_settings(
        model={"kind": "hf", "architecture": architecture, "task": "seq2seq_lm", "config": config},
        data={**data, "tokenizer": str(folder), "sequence_length": 16},
        sample={"prompt": "the cat", "tokens": 8, "temperature": 0.01},
        **{**LEARNING, "optimizer": {"lr": 2e-2}},
        **steps(40),
    )
    assert trained(settings).result["sample"] == "sat"
    export(saved(settings), tmp_path / "out")
    for model in (open_checkpoint(saved(settings), CPU), open_folder(tmp_path / "out", CPU)):
        found = model.answer(model.ids({"prompt": "the cat"}), Sampling(8))
        assert (found.text, found.ended) == ("sat", True)
        with pytest.raises(PromptError, match="reads one text"):
            model.ids({"messages": []})


def test_classifiers_give_labels_by_name_with_probabilities(make_settings: MakeSettings, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", bert=True)
    rows = [{"text": "the cat sat", "label": "animal"}, {"text": "two and two", "label": "number"}] * 8
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    config |= {"vocab_size": 300, "pad_token_id": NAMES.index("[PAD]"), "max_position_embeddings": 32}
    path = lines(tmp_path / "rows.jsonl", rows)
    settings = make_settings(
        model={"kind": "hf", "architecture": "bert", "task": "sequence_classification", "config": config},
        data={
            "kind": "dataset",
            "path": str(path),
            "labels": ["animal", "number"],
            "tokenizer": str(folder),
            "sequence_length": 16,
        },
        **LEARNING,
        **steps(20),
    )
    trained(settings)
    export(saved(settings), tmp_path / "out")
    for model in (open_checkpoint(saved(settings), CPU), open_folder(tmp_path / "out", CPU)):
        labels = model.answer(model.ids({"prompt": "two and two"}), GREEDY).labels
        assert labels is not None
        assert list(labels) == ["number", "animal"]
        assert sum(labels.values()) == pytest.approx(1, abs=1e-5)
    made = transformers.pipeline("text-classification", str(tmp_path / "out"))("two and two")
    assert made[0]["label"] == "number"


@pytest.mark.parametrize("pieces", [(1,), (2, 1, 3)])
def test_text_comes_in_whole_characters(pieces: Sequence[int], make_tokenizer: Callable[..., Path]) -> None:
    text = "naïve — the €uro 😀 sat\n on the mat ✓"
    for encoder in (Encoder(), open_encoder(str(make_tokenizer()))):
        ids, stream, found, turn = encoder.plain(text), TextStream(encoder), [], 0
        while ids:
            size = pieces[turn % len(pieces)]
            found.append(stream.add(*ids[:size]))
            ids, turn = ids[size:], turn + 1
        assert not any("\ufffd" in each for each in found)
        assert "".join(found) == text
        assert stream.add(*encoder.plain("€")[:1]) == ""
        assert stream.end() == "\ufffd"


def test_an_answer_ends_where_the_template_ends_it(make_tokenizer: Callable[..., Path]) -> None:
    end, stop = NAMES.index("<|end|>"), NAMES.index("<|im_end|>")
    assert stop_ids(open_encoder(str(make_tokenizer()))) == {end, stop}
    assert stop_ids(open_encoder(str(make_tokenizer(template=None))), [[7, 8], None, 9]) == {end, 7, 8, 9}
    refusing = "{% if messages[0]['role'] != 'tool' %}{{ raise_exception('no') }}{% endif %}"
    encoder = open_encoder(str(make_tokenizer(template=refusing)))
    assert stop_ids(encoder) == {end}
    with pytest.raises(PromptError, match="the chat template refuses it"):
        prompt_ids(encoder, {"prompt": "a"})
    assert stop_ids(Encoder()) == frozenset()


def test_the_template_is_given_the_chat_and_the_system_message(make_tokenizer: Callable[..., Path]) -> None:
    encoder = open_encoder(str(make_tokenizer(template=CHATML)))
    told = encoder.decode(prompt_ids(encoder, {"prompt": "hi"}, system="be kind"))
    assert told == "system\nbe kind\nuser\nhi\nassistant\n"
    own = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]}
    assert "be kind" not in encoder.decode(prompt_ids(encoder, own, system="be kind"))
    with pytest.raises(PromptError, match="ends with an answer"):
        prompt_ids(encoder, CHATS[0])
    with pytest.raises(PromptError, match="no chat template, and a system message needs one"):
        prompt_ids(Encoder(), {"prompt": "a"}, system="b")
    with pytest.raises(PromptError, match="no chat template, and a chat needs one"):
        prompt_ids(Encoder(), CHATS[0])
    with pytest.raises(PromptError, match="--plain uses no chat template"):
        prompt_ids(encoder, CHATS[0], plain=True)


def test_a_model_of_ones_own_answers_where_it_is_one_of_transformers(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"def make(): return Own(LlamaConfig(**{ {**SIZES, 'vocab_size': 256} }, eos_token_id=None))\n"
        "def other(): return Other()\n"
        "class Own(LlamaForCausalLM):\n"
        "    def forward(self, input_ids=None, tokens=None, targets=None, **more):\n"
        "        made = super().forward(input_ids=input_ids if tokens is None else tokens, **more)\n"
        "        if targets is None: return made\n"
        "        return nn.functional.cross_entropy(made.logits.flatten(0, 1), targets.flatten())\n"
        "Own.__name__ = 'OwnForCausalLM'\n"
        "class Other(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.layer = nn.Embedding(256, 256)\n"
        "    def forward(self, tokens, targets):\n"
        "        return nn.functional.cross_entropy(self.layer(tokens).flatten(0, 1), targets.flatten())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own, other = (
        make_settings(model={"kind": "target", "target": f"{name}:{function}"}, **LEARNING, **steps(1))
        for function in ("make", "other")
    )
    assert trained(own).result["uses"] == ["export --trust-code"]
    trained(other)
    with pytest.raises(TrainingError, match="whose model is custom code"):
        open_checkpoint(saved(own), CPU)
    model = open_checkpoint(saved(own), CPU, trusted=True)
    assert model.answer(model.ids({"prompt": "the "}), GREEDY).tokens == GREEDY.tokens
    with pytest.raises(TrainingError, match="holds a Other, and only models of transformers that write"):
        open_checkpoint(saved(other), CPU, trusted=True)


def test_a_nucleus_holds_the_likeliest_tokens_that_reach_its_probability() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def drawn(top_p: float, temperature: float = 1.0) -> set[int]:
        draw = Drawing(torch.Generator().manual_seed(0), temperature, top_p)
        return {draw(logits) for _ in range(200)}

    assert drawn(1.0) == {0, 1, 2, 3}
    assert drawn(0.8) == {0, 1}
    assert drawn(0.81) == {0, 1, 2}
    assert drawn(0.1) == drawn(0.0) == drawn(1.0, temperature=0) == {0}


def test_what_writes_nothing_or_is_too_long_is_said(make_settings: MakeSettings, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", max_position_embeddings=16)
    model = open_folder(base, CPU)
    with pytest.raises(PromptError, match=r"it has 16 tokens, and the model reads 16, with its answer"):
        model.ids({"prompt": "x" * 16}, plain=True)
    assert model.answer(model.ids({"prompt": "x" * 10}, plain=True), Sampling(100, 0)).tokens <= 6
    for path in (*base.glob("*token*"), *base.glob("*.jinja")):
        path.unlink()
    with pytest.raises(TrainingError, match="has no tokenizer"):
        open_folder(base, CPU)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    with pytest.raises(TrainingError, match="holds BertForMaskedLM, and only models of transformers that write"):
        open_folder(tmp_path / "bert", CPU)
    ready_made = make_settings(data={"kind": "random", "high": 256, "sequence_length": 16}, **LEARNING, **steps(1))
    assert trained(ready_made).result["uses"] == ["export"]
    with pytest.raises(TrainingError, match=r"trained on ready-made ids \(data.kind: random\)"):
        open_checkpoint(saved(ready_made), CPU)
    masked = make_settings(model={"kind": "hf", "architecture": "bert", "task": "masked_lm"})
    assert uses(masked.recipe) == ["export"]
    settings = make_settings(peft={"kind": "lora", "rank": 2}, **LEARNING, **steps(1))
    assert trained(settings).result["uses"] == ["generate", "export"]
    export_adapters(saved(settings), tmp_path / "adapters")
    with pytest.raises(TrainingError, match="whose other part is only in trainkit"):
        open_folder(tmp_path / "adapters", CPU)


def test_a_run_is_used_from_any_folder_with_the_tokenizer_that_it_was_trained_with(
    make_settings: MakeSettings, make_tokenizer: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    tokenizer = make_tokenizer().rename(tmp_path / "project/own")
    monkeypatch.chdir(tmp_path / "project")
    settings = make_settings(model={"vocab_size": 304}, data={"tokenizer": "own"}, **LEARNING, **steps(1))
    trained(settings)
    expected = written(open_checkpoint(saved(settings), CPU), {"prompt": "the "})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()  # of another project
    assert written(open_checkpoint(saved(settings), CPU), {"prompt": "the "}) == expected
    export(saved(settings), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    tokenizer.rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match=r"data.tokenizer: there is no tokenizer in own"):
        export(saved(settings), tmp_path / "again")


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_not_called_damaged(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(**LEARNING, **steps(1))
    trained(settings)
    checkpoint = saved(settings)
    # As soon as its files have been checked.
    monkeypatch.setattr(
        "trainkit.trainer.checkpoint.export.refuse_damaged",
        lambda *_: checkpoint.rename(checkpoint.with_name(f".tmp-old-{checkpoint.name}")),
    )
    with pytest.raises(TrainingError, match="was removed while it was read: its run goes on"):
        open_checkpoint(checkpoint, CPU)


def test_damaged_folders_and_adapters_without_their_base_are_said(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_llama(tmp_path / "base")
    settings = make_settings(
        model={"kind": "hf", "path": str(base)}, data=on_chats(tmp_path, base), peft={"kind": "lora"}, **steps(1)
    )
    trained(settings)
    export_adapters(saved(settings), tmp_path / "adapters")
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(TrainingError, match="base cannot be loaded: "):
        open_folder(base, CPU)
    base.rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match="base cannot be loaded: ") as caught:
        open_folder(tmp_path / "adapters", CPU)
    assert caught.value.hints == (f"the adapters' base must be in {base}, or where adapter_config.json says",)
    config = tmp_path / "adapters/adapter_config.json"
    config.write_text(config.read_text().replace(str(base), "somebody/base"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TrainingError, match="base cannot be loaded: ") as caught:
        open_folder(tmp_path / "adapters", CPU)
    assert caught.value.hints == ("the adapters' base must be here: hf download somebody/base",)
    (tmp_path / "adapters/adapter_model.safetensors").rename(tmp_path / "adapters/adapter_model.bin")
    with pytest.raises(TrainingError, match=r"there is no .*adapter_model\.safetensors"):
        open_folder(tmp_path / "adapters", CPU)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.json").write_text('{"model_type": "trainkit-gpt", "model": {"kind": "gpt", "layers": -1}}')
    with pytest.raises(TrainingError, match="own cannot be loaded: "):
        open_folder(tmp_path / "own", CPU)
