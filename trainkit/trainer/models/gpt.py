"""The native byte-level GPT: learned positions, pre-norm blocks, tied embeddings (GPT-2, Radford et al. 2019)."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from trainkit.recipe.schema import GptModel, Moe, Recipe
from trainkit.trainer.data.source import sample_length
from trainkit.trainer.models.base import Model, TensorPlan
from trainkit.trainer.models.losses import linear_cross_entropy
from trainkit.trainer.models.moe import MixtureOfExperts, Routed, Routing, auxiliary_loss
from trainkit.trainer.models.sample_parts import SampleParts
from trainkit.trainer.models.weights import divide, drawn, give_memory
from trainkit.trainer.optim import DTYPES


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.parts: SampleParts | None = None
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, sequence, width) -> the same shape. mask: (batch, 1, sequence, sequence), where a token may look."""
        batch, length, width = x.shape
        # Of the heads that are on this rank.
        qkv = self.qkv(x).view(batch, length, 3, -1, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.parts is not None:
            key, value, mask = self.parts.attended(key, value, mask)
        dropout = self.dropout if self.training else 0.0
        if self.fused:  # memory grows with the length, not with its square (FlashAttention)
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            )
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            if mask is None:
                mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
            mixed = functional.dropout(weights, dropout) @ value
        return cast("Tensor", self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, fused=fused)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, sequence, width) -> the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        return cast("Tensor", x + self.dropout(self.mlp_out(hidden)))


class MoeBlock(nn.Module):
    """One pre-norm transformer block with experts in place of the feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float, moe: Moe, *, fused: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, fused=fused)
        self.moe_norm = nn.LayerNorm(width)
        self.moe = MixtureOfExperts(width, moe)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routed:
        """(batch, sequence, width) -> the same shape, and the rest of what the experts return."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        mixed, balance, router_z, load = self.moe(self.moe_norm(x))
        return x + self.dropout(mixed), balance, router_z, load


# The projections into the residual stream.
RESIDUAL = ("attention.out.weight", "mlp_out.weight", "experts.down")


class Gpt(Model):
    """Tokens to logits, or with targets to the summed cross-entropy in nats."""

    def __init__(self, settings: GptModel, sequence_length: int, *, fused_attention: bool = True) -> None:
        super().__init__()
        width = settings.hidden_size
        self.tokens = nn.Embedding(settings.vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.moe = settings.moe
        self.routing = (self.moe.experts, self.moe.top_k)
        shape = (width, settings.heads, settings.dropout)
        self.blocks = nn.ModuleList(
            MoeBlock(*shape, self.moe, fused=fused_attention)
            if self.moe.experts and number % self.moe.every == 0
            else Block(*shape, fused=fused_attention)
            for number in range(1, settings.layers + 1)
        )
        self.norm = nn.LayerNorm(width)
        self.tied = (self.tokens,)  # the output layer reads its weight
        self.stochastic = settings.dropout > 0
        self.attention_width = settings.layers * width
        self.parts: SampleParts | None = None
        self.vocabulary, self.attention = settings.vocab_size, "sdpa" if fused_attention else "eager"

    def tensor_plan(self) -> TensorPlan:
        """Heads, and the feed-forward layer; experts stay whole."""
        return TensorPlan({"qkv": 3, "mlp_in": 1}, {"out", "mlp_out"}, {"attention", "mlp_in"})

    def divide_samples(self, parts: SampleParts) -> None:
        self.parts = parts
        for module in self.modules():
            if isinstance(module, Attention):
                module.parts = parts

    def draw(self, seed: int) -> None:
        """Draw the weights, each module's by a generator of its own (:func:`drawn`)."""
        # GPT-2: normal(0, 0.02), and the projections into the residual stream divided by sqrt(2 x layers)
        layers = sum(1 for _ in self.blocks)
        for place, module in self.named_modules():
            with drawn(seed, place, [module]):
                for key, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    if parameter.dim() >= 2:
                        into_residual = f"{place}.{key}".endswith(RESIDUAL)
                        std = 0.02 / math.sqrt(2 * layers) if into_residual else 0.02
                        nn.init.normal_(parameter, std=std)
                    else:
                        nn.init.constant_(
                            parameter, 1.0 if isinstance(module, nn.LayerNorm) and key == "weight" else 0.0
                        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        """(batch, sequence) int64 -> logits (batch, sequence, vocabulary), or with targets the loss summed over tokens.

        Targets of -100 are not counted. position_ids: (batch, sequence), for samples of several texts: each begins at
        0, and sees itself alone. In training the routers' losses are part of the sum.
        """
        mask, length, parts = None, tokens.shape[1], self.parts
        if parts is not None:
            mask = parts.mask(length, position_ids)
            places = torch.arange(length, device=tokens.device)[None] if position_ids is None else position_ids
            places, tokens = parts.own(places), parts.own(tokens)
            targets = None if targets is None else parts.own_targets(targets)
        elif position_ids is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            places, text = position_ids, (position_ids == 0).cumsum(-1)
            causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
            mask = (text[:, None, :, None] == text[:, None, None, :]) & causal
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        routings: list[Routing] = []
        for block in self.blocks:
            if isinstance(block, MoeBlock):
                x, *routing = block(x, mask)
                routings.append(routing)
            else:
                x = block(x, mask)
        x, head = self.norm(x), self.tokens.weight  # tied (Press and Wolf 2017)
        if targets is None:
            logits = functional.linear(x, head)
            return logits if parts is None else parts.gathered(logits, 1)[:, :length]
        if self.loss_function is None:
            loss = linear_cross_entropy((x, head, None), targets, self.targets_at_most)
        else:
            loss = self.loss_function(functional.linear(x, head), {"tokens": tokens, "targets": targets})
        if parts is not None:
            loss = parts.summed(loss)
        if not routings or not self.training:  # evaluation counts predictions only
            return loss
        self.load_of_pass = torch.stack([load for _, _, load in routings])
        return loss + auxiliary_loss(routings, targets, self.moe)


def build_gpt(recipe: Recipe, device: str = "cpu", mesh: DeviceMesh | None = None) -> Gpt:
    """The model of a recipe, in `precision.weights`; device and mesh as of :func:`build_hf`."""
    settings = cast("GptModel", recipe.model)
    with torch.device("meta"):
        model = Gpt(settings, sample_length(recipe), fused_attention=recipe.efficiency.attention != "eager")
    model.to(DTYPES[recipe.precision.weights])
    if device == "meta":
        return model
    if mesh is not None:
        divide(model, mesh)
    give_memory(model, "cpu" if mesh else device)
    model.draw(recipe.train.seed)
    return model
