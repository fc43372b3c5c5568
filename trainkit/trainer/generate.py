"""Text from the trained model, to look at."""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.recipe.schema import Sample
from trainkit.trainer.data.encoding import Encoder
from trainkit.trainer.parallel import Strategy
from trainkit.trainer.randomness import derived_seed


# Not compiled: every length up to the context would be compiled anew.
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
@torch.no_grad()
def generate(
    strategy: Strategy, sample: Sample, encoder: Encoder, *, context: int, seed: int, device: torch.device
) -> str:
    """Continue the prompt; "" without one. Every rank must call it, for weights may be sharded.

    context: how many tokens the model can see.
    """
    if not sample.prompt:
        return ""
    generator = torch.Generator().manual_seed(derived_seed(seed, "sample"))
    prompt = [*encoder.opening(), *encoder.plain(sample.prompt)]
    tokens = torch.tensor([prompt], dtype=torch.int64, device=device)
    strategy.model.eval()
    for _ in range(sample.tokens):
        logits: Tensor = strategy.model(tokens[:, -context:])[0, -1]
        # Drawn on the CPU in fp32, so that every rank draws the same token.
        shares = (logits.float().cpu() / sample.temperature).softmax(dim=-1)
        drawn = torch.multinomial(shares, 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    strategy.model.train()
    return encoder.decode(tokens[0].tolist())
