"""Which of DeepSpeed's ops a plan has built ahead, and for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
NVME: dict[str, Any] = {"strategy": {"kind": "zero3", "offload_param": "nvme", "nvme_path": "/disk"}}


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ((), ["--ops", "async_io", "--device", "cpu"]),
        (("NVIDIA A100",), ["--ops", "async_io", "--device", "cuda", "--capabilities", "8.0"]),
        (("NVIDIA H100", "Tesla T4"), ["--ops", "async_io", "--device", "cuda", "--capabilities", "7.5,9.0"]),
    ],
)
def test_ops_are_built_for_the_device_and_the_cards_of_the_run(
    layered: Layered, machine: Machine, cards: tuple[str, ...], words: list[str]
) -> None:
    (found,) = build_plan(layered(NVME), machine(len(cards), *cards)).plan.preparations
    said = [str(word) for word in found.argv]
    assert said[said.index("--ops") :] == words
