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


class RandomData(_Loaded):
    """Random samples drawn from `train.seed`, for measuring: 512 of 512 ids from 100 up to 30000, labelled 0."""

    kind: Literal["random"] = setting("random", "Random samples, for measuring speed and memory.")
    sequence_length: int = setting(512, "Tokens per sample.", unit="tokens", ge=2)
    samples: int = setting(512, "Training samples; an eighth as many are held out besides.", unit="samples", ge=1)
    low: int = setting(100, "Lowest token id.", ge=0)
    high: int = setting(30000, "All token ids lie below this.", ge=1)
    classes: int = setting(
        1,
        "Labels of classification lie below this; with 1 all of them are 0, as the guides' `randint(0, 1)` draws them.",
        ge=1,
    )

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"no token id is at least low {self.low} and below high {self.high}")
        return self


Data = Annotated[TextData | RandomData, Field(discriminator="kind")]
