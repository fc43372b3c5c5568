"""Two steps of an optimizer, without any group of processes."""

import torch

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(2):
    (weight * 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
