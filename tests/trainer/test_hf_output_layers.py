"""The loss inside the output layer of transformers' language models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.trainer.training import MakeSettings, trained
from trainkit.data.encode import IGNORE_INDEX
from trainkit.trainer.models import losses
from trainkit.trainer.models.hf import PLAIN, Transformer
from trainkit.trainer.setup import prepared_model

MASKED = {"albert", "bert", "camembert", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"}
WRITING = {"longt5", "mt5", "t5", "umt5"}
VOCABULARY = 96
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "embedding_size": 8,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "word_embed_proj_dim": 16,
    "ffn_dim": 32,
    "d_ff": 32,
    "moe_intermediate_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model_of(architecture: str, make_settings: MakeSettings) -> Transformer:
    known = AutoConfig.for_model(architecture)
    names = {*known.to_dict(), *known.attribute_map}
    if architecture == "bloom":  # where the name is another one
        names.discard("num_key_value_heads")
    config = {name: value for name, value in SMALL.items() if name in names}
    task = "masked_lm" if architecture in MASKED else "seq2seq_lm" if architecture in WRITING else "causal_lm"
    asked = {"kind": "hf", "architecture": architecture, "task": task, "config": config}
    torch.manual_seed(0)
    data = {"data": {"kind": "random", "sequence_length": 8}} if task == "seq2seq_lm" else {}
    model = prepared_model(make_settings(model=asked | ({"mask_token": 3} if task == "masked_lm" else {}), **data))
    assert isinstance(model, Transformer)
    return model.eval()  # dropout would draw twice


def loss_and_gradients(model: Transformer, architecture: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    tokens, truth = torch.randint(4, VOCABULARY, (2, 2, 8), generator=draw)
    few = torch.rand(truth.shape, generator=draw) < 0.7
    if architecture in MASKED | WRITING:
        loss = model(input_ids=tokens, labels=truth.masked_fill(few, IGNORE_INDEX))
    else:
        loss = model(tokens=tokens, targets=truth.masked_fill(few, IGNORE_INDEX))
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    model.zero_grad()
    loss.backward()
    parameters = dict(model.named_parameters())
    return [loss.detach(), *(grad for name in names if (grad := parameters[name].grad) is not None)]


@pytest.mark.parametrize("architecture", sorted(PLAIN))
def test_loss_and_gradients_are_those_of_the_models_own_logits(
    architecture: str, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "FEW", 0)
    monkeypatch.setattr(losses, "AT_A_TIME", {"cpu": 5 * VOCABULARY})
    model = model_of(architecture, make_settings)
    assert model._output is not None
    joined = loss_and_gradients(model, architecture)
    model.targets_at_most = 15  # of 16
    bounded = loss_and_gradients(model, architecture)
    model._output = None
    whole = loss_and_gradients(model, architecture)
    assert len(joined) == len(bounded) == len(whole) > 5
    for ours, theirs, expected in zip(joined, bounded, whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_is_one_graph_with_its_loss(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "FEW", 0)
    monkeypatch.setattr(losses, "AT_A_TIME", {"cpu": 5 * VOCABULARY})
    model = model_of("llama", make_settings)
    expected = loss_and_gradients(model, "llama")
    model.compile(backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(loss_and_gradients(model, "llama"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["gemma2", "cohere", "granite"])
def test_logits_that_are_scaled_or_capped_are_left_to_the_model(architecture: str, make_settings: MakeSettings) -> None:
    assert model_of(architecture, make_settings)._output is None


def test_an_adapted_output_layer_gives_the_loss_of_both(make_settings: MakeSettings) -> None:
    """What peft puts around it is no plain layer any more."""
    config = {name: SMALL[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads")}
    asked = {"kind": "hf", "architecture": "gpt2", "config": {**config, "n_embd": 16, "tie_word_embeddings": False}}
    for targets, plain in ((["c_attn"], True), (["c_attn", "lm_head"], False)):
        settings = make_settings(model=asked, peft={"kind": "lora", "target_modules": targets})
        model = prepared_model(settings)
        assert isinstance(model, Transformer)
        assert (model._output is not None) == plain


def test_a_masked_model_computes_hidden_tokens_alone_and_is_judged_by_all(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many targets count is known of each micro batch of the training, and of no pass of an evaluation."""
    config = {name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config |= {
        "intermediate_size": 32,
        "vocab_size": 256,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    asked = {"kind": "hf", "architecture": "bert", "task": "masked_lm", "config": config, "mask_token": 3}
    curves, sizes = [], []
    own = losses._counted

    def noted(rows: torch.Tensor, targets: torch.Tensor, at_most: int) -> Any:
        sizes.append((at_most, rows.shape[0]))
        return own(rows, targets, at_most)

    monkeypatch.setattr(losses, "_counted", noted)
    for few in (losses.FEW, 0):
        monkeypatch.setattr(losses, "FEW", few)
        settings = make_settings(model=asked, train={"steps": 3}, eval={"every_steps": 1, "batches": 2})
        lines = trained(settings).lines
        curves.append([line[name] for line in lines for name in ("loss", "eval_loss") if name in line])
        assert len(sizes) == (0 if few else 3 * settings.batch.accumulation)
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert all(at_most <= rows / 2 for at_most, rows in sizes)
