"""What kinds of GPUs reach at most: arithmetic, memory and connections, by their data sheets."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Format = Literal["fp32", "tf32", "16 bits"]
# GB/s to other GPUs in one direction: half of what data sheets give for both.
_NVLINK2, _NVLINK3, _NVLINK4, _NVLINK5 = 150, 300, 450, 900
_PCIE3, _PCIE4, _PCIE5 = 16, 32, 64


class Accelerator(NamedTuple):
    """The peak rates of a kind of GPU. name: pattern for the driver's full name, which MIG instances do not match.

    fp32, tf32, half: 10^12 operations a second without sparsity; half: 16-bit products with 32-bit sums.
    bandwidth: of its memory, link: to other GPUs in one direction; both GB/s. source: the document with the figures.
    """

    name: str
    fp32: float
    tf32: float | None  # None before Ampere
    half: float | None  # None before Volta
    bandwidth: float
    link: float
    source: str


_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper 2.1"
_H100 = "NVIDIA H100 Tensor Core GPU architecture white paper 1.04"
_V100, _A100 = "NVIDIA V100 data sheet, January 2020", "NVIDIA A100 data sheet, May 2022"

GPUS: tuple[Accelerator, ...] = (
    Accelerator(r"Tesla K80", 4.37, None, None, 240, _PCIE3, "NVIDIA K80 board specification, one of its two GPUs"),
    Accelerator(r"Tesla V100-SXM2-\d+GB", 15.7, None, 125, 900, _NVLINK2, _V100),
    Accelerator(r"Tesla V100-PCIE-\d+GB", 14, None, 112, 900, _PCIE3, _V100),
    Accelerator(r"Tesla T4", 8.1, None, 65, 320, _PCIE3, "NVIDIA T4 data sheet, March 2019"),
    Accelerator(r"NVIDIA A100-SXM4-40GB", 19.5, 156, 312, 1555, _NVLINK3, _A100),
    Accelerator(r"NVIDIA A100-PCIE-40GB", 19.5, 156, 312, 1555, _PCIE4, _A100),
    Accelerator(r"NVIDIA A100-SXM.*80GB.*", 19.5, 156, 312, 2039, _NVLINK3, _A100),
    Accelerator(r"NVIDIA A100[- ].*(40|80)GB.*", 19.5, 156, 312, 1935, _PCIE4, _A100),
    Accelerator(r"NVIDIA A30", 10.3, 82, 165, 933, _PCIE4, "NVIDIA A30 data sheet, March 2022"),
    Accelerator(r"NVIDIA A40", 37.4, 74.8, 149.7, 696, _PCIE4, "NVIDIA A40 data sheet, June 2021"),
    Accelerator(r"NVIDIA A10", 31.2, 62.5, 125, 600, _PCIE4, "NVIDIA A10 data sheet, March 2021"),
    Accelerator(r"NVIDIA RTX A6000", 38.7, 77.4, 154.8, 768, _PCIE4, f"{_GA102}, table 10"),
    Accelerator(r"NVIDIA L4", 30.3, 60, 121, 300, _PCIE4, "NVIDIA L4 data sheet, halved from sparse"),
    Accelerator(r"NVIDIA L40", 90.5, 90.5, 181, 864, _PCIE4, "NVIDIA L40 data sheet, January 2023"),
    Accelerator(r"NVIDIA L40S", 91.6, 183, 362, 864, _PCIE4, "NVIDIA L40S data sheet, August 2023"),
    Accelerator(r"NVIDIA GeForce RTX 3090", 35.6, 35.6, 71, 936, _PCIE4, f"{_GA102}, table 9"),
    Accelerator(
        r"NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 1008, _PCIE4,
        "NVIDIA Ada GPU architecture white paper 2.1, table 2",
    ),
    Accelerator(
        r"NVIDIA H100 96GB HBM2e", 66.9, 494.7, 989.4, 2400, _NVLINK4, f"{_H100}, table 2, and torchtitan",
    ),
    Accelerator(r"NVIDIA H100( 80GB HBM3| SXM.*)", 66.9, 494.7, 989.4, 3350, _NVLINK4, f"{_H100}, table 2"),
    Accelerator(r"NVIDIA H100 PCIe", 51.2, 378, 756, 2000, _PCIE5, f"{_H100}, table 2"),
    Accelerator(r"NVIDIA H100 NVL", 60, 417.5, 835, 3900, 300, "NVIDIA H100 data sheet, halved from sparse"),
    Accelerator(r"NVIDIA H200", 67, 494.5, 989.5, 4800, _NVLINK4, "NVIDIA H200 data sheet, halved from sparse"),
    Accelerator(
        r"NVIDIA GH200 .*", 67, 494.5, 989.5, 4000, _NVLINK4, "NVIDIA GH200 data sheet, halved from sparse",
    ),
    Accelerator(r"NVIDIA B200", 75, 1100, 2250, 7700, _NVLINK5, "NVIDIA HGX B200 data sheet, halved from sparse"),
    Accelerator(r"AMD Instinct MI300X", 163.4, 653.7, 1307.4, 5300, 448, "AMD Instinct MI300X data sheet"),
)  # fmt: skip


def accelerator(name: str) -> Accelerator | None:
    """The entry of the GPU with this driver name; None without a data sheet."""
    # MIG instances of an A100 would match the pattern of the whole GPU.
    return next((each for each in GPUS if re.fullmatch(each.name, name)), None) if "MIG" not in name else None


def peak(name: str, used: Format) -> float | None:
    """Peak operations a second of the GPU with this driver name; None without a data sheet, or without the unit."""
    found = accelerator(name)
    teraflops = {"fp32": found.fp32, "tf32": found.tf32, "16 bits": found.half}[used] if found else None
    return None if teraflops is None else teraflops * 1e12
