"""The native GPT as transformers' GPT-2, which is the same function under other names; and the tokenizer of bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainkit.recipe.schema import GptModel

# Ours -> GPT-2's, inside a block. GPT-2's layers (Conv1D) hold their weights transposed.
_IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
_AROUND = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_OF_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def gpt2_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A dense model's tensors by GPT-2's names. The output layer is the embedding, which is written once."""
    found = {}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if block := _OF_BLOCK.fullmatch(module):
            linear = kind == "weight" and not module.endswith("norm")
            value = tensor.T if linear else tensor
            found[f"transformer.h.{block[1]}.{_IN_BLOCK[block[2]]}.{kind}"] = value.contiguous()
        else:
            found[f"transformer.{_AROUND[module]}.{kind}"] = tensor.contiguous()
    return found


def gpt2_config(settings: GptModel, context: int, dtype: str, end: int | None) -> dict[str, Any]:
    """Its config.json. end: the id that ends a text."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",  # the exact one; GPT-2's own is the approximation `gelu_new`
        "n_embd": settings.hidden_size,
        "n_head": settings.heads,
        "n_layer": settings.layers,
        "n_positions": context,
        "vocab_size": settings.vocab_size,
        "layer_norm_epsilon": 1e-5,  # torch's default
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), settings.dropout),
        "tie_word_embeddings": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),  # GPT-2's own default is 50256
        "torch_dtype": dtype,
    }


def byte_tokenizer() -> dict[str, dict[str, Any]]:
    """The files of a tokenizer whose ids are the bytes of the text in UTF-8: byte-level BPE without any merge."""
    # The characters that stand for bytes in byte-level vocabularies (GPT-2, encoder.py, bytes_to_unicode).
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        **dict.fromkeys(("pre_tokenizer", "decoder"), level),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": letters, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
