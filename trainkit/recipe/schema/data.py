"""The data section: a tagged union on `kind`, one class per source of samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Section, setting


class TextData(Section):
    """Text files read as bytes, one token per byte."""

    kind: Literal["text"] = setting("text", "Text files, one token per byte.")
    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "python-stdlib",
        "A file, a folder, or a list of them, from the working folder; `python-stdlib` is the running interpreter's "
        "standard library source.",
    )
    include: str = setting("**/*.py", "Which files of a folder, as a glob pattern.")
    sequence_length: int = setting(128, "Tokens per sample.", unit="tokens", ge=2)
    validation_fraction: float = setting(0.05, "Share of the corpus held out for evaluation, from its end.", gt=0, lt=1)
    cache: str | None = setting(None, "Folder of tokenised corpora; null is the user's cache folder.")
    workers: int = setting(0, "Loader processes per rank.", ge=0, flag="dataloader_num_workers")
    pin_memory: bool = setting(True, "Page-locked host memory for faster copies to CUDA.", flag="dataloader_pin_memory")


Data = TextData
