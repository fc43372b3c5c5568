"""Models on shapes: the native one, and architectures of transformers.

Their forward functions follow transformers' own (models/*/modeling_*.py, release 5.23) and
trainkit/trainer/models/gpt.py, local variables included, for memory lives as long as they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainkit.foresight.network import Net
from trainkit.foresight.tape import Tensor
from trainkit.tasks import LABELLING, MASKED, WRITING

_WIDE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_LLAMA = {**_WIDE, "intermediate_size": 11008, "hidden_act": "silu", "norm": "llama", "sliding_window": None}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "use_sliding_window": False}
_BERT = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "classifier_dropout": None, "num_labels": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
# Architecture -> its defaults (transformers' configuration_*.py), as far as they decide sizes.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_LLAMA, **_QWEN, "qkv_bias": True},
    "qwen3": {**_LLAMA, **_QWEN, "head_dim": 128, "head_norms": True},
    "gemma": {
        **_LLAMA, "norm": "gemma", "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "mixtral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8,
                "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LLAMA, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "intermediate_size": 6144, "head_norms": True, "moe_intermediate_size": 768, "num_local_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "use_sliding_window": False,
    },
    "phi3": {**_LLAMA, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "fused": True},
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "attention_bias": True, "use_parallel_residual": True,
        "rope_parameters": {"partial_rotary_factor": 0.25},
    },
    "opt": {
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "num_attention_heads": 12,
        "max_position_embeddings": 2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
        "dropout": 0.1, "attention_dropout": 0.0, "activation_function": "relu", "enable_bias": True,
        "tie_word_embeddings": True, "word_embed_proj_dim": None, "layer_norm_elementwise_affine": True,
    },
    "bert": _BERT,
    "roberta": {**_BERT, "vocab_size": 50265},
    "t5": {
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None,
        "num_heads": 8, "relative_attention_num_buckets": 32, "dropout_rate": 0.1, "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": {"num_experts": "num_local_experts"},  # transformers' attribute_map
    "gpt2": {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
             "num_hidden_layers": "n_layer"},
    "t5": {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
           "head_dim": "d_kv"},
}  # fmt: skip


class Gpt(Net):
    """trainkit/trainer/models/gpt.py."""

    def declare(self) -> None:
        own = self.settings
        width = own["hidden_size"]
        self.add("tokens.weight", own["vocab_size"], width, embedding=True)
        self.add("positions.weight", self.length, width, embedding=True)
        for number in range(own["layers"]):
            name = self.block(f"blocks.{number}")
            self.norm(f"{name}.attention_norm", width, bias=True)
            self.by_outputs(f"{name}.attention.qkv", width, 3 * width, bias=True)
            self.by_inputs(f"{name}.attention.out", width, width, bias=True)
            if self.routed(name):
                experts, sharers = own["moe"]["experts"], self.sharers
                self.norm(f"{name}.moe_norm", width, bias=True)
                self.dense(f"{name}.moe.router", width, experts)
                self.add(f"{name}.moe.experts.up", experts // sharers, width, 4 * width, sharers=sharers)
                self.add(f"{name}.moe.experts.down", experts // sharers, 4 * width, width, sharers=sharers)
                continue
            self.norm(f"{name}.mlp_norm", width, bias=True)
            self.by_outputs(f"{name}.mlp_in", width, 4 * width, bias=True)
            self.by_inputs(f"{name}.mlp_out", 4 * width, width, bias=True)
        self.norm("norm", width, bias=True)
        self.shared = {"tokens"}

    def forward(self) -> Tensor:
        tape, own = self.tape, self.settings
        mask = self.apart()
        places = self.ids() if self.wanted.packed else tape.one("arange", [], (self.part,), 8)
        x = tape.dropout(tape.add(self.embed("tokens", self.ids()), self.embed("positions", places)), own["dropout"])
        asides: list[Tensor] = []
        for number, name in enumerate(self.blocks):
            if self.routed(name):
                x, aside = self.call_block(number, partial(self.moe_layer, name, mask), x)
                asides.append(aside)
            else:
                x = self.call_block(number, partial(self.layer, name, mask), x)
        x = self.layer_norm("norm", x)
        scaled = self.wanted.dtype == "fp16"
        loss = tape.linear_cross_entropy(x, self.get("tokens.weight"), None, scaled=scaled)
        for aside in asides:
            loss = tape.add(loss, aside)
        return loss

    def routed(self, name: str) -> bool:
        """Whether a block has experts."""
        moe, number = self.settings["moe"], int(name.rpartition(".")[2]) + 1
        return bool(moe["experts"]) and number % moe["every"] == 0

    def layer(self, name: str, mask: Tensor | None, x: Tensor) -> Tensor:
        tape, chance = self.tape, self.settings["dropout"]
        mixed = self.attend(f"{name}.attention", self.layer_norm(f"{name}.attention_norm", x), mask)
        x = tape.add(x, tape.dropout(mixed, chance))
        del mixed
        read = self.entered(self.layer_norm(f"{name}.mlp_norm", x))
        hidden = tape.activation(self.linear(f"{name}.mlp_in", read), "gelu")
        del read
        return tape.add(x, tape.dropout(self.linear(f"{name}.mlp_out", hidden), chance))

    def moe_layer(self, name: str, mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        tape, chance = self.tape, self.settings["dropout"]
        mixed = self.attend(f"{name}.attention", self.layer_norm(f"{name}.attention_norm", x), mask)
        x = tape.add(x, tape.dropout(mixed, chance))
        del mixed
        made, aside = self.mixture(f"{name}.moe", self.layer_norm(f"{name}.moe_norm", x))
        return tape.add(x, tape.dropout(made, chance)), aside

    def mixture(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """trainkit/trainer/models/moe.py, with tokens spread evenly over the experts; and the routers' loss."""
        tape, moe = self.tape, self.settings["moe"]
        tokens, width = x.shape[0] * x.shape[1], x.shape[2]
        taken = tokens * moe["top_k"]
        logits = tape.cast(self.linear(f"{name}.router", tape.view(x, tokens, width)), 4)
        chances = tape.softmax(logits)
        weights, places = tape.top(chances, moe["top_k"])
        if moe["top_k"] > 1:
            weights = tape.normalized(weights)
        assigned = self.counts((tokens, moe["top_k"]), moe["experts"])
        order = tape.one("sort.stable", [places], (taken,), 8)
        rows = tape.one("floor_divide", [order], (taken,), 8)
        flat = tape.rows(tape.view(x, tokens, width), rows)
        if self.sharers > 1:
            flat = tape.sent(flat)
            flat = tape.rows(flat, tape.one("sort.stable", [flat], (taken,), 8))
        made = self.through(f"{name}.experts", partial(self.experts, f"{name}.experts"), flat)
        del flat
        if self.sharers > 1:
            made = tape.sent(tape.put_back(made, order, (taken, width)))
        made = tape.mul(made, tape.rows(tape.view(weights, taken, 1), order))
        mixed = tape.put_back(tape.cast(made, x.item), rows, (tokens, width))
        share = tape.scale(tape.scale(tape.one("mean.dim", [assigned], (x.shape[0], moe["experts"]), 4)))
        balance = tape.scale(tape.mean(tape.mul(self.averaged(chances, x.shape[0]), share)))
        router = tape.scale(tape.mean(tape.pow(tape.log_sum(logits))))
        return tape.view(mixed, *x.shape), tape.add(balance, router)

    def counts(self, chosen: tuple[int, int], experts: int) -> Tensor:
        """How often each token goes to each expert."""
        tape, shape = self.tape, (*chosen, experts)
        same = tape.one("eq.Tensor", [tape.one("arange", [], (experts,), 8)], shape, 1)
        return tape.one("sum.dim_IntList", [tape.one("_to_copy", [same], shape, 8)], (chosen[0], experts), 8)

    def averaged(self, chances: Tensor, samples: int) -> Tensor:
        """The mean over the tokens of a sample."""
        tape, of, item = self.tape, chances.shape, chances.item
        shape = (samples, of[1])
        return tape.apply("mean.dim", [chances], [(shape, item)], lambda g: [tape.one("div.Scalar", [g], of, item)])

    def experts(self, name: str, x: Tensor) -> Tensor:
        tape, count = self.tape, self.settings["moe"]["experts"] // self.sharers
        (total, width), shape = x.shape, (self.settings["hidden_size"], 4 * self.settings["hidden_size"])
        sizes = [total // count + (number < total % count) for number in range(count)]
        shares = tape.split(x, [(size, width) for size in sizes])
        ups = tape.split(self.get(f"{name}.up"), [shape] * count, "stack")
        downs = tape.split(self.get(f"{name}.down"), [shape[::-1]] * count, "stack")
        outputs = []
        for share, up, down in zip(shares, ups, downs, strict=True):
            hidden = tape.activation(tape.linear(share, up, None, turned=True), "gelu")
            outputs.append(tape.linear(hidden, down, None, turned=True))
            del hidden
        return tape.joined(outputs, total, width)

    def attend(self, name: str, x: Tensor, mask: Tensor | None) -> Tensor:
        tape, heads = self.tape, self.settings["heads"] // self.ranks
        batch, length, width = x.shape[0], x.shape[1], x.shape[2] // self.ranks
        qkv = tape.view(self.linear(f"{name}.qkv", self.entered(x)), batch, length, 3 * width, back="clone")
        shape = (batch, heads, length, width // heads)
        query, key, value = tape.split(qkv, [shape] * 3, "stack")
        key, value, mask = self.everywhere(key, heads), self.everywhere(value, heads), self.later(mask)
        mixed = tape.attention(query, key, value, causal=mask is None, dropout=self.settings["dropout"], given=mask)
        return self.linear(f"{name}.out", tape.view(mixed, batch, length, width))


class Llama(Net):
    """Decoders like Llama's: llama, mistral, qwen2, qwen3, gemma, phi3."""

    def declare(self) -> None:
        own = self.settings
        width, heads = own["hidden_size"], own["num_attention_heads"]
        self.kv = own.get("num_key_value_heads") or heads
        self.head = own.get("head_dim") or width // heads
        window = own["sliding_window"] if own.get("use_sliding_window", True) else None
        turning = own.get("partial_rotary_factor") or (own.get("rope_parameters") or {}).get("partial_rotary_factor", 1)
        drops = own.get("resid_pdrop") or own.get("embd_pdrop")
        self.unknown = bool(window and self.length > window) or turning != 1 or bool(drops)
        self.kind_of_norm = own["norm"]
        self.buffers = self.head * 4 + (4 if own["norm"] == "gemma" else 0)  # inv_freq, twice
        fused, inner = own.get("fused"), own["intermediate_size"]
        self.unknown |= bool(fused) and self.ranks > 1
        biased = own.get("qkv_bias") or own.get("attention_bias", False)
        self.add("inner.model.embed_tokens.weight", own["vocab_size"], width, embedding=True)
        for number in range(own["num_hidden_layers"]):
            name = self.block(f"inner.model.layers.{number}")
            attention = f"{name}.self_attn"
            if fused:
                self.dense(f"{attention}.o_proj", heads * self.head, width)
                self.dense(f"{attention}.qkv_proj", width, (heads + 2 * self.kv) * self.head)
                self.dense(f"{name}.mlp.gate_up_proj", width, 2 * inner)
            else:
                self.by_outputs(f"{attention}.q_proj", width, heads * self.head, bias=biased)
                self.by_outputs(f"{attention}.k_proj", width, self.kv * self.head, bias=biased)
                self.by_outputs(f"{attention}.v_proj", width, self.kv * self.head, bias=biased)
                self.by_inputs(f"{attention}.o_proj", heads * self.head, width, bias=own.get("attention_bias", False))
                if own.get("head_norms"):
                    self.norm(f"{attention}.q_norm", self.head)
                    self.norm(f"{attention}.k_norm", self.head)
                self.declare_feed(f"{name}.mlp", width, inner)
            if fused:
                self.dense(f"{name}.mlp.down_proj", inner, width)
            self.norm(f"{name}.input_layernorm", width)
            self.norm(f"{name}.post_attention_layernorm", width)
        self.norm("inner.model.norm", width)
        self.output("inner.lm_head", width, "inner.model.embed_tokens")

    def declare_feed(self, name: str, width: int, inner: int) -> None:
        biased = self.settings.get("mlp_bias", False)
        for part in ("gate", "up"):
            self.by_outputs(f"{name}.{part}_proj", width, inner, bias=biased)
        self.by_inputs(f"{name}.down_proj", inner, width, bias=biased)

    def forward(self) -> Tensor:
        tape = self.tape
        x = self.embed("inner.model.embed_tokens", self.ids())
        mask = self.apart()
        cos, sin = self.rotary(self.head, x.item)
        if self.kind_of_norm == "gemma":
            x = tape.scale(x)
        for number, name in enumerate(self.blocks):
            x = self.call_block(number, partial(self.layer, name, (cos, sin), mask), x)
        x = self.rms_norm("inner.model.norm", x, self.kind_of_norm)
        del mask
        return self.loss("inner.lm_head", x)

    def rotary(self, width: int, item: float) -> tuple[Tensor, Tensor]:
        """cos and sin of positions, of which all samples have the same, but for those of several texts."""
        shape, tape = (self.rows[0] if self.wanted.packed else 1, 1, self.part, width), self.tape
        angles = tape.one("cat", [], shape, 4)
        made = []
        for name in ("cos", "sin"):
            wave = tape.one(name, [angles], shape, 4)
            made.append(tape.cast(tape.scale(wave), item))
            del wave
        return made[0], made[1]

    def layer(self, name: str, waves: tuple[Tensor, Tensor], mask: Tensor | None, x: Tensor) -> Tensor:
        tape = self.tape
        residual = x
        x = self.rms_norm(f"{name}.input_layernorm", x, self.kind_of_norm)
        x = tape.add(residual, self.attend(f"{name}.self_attn", x, waves, mask))
        residual = x
        x = self.rms_norm(f"{name}.post_attention_layernorm", x, self.kind_of_norm)
        return tape.add(residual, self.feed(f"{name}.mlp", x))

    def feed(self, name: str, x: Tensor) -> Tensor:
        tape, act = self.tape, self.settings["hidden_act"]
        if self.settings.get("fused"):
            up = self.linear(f"{name}.gate_up_proj", x)
            gate, up = tape.split(up, [(*up.shape[:-1], up.shape[-1] // 2)] * 2)
            return self.linear(f"{name}.down_proj", tape.mul(up, tape.activation(gate, act)))
        x = self.entered(x)
        gate = tape.activation(self.linear(f"{name}.gate_proj", x), act)
        return self.linear(f"{name}.down_proj", tape.mul(gate, self.linear(f"{name}.up_proj", x)))

    def attend(self, name: str, x: Tensor, waves: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        tape, head = self.tape, self.head
        heads, kv = self.settings["num_attention_heads"] // self.ranks, self.kv // self.ranks
        batch, length = x.shape[:2]
        x = self.entered(x)
        if self.settings.get("fused"):
            qkv = self.linear(f"{name}.qkv_proj", x)
            sizes = [(batch, length, count * head) for count in (heads, kv, kv)]
            q, k, v = tape.split(qkv, sizes)
            q, k, v = self.heads(q, heads, head), self.heads(k, kv, head), self.heads(v, kv, head)
        elif self.settings.get("head_norms"):
            q = self.linear(f"{name}.q_proj", x)
            q = self.rms_norm(f"{name}.q_norm", tape.view(q, batch, length, heads, head), "llama")
            q = tape.view(q, batch, heads, length, head)
            k = self.linear(f"{name}.k_proj", x)
            k = self.rms_norm(f"{name}.k_norm", tape.view(k, batch, length, kv, head), "llama")
            k = tape.view(k, batch, kv, length, head)
            v = self.heads(self.linear(f"{name}.v_proj", x), kv, head)
        else:
            q = self.heads(self.linear(f"{name}.q_proj", x), heads, head, back="clone")
            k = self.heads(self.linear(f"{name}.k_proj", x), kv, head, back="clone")
            v = self.heads(self.linear(f"{name}.v_proj", x), kv, head)
        q, k = tape.rotate(q, *waves), tape.rotate(k, *waves)
        k, v, mask = self.everywhere(k, heads), self.everywhere(v, heads), self.later(mask)
        if joined := bool(self.settings.get("fused")):
            q, k = tape.joined([q], *q.shape), tape.joined([k], *k.shape)
        chance = self.settings.get("attention_dropout", 0.0)
        mixed = tape.attention(q, k, v, causal=mask is None, dropout=chance, joined=joined, given=mask)
        return self.linear(f"{name}.o_proj", tape.view(mixed, batch, length, heads * head))


class Mixtral(Llama):
    """models/mixtral and models/qwen3_moe, whose experts are multiplied in groups (integrations/moe.py)."""

    def declare(self) -> None:
        super().declare()
        own = self.settings
        uneven = own.get("mlp_only_layers") or own.get("decoder_sparse_step", 1) != 1
        others = own.get("output_router_logits") or own.get("router_jitter_noise")
        self.unknown |= bool(uneven or others) or self.wanted.dtype != "bf16"  # the grouped product is of that format

    def declare_feed(self, name: str, width: int, inner: int) -> None:
        experts, inner = self.settings["num_local_experts"], self.settings.get("moe_intermediate_size", inner)
        if self.settings["model_type"] == "mixtral":
            self.add(f"{name}.gate.weight", experts, width)
        self.add(f"{name}.experts.gate_up_proj", experts, 2 * inner, width)
        self.add(f"{name}.experts.down_proj", experts, width, inner)
        if self.settings["model_type"] != "mixtral":
            self.add(f"{name}.gate.weight", experts, width)

    def feed(self, name: str, x: Tensor) -> Tensor:
        tape = self.tape
        flat = tape.view(x, x.shape[0] * x.shape[1], x.shape[2])
        weights, places = self.module(f"{name}.gate", partial(self.gate, f"{name}.gate"), flat)
        mixed = self.module(f"{name}.experts", partial(self.mixture, f"{name}.experts"), flat, places, weights)
        return tape.view(mixed, *x.shape)

    def gate(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        tape, own = self.tape, self.settings
        logits = tape.linear(x, self.get(f"{name}.weight"), None)
        weights, places = tape.top(tape.softmax(tape.cast(logits, 4)), own["num_experts_per_tok"])
        mixtral = own["model_type"] == "mixtral"
        if mixtral or own["norm_topk_prob"]:
            weights = tape.normalized(weights)
        return (weights if mixtral else tape.cast(weights, logits.item)), places

    def mixture(self, name: str, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        tape, act = self.tape, self.settings["hidden_act"]
        (tokens, width), taken = x.shape, weights.size
        order = tape.one("sort", [places], (taken,), 8)
        rows = tape.rows(x, tape.one("floor_divide", [order], (taken,), 8))
        chosen = tape.rows(tape.view(weights, taken, 1), order)
        double = self.get(f"{name}.gate_up_proj").shape[1]
        hidden = tape.grouped(rows, self.get(f"{name}.gate_up_proj"), double)
        gate, up = tape.split(hidden, [(taken, double // 2)] * 2)
        hidden = tape.mul(tape.activation(gate, act), up)
        del gate, up
        hidden = tape.grouped(hidden, self.get(f"{name}.down_proj"), width)
        hidden = tape.mul(hidden, chosen)
        hidden = tape.rows(hidden, tape.one("empty_like", [order], (taken,), 8))
        return tape.cast(self.summed(hidden, tokens), x.item)

    def summed(self, x: Tensor, tokens: int) -> Tensor:
        """Over the experts of a token; the gradient is spread over them."""
        tape, of, item = self.tape, x.shape, x.item

        def backward(g: Tensor) -> list[Tensor]:
            return [tape.one("clone", [g], of, item)]

        return tape.apply("sum.dim_IntList", [x], [((tokens, of[1]), item)], backward)


class Gpt2(Net):
    """models/gpt2: layers of Conv1D, whose weights are turned."""

    def declare(self) -> None:
        own = self.settings
        width = own["n_embd"]
        self.unknown = self.wanted.packed or bool(own.get("add_cross_attention"))
        self.add("inner.transformer.wte.weight", own["vocab_size"], width, embedding=True)
        self.add("inner.transformer.wpe.weight", own["n_positions"], width, embedding=True)
        for number in range(own["n_layer"]):
            name = self.block(f"inner.transformer.h.{number}")
            self.norm(f"{name}.ln_1", width, bias=True)
            self.dense(f"{name}.attn.c_attn", width, 3 * width, bias=True, turned=True)
            self.dense(f"{name}.attn.c_proj", width, width, bias=True, turned=True)
            self.norm(f"{name}.ln_2", width, bias=True)
            inner = own["n_inner"] or 4 * width
            self.dense(f"{name}.mlp.c_fc", width, inner, bias=True, turned=True)
            self.dense(f"{name}.mlp.c_proj", inner, width, bias=True, turned=True)
        self.norm("inner.transformer.ln_f", width, bias=True)
        self.output("inner.lm_head", width, "inner.transformer.wte")

    def forward(self) -> Tensor:
        return self.loss("inner.lm_head", self.body())

    def body(self) -> Tensor:
        tape = self.tape
        tokens = self.embed("inner.transformer.wte", self.ids())
        places = tape.one("add.Tensor", [tape.one("arange", [], (1, self.length), 8)], (1, self.length), 8)
        positions = self.embed("inner.transformer.wpe", places)
        x = tape.dropout(tape.add(tokens, positions), self.settings["embd_pdrop"])
        for number, name in enumerate(self.blocks):
            x = self.call_block(number, partial(self.layer, name), x)
        return self.layer_norm("inner.transformer.ln_f", x)

    def layer(self, name: str, x: Tensor) -> Tensor:
        tape, chance = self.tape, self.settings["resid_pdrop"]
        residual = x
        x = self.layer_norm(f"{name}.ln_1", x)
        mixed = self.attend(f"{name}.attn", x)
        x = tape.add(mixed, residual)
        residual = x
        x = self.layer_norm(f"{name}.ln_2", x)
        hidden = self.linear(f"{name}.mlp.c_fc", x)
        hidden = tape.activation(hidden, self.settings["activation_function"])
        hidden = self.linear(f"{name}.mlp.c_proj", hidden)
        hidden = tape.dropout(hidden, chance)
        return tape.add(residual, hidden)

    def attend(self, name: str, x: Tensor) -> Tensor:
        tape, heads = self.tape, self.settings["n_head"]
        batch, length, width = x.shape
        parts = tape.split(self.linear(f"{name}.c_attn", x), [x.shape] * 3)
        q, k, v = (self.heads(each, heads, width // heads) for each in parts)
        del parts
        mixed = tape.attention(q, k, v, causal=True, dropout=self.settings["attn_pdrop"])
        return tape.dropout(self.linear(f"{name}.c_proj", tape.view(mixed, batch, length, width)),
                            self.settings["resid_pdrop"])  # fmt: skip


class GptNeox(Llama):
    """models/gpt_neox: attention and feed-forward layers side by side, positions in a part of each head."""

    def declare(self) -> None:
        own = self.settings
        width, inner, bias = own["hidden_size"], own["intermediate_size"], own["attention_bias"]
        self.head = width // own["num_attention_heads"]
        share = own.get("rotary_pct") or (own.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        self.turning = int(self.head * share)
        self.buffers = self.turning * 4
        self.add("inner.gpt_neox.embed_in.weight", own["vocab_size"], width, embedding=True)
        for number in range(own["num_hidden_layers"]):
            name = self.block(f"inner.gpt_neox.layers.{number}")
            self.norm(f"{name}.input_layernorm", width, bias=True)
            self.norm(f"{name}.post_attention_layernorm", width, bias=True)
            self.dense(f"{name}.attention.query_key_value", width, 3 * width, bias=bias)
            self.dense(f"{name}.attention.dense", width, width, bias=bias)
            self.dense(f"{name}.mlp.dense_h_to_4h", width, inner, bias=True)
            self.dense(f"{name}.mlp.dense_4h_to_h", inner, width, bias=True)
        self.norm("inner.gpt_neox.final_layer_norm", width, bias=True)
        self.output("inner.lm_head", width, "inner.gpt_neox.embed_in")

    def forward(self) -> Tensor:
        x = self.tape.dropout(self.embed("inner.gpt_neox.embed_in", self.ids()), self.settings["hidden_dropout"])
        mask = self.apart()
        waves = self.rotary(self.turning, x.item)
        for number, name in enumerate(self.blocks):
            x = self.call_block(number, partial(self.layer, name, waves, mask), x)
        del mask
        return self.loss("inner.lm_head", self.layer_norm("inner.gpt_neox.final_layer_norm", x))

    def layer(self, name: str, waves: tuple[Tensor, Tensor], mask: Tensor | None, x: Tensor) -> Tensor:
        tape, chance, parallel = self.tape, self.settings["hidden_dropout"], self.settings["use_parallel_residual"]
        mixed = self.attend(f"{name}.attention", self.layer_norm(f"{name}.input_layernorm", x), waves, mask)
        mixed = tape.dropout(mixed, chance)
        if not parallel:
            mixed = tape.add(mixed, x)
        fed = self.feed(f"{name}.mlp", self.layer_norm(f"{name}.post_attention_layernorm", x if parallel else mixed))
        fed = tape.dropout(fed, chance)
        return tape.add(tape.add(fed, mixed), x) if parallel else tape.add(fed, mixed)

    def feed(self, name: str, x: Tensor) -> Tensor:
        hidden = self.linear(f"{name}.dense_h_to_4h", x)
        hidden = self.tape.activation(hidden, self.settings["hidden_act"])
        return self.linear(f"{name}.dense_4h_to_h", hidden)

    def attend(self, name: str, x: Tensor, waves: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        tape, heads, head, turning = self.tape, self.settings["num_attention_heads"], self.head, self.turning
        batch, length, width = x.shape
        qkv = self.linear(f"{name}.query_key_value", x)
        whole = (batch, heads, length, head)
        q, k, v = tape.split(tape.view(qkv, batch, heads, length, 3 * head, back="clone"), [whole] * 3)
        q_part, q_rest = tape.part(q, *whole[:3], turning), tape.part(q, *whole[:3], head - turning)
        k_part, k_rest = tape.part(k, *whole[:3], turning), tape.part(k, *whole[:3], head - turning)
        q_part, k_part = tape.rotate(q_part, *waves), tape.rotate(k_part, *waves)
        q_part = tape.joined([q_part, q_rest], *whole)
        k_part = tape.joined([k_part, k_rest], *whole)
        chance = self.settings["attention_dropout"]
        mixed = tape.attention(q_part, k_part, v, causal=mask is None, dropout=chance, joined=True, given=mask)
        return self.linear(f"{name}.dense", tape.view(mixed, batch, length, width))


class Opt(Net):
    """models/opt."""

    def declare(self) -> None:
        own = self.settings
        width, inner, bias = own["hidden_size"], own["ffn_dim"], own["enable_bias"]
        narrow = own["word_embed_proj_dim"] or width
        self.unknown = self.wanted.packed or narrow != width or not own["layer_norm_elementwise_affine"]
        self.add("inner.model.decoder.embed_tokens.weight", own["vocab_size"], width, embedding=True)
        places = own["max_position_embeddings"] + 2
        self.add("inner.model.decoder.embed_positions.weight", places, width, embedding=True)
        if own["do_layer_norm_before"] and not own["_remove_final_layer_norm"]:
            self.norm("inner.model.decoder.final_layer_norm", width, bias=True)
        for number in range(own["num_hidden_layers"]):
            name = self.block(f"inner.model.decoder.layers.{number}")
            for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                self.dense(f"{name}.self_attn.{part}", width, width, bias=bias)
            self.norm(f"{name}.self_attn_layer_norm", width, bias=True)
            self.dense(f"{name}.fc1", width, inner, bias=bias)
            self.dense(f"{name}.fc2", inner, width, bias=bias)
            self.norm(f"{name}.final_layer_norm", width, bias=True)
        self.output("inner.lm_head", width, "inner.model.decoder.embed_tokens")

    def forward(self) -> Tensor:
        return self.loss("inner.lm_head", self.body())

    def body(self) -> Tensor:
        tape, decoder = self.tape, "inner.model.decoder"
        tokens = self.embed(f"{decoder}.embed_tokens", self.ids())
        positions = self.embed(f"{decoder}.embed_positions", tape.one("add.Tensor", [], self.rows, 8))
        x = tape.add(tokens, positions)
        for number, name in enumerate(self.blocks):
            x = self.call_block(number, partial(self.layer, name), x)
        return self.layer_norm(f"{decoder}.final_layer_norm", x)

    def layer(self, name: str, x: Tensor) -> Tensor:
        tape, before, chance = self.tape, self.settings["do_layer_norm_before"], self.settings["dropout"]
        first, second = f"{name}.self_attn_layer_norm", f"{name}.final_layer_norm"
        residual = x
        if before:
            x = self.layer_norm(first, x)
        x = self.attend(f"{name}.self_attn", x)
        x = tape.dropout(x, chance)
        x = tape.add(residual, x)
        if not before:
            x = self.layer_norm(first, x)
        residual = x
        if before:
            x = self.layer_norm(second, x)
        x = self.linear(f"{name}.fc1", x)
        x = tape.activation(x, self.settings["activation_function"])
        x = self.linear(f"{name}.fc2", x)
        x = tape.dropout(x, chance)
        x = tape.add(residual, x)
        return x if before else self.layer_norm(second, x)

    def attend(self, name: str, x: Tensor) -> Tensor:
        tape, heads = self.tape, self.settings["num_attention_heads"]
        batch, length, width = x.shape
        head = width // heads
        q = self.heads(tape.scale(self.linear(f"{name}.q_proj", x)), heads, head)
        k = self.heads(self.linear(f"{name}.k_proj", x), heads, head)
        v = self.heads(self.linear(f"{name}.v_proj", x), heads, head)
        mixed = tape.attention(q, k, v, causal=True, dropout=self.settings["attention_dropout"])
        return self.linear(f"{name}.out_proj", tape.view(mixed, batch, length, width))


class Bert(Net):
    """models/bert and models/roberta, for labels and for masked tokens."""

    tasks = (MASKED, LABELLING)

    def declare(self) -> None:
        own = self.settings
        width, inner = own["hidden_size"], own["intermediate_size"]
        self.base = f"inner.{own['model_type']}"
        self.unknown = bool(own.get("is_decoder"))
        self.roberta = own["model_type"] == "roberta"
        self.buffers = 2 * own["max_position_embeddings"] * 8
        tables = {"word": own["vocab_size"], "position": own["max_position_embeddings"]}
        tables["token_type"] = own["type_vocab_size"]
        order = ("word", "token_type", "", "position") if self.roberta else ("word", "position", "token_type", "")
        for name in order:
            if name:
                self.add(f"{self.base}.embeddings.{name}_embeddings.weight", tables[name], width, embedding=True)
            else:
                self.norm(f"{self.base}.embeddings.LayerNorm", width, bias=True)
        for number in range(own["num_hidden_layers"]):
            name = self.block(f"{self.base}.encoder.layer.{number}")
            for part in ("query", "key", "value"):
                self.dense(f"{name}.attention.self.{part}", width, width, bias=True)
            self.dense(f"{name}.attention.output.dense", width, width, bias=True)
            self.norm(f"{name}.attention.output.LayerNorm", width, bias=True)
            self.dense(f"{name}.intermediate.dense", width, inner, bias=True)
            self.dense(f"{name}.output.dense", inner, width, bias=True)
            self.norm(f"{name}.output.LayerNorm", width, bias=True)
        words = f"{self.base}.embeddings.word_embeddings"
        if self.task == MASKED:
            head, norm = ("inner.lm_head", "layer_norm") if self.roberta else ("inner.cls.predictions", "LayerNorm")
            self.lead = head if self.roberta else f"{head}.transform"
            self.add(f"{head}.bias", own["vocab_size"])
            self.dense(f"{self.lead}.dense", width, width, bias=True)
            self.norm(f"{self.lead}.{norm}", width, bias=True)
            self.tie(f"{head}.decoder.weight", f"{words}.weight")
            self.tie(f"{head}.decoder.bias", f"{head}.bias")
            return
        layers = [("inner.classifier.dense", width), ("inner.classifier.out_proj", own["num_labels"])]
        if not self.roberta:
            layers = [(f"{self.base}.pooler.dense", width), ("inner.classifier", own["num_labels"])]
        for name, outer in layers:
            if name.startswith("inner.classifier"):  # the head, which is trained beside adapters
                self.add(f"{name}.weight", outer, width, trained=True)
                self.add(f"{name}.bias", outer, trained=True)
            else:
                self.dense(name, width, outer, bias=True)

    def forward(self) -> Tensor:
        tape, own = self.tape, self.settings
        x = embedded = self.embedded()
        for number, name in enumerate(self.blocks):
            x = self.call_block(number, partial(self.layer, name), x)
        if self.roberta or self.task == MASKED:
            del embedded
        if self.task == MASKED:
            hidden = tape.activation(self.linear(f"{self.lead}.dense", x), own["hidden_act"])
            hidden = self.layer_norm(f"{self.lead}.{'layer_norm' if self.roberta else 'LayerNorm'}", hidden)
            return self.loss(f"{'inner.lm_head' if self.roberta else 'inner.cls.predictions'}.decoder", hidden)
        chance = own["classifier_dropout"] if own["classifier_dropout"] is not None else own["hidden_dropout_prob"]
        first = tape.part(x, x.shape[0], x.shape[2], name="select_backward")
        if self.roberta:
            first = tape.activation(self.linear("inner.classifier.dense", tape.dropout(first, chance)), "tanh")
            return tape.cross_entropy(self.linear("inner.classifier.out_proj", tape.dropout(first, chance)))
        first = tape.activation(self.linear(f"{self.base}.pooler.dense", first), "tanh")
        return tape.cross_entropy(self.linear("inner.classifier", tape.dropout(first, chance)))

    def embedded(self) -> Tensor:
        tape, name = self.tape, f"{self.base}.embeddings"
        places = tape.one("add.Tensor", [], self.rows, 8) if self.roberta else self.ids(1, self.length)
        kinds = tape.one("gather", [places], (1, self.length), 8)
        words = self.embed(f"{name}.word_embeddings", self.ids())
        kind = self.embed(f"{name}.token_type_embeddings", Tensor(self.rows, 8, kinds.storage))
        x = tape.add(words, kind)
        position = self.embed(f"{name}.position_embeddings", places)
        x = tape.add(x, position)
        x = self.layer_norm(f"{name}.LayerNorm", x)
        return tape.dropout(x, self.settings["hidden_dropout_prob"])

    def layer(self, name: str, x: Tensor) -> Tensor:
        tape, heads = self.tape, self.settings["num_attention_heads"]
        batch, length, width = x.shape
        attention = f"{name}.attention"
        parts = [self.linear(f"{attention}.self.{part}", x) for part in ("query", "key", "value")]
        q, k, v = (self.heads(each, heads, width // heads) for each in parts)
        del parts
        mixed = tape.attention(q, k, v, causal=False, dropout=self.settings["attention_probs_dropout_prob"])
        del q, k, v
        x = self.after(f"{attention}.output", tape.view(mixed, batch, length, width), x)
        del mixed
        hidden = tape.activation(self.linear(f"{name}.intermediate.dense", x), self.settings["hidden_act"])
        return self.after(f"{name}.output", hidden, x)

    def after(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        x = self.linear(f"{name}.dense", x)
        x = self.tape.dropout(x, self.settings["hidden_dropout_prob"])
        return self.layer_norm(f"{name}.LayerNorm", self.tape.add(x, residual))


class T5(Net):
    """models/t5: two stacks with positions as a bias of the scores."""

    tasks = (WRITING,)
    wide = (".wo",)

    def declare(self) -> None:
        own = self.settings
        width, inner, across = own["d_model"], own["d_ff"], own["num_heads"] * own["d_kv"]
        self.act = own["feed_forward_proj"].split("-")[-1]
        self.gated = own["feed_forward_proj"].startswith("gated")
        if own["feed_forward_proj"] == "gated-gelu":
            self.act = "gelu_new"
        self.add("inner.shared.weight", own["vocab_size"], width, embedding=True)
        for stack in ("encoder", "decoder"):
            self.tie(f"inner.{stack}.embed_tokens.weight", "inner.shared.weight")
            count = own["num_layers"] if stack == "encoder" else own["num_decoder_layers"] or own["num_layers"]
            for number in range(count):
                name = self.block(f"inner.{stack}.block.{number}")
                kinds = ["SelfAttention", *(["EncDecAttention"] if stack == "decoder" else [])]
                for place, kind in enumerate(kinds):
                    for part in ("q", "k", "v"):
                        self.dense(f"{name}.layer.{place}.{kind}.{part}", width, across)
                    self.dense(f"{name}.layer.{place}.{kind}.o", across, width)
                    if number == 0 and place == 0:
                        table = f"{name}.layer.0.SelfAttention.relative_attention_bias.weight"
                        self.add(table, own["relative_attention_num_buckets"], own["num_heads"], embedding=True)
                    self.norm(f"{name}.layer.{place}.layer_norm", width)
                feed = f"{name}.layer.{len(kinds)}"
                for part in ("wi_0", "wi_1") if self.gated else ("wi",):
                    self.dense(f"{feed}.DenseReluDense.{part}", width, inner)
                self.dense(f"{feed}.DenseReluDense.wo", inner, width)
                self.norm(f"{feed}.layer_norm", width)
            self.norm(f"inner.{stack}.final_layer_norm", width)
        self.tie("inner.lm_head.weight", "inner.shared.weight")  # whatever tie_word_embeddings says

    def forward(self) -> Tensor:
        tape, own = self.tape, self.settings
        read = tape.one("new_zeros", [], (self.rows[0], self.target), 8)
        encoded = self.stack("encoder", self.ids(), None)
        x = self.stack("decoder", read, encoded)
        if own["tie_word_embeddings"] is not False:
            x = tape.scale(x)
        return self.loss("inner.lm_head", x)

    def stack(self, kind: str, ids: Tensor, encoded: Tensor | None) -> Tensor:
        tape, chance = self.tape, self.settings["dropout_rate"]
        tokens = self.embed("inner.shared", ids)
        x = tape.dropout(tokens, chance)
        bias: Tensor | None = None
        cross: Tensor | None = None
        for number, name in enumerate(self.blocks):
            if name.startswith(f"inner.{kind}."):
                given = (x, bias, encoded, cross)
                x, bias, *rest = self.call_block(number, partial(self.layer, name), *given)
                del given
                cross = rest[0] if rest else None
        x = self.rms_norm(f"inner.{kind}.final_layer_norm", x, "t5")
        return tape.dropout(x, chance)

    def layer(
        self, name: str, x: Tensor, bias: Tensor | None, encoded: Tensor | None, cross: Tensor | None
    ) -> Sequence[Tensor]:
        tape, chance = self.tape, self.settings["dropout_rate"]
        decodes = encoded is not None
        x, bias = self.sublayer(f"{name}.layer.0", "SelfAttention", x, None, bias, causal=decodes)
        made = [bias]
        if encoded is not None:
            x, cross = self.sublayer(f"{name}.layer.1", "EncDecAttention", x, encoded, cross, causal=False)
            made.append(cross)
        feed = f"{name}.layer.{2 if decodes else 1}"
        normed = self.rms_norm(f"{feed}.layer_norm", x, "t5")
        normed = self.feed(f"{feed}.DenseReluDense", normed)
        return [self.clamped(tape.add(x, tape.dropout(normed, chance))), *made]

    def clamped(self, x: Tensor) -> Tensor:
        return self.tape.clamp(x) if x.item == 2 and self.wanted.dtype == "fp16" else x

    def feed(self, name: str, x: Tensor) -> Tensor:
        tape = self.tape
        if self.gated:
            gate = tape.activation(self.linear(f"{name}.wi_0", x), self.act)
            up = self.linear(f"{name}.wi_1", x)
            x = tape.mul(gate, up)
        else:
            x = self.linear(f"{name}.wi", x)
            x = tape.activation(x, self.act)
        x = tape.dropout(x, self.settings["dropout_rate"])
        x = tape.cast(x, self.item)
        return self.linear(f"{name}.wo", x)

    def sublayer(
        self, name: str, kind: str, x: Tensor, encoded: Tensor | None, bias: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        tape, chance = self.tape, self.settings["dropout_rate"]
        normed = self.rms_norm(f"{name}.layer_norm", x, "t5")
        mixed, bias = self.attend(f"{name}.{kind}", normed, encoded, bias, causal=causal)
        return self.clamped(tape.add(x, tape.dropout(mixed, chance))), bias

    def attend(
        self, name: str, x: Tensor, encoded: Tensor | None, bias: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        tape, heads, head = self.tape, self.settings["num_heads"], self.settings["d_kv"]
        batch, length, _ = x.shape
        source = x if encoded is None else encoded
        q = self.heads(self.linear(f"{name}.q", x), heads, head)
        k = self.heads(self.linear(f"{name}.k", source), heads, head)
        v = self.heads(self.linear(f"{name}.v", source), heads, head)
        shape = (1, heads, length, k.shape[2])
        if bias is None and encoded is not None:
            bias = tape.one("zeros", [], shape, q.item)
        elif bias is None:
            bias = tape.view(self.embed(f"{name}.relative_attention_bias", self.buckets(*shape[2:])), *shape)
        mixed = tape.attention(q, k, v, causal=False, dropout=self.settings["dropout_rate"],
                               given=bias if encoded is not None else self.added(bias, causal=causal))  # fmt: skip
        return self.linear(f"{name}.o", tape.view(mixed, batch, length, heads * head)), bias

    def buckets(self, length: int, keys: int) -> Tensor:
        """The number of a distance, in a table of them."""
        tape, shape = self.tape, (length, keys)
        distance = tape.one("sub.Tensor", [], shape, 8)
        near = tape.one("abs", [distance], shape, 8)
        far = tape.one("add.Tensor", [tape.one("_to_copy", [near], shape, 8)], shape, 8)
        at_most = tape.one("full_like", [far], shape, 8)
        far = tape.one("minimum", [far, at_most], shape, 8)
        del at_most
        return tape.one("add.Tensor", [distance, tape.one("where.self", [near, far], shape, 8)], shape, 8)

    def added(self, bias: Tensor, *, causal: bool) -> Tensor:
        """integrations/sdpa_attention.py: the bias, and nothing of what comes later."""
        tape, shape, item = self.tape, bias.shape, bias.item
        if not causal:
            return tape.copied(bias)
        allowed = tape.one("ge.Tensor", [], shape[2:], 1)

        def backward(g: Tensor, kept: Tensor) -> list[Tensor]:
            return [tape.one("where.self", [kept, g], shape, item)]

        return tape.copied(tape.apply("where.self", [bias], [(shape, item)], backward, keep=[allowed]))


MAKERS: Mapping[str, type[Net]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3"), Llama),
    **dict.fromkeys(("mixtral", "qwen3_moe"), Mixtral),
    **dict.fromkeys(("bert", "roberta"), Bert),
    "gpt2": Gpt2,
    "gpt_neox": GptNeox,
    "opt": Opt,
    "t5": T5,
}
