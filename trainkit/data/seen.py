"""What a plan knows of the data and of the tokenizer, from the heads of their files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.data.formats import RowFormat


@dataclass(frozen=True, slots=True)
class SeenTokenizer:
    """size: ids from 0 on that it gives, None where that is not known. own: whether it is the model's own."""

    name: str
    size: int | None
    own: bool | None


@dataclass(frozen=True, slots=True)
class SeenModel:
    """The weights of a pretrained model, by the heads of their files. adapters: values of LoRA adapters for them."""

    parameters: int
    adapters: int
    format: str  # `bf16`, `fp32`, … as most of the weights are stored


@dataclass(frozen=True, slots=True)
class SeenData:
    """form: of the rows, None where that is decided before the ranks start. fault: what is wrong, and what to do.

    rows: how many there are, None where that is not known. files: how many, and their bytes together.
    """

    form: RowFormat | None = None
    fault: tuple[str, str] | None = None
    rows: int | None = None
    files: int = 0
    size: int = 0
    tokenizer: SeenTokenizer | None = None
    model: SeenModel | None = None
    length: int | None = None  # tokens of a sample, where an earlier preparation has found it out
