"""FSDP as Trainer's flags and files say it, and what of them it ignores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trainkit.frameworks.base.draft import FlagUse, ImportContext, read_flag
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import Files, absolute
from trainkit.recipe.yaml.reader import compose_bytes

if TYPE_CHECKING:
    from trainkit.frameworks.hf_trainer.importer import Reading

NO_SHARD = "FSDP without sharding (no_shard) is plain data parallelism"
# Keys of the file that Trainer reads otherwise than their names say.
NOT_READ = (
    "Trainer does not read fsdp_offload_params in --fsdp_config (its name there is cpu_offload); the recipe means it."
)
ONLY_BY_SIZE = "Trainer reads min_num_params only beside auto_wrap_policy SIZE_BASED_WRAP; the recipe wraps by size."


def _fsdp(reading: Reading, name: str) -> None:
    phrase, value = reading.said[name], reading.value(name)
    words = (value or "").replace(",", " ").split()
    if (phrase.values and not words) or value in ("False", "false"):
        reading.take(name, [])
        return
    if "no_shard" in words:
        reading.take(name, [Assignment("strategy.kind", "ddp", phrase.origin)], NO_SHARD)
        return
    if value in ("True", "true"):
        reading.draft.remark("Trainer of transformers 5 ends with an error at --fsdp True; the switch is bare.")
    assignments, problems = read_flag(
        reading.draft, reading.context, FlagUse(name, value if phrase.values else None, phrase.origin)
    )
    reading.draft.problems += problems
    reading.take(name, assignments)


def _fsdp_config(reading: Reading, name: str) -> None:
    phrase, value = reading.said[name], reading.value(name) or ""
    kind = reading.draft.get("strategy.kind")
    if "fsdp" not in reading.said and kind != "fsdp":
        reading.draft.remark(f"Trainer does not read {' '.join(phrase.words)} without --fsdp; it is left out.")
        reading.taken.add(name)
        return
    if kind != "fsdp":
        reading.draft.remark(f"{' '.join(phrase.words)} says nothing of plain data parallelism.")
        reading.taken.add(name)
        return
    context, path = written_out(reading.context, value)
    assignments, problems = read_flag(reading.draft, context, FlagUse(name, path, phrase.origin))
    reading.draft.problems += problems
    reading.take(name, assignments)
    if not problems:
        remark_on_file(reading, context, path)


class _Beside:
    """The files, and a text of the command line as one more."""

    def __init__(self, files: Files, path: str, text: str) -> None:
        self._files, self._path, self._text = files, path, text

    def read(self, path: str) -> bytes:
        """The file's bytes. Raises OSError."""
        return self._text.encode() if path == self._path else self._files.read(path)

    def exists(self, path: str) -> bool:
        """Whether there is a file."""
        return path == self._path or self._files.exists(path)

    def shipped(self) -> Mapping[str, str]:
        """As they are."""
        return self._files.shipped()


def written_out(context: ImportContext, value: str) -> tuple[ImportContext, str]:
    """The context with the file that a flag names, and its path: Trainer also takes the file's content in its place."""
    if not value.lstrip().startswith("{"):
        return context, value
    path = "the words of --fsdp_config"
    return ImportContext(_Beside(context.files, absolute(path, context.cwd), value), context.cwd), path


def remark_on_file(reading: Reading, context: ImportContext, path: str) -> None:
    """What Trainer does not read in the file."""
    tree = compose_bytes(context.files.read(absolute(path, context.cwd))).tree
    both = {key: value_at(tree, key) for key in tree} | {key.removeprefix("fsdp_"): tree[key] for key in tree}
    if both.get("offload_params") and "cpu_offload" not in both:
        reading.draft.remark(NOT_READ)
    by_name = both.get("auto_wrap_policy") == "SIZE_BASED_WRAP" or both.get("xla") is True
    if both.get("min_num_params") and not by_name:
        reading.draft.remark(ONLY_BY_SIZE)


def _classes(reading: Reading, name: str) -> None:
    """`--fsdp_transformer_layer_cls_to_wrap`, a flag until transformers 5."""
    phrase = reading.said[name]
    names = [each for value in phrase.values for each in value.replace(",", " ").split()]
    settings: list[tuple[str, object]] = [("strategy.wrap_classes", names), ("strategy.auto_wrap", "transformer")]
    reading.take(name, [Assignment(key, value, phrase.origin) for key, value in settings])


def _size(reading: Reading, name: str) -> None:
    """`--fsdp_min_num_params`, a flag until transformers 5."""
    phrase, value = reading.said[name], reading.value(name) or ""
    if not value.isdecimal():
        reading.draft.fail(f"{' '.join(phrase.words)} is no number", phrase.origin, "write a number of parameters")
        return
    settings: list[tuple[str, object]] = [("strategy.min_params", int(value)), ("strategy.auto_wrap", "size")]
    reading.take(name, [Assignment(key, each, phrase.origin) for key, each in settings if int(value)])


FSDP_READERS: Mapping[str, Callable[[Reading, str], None]] = {
    "fsdp": _fsdp,
    "fsdp_config": _fsdp_config,
    "fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_min_num_params": _size,
}
