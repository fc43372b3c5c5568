"""The data section: a tagged union on `kind`, one class per source of samples."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainkit.recipe.schema.base import MOST, Count, ImportPath, Section, setting
from trainkit.recipe.schema.launching import Scalar

_TOKENIZER = (
    "Folder of a Hugging Face tokenizer, as `save_pretrained` writes it, relative to the working folder, or the name "
    "of a repository of the Hub; null is that of `model.path`, and without one `bytes`, which makes each byte a token."
)
BYTES = "bytes"
_TOKENIZER_REVISION = (
    "Branch, tag or commit of a `tokenizer` on the Hub; null is `main`, or `model.revision` for that of the model."
)
_NO_VALIDATION = "check data.validation_path, relative to the working folder"
_VALIDATION_PATH = "Files to evaluate on, as `path` names them; null holds out a share of the data."

# What the columns of a row may be to the training, by the name that a column has by itself.
ROLES = (
    *("messages", "conversations", "tools", "system"),
    *("instruction", "input", "output", "prompt", "completion", "source", "target"),
    *("text", "label", "input_ids", "labels"),
)


_TARGET_LENGTH = (
    "Most tokens of a target, for model.task seq2seq_lm; sequence_length is for the source. null is sequence_length."
)


class _Loaded(Section):
    """Settings that every source has: the length of its samples, and how they are brought to the device."""

    # The setting that a source is nothing without, and what it must name.
    required: ClassVar[tuple[str, str]] = ("", "")

    sequence_length: int = setting(128, "Tokens per sample.", unit="tokens", ge=2)
    workers: int = setting(
        0,
        "Loader processes per rank, for the whole run; 0 reads in the training process.",
        ge=0,
        flag="dataloader_num_workers",
    )
    persistent_workers: Literal[True] = setting(
        True,
        "Loader processes are started once and persist over epochs; always true here.",
        flag="dataloader_persistent_workers",
    )
    prefetch_factor: Count | None = setting(
        None,
        "Optimizer steps that each loader process reads ahead; null is torch's default, 2.",
        unit="steps",
        flag="dataloader_prefetch_factor",
    )
    pin_memory: bool = setting(True, "Page-locked host memory for faster copies to CUDA.", flag="dataloader_pin_memory")

    def _contradictions(self) -> Iterator[str]:
        name, what = self.required
        if name and not getattr(self, name) and not getattr(self, "mix", None):
            yield f"{name} must name {what}"
        if self.prefetch_factor is not None and not self.workers:
            yield f"prefetch_factor {self.prefetch_factor} is for loader processes, and workers is 0"


_FOLDER_OR_NAME = "give a folder as save_pretrained writes it, or a name of the Hub"
_NO_DATA = "check data.path, relative to the working folder; names of the Hub are for data.kind: dataset"


Length = Literal["auto"] | Annotated[int, Field(ge=2, le=MOST)]


class TextData(_Loaded):
    """Text files, one token per byte or those of a tokenizer."""

    kind: Literal["text"] = setting("text", "Text files.")
    sequence_length: Length = setting(
        128,
        "Tokens per sample; `auto`, the default for a pretrained model, is 1024, or what the model can read if that is "
        "less.",
        unit="tokens",
    )  # type: ignore[assignment]
    tokenizer: str | None = setting(
        None, _TOKENIZER, reads="repository", missing=_FOLDER_OR_NAME, words=(BYTES,), here=True
    )
    tokenizer_revision: str | None = setting(None, _TOKENIZER_REVISION, min_length=1)
    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "python-stdlib",
        "A file, a folder, or a list of them, relative to the working folder; `python-stdlib` is the interpreter's "
        "standard library source.",
        reads="path",
        missing=_NO_DATA,
        words=("python-stdlib",),
    )
    include: str = setting("**/*.py", "Which files of a folder, as a glob pattern.")
    validation_path: str | Annotated[list[str], Field(min_length=1)] | None = setting(
        None, _VALIDATION_PATH, reads="path", missing=_NO_VALIDATION
    )
    validation_fraction: float = setting(0.05, "Share of the corpus held out for evaluation, from its end.", gt=0, lt=1)
    cache: str | None = setting(None, "Folder of tokenised corpora; null is the user's cache folder.", reads="output")


class RandomData(_Loaded):
    """Random samples drawn from `train.seed`, for measuring: 512 of 512 ids from 100 up to 30000, labelled 0."""

    kind: Literal["random"] = setting("random", "Random samples, for measuring speed and memory.")
    sequence_length: int = setting(512, "Tokens per sample.", unit="tokens", ge=2)
    samples: int = setting(512, "Training samples; an eighth as many more are held out.", unit="samples", ge=1)
    low: int = setting(100, "Lowest token id.", ge=0)
    high: int = setting(30000, "All token ids are below this.", ge=1)
    classes: int = setting(
        1,
        "Classification labels are below this; with 1 all labels are 0, as in Hugging Face's guides.",
        ge=1,
    )
    target_length: Count | None = setting(None, _TARGET_LENGTH, unit="tokens")

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.low >= self.high:
            yield f"no token id is at least low {self.low} and below high {self.high}"


class TokensData(_Loaded):
    """Token ids in one NumPy (.npy) or raw binary file, memory-mapped."""

    required = ("path", "the file of token ids")

    kind: Literal["tokens"] = setting("tokens", "Token ids in a NumPy or raw binary file.")
    path: str = setting(
        "",
        "The file, relative to the working folder: a one-dimensional array of integers, cut into samples.",
        reads="file",
        missing=_NO_DATA,
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = setting(
        None, "Number format of a raw file, in the machine's byte order; a .npy file says its own."
    )
    validation_fraction: float = setting(0.05, "Share of the file held out for evaluation, from its end.", gt=0, lt=1)

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.path.endswith(".npy") and self.dtype:
            yield f"dtype {self.dtype} is for raw files, and a .npy file says its own"
        if not self.path.endswith(".npy") and not self.dtype:
            yield f"dtype must say how the numbers in {self.path} are written, for its name is not *.npy"


Columns = dict[str, Annotated[str, Field(min_length=1)]]
_COLUMNS = (
    "Column of each part of a row whose name is another than the part's: `{prompt: question, completion: answer}`. The "
    f"parts are {', '.join(ROLES)}; dots select from mappings (`translation.en`)."
)


def _unknown_roles(columns: Columns) -> Iterator[str]:
    for role in columns:
        if role not in ROLES:
            yield f"columns has no part {role!r}: a row's parts are {', '.join(ROLES)}"


class Mixed(Section):
    """One source of `data.mix`."""

    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "", "Anything that `data.path` may name.", reads="repository"
    )
    weight: float = setting(1.0, "Its share of the samples, relative to the sum of all weights.", ge=0)
    split: str | None = setting(None, "Split to train on; null is `train`, or the only one.", min_length=1)
    columns: Columns = setting({}, "As `data.columns`, where this source's columns have other names.", lines=True)
    revision: str | None = setting(None, "As `data.revision`, for a `path` on the Hub.", min_length=1)
    subset: str | None = setting(None, "As `data.subset`.", min_length=1)

    @property
    def is_read(self) -> bool:
        """Whether the source has a share of the samples."""
        return bool(self.weight)

    def _contradictions(self) -> Iterator[str]:
        if not self.path:
            yield "path must name the data of each source of mix"
        yield from _unknown_roles(self.columns)


class DatasetData(_Loaded):
    """Rows: chats, prompts with answers, texts, labelled texts, sources with targets, or token ids.

    From JSON lines, JSON arrays, CSV, TSV, parquet or Arrow, plain or compressed, or folders of them, or the Hub.
    """

    required = ("path", "a file of rows or a folder of them, or mix several")

    kind: Literal["dataset"] = setting("dataset", "Rows: chats, prompts with answers, texts, labelled texts.")
    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "",
        "A file of rows (.jsonl, .json, .csv, .tsv, .parquet, .arrow, also with .gz or .zst), a folder of them or one "
        "of `save_to_disk`, or a list of such, relative to the working folder; or the name of a repository of the "
        "Hub, if there is no such folder.",
        reads="repository",
        missing=_NO_DATA,
    )
    revision: str | None = setting(None, "Branch, tag or commit of a `path` on the Hub; null is `main`.", min_length=1)
    subset: str | None = setting(
        None, "Subset (config) of a data set that has several, by its README.md; null is the default one.", min_length=1
    )
    split: str | None = setting(None, "Split to train on; null is `train`, or the only one.", min_length=1)
    validation_path: str | Annotated[list[str], Field(min_length=1)] | None = setting(
        None, _VALIDATION_PATH, reads="path", missing=_NO_VALIDATION
    )
    validation_split: str | None = setting(
        None,
        "Split to evaluate on; null is `validation`, else a share of the training split; for a stream its first rows.",
        min_length=1,
    )
    validation_fraction: float = setting(
        0.05, "Share of the rows held out for evaluation, drawn by `split_seed`.", gt=0, lt=1
    )
    split_seed: int = setting(
        0, "Seed of the rows that are held out; with each seed equal rows are on the same side.", ge=0, lt=2**63
    )
    columns: Columns = setting({}, _COLUMNS, lines=True)
    tokenizer: str | None = setting(
        None, _TOKENIZER, reads="repository", missing=_FOLDER_OR_NAME, words=(BYTES,), here=True
    )
    tokenizer_revision: str | None = setting(None, _TOKENIZER_REVISION, min_length=1)
    chat_template: str | None = setting(
        None,
        "How a chat becomes one text: `chatml`, `llama3` or `alpaca`, a file with a Jinja template, or `none` for "
        "prompts and completions as they are; null is the tokenizer's own.",
        reads="file",
        missing="name a file with a Jinja template, or chatml, llama3 or alpaca",
        words=("chatml", "llama3", "alpaca", "none"),
        min_length=1,
    )
    sequence_length: Length = setting(
        128,
        "Tokens per sample; what is longer is cut, and counted. `auto`, the default for a pretrained model, is what 99 "
        "of 100 rows fit into, in multiples of 64, and at most what the model can read.",
        unit="tokens",
    )  # type: ignore[assignment]
    target_length: Literal["auto"] | Count | None = setting(
        None, f"{_TARGET_LENGTH} `auto` is as for sequence_length.", unit="tokens"
    )
    prompt_prefix: str | None = setting(
        None,
        "Text before each prompt or source, and before sample.prompt (such as `summarize: ` for t5).",
        lines=True,
        min_length=1,
    )
    padding: Literal["longest", "max_length"] = setting(
        "longest",
        "Padding of sources and targets for model.task seq2seq_lm. `longest`: to the longest that a rank has "
        "in a step, in multiples of 8. `max_length`: to sequence_length and target_length.",
    )
    labels: list[str] = setting([], "Names of the labels, from 0 on; empty sorts the names in the data.")
    skip_empty: bool = setting(
        False,
        "Skip rows whose text, prompt, chat or token ids are empty or null; `false` ends the run at the first.",
    )
    train_on_prompts: bool = setting(
        False,
        "Whether prompts are learned too: the whole text of a chat, or of a prompt with its answer. A message that "
        "says it is not learned (`weight: 0`) is refused beside it.",
    )
    max_rows: Count | Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None,
        "At most so many rows of each source, the first ones, of which those to evaluate on are held out; as many of "
        "files or a split to evaluate on. A number below 1 is a share of the rows. null reads all.",
        unit="rows",
    )
    packing: Literal["auto", "isolated", "dense", "none"] = setting(
        "auto",
        "How texts fill samples. `isolated`: several whole texts in one, each with its own positions and attention, in "
        "other company in each epoch. `dense`: texts end to end, cut wherever a sample is full, with attention to the "
        "earlier ones, as in pretraining. `none`: each text is a sample, padded. `auto` is `isolated` where the model "
        "can keep texts apart, for masked models `dense`, for labelled texts and sources with targets `none`.",
    )
    streaming: bool = setting(
        False, "Read rows during training, for data larger than the disk's room for token ids; requires `train.steps`."
    )
    mix: list[Mixed] = setting(
        [],
        "Several sources instead of `path`, each with a weight; requires `streaming`.",
        reads="repository",
        missing="check its paths, relative to the working folder; names of the Hub are one in each path",
    )
    shuffle_buffer: int = setting(
        1000,
        "Streamed samples of a source that are held in memory and shuffled before the next ones are "
        "read; 0 does not shuffle.",
        unit="samples",
        ge=0,
    )
    shuffle_files: bool = setting(True, "Whether the order of streamed files is drawn anew for each epoch.")
    validation_rows: int = setting(
        100,
        "Rows that a stream holds out for evaluation: the first of each source, or of its split for evaluation.",
        unit="rows",
        ge=1,
    )
    cache: str | None = setting(
        None, "Folder of prepared data (token ids by content); null is the user's cache folder.", reads="output"
    )

    @property
    def limit_in_words(self) -> str:
        """``at most the first 100 rows``, ``the first 0.2 of the rows``; empty where all rows are read."""
        if self.max_rows is None:
            return ""
        return (
            f"the first {self.max_rows:.4g} of the rows"
            if self.max_rows < 1
            else f"at most the first {self.max_rows:,} rows"
        )

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.streaming and self.max_rows is not None and self.max_rows < 1:
            yield "max_rows below 1 is a share of the rows, and how many a stream has is not known before its end"
        if self.mix and not self.streaming:
            yield "mix requires streaming: true"
        if self.mix and self.path:
            yield "path and mix each name the data: keep one"
        if self.mix and not sum(each.weight for each in self.mix):
            yield "the weights in mix sum to 0: at least one must be above"
        for name in ("split", "subset", "revision"):
            if self.mix and getattr(self, name):
                yield f"{name} is each source's own in mix: set it there"
        if self.validation_path and self.validation_split:
            yield "validation_path and validation_split each name the rows to evaluate on: keep one"
        yield from _unknown_roles(self.columns)


class TargetData(_Loaded):
    """A data set of the user's own, by import path; the working folder is searched after installed packages."""

    required = ("target", "the data set as pkg.mod:name")

    kind: Literal["target"] = setting("target", "A data set of the user's own.")
    sequence_length: int = setting(
        128, "Tokens of the longest sample; the context of the native model.", unit="tokens", ge=2
    )
    target: ImportPath = setting(
        "",
        "Function that makes the data set, `pkg.mod:name`, called with `args`: an object with `len()` and indexing, or "
        "a pair of these, for training and for validation.",
        expects="an import path pkg.mod:name",
    )
    args: dict[str, Scalar | list[Scalar]] = setting({}, "Arguments of the target, by name.", lines=True)
    collate: ImportPath | None = setting(
        None,
        "Function that turns a list of samples into a batch, a mapping of tensors by the model's argument names, "
        "`pkg.mod:name`; null stacks samples that are such mappings.",
        expects="an import path pkg.mod:name",
    )
    validation_fraction: float = setting(
        0.05, "Share of the samples held out for evaluation, from their end, if there is no pair.", gt=0, lt=1
    )


Data = Annotated[TextData | RandomData | TokensData | DatasetData | TargetData, Field(discriminator="kind")]
