"""The numbers of an evaluation: from predictions and references, by the libraries that define them."""

from __future__ import annotations

import logging
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from trainkit.distribution import install
from trainkit.errors import TrainingError
from trainkit.metrics import METRICS, SEVERAL, is_own, metrics_of
from trainkit.recipe.schema import Recipe
from trainkit.text import join_names
from trainkit.trainer.user_code import blaming, imported

log = logging.getLogger("trainkit.trainer")
Scores = dict[str, float]
OwnMetric = Callable[[Sequence[Any], Sequence[Any]], Any]
_MODULES = {"scikit-learn": "sklearn", "sacrebleu": "sacrebleu", "rouge-score": "rouge_score"}


def usable_metrics(recipe: Recipe) -> tuple[str, ...]:
    """The metrics of a recipe for which everything is installed. TrainingError for one that it names, and is not."""
    names = metrics_of(recipe)
    lacking = [name for name in names if not is_own(name) and not _installed(METRICS[name].package)]
    if lacking and recipe.eval.metrics is not None:
        packages = sorted({METRICS[name].package for name in lacking})
        what = f"eval.metrics: {join_names(lacking)} needs {join_names(packages)}, which is not installed"
        raise TrainingError(what, hint=install(sys.executable, *packages))
    return tuple(name for name in names if name not in lacking)


def _installed(package: str) -> bool:
    return not package or find_spec(_MODULES[package]) is not None


def own_metrics(names: Sequence[str]) -> dict[str, OwnMetric]:
    """The functions of the user's among metrics, by their import paths. TrainingError for one that is not there."""
    return {name: imported(name, "eval.metrics") for name in names if is_own(name)}


def of_labels(names: Sequence[str], predictions: Sequence[int], references: Sequence[int], *, labels: int) -> Scores:
    """Metrics of label numbers. labels: how many there are; of two, label 1 is the one that is looked for."""
    from sklearn import metrics

    average = {"f1_macro": "macro", "f1_micro": "micro", "f1_weighted": "weighted"}
    by_itself = "binary" if labels == 2 else "macro"
    found: Scores = {}
    with warnings.catch_warnings():  # of labels that nothing predicts, or that no held-out sample has
        warnings.simplefilter("ignore")
        for name in names:
            kind, options = name.partition("_")[0], {}
            if kind in ("f1", "precision", "recall"):
                options = {"average": average.get(name, by_itself), "zero_division": 0}
            function = {"accuracy": "accuracy_score", "balanced_accuracy": "balanced_accuracy_score"}.get(name)
            function = function or (name if name == "matthews_corrcoef" else f"{kind}_score")
            found[name] = float(getattr(metrics, function)(references, predictions, **options))
    return found


def of_texts(names: Sequence[str], predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """Metrics of written texts."""
    found: Scores = {}
    rouge = [each for name in names for each in SEVERAL.get(name, (name,)) if each.startswith("rouge")]
    if rouge:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(rouge)
        each = [scorer.score(wanted, given) for given, wanted in zip(predictions, references, strict=True)]
        found |= {name: math.fsum(score[name].fmeasure for score in each) / len(each) for name in rouge}
    for name in names:
        if METRICS[name].package == "sacrebleu":
            import sacrebleu

            found[name] = float(getattr(sacrebleu, f"corpus_{name}")(list(predictions), [list(references)]).score)
        elif name == "exact_match":
            alike = (given.strip() == wanted.strip() for given, wanted in zip(predictions, references, strict=True))
            found[name] = sum(alike) / len(predictions)
    return found


def of_own(path: str, function: OwnMetric, predictions: Sequence[Any], references: Sequence[Any]) -> Scores:
    """What a function of the user's makes of them. TrainingError for anything but numbers."""
    with blaming("eval.metrics", path):
        made = function(predictions, references)
    name = path.rpartition(":")[2].rpartition(".")[2]
    found = made if isinstance(made, Mapping) else {name: made}
    values = {key: _number(value) for key, value in found.items()}
    if wrong := [key for key, value in values.items() if value is None or not isinstance(key, str)]:
        given = type(found[wrong[0]]).__name__
        what = f"eval.metrics: {path} gives {given} for {wrong[0]!r}, and not a number"
        raise TrainingError(what, hint="return a number, or a mapping of names to numbers")
    return {key: value for key, value in values.items() if value is not None}


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch; None for anything else."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # of several
            return None
    return float(value) if isinstance(value, numbers.Real) else None
