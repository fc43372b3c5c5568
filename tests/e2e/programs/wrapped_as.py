"""Takes three optimizer steps with a model that is wrapped as its argument says."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def fsdp2(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


WRAPPINGS = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp2": fsdp2,
    "nothing": lambda model: model,
    "uneven": lambda model: model if dist.get_rank() else DistributedDataParallel(model),  # which waits for its peer
}

dist.init_process_group("gloo")
model = WRAPPINGS[sys.argv[1]](torch.nn.Linear(4, 4))
if sys.argv[2:] == ["bf16"]:
    model = model.to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("took its steps with", os.environ.get("PYTHONPATH"), [name for name in os.environ if "TRAINKIT_SH" in name])
dist.barrier()  # gloo aborts a rank whose peer leaves while it is still leaving
time.sleep(0.5)  # gloo's threads let go of their last work; in a dying interpreter that would abort the rank
dist.destroy_process_group()
