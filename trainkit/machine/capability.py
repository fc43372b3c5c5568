"""What GPUs can compute by their compute capability: formats with units of their own, kernels, and builds of torch.

A kernel of compute capability x.y runs on GPUs of x.y and of later minor numbers (CUDA C programming guide, binary
compatibility), so that a build serves a range of GPUs, from the oldest that its toolkit targets on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from trainkit.machine.facts import Facts, Gpu, at_least

Dtype = Literal["fp32", "bf16", "fp16"]
Capability = tuple[int, int]
TRITON: Capability = (7, 0)  # torch/_inductor/scheduler.py: GPUTooOldForTriton
FLASH_ATTENTION: Capability = (8, 0)  # https://github.com/Dao-AILab/flash-attention, CUDA support
# CUDA's major number -> the oldest GPUs that its compiler has code for (release notes, deprecated architectures).
OLDEST: Mapping[int, Capability] = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
# Major number of GPUs -> the first CUDA that has code for them.
FIRST: Mapping[int, str] = {9: "11.8", 10: "12.8", 12: "12.8"}
VOLTA = (7, 0)  # first compute capability with tensor cores, for fp16
AMPERE = (8, 0)  # first compute capability with bf16 and tf32 units (CUDA C programming guide, arithmetic instructions)
HOPPER = (9, 0)
# GPUs of Turing's small chips, TU116 and TU117, which have 7.5 and no tensor cores (NVIDIA Turing GPU architecture).
_SMALL_TURING = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


def oldest_in_wheels(torch: str, cuda: str) -> Capability:
    """The oldest GPUs that PyTorch's own wheels of a release have kernels for (.ci/manywheel/build_cuda.sh)."""
    if not at_least(cuda, "12.8"):
        return (5, 0)
    # https://github.com/pytorch/pytorch/issues/157517 and, from 2.11 on, issues/172352
    return (7, 5) if at_least(cuda, "13") or at_least(torch, "2.11") else (7, 0)


def cuda_of(facts: Facts) -> str:
    """The CUDA that the installed torch is built for; empty where that is not known, or where it is none."""
    if facts.torch is not None:
        return facts.torch.cuda or ""
    tag = facts.packages.get("torch", "").partition("+cu")[2]
    return f"{tag[:-1]}.{tag[-1]}" if tag.isdecimal() and len(tag) > 2 else ""


def fast_format(cards: Sequence[Gpu]) -> Dtype:
    """bf16 where every GPU has units for it, else fp16 where every GPU has tensor cores, else fp32."""
    if cards and all(gpu.compute_capability >= AMPERE for gpu in cards):
        return "bf16"
    return "fp16" if cards and all(map(has_tensor_cores, cards)) else "fp32"


def has_tensor_cores(gpu: Gpu) -> bool:
    """Whether a GPU computes 16-bit products on units of their own. Of AMD's, the ones that PyTorch runs on have."""
    return gpu.vendor == "amd" or (gpu.compute_capability >= VOLTA and not _SMALL_TURING.search(gpu.name))


def has_flash_attention(cards: Sequence[Gpu]) -> bool:
    """Whether FlashAttention-2 runs on every GPU; of AMD's it is not known here."""
    return all(gpu.vendor == "amd" or gpu.compute_capability >= FLASH_ATTENTION for gpu in cards)


def named(gpu: Gpu) -> str:
    """The GPU with what it has, for the end of a sentence."""
    return f"{gpu.name} has {dotted(gpu.compute_capability)}"


def dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
