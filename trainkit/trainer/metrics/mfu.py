"""How much a model computes for a token, and what share of its cards' peak a run reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from trainkit.trainer.data.source import Batch
from trainkit.trainer.models.base import Model, entries
from trainkit.trainer.settings import Settings

Format = Literal["fp32", "tf32", "16 bits"]
TOKENS = ("tokens", "input_ids")  # the inputs that hold tokens, by the models' names for them


class Card(NamedTuple):
    """One kind of card. name: a pattern of the driver's whole name for it, so that parts of cards are none of them.

    fp32, tf32, half: 10^12 operations a second without sparsity; of products in 16 bits with sums in 32.
    source: a document.
    """

    name: str
    fp32: float
    tf32: float | None  # None before Ampere
    half: float
    source: str


_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper 2.1"
_H100 = "NVIDIA H100 Tensor Core GPU architecture white paper 1.04"

CARDS: tuple[Card, ...] = (
    Card(r"Tesla V100-SXM2-\d+GB", 15.7, None, 125, "NVIDIA V100 data sheet, January 2020"),
    Card(r"Tesla V100-PCIE-\d+GB", 14, None, 112, "NVIDIA V100 data sheet, January 2020"),
    Card(r"Tesla T4", 8.1, None, 65, "NVIDIA T4 data sheet, March 2019"),
    Card(r"NVIDIA A100[- ].*(40|80)GB.*", 19.5, 156, 312, "NVIDIA A100 data sheet, May 2022"),
    Card(r"NVIDIA A30", 10.3, 82, 165, "NVIDIA A30 data sheet, March 2022"),
    Card(r"NVIDIA A40", 37.4, 74.8, 149.7, "NVIDIA A40 data sheet, June 2021"),
    Card(r"NVIDIA A10", 31.2, 62.5, 125, "NVIDIA A10 data sheet, March 2021"),
    Card(r"NVIDIA RTX A6000", 38.7, 77.4, 154.8, f"{_GA102}, table 10"),
    Card(r"NVIDIA L4", 30.3, 60, 121, "NVIDIA L4 data sheet, halved from sparse"),
    Card(r"NVIDIA L40", 90.5, 90.5, 181, "NVIDIA L40 data sheet, January 2023"),
    Card(r"NVIDIA L40S", 91.6, 183, 362, "NVIDIA L40S data sheet, August 2023"),
    Card(r"NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, f"{_GA102}, table 9"),
    Card(r"NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, "NVIDIA Ada GPU architecture white paper 2.1, table 2"),
    Card(r"NVIDIA H100( 80GB HBM3| SXM.*)", 66.9, 494.7, 989.4, f"{_H100}, table 2"),
    Card(r"NVIDIA H100 PCIe", 51.2, 378, 756, f"{_H100}, table 2"),
    Card(r"NVIDIA H100 NVL", 60, 417.5, 835, "NVIDIA H100 data sheet, halved from sparse"),
    Card(r"NVIDIA H200", 67, 494.5, 989.5, "NVIDIA H200 data sheet, halved from sparse"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """What training computes, and could compute; None where it is not known."""

    flops_per_token: float | None  # forward and backward
    peak: float | None  # operations a second of one rank's card in the format of the computation

    def share(self, tokens_per_second: float, ranks: int) -> float | None:
        """Model FLOPs utilisation (MFU) of all ranks: PaLM (Chowdhery et al. 2022), appendix B."""
        # Recomputed activations are no work of the model's: gradient checkpointing lowers the share.
        if self.flops_per_token is None or self.peak is None:
            return None
        return round(tokens_per_second * self.flops_per_token / (self.peak * ranks), 4)


def work_of(model: Model, settings: Settings, device: torch.device) -> Work:
    """Call it before a strategy shards the model. A card is probed only if the run uses one."""
    flops = flops_per_token(model, settings.recipe.data.sequence_length)
    if device.type != "cuda":
        return Work(flops, None)
    # The peaks in data sheets differ by the unit that computes: fp32 products may run on the tensor cores as TF32.
    tf32 = settings.dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32
    used: Format = "tf32" if tf32 else "fp32" if settings.dtype == "fp32" else "16 bits"
    return Work(flops, peak(torch.cuda.get_device_name(device), used))


def peak(name: str, used: Format) -> float | None:
    """Operations a second of the card that the driver calls so; None where no data sheet is known, or no such unit."""
    # MIG's parts of an A100 would match the pattern of the whole card.
    card = next((card for card in CARDS if re.fullmatch(card.name, name)), None) if "MIG" not in name else None
    teraflops = {"fp32": card.fp32, "tf32": card.tf32, "16 bits": card.half}[used] if card else None
    return None if teraflops is None else teraflops * 1e12


def flops_per_token(model: Model, sequence_length: int) -> float | None:
    """6 N + 12 L H Q T (PaLM, appendix B), for tokens in samples of `sequence_length` = T; L H Q: `attention_width`."""
    # N: entries of matrices that a token is multiplied with: no look-up tables, no biases, and of experts only those
    # that it goes through. Of frozen ones the gradient is not computed: 4 instead of 6.
    if model.attention_width is None:
        return None
    # A look-up costs no product; a table that is tied to the output layer is multiplied with there.
    tables = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module not in model.tied
        for parameter in module.parameters(recurse=False)
    }
    used = [parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter not in tables]
    training = sum(entries(parameter) for parameter in used if parameter.requires_grad)
    frozen = sum(entries(parameter) for parameter in used) - training
    idle = model.idle_parameters()
    products = 6 * training + 4 * frozen - (6 if training > idle else 4) * idle
    return float(products + 12 * model.attention_width * sequence_length)


def tokens_in(batch: Batch) -> int:
    """Tokens of a batch that go through the model, padding too; 0 where its inputs are of another kind."""
    return batch.written + sum(values.numel() for name, values in batch.inputs.items() if name in TOKENS)
