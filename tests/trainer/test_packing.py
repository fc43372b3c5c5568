"""Several texts in one sample, each apart from the others: losses and gradients are those of each text alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strategy_runs import Case, write_corpus

from tests.trainer.sources import lines
from tests.trainer.training import MakeSettings, parts_of, trained
from tests.warm_ranks import run_case
from trainkit.data.formats import KEEPS_APART, packing_of
from trainkit.launch_plan.model import SolvedBatch
from trainkit.recipe.resolved import Asked, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.tools.builtin.inputs import packed_texts_are_kept_apart
from trainkit.trainer.data.rows import Text
from trainkit.trainer.data.source import BatchFormat
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.gpt import build_gpt
from trainkit.trainer.models.hf import build_hf

LENGTH, VOCABULARY = 24, 96
FORM = BatchFormat(LENGTH, 0, False)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
SIZES |= {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_inner": 32, "head_dim": 8, "intermediate_size": 32}
SIZES |= {"intermediate_size_mlp": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SIZES |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
SIZES |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "attention_chunk_size": 64}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
NO_CHANCE = ("dropout", "drop", "pdrop", "jitter")
GPT = {"kind": "gpt", "layers": 2, "heads": 2, "hidden_size": 16, "vocab_size": VOCABULARY}


def native(attention: str = "sdpa", **more: Any) -> Model:
    recipe = {
        "model": {**GPT, **more},
        "data": {"kind": "text", "sequence_length": LENGTH},
        "efficiency": {"attention": attention},
    }
    return build_gpt(Recipe.model_validate(recipe))


def of_transformers(architecture: str, attention: str = "sdpa", **more: Any) -> Model:
    transformers = pytest.importorskip("transformers")
    known = transformers.AutoConfig.for_model(architecture)
    names = {*known.to_dict(), *known.attribute_map} - {*known.attribute_map.values()} | {*known.to_dict()}
    config: dict[str, Any] = {name: value for name, value in SIZES.items() if name in names}
    config |= {name: 0.0 for name, value in known.to_dict().items()
               if any(part in name for part in NO_CHANCE) and isinstance(value, float)}  # fmt: skip
    config |= {name: None for name in ("bos_token_id", "eos_token_id") if name in names}
    model = {"kind": "hf", "architecture": architecture, "config": {**config, **more}}
    data = {"kind": "dataset", "path": "a.jsonl", "sequence_length": LENGTH}
    return build_hf(Recipe.model_validate({"model": model, "data": data, "efficiency": {"attention": attention}}))


def texts() -> Sequence[Text]:
    """Of very different lengths; of some the beginning is not learned. With the room behind them they fill a sample."""
    chance = random.Random(0)
    made = []
    for size, read in ((9, 0), (2, 0), (7, 4), (6, 2)):
        ids = np.array([chance.randrange(1, VOCABULARY) for _ in range(size)], dtype=np.uint16)
        made.append((ids, np.array([False] * read + [True] * (size - read))))
    return made


def learned_from(model: Model, batches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of all batches together, and its gradients."""
    model.zero_grad()
    losses = [model(**inputs) for inputs in batches]
    total = torch.stack(losses).sum()
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return float(total.detach()), gradients


def differences(model: Model, packed: Sequence[Sequence[Text]] | None = None) -> tuple[float, float]:
    """How far loss and gradients of packed texts are from those of each text alone, relative to the largest."""
    model.eval()
    whole = packed if packed is not None else [texts()]
    alone, expected = learned_from(model, [FORM.batch([each]).inputs for sample in whole for each in sample])
    together, found = learned_from(model, [FORM.packed(whole).inputs])
    assert expected.keys() == found.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    worst = max(float((found[name] - each).abs().max()) for name, each in expected.items())
    return abs(together - alone) / abs(alone), worst / largest


CLOSE = 1e-5
# Settings of types whose attention sees no further than a window, so that one has to end within the texts.
SLIDING = ("cohere2", "exaone4", "gemma2", "gemma3_text", "mistral", "mixtral", "olmo3", "phi3", "starcoder2")
BY_SWITCH = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")


def with_window(name: str) -> Mapping[str, Any]:
    """Settings of a type with which a window ends within the texts; none where its attention always sees all."""
    if name == "llama4_text":
        return {"attention_chunk_size": 4}
    first = {"max_window_layers": 1} if name in ("qwen2", "qwen3", "qwen2_moe") else {}
    switch = {"use_sliding_window": True, **first} if name in BY_SWITCH else {}
    return {"sliding_window": 4, **switch} if name in (*SLIDING, *BY_SWITCH) else {}


USUAL = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "granitemoe")
WITHOUT_SDPA = ("gemma2",)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("more", [{}, {"moe": {"experts": 4, "top_k": 2}}], ids=["dense", "moe"])
def test_texts_in_one_sample_of_the_native_model_are_learned_as_each_alone(
    more: Mapping[str, Any], attention: str
) -> None:
    assert max(differences(native(attention, **more))) < CLOSE


def test_texts_in_one_sample_of_every_type_are_learned_as_each_alone(thorough: bool) -> None:
    for name in sorted(KEEPS_APART) if thorough else USUAL:
        cases = [("eager", {}), ("eager", with_window(name)), ("sdpa", {}), ("sdpa", with_window(name))]
        for attention, settings in cases if name in USUAL else cases[1:3]:
            if attention == "eager" or name not in WITHOUT_SDPA:
                found = differences(of_transformers(name, attention, **settings))
                assert max(found) < CLOSE, (name, attention, settings)


def test_samples_of_one_batch_and_full_ones_are_kept_apart_too() -> None:
    pytest.importorskip("transformers")
    full = [(np.arange(1, LENGTH + 2, dtype=np.uint16), np.ones(LENGTH + 1, dtype=np.bool_))]
    several = [texts(), full, texts()[2:], texts()[:1]]
    for model in (native(), native("eager"), of_transformers("llama")):
        assert max(differences(model, several)) < CLOSE


def test_a_type_that_does_not_keep_texts_apart_is_refused_by_a_plan_and_packs_none_by_itself() -> None:
    model = of_transformers("gpt_oss", "eager")
    assert min(differences(model)) > CLOSE, "this one belongs into KEEPS_APART"
    recipe = {"model": {"kind": "hf", "architecture": "gpt_oss"}, "data": {"kind": "dataset", "path": "a.jsonl"}}
    assert packing_of(Recipe.model_validate(recipe), "gpt_oss") == "none"
    asked = {**recipe, "data": {**recipe["data"], "packing": "isolated"}}
    resolved = Resolved(Recipe.model_validate(asked), {}, {}, {})
    [found] = packed_texts_are_kept_apart(Asked(resolved, {}, {}, None))
    assert "gpt_oss is not known to keep the texts of a sample apart" in found.what
    masked = {"model": {"kind": "hf", "architecture": "bert", "task": "masked_lm"}, "data": asked["data"]}
    [found] = packed_texts_are_kept_apart(Asked(Resolved(Recipe.model_validate(masked), {}, {}, {}), {}, {}, None))
    assert "a masked model sees all texts of a sample" in found.what


def test_a_model_trains_the_same_on_packed_texts_and_on_padded_ones(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    chance = random.Random(1)
    rows = [{"text": "".join(chance.choices("abcdef", k=chance.randint(2, 12)))} for _ in range(16)]
    path, held_out = lines(tmp_path / "a.jsonl", rows), lines(tmp_path / "b.jsonl", rows[:3])
    weights = {}
    for packing in ("isolated", "none"):
        data = {"kind": "dataset", "path": str(path), "validation_path": str(held_out), "packing": packing}
        settings = make_settings(data={**data, "sequence_length": 16}, train={"steps": 1}, eval={"every_steps": 0})
        parts = parts_of(settings)
        # All rows once: every bin of an epoch, or each row.
        samples = len(parts.source.train)
        assert samples == len(rows) if packing == "none" else samples < len(rows)
        learned = [parts.source.train[[number]].inputs for number in range(samples)]
        weights[packing] = learned_from(parts.model.eval(), learned)
    (one, gradients), (other, others) = weights["isolated"], weights["none"]
    assert one == pytest.approx(other, rel=1e-6)
    for name, each in gradients.items():
        torch.testing.assert_close(each, others[name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def packed(tmp_path: Path) -> dict[str, Any]:
    """Prompts with answers of very different lengths, of which an epoch has three steps."""
    chance = random.Random(2)
    rows = [{"prompt": "".join(chance.choices("abc", k=chance.randint(1, 9))),
             "completion": "".join(chance.choices("def", k=chance.randint(1, 12)))} for _ in range(120)]  # fmt: skip
    return {"kind": "dataset", "path": str(lines(tmp_path / "a.jsonl", rows)), "sequence_length": 32}


def test_a_run_goes_on_bit_equal_from_the_middle_of_an_epoch_of_packed_texts(
    packed: dict[str, Any], make_settings: MakeSettings
) -> None:
    run: dict[str, Any] = {"data": packed, "train": {"steps": 9}, "eval": {"every_steps": 0}}
    whole = trained(make_settings(**run, checkpoint={"every_steps": 4, "keep": 9}))
    assert 16 * 2 < len(whole.parts.source.train) < 16 * 4
    for step in (4, 8):
        settings = make_settings(**run)
        saved = whole.parts.settings.run_dir / f"checkpoints/step-{step:08}"
        went_on = trained(replace(settings, resume=saved))
        assert went_on.losses == whole.losses[step:]
        for name, values in went_on.weights.items():
            assert torch.equal(values, whole.weights[name])


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_recomputing_compiling_and_micro_batches_keep_texts_apart(
    kind: str, packed: dict[str, Any], make_settings: MakeSettings, thorough: bool
) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    model = {"kind": "hf", "architecture": "llama", "config": {**config, "vocab_size": 256}}
    run: dict[str, Any] = {"data": packed, "train": {"steps": 3}, **({"model": model} if kind == "llama" else {})}
    whole = trained(make_settings(**run)).losses
    recomputed = trained(make_settings(**run, efficiency={"gradient_checkpointing": {"every": 1}})).losses
    assert recomputed == pytest.approx(whole, rel=2e-6)
    at_once = replace(make_settings(**run), batch=SolvedBatch(16, 16, 1, 1, eval_micro=8))
    assert trained(at_once).losses == pytest.approx(whole, rel=2e-6)
    if thorough:
        torch.compiler.reset()  # of how often other tests have compiled
        compiled = trained(make_settings(**run, efficiency={"compile": {"enabled": True, "backend": "aot_eager"}}))
        assert compiled.losses == pytest.approx(whole, rel=2e-6)


@pytest.mark.e2e
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2)])
def test_packed_texts_lose_the_same_on_any_number_of_ranks(
    strategy: str, ranks: int, packed: dict[str, Any], tmp_path: Path
) -> None:
    curves = []
    write_corpus(tmp_path / "corpus")
    for kind, count in (("single", 1), (strategy, ranks)):
        case = Case({"kind": kind}, ranks=count).changed(data=packed, train={"steps": 4}, eval={"every_steps": 4})
        curves.append(run_case(tmp_path / kind, case, tmp_path / "corpus"))
    assert list(curves[1].losses.values()) == pytest.approx(list(curves[0].losses.values()), rel=2e-6)
    assert list(curves[1].norms.values()) == pytest.approx(list(curves[0].norms.values()), rel=2e-5)
    assert list(curves[1].eval_losses.values()) == pytest.approx(list(curves[0].eval_losses.values()), rel=2e-6)
