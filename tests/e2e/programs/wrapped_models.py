"""Wraps small models as real programs do, each alone in a group of one, and says what an optimizer is seen to train."""

import gc
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainkit.verify.observe import observe

warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
cpu = torch.device("cpu")


def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def compiled_outside(kept):
    model = torch.compile(DistributedDataParallel(net()))
    kept.append(model)
    return sgd(model.parameters())


def compiled_inside(kept):
    model = DistributedDataParallel(torch.compile(net()))
    kept.append(model)
    return sgd(model.parameters())


def adapters(kept):
    model = net()
    model[0].requires_grad_(False)
    kept.append(DistributedDataParallel(model))
    return sgd(parameter for parameter in model.parameters() if parameter.requires_grad)


def two_models(kept):
    kept += [DistributedDataParallel(net()), DistributedDataParallel(net())]
    return sgd(kept[1].parameters())


def copies(kept):
    model = DistributedDataParallel(net().double())  # not every gloo sends types of 16 bits
    kept.append(model)
    return sgd([parameter.detach().float() for parameter in model.parameters()])


def beside_another(kept):
    kept.append(DistributedDataParallel(net()))
    kept.append(net())
    return sgd(kept[1].parameters())


def fsdp1(kept, *, original=False):
    model = FullyShardedDataParallel(net(), device_id=cpu, use_orig_params=original)
    kept.append(model)
    return sgd(model.parameters())


def fsdp2(kept):
    kept.append(fully_shard(net()))
    return sgd(kept[0].parameters())


def local_parts(kept):
    kept.append(fully_shard(net()))
    return sgd([parameter.to_local().detach() for parameter in kept[0].parameters()])


def replicated(kept):
    kept.append(replicate(net()))
    kept[0](torch.ones(1, 4))  # which wraps it
    return sgd(kept[0].parameters())


def alone(kept):
    kept.append(net())
    return sgd(kept[0].parameters())


CASES = {
    "compiled outside": compiled_outside,
    "compiled inside": compiled_inside,
    "adapters": adapters,
    "two models": two_models,
    "copies": copies,
    "beside another": beside_another,
    "fsdp1": fsdp1,
    "fsdp1, original": lambda kept: fsdp1(kept, original=True),
    "fsdp2": fsdp2,
    "local parts": local_parts,
    "replicated": replicated,
    "alone": alone,
}
found = {}
for name, case in CASES.items():
    kept = []
    optimizer = case(kept)
    found[name] = observe(optimizer)
    del optimizer
    kept.clear()
    gc.collect()
print(json.dumps(found))
dist.destroy_process_group()
