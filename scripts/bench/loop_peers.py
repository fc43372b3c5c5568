"""Four loops that train one model object alike: trainkit's, a hand-written one, Accelerate's and HF Trainer's.

Same batches in the same order, same parameter groups for the same optimizer, same learning rates, accumulation and
clipping; each loads data and logs in its own way, in the same steps.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from strategy_runs import WORDS
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

from trainkit.data.encode import IGNORE_INDEX
from trainkit.recipe.schema import TextData
from trainkit.trainer.data.source import sample_length
from trainkit.trainer.data.text import read_corpus
from trainkit.trainer.loop import SignalRequests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.optim import build_optimizer
from trainkit.trainer.setup import Parts

Loop = Callable[[], object]  # trains once, from the first step to the last
MIXED = {"fp32": "no", "bf16": "bf16"}  # a format as Accelerate calls it


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of a whole run, in the order in which trainkit takes them."""

    def __init__(self, parts: Parts) -> None:
        data = cast("TextData", parts.settings.recipe.data)
        self.length, self.text = sample_length(parts.settings.recipe), read_corpus(data, parts.settings.run_dir).tokens
        share = parts.settings.batch.global_
        self.order = [sample for step in range(parts.steps) for sample in parts.order.indices(step, 0, share)]
        if any(bool((parts.source.train[[sample]].inputs["targets"] == IGNORE_INDEX).any()) for sample in self.order):
            raise ValueError("a sample has fewer targets than places: a mean over places is not the trainer's loss")

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self.read(place))
        return {"tokens": row[:-1], "targets": row[1:]}

    def read(self, place: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens of one sample, and the one after."""
        start = self.order[place] * self.length
        return np.asarray(self.text[start : start + self.length + 1]).astype(np.int64)


def builtin_loop(parts: Parts, rows: Rows) -> Loop:
    """What `trainkit run` runs."""

    def run() -> None:
        metrics = Metrics(parts.settings.run_dir, [], main=True)
        train(parts, 0, metrics, SignalRequests())
        metrics.close()

    return run


def bare_loop(parts: Parts, rows: Rows) -> Loop:
    """What one would write by hand, as nanoGPT does: no abstractions, no workers."""
    model, recipe, batch = parts.model, parts.settings.recipe, parts.settings.batch
    optimizer, pinned = build_optimizer(model, recipe.optimizer), parts.device.type == "cuda"

    def run() -> list[float]:
        logged, place = [], 0
        for step in range(parts.steps):
            for group in optimizer.param_groups:
                group["lr"] = parts.learning_rate(step)
            for _ in range(batch.accumulation):
                tokens = torch.from_numpy(np.stack([rows.read(place + row) for row in range(batch.micro)]))
                place += batch.micro
                tokens = (tokens.pin_memory() if pinned else tokens).to(parts.device, non_blocking=True)
                with parts.autocast:
                    loss = model(tokens[:, :-1], tokens[:, 1:]) / (batch.global_ * rows.length)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if logs(parts, step):
                logged.append(loss.item())
        return logged

    return run


def accelerate_loop(parts: Parts, rows: Rows) -> Loop:
    """The loop of Accelerate's guide to gradient accumulation, with its data loader, optimizer and schedule wrapped."""
    recipe, batch = parts.settings.recipe, parts.settings.batch
    optimizer = build_optimizer(parts.model, recipe.optimizer)

    @as_it_was(parts.model)
    def run() -> list[float]:
        forget_accelerate()
        accelerator = Accelerator(
            cpu=parts.device.type == "cpu",
            mixed_precision=MIXED[parts.settings.dtype],
            gradient_accumulation_steps=batch.accumulation,
        )
        data = DataLoader(rows, batch_size=batch.micro, pin_memory=parts.device.type == "cuda")
        model, optim, loader, schedule = accelerator.prepare(parts.model, optimizer, data, scheduler(parts, optimizer))
        logged, step = [], 0
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs) / inputs["targets"].numel()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.train.max_grad_norm)
                optim.step()
                schedule.step()
                optim.zero_grad()
            if accelerator.sync_gradients:
                if logs(parts, step):
                    logged.append(loss.item())
                step += 1
        return logged

    return run


class SummedLoss(Trainer):  # type: ignore[misc]  # transformers is untyped
    """The one thing that HF Trainer must be told: this model gives a sum, and the mean is wanted."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        """The mean over the targets of a micro batch; Trainer divides by the micro batches itself."""
        return model(**inputs) / inputs["targets"].numel()


def trainer_loop(parts: Parts, rows: Rows) -> Loop:
    """HF Trainer as it is, less its progress bar, its checkpoints and its shuffling."""
    recipe, batch = parts.settings.recipe, parts.settings.batch
    optimizer = build_optimizer(parts.model, recipe.optimizer)

    @as_it_was(parts.model)
    def run() -> list[Any]:
        forget_accelerate()
        arguments = TrainingArguments(
            output_dir=str(parts.settings.run_dir / "hf"),
            per_device_train_batch_size=batch.micro,
            gradient_accumulation_steps=batch.accumulation,
            max_steps=parts.steps,
            max_grad_norm=recipe.train.max_grad_norm,
            logging_steps=recipe.logging.every_steps,
            logging_first_step=True,
            label_names=["targets"],
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=parts.device.type == "cpu",
            bf16=parts.settings.dtype == "bf16",
            dataloader_pin_memory=parts.device.type == "cuda",
        )
        optimizers = (optimizer, scheduler(parts, optimizer))
        trainer = SummedLoss(parts.model, arguments, train_dataset=rows, optimizers=optimizers)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        return [record["loss"] for record in trainer.state.log_history if "loss" in record]

    return run


def with_whole_logits(make: Callable[[Parts, Rows], Loop]) -> Callable[[Parts, Rows], Loop]:
    """The same loop with the loss that one writes by hand, and that models of transformers have: of all logits."""

    def made(parts: Parts, rows: Rows) -> Loop:
        run, own = make(parts, rows), parts.model.forward

        def forward(tokens: Tensor, targets: Tensor) -> Tensor:
            logits = own(tokens).flatten(0, 1).float()
            return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

        def wrapped() -> object:
            parts.model.forward = forward
            try:
                return run()
            finally:
                vars(parts.model).pop("forward", None)

        return wrapped

    return made


LOOPS: Mapping[str, Callable[[Parts, Rows], Loop]] = {
    "built-in": builtin_loop,
    "bare PyTorch": with_whole_logits(bare_loop),
    "Accelerate": with_whole_logits(accelerate_loop),
    "HF Trainer": with_whole_logits(trainer_loop),
}


def logs(parts: Parts, step: int) -> bool:
    """Whether trainkit writes a metrics line after this step, counted from 0."""
    every = parts.settings.recipe.logging.every_steps
    return step == 0 or (step + 1) % every == 0 or step + 1 == parts.steps


def scheduler(parts: Parts, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The same learning rates as a torch scheduler."""
    peak = parts.settings.recipe.optimizer.lr
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] = peak
    return LambdaLR(optimizer, lambda step: parts.learning_rate(min(step, parts.steps - 1)) / peak)


def forget_accelerate() -> None:
    """Accelerate keeps settings for the whole process, and Trainer builds on it: each loop starts without them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Take off a model what Accelerate puts on it: an autocast around its forward, and a mark that it has one.

    Left alone, the mark has the next loop on Accelerate put nothing on, and a loop in 16 bits trains in 32.
    """
    before = {*vars(model)}
    yield
    for name in {*vars(model)} - before:
        delattr(model, name)


def seconds_of_steps(model: torch.nn.Module, loop: Loop) -> float:
    """From the first forward pass to the end of the last update: what comes before and after a loop is not counted."""
    moments: list[Any] = []
    cuda = next(model.parameters()).is_cuda

    def note(*_: object) -> None:
        moment: Any = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()  # type: ignore[no-untyped-call]
        if cuda:
            moment.record()  # when the card comes to it: the host runs ahead
        del moments[1:]
        moments.append(moment)

    marks = [model.register_forward_pre_hook(lambda *_: None if moments else note())]
    marks.append(register_optimizer_step_post_hook(note))
    try:
        loop()
    finally:
        for mark in marks:
            mark.remove()
    if cuda:
        torch.cuda.synchronize()
        return float(moments[0].elapsed_time(moments[-1])) / 1000
    return float(moments[-1] - moments[0])


@contextmanager
def observed(model: torch.nn.Module) -> Iterator[tuple[list[float], list[int]]]:
    """The loss that each forward pass gives, and the bytes of the tensors that it saves for backward."""
    losses: list[float] = []
    saved: list[int] = []
    watching = contextlib.ExitStack()

    def count(tensor: Tensor) -> Tensor:
        saved[-1] += tensor.nbytes
        return tensor

    def begin(*_: object) -> None:
        saved.append(0)
        watching.enter_context(torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor))

    def end(_module: object, _inputs: object, loss: Tensor) -> None:
        watching.close()
        losses.append(loss.item())

    marks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield losses, saved
    finally:
        for mark in marks:
            mark.remove()


def compared(parts: Parts) -> tuple[dict[str, float], dict[str, int]]:
    """From the same weights: each loop's distance from the built-in loop's losses, and its bytes saved for backward."""
    model, rows = parts.model, Rows(parts)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    curves, saved = {}, {}
    for name, make in LOOPS.items():
        model.load_state_dict(start)
        with observed(model) as (losses, sizes):
            make(parts, rows)()
        curves[name], saved[name] = losses, sizes[-1]  # the first pass of the built-in loop looks for itself
    ours = curves.pop("built-in")
    return {name: largest_distance(ours, theirs) for name, theirs in curves.items()}, saved


def largest_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest relative difference; infinite where there are not as many."""
    if len(first) != len(second):
        return math.inf
    return max(abs(one - other) / abs(one) for one, other in zip(first, second, strict=True))


def timed_round(model: torch.nn.Module, loops: dict[str, Loop], turn: int) -> dict[str, float]:
    """Seconds of each loop. Who goes first turns, and every other round goes backwards."""
    names = list(loops)
    order = [names[(turn // 2 + place) % len(names)] for place in range(len(names))]
    return {name: seconds_of_steps(model, loops[name]) for name in (order if turn % 2 else reversed(order))}


def write_text(folder: Path) -> None:
    """One file, so that every byte but the first is predicted; whole samples of any power of two up to 1024.

    What is held out must be the least (a data.validation_fraction of a millionth): one sample and the token before it.
    """
    folder.mkdir(parents=True)
    chance = random.Random(0)
    text = " ".join(chance.choice(WORDS) for _ in range(100_000))
    (folder / "all.txt").write_text(text[: len(text) // 1024 * 1024 + 2])
