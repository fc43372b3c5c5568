"""A tiny Llama with a chat tokenizer, saved as models lie on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.tiny_tokenizer import NAMES, save_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300,
}  # fmt: skip


def save_llama(folder: Path, *, dtype: str = "float32", **config: Any) -> Path:
    """Save it with random weights; texts end with the first of NAMES, answers in a chat with `<|im_end|>`."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    end = NAMES.index("<|end|>")
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "bos_token_id": None, "eos_token_id": end, **config}))
    model.generation_config = GenerationConfig(eos_token_id=end, temperature=0.6, do_sample=True)
    model.to(getattr(torch, dtype)).save_pretrained(save_tokenizer(folder))
    return folder
