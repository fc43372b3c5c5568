"""How evenly the tokens fall on the experts of a mixture, for the metrics."""

from __future__ import annotations

from typing import Any

from trainkit.trainer.distributed import sum_over_ranks
from trainkit.trainer.models import Model
from trainkit.trainer.settings import World


def expert_use(model: Model, world: World) -> dict[str, Any]:
    """What a metrics line says of the experts since the line before; nothing for a dense model. Called on every rank.

    expert_shares: of each block with experts, each expert's share of the tokens. expert_imbalance: the largest share
    over the mean share, in the least even block; 1 is even.
    """
    load, model.expert_load = model.expert_load, None
    if load is None:
        return {}
    blocks, experts = load.shape
    counts = sum_over_ranks(load.flatten().tolist(), world)
    shares = []
    for block in range(blocks):
        row = counts[block * experts : (block + 1) * experts]
        shares.append([round(count / max(1, sum(row)), 6) for count in row])
    return {"expert_imbalance": round(max(max(row) for row in shares) * experts, 6), "expert_shares": shares}
