"""The trainer, computing and summing in 64 bits where a recipe says 32: sums in another order then agree to 1e-9."""

import sys

import torch

from trainkit.trainer import optim
from trainkit.trainer.__main__ import main

torch.set_default_dtype(torch.float64)
optim.DTYPES["fp32"] = torch.float64  # type: ignore[index]
sys.exit(main(sys.argv[1:]))
