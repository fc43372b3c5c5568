"""The fields of TrainingArguments that a program's own words set, and where they disagree with the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainkit.frameworks.hf_trainer.row import Value
from trainkit.frameworks.hf_trainer.versions import NAMES
from trainkit.recipe.schema.launching import Scalar

TRUE = ("true", "yes", "y", "1", "t")  # as HfArgumentParser reads them
FALSE = ("false", "no", "n", "0", "f")

# Older names of fields that rows of the table set.
OLD: Mapping[str, str] = {
    "no_cuda": "use_cpu",
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    **{name: field for field, names in NAMES.items() for _, name in names},
}


@dataclass(frozen=True, slots=True)
class Spoken:
    """One field as the program's own words set it. words: what follows the flag; none is a bare switch."""

    field: str
    written: str  # the flag as it stands there
    words: tuple[str, ...]
    key: str  # the recipe key: program.args, or the entry in it

    def agrees(self, value: Value) -> bool:
        """Whether these words say the same as a value of the plan's."""
        if value is None:
            return False
        if isinstance(value, bool):
            said = self.words[0].lower() if self.words else "true"
            return said in (TRUE if value else FALSE)
        if isinstance(value, int | float):
            return len(self.words) == 1 and _number(self.words[0]) == value
        if isinstance(value, list):
            return tuple(value) == self.words
        return self.words == (value,)


def spoken_fields(args: Mapping[str, Scalar | list[Scalar]] | list[str]) -> dict[str, Spoken]:
    """The fields that the words set, by their newest names; where one is set twice, the last counts, as in argparse."""
    found = _of_list(args) if isinstance(args, list) else _of_mapping(args)
    return {each.field: each for each in found}


def _of_mapping(args: Mapping[str, Scalar | list[Scalar]]) -> Iterator[Spoken]:
    for name, value in args.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        yield _spoken(f"--{name}", tuple(str(each) for each in values), f"program.args.{name}")


def _of_list(args: list[str]) -> Iterator[Spoken]:
    flag, values = "", list[str]()
    for word in (*args, "--"):
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag:
            yield _spoken(flag, tuple(values), "program.args")
        flag, _, first = word.partition("=")
        values = [first] if "=" in word else []
        if word == "--":
            return


def _spoken(flag: str, words: tuple[str, ...], key: str) -> Spoken:
    """A flag with dashes or underscores; `--no_NAME` is the complement of a switch that is on by default."""
    name = flag.removeprefix("--").replace("-", "_")
    name = OLD.get(name, name)
    if name.startswith("no_") and not words:
        return Spoken(name.removeprefix("no_"), flag, ("false",), key)
    return Spoken(name, flag, words, key)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
