"""How fast a run is: the time of its steps alone, what it waits for data, and its share of the GPUs' peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.training import MakeSettings, trained
from trainkit.machine.accelerators import GPUS, peak
from trainkit.trainer.checkpoint.saving import Checkpoints
from trainkit.trainer.metrics.evaluation import Evaluation
from trainkit.trainer.metrics.speed import (
    DataWaiting,
    Totals,
    TrainingFlops,
    flops_per_token,
    steady,
    training_flops,
)
from trainkit.trainer.setup import prepared_model


class Gpu:
    """A host and a GPU that works through what the host launches, with one clock for both, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0  # of the host
        self.free = 0.0  # when the GPU has done all that it was given
        self.waiting = DataWaiting(lambda: Event(self), lambda: self.now)

    def step(self, launching: float, computing: float) -> None:
        """The host launches what the GPU then computes."""
        self.free = max(self.free, self.now) + computing
        self.now += launching
        self.waiting.step_launched()

    def batch(self, seconds: float) -> None:
        """The host waits for a batch."""
        self.waiting.begin()
        self.now += seconds
        self.waiting.end()

    def read(self) -> float:
        """The host waits for the GPU, as it does where a loss is read; the seconds that are known by then."""
        self.now = max(self.now, self.free)
        return self.waiting.seconds


class Event:
    """As CUDA's: it happens when the GPU comes to it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at = gpu, 0.0

    def record(self) -> None:
        self._gpu.free = self._at = max(self._gpu.free, self._gpu.now)

    def query(self) -> bool:
        return self._at <= self._gpu.now

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "CUDA raises for events that have not happened"
        return (later._at - self._at) * 1000


def test_a_wait_while_the_gpu_is_busy_is_none() -> None:
    gpu = Gpu()
    gpu.batch(2.0)  # before the first step it has nothing to do
    for _ in range(5):
        gpu.step(launching=0.1, computing=1.0)
        gpu.batch(0.5)
    assert gpu.waiting.seconds == 2.0  # of the others nothing is known yet, and nobody waits to learn it
    assert gpu.read() == pytest.approx(2.0)


def test_a_wait_counts_from_when_the_gpu_has_nothing_left_to_do() -> None:
    gpu = Gpu()
    gpu.batch(0.0)
    gpu.step(launching=0.1, computing=1.0)
    gpu.batch(1.5)  # from 0.1 to 1.6; the GPU is done at 1
    assert gpu.read() == pytest.approx(0.6)
    gpu.step(launching=0.1, computing=0.2)
    gpu.now += 3.0  # an evaluation, say: the GPU stands still, but not for want of data
    gpu.batch(0.25)
    assert gpu.read() == pytest.approx(0.85)


def test_on_a_device_that_the_host_waits_for_every_wait_counts() -> None:
    clock = iter((1.0, 3.0, 10.0, 10.5))
    waiting = DataWaiting(None, lambda: next(clock))
    for _ in range(2):
        waiting.begin()
        waiting.end()
        waiting.step_launched()
    assert waiting.seconds == 2.5


def test_rates_are_of_steps_alone_without_the_first_ones_where_there_are_enough_others() -> None:
    marks = [Totals(100.0, steps=7), Totals(130.0, steps=8, compiled=20.0), Totals(134.0, steps=12, compiled=20.0)]
    end = Totals(154.0, steps=22, tokens=10_000, computed=40_000, compiled=21.0, aside=9.0)
    assert steady(marks, end) == marks[2]
    assert steady(marks, end._replace(steps=16)) == marks[1]
    assert steady(marks[:2], end._replace(steps=8)) == marks[0]
    since = end.since(marks[2]._replace(tokens=5_000, computed=20_000))
    assert since.training == 10.0
    assert since.rates(4, TrainingFlops(6e9, 24e12), 1) == {
        "samples_per_second": 4.0,
        "tokens_per_second": 500.0,
        "mfu": 0.5,
    }


def test_evaluation_and_saving_are_no_time_of_steps(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def slower(*given: Any, **named: Any) -> Any:
            time.sleep(0.5)
            return function(*given, **named)

        return slower

    monkeypatch.setattr(Evaluation, "measured", slow(Evaluation.measured))
    monkeypatch.setattr(Checkpoints, "save", slow(Checkpoints.save))
    asked = {"train": {"steps": 6}, "eval": {"every_steps": 2}, "checkpoint": {"every_steps": 3}}
    settings = make_settings(**asked, logging={"every_steps": 1})
    done = trained(settings)
    outcome, lines = done.result, done.lines
    assert outcome["aside_seconds"] >= 5 * 0.5
    steps = [line for line in lines if "loss" in line]
    assert sum(line["seconds"] for line in steps) <= outcome["train_seconds"] - outcome["aside_seconds"]
    assert min(line["eval_seconds"] for line in lines if "eval_loss" in line) >= 0.5
    # Five steps follow the first.
    assert outcome["rates_from_step"] == 2
    later = 5 * settings.batch.global_ / (sum(line["seconds"] for line in steps[1:]))
    assert outcome["samples_per_second"] == pytest.approx(later, rel=0.5)


GPT: dict[str, Any] = {"layers": 3, "heads": 4, "hidden_size": 64}
LLAMA: dict[str, Any] = {
    "kind": "hf",
    "architecture": "llama",
    "config": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
}


def counted(model: Any, length: int) -> float:
    """Operations of all products in forward and backward, for a token."""
    tokens = torch.randint(0, 256, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, targets=tokens).backward()
    return float(counter.get_total_flops()) / tokens.numel()


@pytest.mark.parametrize(
    "sections",
    [
        {"model": GPT},
        {"model": {**GPT, "moe": {"experts": 4, "top_k": 2, "every": 1}}},
        {"model": LLAMA},
    ],
    ids=["gpt", "mixture of experts", "hf"],
)
def test_the_formula_is_what_torch_counts(make_settings: MakeSettings, sections: dict[str, Any]) -> None:
    settings = make_settings(**sections, data={"sequence_length": 96}, efficiency={"attention": "eager"})
    model = prepared_model(settings)
    assert flops_per_token(model, 96) == pytest.approx(counted(model, 96), rel=0.01)


def test_frozen_weights_have_no_gradient_to_compute(make_settings: MakeSettings) -> None:
    settings = make_settings(
        model=GPT, peft={"kind": "lora"}, data={"sequence_length": 96}, efficiency={"attention": "eager"}
    )
    model = prepared_model(settings)
    # The first layer's input needs no gradient either.
    assert flops_per_token(model, 96) == pytest.approx(counted(model, 96), rel=0.05)


def test_a_mixture_whose_experts_are_not_known_has_no_figure(make_settings: MakeSettings) -> None:
    config = {**LLAMA["config"], "num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 4}
    settings = make_settings(model={"kind": "hf", "architecture": "mixtral", "config": config})
    assert flops_per_token(prepared_model(settings), 96) is None


def test_the_share_is_work_done_over_what_the_gpus_could_do() -> None:
    work = TrainingFlops(flops_per_token=6e9, peak=300e12)
    assert work.share(tokens_per_second=40_000, ranks=2) == 0.4
    assert TrainingFlops(6e9, None).share(1.0, 1) is None
    assert TrainingFlops(None, 300e12).share(1.0, 1) is None


def test_on_a_cpu_the_peak_is_not_known_and_nothing_is_said(make_settings: MakeSettings) -> None:
    settings = make_settings()
    assert training_flops(prepared_model(settings), settings, torch.device("cpu")).peak is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA Something New", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, teraflops: float | None) -> None:
    assert peak(name, "16 bits") == (None if teraflops is None else teraflops * 1e12)


def test_every_gpu_names_its_source_and_is_faster_in_fewer_bits() -> None:
    for gpu in GPUS:
        assert gpu.source
        assert gpu.bandwidth > gpu.link > 0
        assert gpu.half is None or gpu.half > gpu.fp32 > 0
    assert peak("Tesla V100-SXM2-16GB", "tf32") is None
