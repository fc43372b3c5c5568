"""Fits a small network to numbers that it makes up, in a loop as PyTorch's documentation of DDP writes it."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(32, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            loss.backward()
            optimizer.step()
            seen = loss.detach().clone()
            dist.all_reduce(seen)
            losses.append(seen.item() / dist.get_world_size())

    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"losses": losses, "words": sys.argv[2:]}))
    dist.barrier()
    time.sleep(0.5)  # gloo's threads let go of their last work; in a dying interpreter that would abort the rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
