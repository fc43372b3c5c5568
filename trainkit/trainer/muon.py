"""Muon for the matrices of blocks, and AdamW for the rest, as one optimizer; also of sharded matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Muon

MATRICES = "matrices"  # of a parameter group: whether Muon updates it


class MuonWithAdamW(torch.optim.Optimizer):
    """`optimizer.name: muon`: Muon where a group says `matrices`, and AdamW where it does not.

    Keller Jordan (kellerjordan.github.io/posts/muon) and Liu et al. 2025 (arXiv:2502.16982), whose adjustment
    `match_rms_adamw` gives updates the size of AdamW's: learning rate and weight decay are those of an AdamW recipe.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool | None = None,
        foreach: bool | None = None,
        adjust_lr_fn: str = "match_rms_adamw",
        **muon: Any,
    ) -> None:
        matrices = [group for group in groups if group[MATRICES]]
        others = [group for group in groups if not group[MATRICES]]
        if not matrices:
            message = (
                "no parameter is a matrix of a block (a member of a torch.nn.ModuleList), which is what Muon updates"
            )
            raise ValueError(message)
        # Either is given its groups in each step: a checkpoint that is read replaces them, and the state.
        self._muon = _ShardedMuon(matrices, lr=lr, adjust_lr_fn=adjust_lr_fn, **muon)
        self._adamw = AdamW(others or [{"params": []}], lr=lr, betas=betas, eps=eps, fused=fused, foreach=foreach)
        filled = [*self._muon.param_groups, *(self._adamw.param_groups if others else ())]
        super().__init__(filled, {**self._adamw.defaults, **self._muon.defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. closure: computes the loss anew, which PyTorch's own optimizers offer, too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner, matrices in ((self._muon, True), (self._adamw, False)):
            inner.param_groups = [group for group in self.param_groups if group[MATRICES] is matrices]
            inner.state = self.state
            inner.step()
        return loss


class _ShardedMuon(Muon):
    """PyTorch's, which also updates matrices of which each rank has some rows (FSDP2).

    The iteration needs a whole matrix. On shards it runs, too, but sums in another order, and rounding in bf16 grows in
    directions without a gradient: updates differ from those of one process. So each rank gathers one matrix after the
    other, in bf16, and computes its update whole, as under ddp.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if isinstance(each, DTensor) and each.grad is not None:
                    self._update_sharded(each, group)
        sharded = self.param_groups
        self.param_groups = [
            {**group, "params": [each for each in group["params"] if not isinstance(each, DTensor)]}
            for group in sharded
        ]
        try:
            return super().step(closure)  # type: ignore[no-any-return, no-untyped-call]
        finally:
            self.param_groups = sharded

    def _update_sharded(self, parameter: DTensor, group: dict[str, Any]) -> None:
        momentum, held = group["momentum"], self.state[parameter]
        gradient: Any = parameter.grad
        if "momentum_buffer" not in held:
            held["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = held["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        # From zero, without momentum and decay, what PyTorch's takes a weight to is the update itself.
        gathered = _whole(direction)
        whole = nn.Parameter(torch.zeros_like(gathered))
        whole.grad = gathered
        settings = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        Muon([whole], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()  # type: ignore[no-untyped-call]
        mesh = parameter.device_mesh
        update = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        local = parameter.to_local()
        local.add_(update.redistribute(placements=parameter.placements).to_local().to(local))


def _whole(sharded: DTensor) -> Tensor:
    """All rows, on the device of the mesh: offloaded shards are on the CPU, where NCCL gathers nothing."""
    mesh = sharded.device_mesh
    local = sharded.to_local().bfloat16().to(mesh.device_type)
    moved = DTensor.from_local(
        local, mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
    return moved.full_tensor().float()
