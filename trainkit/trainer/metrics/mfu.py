"""How much a model computes for a token, and what share of its cards' peak a run reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainkit.machine.peaks import Format, peak
from trainkit.trainer.data.source import Batch
from trainkit.trainer.models.base import Model
from trainkit.trainer.settings import Settings

TOKENS = ("tokens", "input_ids")  # the inputs that hold tokens, by the models' names for them


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
    training = sum(parameter.numel() for parameter in used if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in used) - training
    idle = model.idle_parameters()
    products = 6 * training + 4 * frozen - (6 if training > idle else 4) * idle
    return float(products + 12 * model.attention_width * sequence_length)


def tokens_in(batch: Batch) -> int:
    """Tokens of a batch that go through the model, padding too; 0 where its inputs are of another kind."""
    return sum(values.numel() for name, values in batch.inputs.items() if name in TOKENS)
