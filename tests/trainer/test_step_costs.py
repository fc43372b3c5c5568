"""What a step does beside computing: what it reads back to the host, casts, scales, sends and collects."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.training import CPU, MakeSettings, parts_of
from trainkit.optimizers import OPTIMIZERS
from trainkit.trainer import loop
from trainkit.trainer.distributed import process_group
from trainkit.trainer.loop import YOUNG_EVERY, batches, collected_between_steps, optimizer_step
from trainkit.trainer.optim import clip_gradients
from trainkit.trainer.parallel.single_and_ddp import Single
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import Parts

READ = "aten._local_scalar_dense"  # what `item`, `tolist` and `float` of a tensor come to
ACCUMULATION = 8  # of the small runs


@contextlib.contextmanager
def operations() -> Iterator[Counter[str]]:
    """How often each operation of torch is done meanwhile, by name; of casts those to another format."""
    found: Counter[str] = Counter()

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = function(*args, **(kwargs or {}))
            name = str(function).rpartition(".")[0]
            if name != "aten._to_copy" or given.dtype != args[0].dtype:
                found[name] += 1
            if name == "aten._to_copy" and isinstance(args[0], nn.Parameter):
                found["weights cast"] += 1
            return given

    with Look():  # type: ignore[no-untyped-call]
        yield found


def accumulating(make_settings: MakeSettings, **changes: dict[str, Any]) -> Parts:
    parts = parts_of(make_settings(**changes))
    assert parts.settings.batch.accumulation == ACCUMULATION
    return parts


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("norm", [1.0, 0.0])
def test_a_step_reads_nothing_back_to_the_host(dtype: str, norm: float, make_settings: MakeSettings) -> None:
    """On a card each of these would wait for all that was launched before."""
    parts = accumulating(make_settings, precision={"dtype": dtype}, train={"max_grad_norm": norm})
    given = batches(parts, 0)
    batch = next(given)
    optimizer_step(parts, 0, batch, batch.counted)  # the first makes the state, and the sizes for the summary
    batch = next(given)
    with operations() as found:
        optimizer_step(parts, 1, batch, batch.counted)
    assert found["aten.mm"] + found["aten.addmm"] > 0
    assert found[READ] == 0


def test_an_evaluation_is_read_once_and_not_once_a_pass(make_settings: MakeSettings) -> None:
    parts = parts_of(make_settings(eval={"batches": 5}))
    with operations() as found:
        parts.evaluation.measured(parts.strategy, parts.eval_autocast)["loss"]
    assert len(parts.evaluation.passes) == 5
    assert found[READ] == 0  # `tolist` of one tensor copies it


def test_weights_are_cast_once_for_all_micro_steps_and_the_gradients_stay(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    casts, slopes = [], []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(loop, "cached_casts", contextlib.nullcontext)
        parts = accumulating(make_settings, precision={"dtype": "bf16"}, train={"max_grad_norm": 0.0})
        monkeypatch.setattr(parts.strategy, "update", lambda rate: 0.0)  # gradients stay to be looked at
        batch = next(batches(parts, 0))
        with operations() as found:
            optimizer_step(parts, 0, batch, batch.counted)
        casts.append(found["weights cast"])
        slopes.append([each.grad for each in parts.model.parameters()])
    assert 0 < ACCUMULATION * casts[0] == casts[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*slopes, strict=True))


def test_after_a_step_weights_are_cast_anew(make_settings: MakeSettings) -> None:
    parts = accumulating(make_settings, precision={"dtype": "bf16"}, optimizer={"lr": 0.1})
    batch = next(batches(parts, 0))
    first, second = (float(optimizer_step(parts, step, batch, batch.counted)[0]) for step in range(2))
    assert first != second  # of the same samples


def test_clipping_that_is_off_writes_no_gradient() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for each in parameters:
        each.grad = torch.full_like(each, 2.0)
    versions = [each.grad._version for each in parameters if each.grad is not None]
    norm = clip_gradients([(parameters, None)], None)
    assert norm.item() == pytest.approx((5 * 4.0) ** 0.5)
    assert [each.grad._version for each in parameters if each.grad is not None] == versions
    clip_gradients([(parameters, None)], 1.0)
    assert [each.grad._version for each in parameters if each.grad is not None] != versions


def events_of_a_step(settings: Settings) -> list[str]:
    """What torch's profiler sees of one step, in order."""
    with process_group(World(), CPU, needed=True):
        parts = parts_of(settings)
        batch = next(batches(parts, 0))
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimizer_step(parts, 0, batch, batch.counted)
        del parts
    return [event.name for event in sorted(seen.events() or [], key=lambda event: event.time_range.start)]


@pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
@pytest.mark.parametrize(("way", "times"), [("each_micro_step", ACCUMULATION), ("once", 1)])
def test_fsdp_reduces_gradients_as_often_as_it_is_told(way: str, times: int, make_settings: MakeSettings) -> None:
    names = events_of_a_step(make_settings(strategy={"kind": "fsdp", "reduce_gradients": way}, model={"layers": 2}))
    reduced = [name for name in names if name.startswith("FSDP::post_backward_reduce")]
    assert len(reduced) == times * 3  # two blocks, and what is around them


@pytest.mark.needs("torch>=2.7")
@pytest.mark.parametrize(("prefetch", "forward"), [(1, []), (3, [1, 2, 3])])
def test_so_many_units_are_gathered_while_a_block_computes(
    prefetch: int, forward: list[int], make_settings: MakeSettings
) -> None:
    """By itself FSDP2 gathers one unit ahead in backward, and in forward leaves that to the order of the streams."""
    names = events_of_a_step(make_settings(strategy={"kind": "fsdp", "prefetch": prefetch}, model={"layers": 5}))
    assert gathered(names, "forward", 0) == forward
    assert gathered(names, "backward", 4) == [3, 2, 1, 0][:prefetch]


def gathered(names: list[str], direction: str, block: int) -> list[int]:
    """The blocks whose shards are gathered between the beginning of one block's pass and of the next thing's."""
    begun = names.index(f"FSDP::pre_{direction} (blocks.{block})")
    found: list[int] = []
    for name in names[begun + 1 :]:
        if name.startswith(f"FSDP::{direction}_prefetch for blocks."):
            found.append(int(name.rpartition(".")[2]))
        elif name.startswith("FSDP::p"):  # pre_… or post_… of whatever comes next
            break
    return found


def test_garbage_is_collected_between_steps_alone() -> None:
    class Loop:
        def __init__(self) -> None:
            self.own = self

    assert gc.isenabled()
    with collected_between_steps() as collect:
        assert not gc.isenabled()
        lost = weakref.ref(Loop())
        for step in range(1, YOUNG_EVERY):
            collect(step)
        assert lost() is not None
        collect(YOUNG_EVERY)
        assert lost() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("arguments", "fused"), [({}, True), ({"foreach": True}, None), ({"fused": False}, False)])
def test_the_usual_adamw_is_fused_unless_an_argument_says_otherwise(
    arguments: dict[str, Any], fused: bool | None, make_settings: MakeSettings
) -> None:
    parts = parts_of(make_settings(optimizer={"name": "adamw_torch", "args": arguments}))
    assert isinstance(parts.strategy, Single)
    assert parts.strategy.optimizer.defaults["fused"] is fused
    assert OPTIMIZERS["adamw_torch"].fixed_on["cuda"] == {"fused": True}
