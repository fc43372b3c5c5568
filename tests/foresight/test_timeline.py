"""Where on a timeline a request was refused, and what a step moves between a GPU and the machine's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.foresight.test_formula import GPT, made
from trainkit.foresight.memory import simulate
from trainkit.foresight.speed import collectives, moved
from trainkit.foresight.strategies import Run, offloadable
from trainkit.foresight.timeline import Timeline
from trainkit.foresight.trace import ACTIVATIONS

pytestmark = pytest.mark.unit


def timeline() -> Timeline:
    """Weights of 100; in forward three times 50, the first given back before the third; in backward 80."""
    found = Timeline()
    found.take("weights", 100, ACTIVATIONS)
    found.begin("forward")
    found.take(1, 5000, ACTIVATIONS)
    found.take(2, 5000, ACTIVATIONS)
    found.drop(1)
    found.take(3, 5000, ACTIVATIONS)
    found.begin("backward")
    found.take(4, 8000, ACTIVATIONS)
    return found


@pytest.mark.parametrize(
    ("size", "moment", "room"),
    [
        (5000, "forward", (100, 10100)),  # by the first request at least, by the second at most
        (5060, "", (100, 10100)),  # as a message rounds it
        (5000, "backward", None),  # there is none in that moment
        (8000, "backward", (10100, 18100)),
        (700_000, "", None),
    ],
)
def test_a_refused_request_tells_how_much_there_is(size: int, moment: str, room: tuple[int, int] | None) -> None:
    assert timeline().room(size, moment) == room


def test_a_request_that_takes_no_more_than_was_granted_before_is_not_the_one() -> None:
    found = timeline()
    found.drop(4)
    found.drop(3)
    found.take(5, 6000, ACTIVATIONS)  # 11,100, and 18,100 were granted before
    assert found.room(6000, "") is None


def test_offloading_moves_weights_twice_a_micro_step_and_gradients_once() -> None:
    trace = made(GPT, 16)
    run = Run(strategy="zero3", ranks=2, local=2, accumulation=4, dtype="bf16")
    share = trace.size * 2 / 2  # bytes of a rank in 16 bits
    assert moved(trace, run, set()) == 0
    assert moved(trace, run, {"offload_optimizer"}) == 4 * share + share
    assert moved(trace, run, {"offload_optimizer", "offload_param"}) == 4 * share + 8 * share


def test_each_micro_step_of_fsdp_gathers_and_reduces_each_unit() -> None:
    trace = made(GPT, 16, strategy={"kind": "fsdp"})
    units = 1 + sum(each.unit for each in trace.modules)
    run = Run(strategy="fsdp", ranks=2, local=2, accumulation=4, options={"sharding": "full_shard"})
    assert collectives(trace, run) == 4 * units * 3
    assert collectives(trace, Run(strategy="ddp", ranks=2, local=2)) == 1
    assert collectives(trace, Run()) == 0


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_offloaded_activations_are_in_the_machines_memory_until_backward(strategy: str, ranks: int) -> None:
    model = {**GPT, "layers": 6, "hidden_size": 256}
    trace = made(model, 1024, micro=8)
    run = Run(strategy=strategy, ranks=ranks, local=ranks, dtype="bf16", options={"sharding": "full_shard"})
    plain, offloaded = (simulate(trace, each) for each in (run, replace(run, offloads_activations=True)))
    away = sum(trace.sizes[each] for each in offloadable(trace, trace.first))
    assert offloaded.device.peak < plain.device.peak - away / 2
    assert 0.9 * away < offloaded.host.peak - plain.host.peak <= away
    # At the end nothing is left on either side but what is there without it.
    assert offloaded.device.now == plain.device.now
    assert offloaded.host.now == plain.host.now
    recomputed = made(model, 1024, micro=8, efficiency={"gradient_checkpointing": True})
    less = offloadable(recomputed, recomputed.first)
    assert 0 < sum(recomputed.sizes[each] for each in less) < away / 4
