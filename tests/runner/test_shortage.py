"""What the end of a log says of memory that ran out."""

from __future__ import annotations

import pytest

from trainkit.runner.report.shortage import Shortage, read

GIB = 2**30
CUDA = """
Traceback (most recent call last):
  File "/x/torch/autograd/graph.py", line 829, in _engine_run_backward
    return Variable._execution_engine.run_backward(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.50 GiB of \
which 1.50 GiB is free. Including non-PyTorch memory, this process has 22.00 GiB memory in use. Of the allocated \
memory 17.00 GiB is allocated by PyTorch, and 4.25 GiB is reserved by PyTorch but unallocated. If reserved but \
unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.
"""
CPU = """
  File "/x/torch/nn/modules/module.py", line 1773, in _call_impl
RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \
allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)
"""


def test_a_gpus_shortage_has_its_figures() -> None:
    found = read(3, CUDA)
    assert found == Shortage(3, 2 * GIB, 17 * GIB, int(4.25 * GIB), int(1.5 * GIB), int(23.5 * GIB), moment="backward")
    assert found.splintered  # 4.25 GiB lie unused, and half a GiB was missing


def test_memory_in_few_pieces_is_not_what_is_missing() -> None:
    assert not Shortage(0, wanted=4 * GIB, unused=GIB, free=GIB).splintered


def test_the_machines_memory_is_told_apart() -> None:
    assert read(0, CPU) == Shortage(0, 4 * GIB, host=True, moment="forward")


@pytest.mark.parametrize("text", ["", "KeyError: 'out of memory'", "ValueError: the loss is nan"])
def test_other_failures_are_none(text: str) -> None:
    assert read(0, text) is None
