"""What it takes to let a model answer, beside what transformers keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.foresight.test_formula import hf, made
from trainkit.foresight.use import use_of
from trainkit.recipe.schema import Recipe

pytestmark = pytest.mark.torch
TOKENS = 24
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2},
    "qwen3": {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128},
    "opt": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_what_transformers_keeps(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    asked = hf(name, **MODELS[name])
    found = use_of(Recipe.model_validate({"model": asked}), made(asked, 8), {})
    config = AutoConfig.for_model(name, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert found.weights == sum(each.numel() * each.element_size() for each in model.parameters())
    with torch.no_grad():
        cache = model(torch.zeros((1, TOKENS), dtype=torch.int64), use_cache=True).past_key_values
    kept = sum(each.keys.nbytes + each.values.nbytes for each in cache.layers)
    assert found.cache is not None
    assert found.cache * TOKENS == kept
