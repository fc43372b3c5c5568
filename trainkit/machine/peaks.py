"""How many floating-point operations cards can do in a second, dense, by number format; from NVIDIA's data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Format = Literal["fp32", "tf32", "16 bits"]


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of card. name: a pattern of the driver's whole name for it, so that parts of cards are none of them.

    teraflops: 10^12 operations a second without sparsity; of products in 16 bits with sums in 32. source: a document.
    """

    name: str
    teraflops: Mapping[Format, float]
    source: str


CARDS: tuple[Card, ...] = (
    Card(r"Tesla V100-SXM2-\d+GB", {"fp32": 15.7, "16 bits": 125}, "NVIDIA V100 data sheet, January 2020"),
    Card(r"Tesla V100-PCIE-\d+GB", {"fp32": 14, "16 bits": 112}, "NVIDIA V100 data sheet, January 2020"),
    Card(r"Tesla T4", {"fp32": 8.1, "16 bits": 65}, "NVIDIA T4 data sheet, March 2019"),
    Card(
        r"NVIDIA A100[- ].*(40|80)GB.*",
        {"fp32": 19.5, "tf32": 156, "16 bits": 312},
        "NVIDIA A100 data sheet, May 2022",
    ),
    Card(r"NVIDIA A30", {"fp32": 10.3, "tf32": 82, "16 bits": 165}, "NVIDIA A30 data sheet, March 2022"),
    Card(r"NVIDIA A40", {"fp32": 37.4, "tf32": 74.8, "16 bits": 149.7}, "NVIDIA A40 data sheet, June 2021"),
    Card(r"NVIDIA A10", {"fp32": 31.2, "tf32": 62.5, "16 bits": 125}, "NVIDIA A10 data sheet, March 2021"),
    Card(
        r"NVIDIA RTX A6000",
        {"fp32": 38.7, "tf32": 77.4, "16 bits": 154.8},
        "NVIDIA Ampere GA102 GPU architecture white paper 2.1, table 10",
    ),
    Card(r"NVIDIA L4", {"fp32": 30.3, "tf32": 60, "16 bits": 121}, "NVIDIA L4 data sheet, halved from sparse"),
    Card(r"NVIDIA L40", {"fp32": 90.5, "tf32": 90.5, "16 bits": 181}, "NVIDIA L40 data sheet, January 2023"),
    Card(r"NVIDIA L40S", {"fp32": 91.6, "tf32": 183, "16 bits": 362}, "NVIDIA L40S data sheet, August 2023"),
    Card(
        r"NVIDIA GeForce RTX 3090",
        {"fp32": 35.6, "tf32": 35.6, "16 bits": 71},
        "NVIDIA Ampere GA102 GPU architecture white paper 2.1, table 9",
    ),
    Card(
        r"NVIDIA GeForce RTX 4090",
        {"fp32": 82.6, "tf32": 82.6, "16 bits": 165.2},
        "NVIDIA Ada GPU architecture white paper 2.1, table 2",
    ),
    Card(
        r"NVIDIA H100( 80GB HBM3| SXM.*)",
        {"fp32": 66.9, "tf32": 494.7, "16 bits": 989.4},
        "NVIDIA H100 Tensor Core GPU architecture white paper 1.04, table 2",
    ),
    Card(
        r"NVIDIA H100 PCIe",
        {"fp32": 51.2, "tf32": 378, "16 bits": 756},
        "NVIDIA H100 Tensor Core GPU architecture white paper 1.04, table 2",
    ),
    Card(r"NVIDIA H100 NVL", {"fp32": 60, "tf32": 417.5, "16 bits": 835}, "NVIDIA H100 data sheet, halved from sparse"),
    Card(r"NVIDIA H200", {"fp32": 67, "tf32": 494.5, "16 bits": 989.5}, "NVIDIA H200 data sheet, halved from sparse"),
)


def peak(name: str, used: Format) -> float | None:
    """Operations a second of the card that the driver calls so; None where no data sheet is known, or no such unit."""
    if "MIG" in name:  # a part of a card
        return None
    card = next((card for card in CARDS if re.fullmatch(card.name, name)), None)
    teraflops = card.teraflops.get(used) if card else None
    return None if teraflops is None else teraflops * 1e12
