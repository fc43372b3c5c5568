"""Tiny models of transformers that can be taught an answer in seconds, with their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.tiny_tokenizer import save_tokenizer

WIDE = 0.2  # standard deviation of random weights with which a model so small can be sure of a token


def save_model(folder: Path, kind: str) -> Path:
    """A tiny model of random weights with its tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "llama": {"intermediate_size": 128, "num_key_value_heads": 4, "eos_token_id": 2, "bos_token_id": None},
        "bert": {"intermediate_size": 128, "pad_token_id": 3},
        "t5": {
            "d_ff": 128,
            "d_kv": 16,
            "num_decoder_layers": 2,
            "decoder_start_token_id": 3,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
    }
    made: Any = transformers.AutoConfig.for_model(
        kind, vocab_size=304, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=WIDE,
        **({} if kind == "t5" else {"max_position_embeddings": 256}), **sizes[kind],
    )  # fmt: skip
    model = {
        "llama": transformers.AutoModelForCausalLM,
        "bert": transformers.AutoModelForMaskedLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
    }[kind]
    model.from_config(made).save_pretrained(folder)
    return save_tokenizer(folder, bert=kind == "bert", **({} if kind == "llama" else {"template": None}))
