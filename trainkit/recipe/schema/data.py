"""The data section: a tagged union on `kind`, one class per source of samples."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainkit.recipe.schema.base import Section, setting


class _Loaded(Section):
    """Settings that every source has: the length of its samples, and how they are brought to the device."""

    sequence_length: int = setting(128, "Tokens per sample.", unit="tokens", ge=2)
    workers: int = setting(
        0,
        "Loader processes per rank, which live as long as the run; 0 reads in the training process.",
        ge=0,
        flag="dataloader_num_workers",
    )
    prefetch_factor: Annotated[int, Field(ge=1)] | None = setting(
        None,
        "Optimizer steps that each worker reads ahead; null is torch's default, 2.",
        unit="steps",
        flag="dataloader_prefetch_factor",
    )
    pin_memory: bool = setting(True, "Page-locked host memory for faster copies to CUDA.", flag="dataloader_pin_memory")

    @model_validator(mode="after")
    def _workers_prefetch(self) -> Self:
        if self.prefetch_factor is not None and not self.workers:
            raise ValueError(f"prefetch_factor {self.prefetch_factor} is for loader processes, and workers is 0")
        return self


class TextData(_Loaded):
    """Text files read as bytes, one token per byte."""

    kind: Literal["text"] = setting("text", "Text files, one token per byte.")
    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "python-stdlib",
        "A file, a folder, or a list of them, from the working folder; `python-stdlib` is the running interpreter's "
        "standard library source.",
    )
    include: str = setting("**/*.py", "Which files of a folder, as a glob pattern.")
    validation_fraction: float = setting(0.05, "Share of the corpus held out for evaluation, from its end.", gt=0, lt=1)
    cache: str | None = setting(None, "Folder of tokenised corpora; null is the user's cache folder.")


Data = TextData
