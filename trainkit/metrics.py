"""Every metric of an evaluation by its name in a recipe: what it compares, which way is better, what computes it.

scikit-learn computes what is computed from labels and sacrebleu BLEU, chrF and TER: published figures are theirs. ROUGE
is of rouge-score, Google's own. `evaluate` would load programs from the Hub, and torchmetrics has a ROUGE and a chrF of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.tasks import CAUSAL, LABELLING, MASKED, WRITING, task_of

# What a metric compares: the labels of samples, written texts, the likeliest tokens, or nothing but the loss.
Of = Literal["labels", "texts", "tokens", "loss"]
PREFIX = "eval_"  # of a metric's name in the metrics of a run
LOSS = "loss"
TOKENS = 128  # that a causal model writes at most, unless the recipe says another number


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. of: what it can compare. package: that computes it; empty for the trainer itself."""

    what: str
    of: tuple[Of, ...]
    package: str = ""
    lower_is_better: bool = False


_LABELS: tuple[Of, ...] = ("labels",)
_TEXTS: tuple[Of, ...] = ("texts",)
_SK, _ROUGE, _BLEU = "scikit-learn", "rouge-score", "sacrebleu"
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("share of labels, or of tokens of a language model, that are right", ("labels", "tokens"), _SK),
    "balanced_accuracy": Metric("mean share of right ones of each label", _LABELS, _SK),
    "f1": Metric("F1 of label 1 where there are two, else the mean over the labels (macro)", _LABELS, _SK),
    "f1_macro": Metric("mean of the labels' F1", _LABELS, _SK),
    "f1_micro": Metric("F1 over all samples together", _LABELS, _SK),
    "f1_weighted": Metric("mean of the labels' F1, weighted by their samples", _LABELS, _SK),
    "precision": Metric("precision of label 1 where there are two, else macro", _LABELS, _SK),
    "recall": Metric("recall of label 1 where there are two, else macro", _LABELS, _SK),
    "matthews_corrcoef": Metric("Matthews correlation coefficient", _LABELS, _SK),
    "perplexity": Metric("exponential of the loss", ("loss",), lower_is_better=True),
    "rouge": Metric("rouge1, rouge2, rougeL and rougeLsum", _TEXTS, _ROUGE),
    "rouge1": Metric("F1 of words", _TEXTS, _ROUGE),
    "rouge2": Metric("F1 of pairs of words", _TEXTS, _ROUGE),
    "rougeL": Metric("F1 of the longest common subsequence of words", _TEXTS, _ROUGE),
    "rougeLsum": Metric("rougeL line by line", _TEXTS, _ROUGE),
    "chrf": Metric("chrF2, of characters, in any language; 0 to 100", _TEXTS, _BLEU),
    "bleu": Metric("BLEU of the corpus; 0 to 100", _TEXTS, _BLEU),
    "ter": Metric("translation edit rate; 0 and up", _TEXTS, _BLEU, lower_is_better=True),
    "exact_match": Metric("share of texts that are their reference", _TEXTS),
}
SEVERAL: Mapping[str, tuple[str, ...]] = {"rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum")}
# chrF is the one that needs no words: ROUGE's are Latin letters and digits.
BY_ITSELF: Mapping[str, tuple[str, ...]] = {
    LABELLING: ("accuracy", "f1"),
    WRITING: ("chrf",),
    CAUSAL: ("perplexity",),
    MASKED: ("perplexity",),
}


def comparable(task: str, kind: str, *, own_loss: bool, has_rows: bool) -> tuple[Of, ...]:
    """What can be compared with a model. kind: of the model; has_rows: whether data.kind is dataset.

    Only then there are prompts or sources, and a tokenizer that makes texts of ids. A model of the user's own returns
    a loss, and nothing else is known of it.
    """
    if kind == "target":
        return ()
    if task == LABELLING:
        return ("labels",)
    written = has_rows and kind == "hf" and task in (WRITING, CAUSAL)
    return (*(() if own_loss else ("loss",)), "tokens", *(("texts",) if written else ()))


def compares(recipe: Any) -> tuple[Of, ...]:
    """What the metrics of a recipe's evaluation can compare."""
    given = {"own_loss": recipe.train.loss is not None, "has_rows": recipe.data.kind == "dataset"}
    return comparable(task_of(recipe), recipe.model.kind, **given)


def metrics_of(recipe: Any) -> tuple[str, ...]:
    """The metrics of a recipe's evaluation: those that it names, or else those of its task."""
    if recipe.eval.metrics is not None:
        return tuple(dict.fromkeys(recipe.eval.metrics))
    found, can = BY_ITSELF[task_of(recipe)], compares(recipe)
    return tuple(name for name in found if {*METRICS[name].of} & {*can})


def is_own(name: str) -> bool:
    """Whether it is a function of the user's, by its import path."""
    return ":" in name


def writes_texts(recipe: Any, names: Sequence[str]) -> bool:
    """Whether an evaluation by these metrics writes texts: a function of the user's compares what there is."""
    can = compares(recipe)
    return "texts" in can and any(is_own(name) or "texts" in METRICS[name].of for name in names)


def written_tokens(recipe: Any) -> int:
    """Tokens that are written at most for a source or a prompt."""
    if recipe.eval.tokens is not None:
        return int(recipe.eval.tokens)
    length = getattr(recipe.data, "target_length", None) or recipe.data.sequence_length
    return int(length) if task_of(recipe) == WRITING and isinstance(length, int) else TOKENS


def values_of(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the numbers that these metrics give; not those of the user's own functions, which name theirs."""
    return tuple(each for name in names if not is_own(name) for each in SEVERAL.get(name, (name,)))


def lower_is_better(name: str, *, greater: bool | None = None) -> bool:
    """Whether the lowest value of the loss, or of a metric, is the best. greater: `eval.greater_is_better`."""
    if greater is not None:
        return not greater
    return name == LOSS or (name in METRICS and METRICS[name].lower_is_better)
