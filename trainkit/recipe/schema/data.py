"""The data section: a tagged union on `kind`, one class per source of samples."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainkit.recipe.schema.base import Section, setting
from trainkit.recipe.schema.launching import Scalar


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


class TokensData(_Loaded):
    """Token ids in one NumPy (.npy) or raw binary file, memory-mapped."""

    kind: Literal["tokens"] = setting("tokens", "Token ids in a NumPy or raw binary file.")
    path: str = setting("", "The file, from the working folder: one row of whole numbers, samples end to end.")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = setting(
        None, "Number format of a raw file, in the machine's byte order; a .npy file says its own."
    )
    validation_fraction: float = setting(0.05, "Share of the file held out for evaluation, from its end.", gt=0, lt=1)

    @model_validator(mode="after")
    def _format_is_known(self) -> Self:
        if not self.path:
            raise ValueError("path must name the file of token ids")
        if self.path.endswith(".npy") and self.dtype:
            raise ValueError(f"dtype {self.dtype} is for raw files, and a .npy file says its own")
        if not self.path.endswith(".npy") and not self.dtype:
            raise ValueError(f"dtype must say how the numbers in {self.path} are written, for its name is not *.npy")
        return self


class JsonlData(_Loaded):
    """Texts in JSON lines, one token per byte; prompts with answers for instruction tuning. Held in memory."""

    kind: Literal["jsonl"] = setting("jsonl", "Texts in JSON lines, one token per byte.")
    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "", "A file with an object in each line, or a list of such files, from the working folder."
    )
    field: str = setting("text", "Where in the object the text stands.", min_length=1)
    prompt_field: str | None = setting(
        None,
        "Where the prompt stands that the text answers; it is read and not predicted: loss on the answers only.",
        min_length=1,
    )
    packing: bool = setting(
        True,
        "Fill samples with texts end to end, without waste; `false` starts a sample with each text, cuts what is too "
        "long and pads what is too short.",
    )
    validation_fraction: float = setting(
        0.05, "Share of the samples held out for evaluation, from their end.", gt=0, lt=1
    )

    @model_validator(mode="after")
    def _path_is_given(self) -> Self:
        if not self.path:
            raise ValueError("path must name a file of JSON lines")
        return self


_IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


class TargetData(_Loaded):
    """A data set of the user's own, by import path; the working folder is searched after installed packages."""

    kind: Literal["target"] = setting("target", "A data set of the user's own.")
    sequence_length: int = setting(
        128, "Tokens of the longest sample; the context of the native model.", unit="tokens", ge=2
    )
    target: str = setting(
        "",
        "What makes the data set, `pkg.mod:name`, called with `args`: something with `len()` and samples by number, or "
        "a pair of them, for training and for validation.",
        pattern=_IMPORT_PATH,
    )
    args: dict[str, Scalar | list[Scalar]] = setting({}, "Arguments of the target, by name.")
    collate: str | None = setting(
        None,
        "What makes a batch, a mapping of tensors by the names of the model's arguments, out of a list of samples, "
        "`pkg.mod:name`; null stacks samples that are such mappings themselves.",
        pattern=_IMPORT_PATH,
    )
    validation_fraction: float = setting(
        0.05, "Share of the samples held out for evaluation, from their end, where there is no pair.", gt=0, lt=1
    )

    @model_validator(mode="after")
    def _target_is_named(self) -> Self:
        if not self.target:
            raise ValueError("target must name the data set as pkg.mod:name")
        return self


Data = Annotated[TextData | RandomData | TokensData | JsonlData | TargetData, Field(discriminator="kind")]
