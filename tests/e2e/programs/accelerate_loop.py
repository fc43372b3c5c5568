"""Fits a small network to numbers that it makes up, in a loop as accelerate's documentation writes it."""

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--report", default=None)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    handlers = [InitProcessGroupKwargs(backend=args.backend)] if args.backend else []
    accelerator = Accelerator(cpu=args.cpu, kwargs_handlers=handlers)
    set_seed(0)
    inputs = torch.randn(32, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(data, shuffle=True, batch_size=args.batch_size)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses, updates = [], 0
    for _ in range(args.epochs):
        for batch, wanted in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), wanted.to(accelerator.device))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    updates += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())

    if args.report and accelerator.is_main_process:
        report = {
            "losses": losses,
            "updates": updates,
            "processes": accelerator.num_processes,
            "type": accelerator.distributed_type.value,
            "accumulation": accelerator.gradient_accumulation_steps,
            "precision": accelerator.mixed_precision,
        }
        Path(args.report).write_text(json.dumps(report))
    time.sleep(0.5)  # gloo's threads let go of their last work; in a dying interpreter that would abort the rank
    accelerator.end_training()


if __name__ == "__main__":
    main()
