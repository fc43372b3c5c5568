"""What a rank of ZeRO holds, and takes for a moment: of three layers of 1000 weights, the first with a bias of 40."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from trainkit.foresight.memory import simulate
from trainkit.foresight.strategies import Run, Whole
from trainkit.foresight.timeline import Timeline
from trainkit.foresight.trace import GRADIENTS, PARTS, Events, Kind, Module, Parameter, Trace
from trainkit.foresight.zero import Engine, settings_of

WEIGHT, BIAS = 1000, 40
ALL = 3 * WEIGHT + BIAS
LAYERS = ((0, 3), (1,), (2,))  # parameters of each
ROOT = 3  # module


def layers(low: int = 2, frozen: tuple[int, ...] = ()) -> Trace:
    """low: bytes of a value of a gradient. Gradients are the only storages, each with its parameter's number."""
    shapes = ((100, 10), (100, 10), (100, 10), (BIAS,))
    parameters = tuple(Parameter(f"p{number}", shape, 4, number not in frozen) for number, shape in enumerate(shapes))
    modules = (*(Module(f"m{number}", own, own) for number, own in enumerate(LAYERS)), Module("", (), (0, 1, 2, 3)))
    events = _micro_step({number for number, each in enumerate(parameters) if each.trained})
    return Trace(
        parameters=parameters,
        modules=modules,
        buffers=0,
        batch=0,
        sizes=tuple(each.size * low for each in parameters),
        parts=(GRADIENTS,) * 4,
        operators=(0,) * 4,
        names=("",),
        gradients={number: number for number, each in enumerate(parameters) if each.trained},
        first=events,
        further=events,
        work=(),
    )


def _micro_step(trained: set[int]) -> Events:
    def found() -> Iterator[tuple[int, int]]:
        yield Kind.FORWARD, 0
        yield Kind.ENTER, ROOT
        for number in range(3):
            yield from ((Kind.ENTER, number), (Kind.LEAVE, number))
        yield Kind.LEAVE, ROOT
        yield Kind.BACKWARD, 0
        yield Kind.REACH, ROOT
        for number in (2, 1, 0):
            yield Kind.REACH, number
            for each in trained.intersection(LAYERS[number]):
                yield from ((Kind.TAKE, each), (Kind.READY, each))
            if number:  # the first layer's input has no gradient
                yield Kind.AFTER, number
        yield Kind.END, 0

    return tuple(number for event in found() for number in event)


def run(strategy: str, dtype: str = "bf16", ranks: int = 4, device: str = "cuda", **zero: Any) -> Run:
    settings = {"reduce_bucket_size": 1500, "stage3_param_persistence_threshold": 0, **zero}
    planned = {"zero_optimization": settings, "data_types": {"grad_accum_dtype": "fp32"}}
    settings["stage"] = int(strategy[-1])
    return Run(strategy=strategy, ranks=ranks, local=ranks, dtype=dtype, device=device, deepspeed=planned)


def simulated(strategy: str, dtype: str = "bf16", **more: Any) -> Whole:
    return simulate(layers(4 if dtype == "fp32" else 2), run(strategy, dtype, **more))


def stays(timeline: Timeline) -> Mapping[str, int]:
    """Bytes of each part between steps."""
    found = timeline.left()
    return {name: found.get(name, 0) for name in ("parameters", "gradients", "optimizer state", "communication")}


def most(timeline: Timeline, name: str) -> int:
    """The most bytes of a part at a time."""
    number, now, found = PARTS.index(name), 0, 0
    for identity, size in timeline.changes:
        if timeline.part[identity] == number:
            now += size or -timeline.sizes[identity]
            found = max(found, now)
    return found


@pytest.mark.parametrize(
    ("strategy", "dtype", "parameters", "gradients"),
    [
        ("zero1", "bf16", 2 * ALL, 4 * ALL),  # summed by an optimizer of its own
        ("zero1", "fp16", 2 * ALL, 0),
        ("zero1", "fp32", 4 * ALL, 0),
        ("zero2", "bf16", 2 * ALL, 0),
        ("zero2", "fp32", 4 * ALL, 0),
        ("zero3", "bf16", 2 * ALL // 4, 4 * ALL // 4),
        ("zero3", "fp32", 4 * ALL // 4, 4 * ALL // 4),
    ],
)
def test_each_stage_divides_more(strategy: str, dtype: str, parameters: int, gradients: int) -> None:
    found = stays(simulated(strategy, dtype).device)
    assert (found["parameters"], found["gradients"]) == (parameters, gradients)
    assert found["optimizer state"] == 12 * ALL // 4  # a master copy, also of fp32 weights, and two moments


def test_flat_groups_are_padded_for_each_rank() -> None:
    found = stays(simulated("zero2", ranks=3).device)
    assert found["parameters"] == 2 * (3 * WEIGHT + BIAS + 2)  # of a multiple of two values for each rank
    assert found["optimizer state"] == 12 * (WEIGHT + 14)


def test_shards_of_stage_3_are_padded_one_by_one() -> None:
    assert stays(simulated("zero3", ranks=3).device)["parameters"] == 2 * (3 * 334 + 14)


def test_frozen_parameters_have_neither_state_nor_gradients() -> None:
    trace = layers(frozen=(1, 2))
    for strategy, kept in (("zero2", 2 * ALL), ("zero3", 2 * ALL // 4)):
        found = stays(simulate(trace, run(strategy)).device)
        assert found["parameters"] == kept
        assert found["optimizer state"] == 12 * (WEIGHT + BIAS) // 4


def test_a_bucket_is_there_while_gradients_pass_and_what_it_sends_is_beside_it() -> None:
    # The third layer's gradient, the second's, then the first's with its bias: those of several ranks are made one.
    assert most(simulated("zero2").device, "communication") == 2 * 1500 + 2 * (WEIGHT + BIAS)
    assert most(simulated("zero2", overlap_comm=True).device, "communication") == 2 * 2 * 1500 + 2 * (WEIGHT + BIAS)
    assert stays(simulated("zero2").device)["communication"] == 0
    assert stays(simulated("zero3").device)["communication"] == 2 * 1500  # it stays


def test_a_gradient_larger_than_the_bucket_is_reduced_where_it_is() -> None:
    found = simulated("zero2", reduce_bucket_size=500).device
    assert most(found, "communication") == 2 * 500 + 2 * WEIGHT


def test_stage_1_keeps_all_gradients_until_the_last_micro_step() -> None:
    # The first is in the bucket when the rank that touches two weights makes room for these and the bias.
    assert most(simulated("zero1", "fp32").device, "gradients") == 4 * (ALL - WEIGHT) + 4 * (2 * WEIGHT + BIAS)
    # Stage 2 has one whole gradient at a time beside these.
    assert most(simulated("zero2", "fp32").device, "gradients") == 4 * (2 * WEIGHT + BIAS) + 4 * WEIGHT


def test_stage_2_in_fp32_keeps_whole_gradients_of_what_touches_a_partition() -> None:
    found = simulated("zero2", "fp32", ranks=2, reduce_bucket_size=1000).device
    # Of the first rank: two weights and the bias whole; and for the update the partition of the weights' group.
    assert most(found, "gradients") == 4 * (2 * WEIGHT + BIAS) + 4 * 1500


def test_offloaded_state_is_on_the_host() -> None:
    for strategy in ("zero1", "zero2", "zero3"):
        made = simulated(strategy, offload_optimizer={"device": "cpu"})
        assert stays(made.device)["optimizer state"] == 0
        assert stays(made.host)["optimizer state"] == 12 * ALL // 4
        assert stays(made.host)["gradients"] >= 4 * ALL // 4


def test_offloaded_parameters_are_on_the_host_until_they_are_gathered() -> None:
    made = simulated("zero3", offload_param={"device": "cpu"})
    assert stays(made.device)["parameters"] == 0
    assert stays(made.host)["parameters"] == 2 * ALL // 4
    assert most(made.device, "parameters") == 2 * ALL


def test_on_a_cpu_both_are_one_memory() -> None:
    made = simulated("zero3", device="cpu", offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert made.host is made.device
    assert stays(made.device)["parameters"] == 2 * ALL // 4


def test_parameters_that_are_needed_again_soon_stay_gathered() -> None:
    assert most(simulated("zero3").device, "parameters") == 2 * ALL // 4 + 2 * ALL
    limits: dict[str, Any] = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    assert most(simulated("zero3", **limits).device, "parameters") == 2 * ALL // 4 + 2 * (WEIGHT + BIAS)


def test_prefetching_gathers_what_follows_beside_the_layer_that_computes() -> None:
    limits: dict[str, Any] = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}
    without = most(simulated("zero3", **{**limits, "stage3_prefetch_bucket_size": 0}).device, "parameters")
    assert most(simulated("zero3", **limits).device, "parameters") >= without + 2 * WEIGHT
    few: dict[str, Any] = {**limits, "stage3_max_live_parameters": 0}
    assert most(simulated("zero3", **few).device, "parameters") == without


def test_small_parameters_stay_whole_between_steps() -> None:
    found = stays(simulated("zero3", stage3_param_persistence_threshold=BIAS).device)
    assert found["parameters"] == 2 * ALL // 4 + 2 * BIAS


def test_a_single_rank_has_nothing_to_gather() -> None:
    assert most(simulated("zero3", ranks=1).device, "parameters") == 2 * ALL
    small = simulated("zero3", ranks=1, stage3_param_persistence_threshold=BIAS)
    assert stays(small.device)["parameters"] == 2 * ALL
    offloaded = simulated("zero3", ranks=1, offload_param={"device": "cpu"})
    assert most(offloaded.device, "parameters") == 2 * ALL  # what is uploaded


def test_what_is_gathered_goes_with_its_buffers_before_the_update() -> None:
    for reuse, prefetch in ((0, 0), (0, 1), (10, 1500), (1500, 1500), (10**9, 5 * 10**7)):
        limits: dict[str, Any] = {"stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": prefetch}
        found = stays(simulated("zero3", **limits).device)
        assert (found["parameters"], found["communication"]) == (2 * ALL // 4, 2 * 1500)


def test_an_update_takes_a_sub_group_at_a_time() -> None:
    def taken(timeline: Timeline) -> set[int]:
        update = timeline.moments[-1][0]
        return {size for number, size in timeline.changes[update:] if timeline.part[number] == GRADIENTS}

    assert taken(simulated("zero3").device) == {0, 4 * 3 * WEIGHT // 4, 4 * BIAS // 4}
    assert taken(simulated("zero3", sub_group_size=250).device) == {0, 4 * WEIGHT // 4, 4 * BIAS // 4}


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_the_whole_model_is_on_the_device_at_the_start(strategy: str) -> None:
    made = simulated(strategy, reduce_bucket_size=1)
    assert isinstance(made, Engine)
    device, host = made.start_peak()
    assert device >= 4 * ALL + 2 * WEIGHT  # in fp32, and the first that is cast
    assert host == 4 * WEIGHT  # the largest tensor, where it is drawn


def test_stage_3_has_one_whole_tensor_on_the_device_at_the_start() -> None:
    made = simulated("zero3", reduce_bucket_size=1)
    device, host = made.start_peak()
    assert device < 4 * ALL
    assert 4 * ALL // 4 <= host <= 4 * ALL // 4 + 4 * WEIGHT  # slices, and a tensor that is drawn


def test_settings_that_are_left_out_have_the_defaults_of_deepspeed() -> None:
    found = settings_of({"zero_optimization": {"stage": 3}}, "bf16")
    assert (found.bucket, found.prefetched, found.persistent) == (500_000_000, 50_000_000, 100_000)
    assert (found.live, found.reuse, found.sub_group) == (1_000_000_000,) * 3
    assert found.overlaps
    assert not settings_of({"zero_optimization": {"stage": 2}}, "bf16").overlaps
    assert found.accumulated == 2
    assert settings_of({"data_types": {"grad_accum_dtype": "fp32"}}, "bf16").accumulated == 4
