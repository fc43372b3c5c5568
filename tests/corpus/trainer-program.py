"""A plain script with DistributedDataParallel."""

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel", "torch"]
