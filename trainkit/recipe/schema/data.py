"""The data section: a tagged union on `kind`, one class per source of samples."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Count, ImportPath, Section, setting
from trainkit.recipe.schema.launching import Scalar

_TOKENIZER = (
    "Folder of a Hugging Face tokenizer, as `save_pretrained` writes it, relative to the working folder, or "
    "the name of a "
    "repository of the Hub; null makes each byte a token."
)
_TOKENIZER_REVISION = (
    "Branch, tag or commit of a `tokenizer` on the Hub; null is `main`, or `model.revision` for that of the model."
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


class TextData(_Loaded):
    """Text files, one token per byte or those of a tokenizer."""

    kind: Literal["text"] = setting("text", "Text files.")
    tokenizer: str | None = setting(None, _TOKENIZER, reads="repository", missing=_FOLDER_OR_NAME, here=True)
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


class Mixed(Section):
    """One source of `data.mix`."""

    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "", "Anything that `data.path` may name, or a single file of it.", reads="repository"
    )
    weight: float = setting(1.0, "Its share of the samples, relative to the sum of all weights.", ge=0)
    split: str | None = setting(None, "Split to train on; null is `train`, or the only one.", min_length=1)
    field: str | None = setting(None, "Field of the text in this source; null is `data.field`.", min_length=1)
    revision: str | None = setting(None, "As `data.revision`, for a `path` on the Hub.", min_length=1)
    subset: str | None = setting(None, "As `data.subset`.", min_length=1)

    @property
    def is_read(self) -> bool:
        """Whether the source has a share of the samples."""
        return bool(self.weight)

    def _contradictions(self) -> Iterator[str]:
        if not self.path:
            yield "path must name the data of each source of mix"


class _Rows(_Loaded):
    """Settings of sources whose samples come from rows with named fields."""

    tokenizer: str | None = setting(None, _TOKENIZER, reads="repository", missing=_FOLDER_OR_NAME, here=True)
    tokenizer_revision: str | None = setting(None, _TOKENIZER_REVISION, min_length=1)
    field: str = setting(
        "text",
        "Field of the text; dots select from mappings (`translation.en`), in all settings for fields.",
        min_length=1,
    )
    prompt_field: str | None = setting(
        None,
        "Field of the prompt that the text answers; it is read but not predicted: the loss is on answers only. For "
        "model.task seq2seq_lm it is the source, and the text is the target.",
        min_length=1,
    )
    prompt_prefix: str | None = setting(
        None,
        "Text before each prompt, and before sample.prompt (such as `summarize: ` for t5).",
        lines=True,
        min_length=1,
    )
    target_length: Count | None = setting(None, _TARGET_LENGTH, unit="tokens")
    padding: Literal["longest", "max_length"] = setting(
        "longest",
        "Padding of sources and targets for model.task seq2seq_lm. `longest`: to the longest that a rank has "
        "in a step, in multiples of 8. `max_length`: to sequence_length and target_length.",
    )
    messages_field: str | None = setting(
        None,
        "Field of a chat instead of a text: a list of {role, content}, formatted by the tokenizer's chat template; "
        "only the assistant's answers are predicted.",
        min_length=1,
    )
    tokens_field: str | None = setting(None, "Field of a list of token ids instead of a text.", min_length=1)
    targets_field: str | None = setting(
        None, "Field of target ids, as many as in `tokens_field`; -100 is not predicted.", min_length=1
    )
    label_field: str | None = setting(
        None,
        "Field of the label, for model.task sequence_classification: a number from 0 on, or a name.",
        min_length=1,
    )
    labels: list[str] = setting([], "Names of the labels, from 0 on; empty sorts the names in the data.")
    skip_empty: bool = setting(
        False,
        "Skip rows whose text, prompt, chat or token ids are empty or null; `false` ends the run at the first.",
    )
    packing: bool = setting(
        True,
        "Fill samples with texts end to end, without padding: attention covers earlier texts of the sample. `false` "
        "makes each text a sample, cut or padded; labelled texts, and "
        "sources with targets, always are.",
    )
    validation_fraction: float = setting(
        0.05, "Share of the samples held out for evaluation, from their end.", gt=0, lt=1
    )
    streaming: bool = setting(False, "Read rows during training, for data larger than memory; requires `train.steps`.")
    mix: list[Mixed] = setting(
        [],
        "Several sources instead of `path`, each with a weight; requires `streaming`.",
        reads="repository",
        missing="check its paths, relative to the working folder; names of the Hub are for data.kind: dataset, "
        "one in each "
        "path",
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

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.mix and not self.streaming:
            yield "mix requires streaming: true"
        if self.mix and getattr(self, "path", None):
            yield "path and mix each name the data: keep one"
        if self.mix and not sum(each.weight for each in self.mix):
            yield "the weights in mix sum to 0: at least one must be above"
        whole = {"messages_field": self.messages_field, "tokens_field": self.tokens_field}
        given = [name for name, value in whole.items() if value]
        if self.field != "text":
            given.append("field")
        if len(given) > 1:
            yield f"{' and '.join(given)} are each the whole of a sample: keep one"
        if given and given != ["field"] and self.prompt_field:
            yield f"prompt_field goes before a text, and {given[0]} is none"
        if self.prompt_prefix and not self.prompt_field:
            yield "prompt_prefix goes before a prompt: it requires prompt_field"
        if self.messages_field and not self.tokenizer:
            yield "messages_field needs the chat template of a tokenizer: name its folder in tokenizer"
        if self.targets_field and not self.tokens_field:
            yield "targets_field requires tokens_field"
        if self.labels and not self.label_field:
            yield "labels requires label_field, whose values they name"
        if self.label_field and (self.prompt_field or self.messages_field or self.targets_field):
            yield "label_field labels a text or its token ids: it goes with field or tokens_field alone"
        if (self.messages_field or self.tokens_field) and any(each.field for each in self.mix):
            yield "field in mix is for texts, and messages_field or tokens_field is given"


class JsonlData(_Rows):
    """Rows in JSON lines: texts, prompts with answers, chats, or labelled texts. Held in memory, unless streamed."""

    required = ("path", "a file of JSON lines, or mix several")

    kind: Literal["jsonl"] = setting("jsonl", "Rows in JSON lines: texts, prompts with answers, chats, labelled texts.")
    path: str | Annotated[list[str], Field(min_length=1)] = setting(
        "",
        "A file with a JSON object per line, or a list of such files, relative to the working folder.",
        reads="file",
        missing=_NO_DATA,
    )

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        for name in ("split", "subset", "revision"):
            if any(getattr(each, name) for each in self.mix):
                yield f"{name} in mix is for kind: dataset, and files of JSON lines have none"


class DatasetData(_Rows):
    """A Hugging Face data set, in a local folder or on the Hub. Held in memory as tokens, unless it is streamed."""

    required = ("path", "the folder of the data set, or mix several")

    kind: Literal["dataset"] = setting("dataset", "A Hugging Face data set in a local folder, or on the Hub.")
    path: str = setting(
        "",
        "The folder, relative to the working folder: from `save_to_disk`, or with parquet files or JSON lines; "
        "or the name "
        "of a repository of the Hub, if there is no such folder.",
        reads="repository",
        missing=_NO_DATA,
    )
    revision: str | None = setting(None, "Branch, tag or commit of a `path` on the Hub; null is `main`.", min_length=1)
    subset: str | None = setting(
        None, "Subset (config) of a data set that has several, by its README.md; null is the default one.", min_length=1
    )
    split: str | None = setting(None, "Split to train on; null is `train`, or the only one.", min_length=1)
    validation_split: str | None = setting(
        None,
        "Split to evaluate on; null is `validation`, else the end of the training split; for a stream its first rows.",
        min_length=1,
    )

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        for name in ("split", "subset", "revision"):
            if self.mix and getattr(self, name):
                yield f"{name} is each source's own in mix: set it there"


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


Data = Annotated[TextData | RandomData | TokensData | JsonlData | DatasetData | TargetData, Field(discriminator="kind")]
