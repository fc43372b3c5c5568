"""What the config.json of models on the Hub says of their sizes, for those that shipped recipes name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "head_dim": 128,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "meta-llama/Llama-3.1-70B": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "google-bert/bert-large-uncased": {
        "model_type": "bert", "vocab_size": 30522, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 512,
    },
    "google-t5/t5-large": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24,
        "num_decoder_layers": 24, "num_heads": 16, "pad_token_id": 0, "decoder_start_token_id": 0,
        "is_encoder_decoder": True,
    },
}  # fmt: skip
