"""Trains a small model with DeepSpeed's engine, as its getting-started page writes it."""

import argparse
import json
import sys
import time
from pathlib import Path

import deepspeed
import torch


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--report", default="")
    parser.add_argument("--steps", type=int, default=4)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = arguments()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank, micro = torch.distributed.get_rank(), engine.train_micro_batch_size_per_gpu()
    data = torch.Generator().manual_seed(1)
    losses, rates = [], []
    for _ in range(args.steps * engine.gradient_accumulation_steps()):
        batch = torch.randn(torch.distributed.get_world_size() * micro, 8, generator=data)
        inputs = batch[rank * micro : (rank + 1) * micro].to(engine.device)
        loss = (engine(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / torch.distributed.get_world_size())
        rates.append(optimizer.param_groups[0]["lr"])
    if rank == 0 and args.report:
        with Path(args.report).open("w") as file:
            json.dump(
                {
                    "losses": losses,
                    "rates": rates,
                    "stage": engine.zero_optimization_stage(),
                    "optimizer": type(engine.basic_optimizer).__name__,
                    "scheduler": type(scheduler).__name__,
                    "clipping": engine.gradient_clipping(),
                    "batch": engine.train_batch_size(),
                    "local_rank": [word for word in sys.argv if word.startswith("--local_rank")],
                },
                file,
            )
    torch.distributed.barrier()
    time.sleep(0.5)  # gloo's threads let go of their last work; in a dying interpreter that would abort the rank
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
