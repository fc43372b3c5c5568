"""Ranks that step together over gloo: gloo_steps.py FOLDER STEPS [FAILING_RANK CODE]. Peers of a failure block."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.ones(1)
for step in range(steps):
    dist.all_reduce(total)
    total /= dist.get_world_size()
    (folder / f"beat-{rank}").write_text(f"{step} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    if len(sys.argv) > 3 and step == 3 and rank == int(sys.argv[3]):
        os._exit(int(sys.argv[4]))
dist.destroy_process_group()
print(f"rank {rank} is done")
