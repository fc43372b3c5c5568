"""Rules over the settings of a recipe that the built-in trainer runs; no device is chosen yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trainkit.errors import Diagnostic
from trainkit.metrics import BY_ITSELF, LOSS, METRICS, SEVERAL, comparable, is_own, values_of
from trainkit.recipe.merge import value_at
from trainkit.recipe.rules import RecipeRule, RecipeTree
from trainkit.recipe.schema.data import BYTES
from trainkit.recipe.suggestions import did_you_mean
from trainkit.tasks import CAUSAL
from trainkit.tasks import WRITING as TASK
from trainkit.text import join_names

# Key -> its value where nobody has set it.
OF_PAIRS = {"data.target_length": None, "data.padding": "longest"}


def length_is_given(context: RecipeTree) -> Iterator[Diagnostic]:
    """The trainer has to know when it is done. A missing file or a typo in `train.stepz` is the better message."""
    if context.incomplete or any(key.partition(".")[0] == "train" for key in context.broken) or context.lacks_kind:
        return
    if not any(context.get(key) is not None for key in ("train.steps", "train.epochs")):
        yield context.error("train", "train requires steps or epochs", "add train.steps: 300, or train.epochs: 1")


def pairs_for_encoder_decoders(context: RecipeTree) -> Iterator[Diagnostic]:
    """Errors where an encoder-decoder has no pairs to learn from, or others are given settings of pairs."""
    kind, task = context.get("data.kind"), context.get("model.task")
    if context.get("model.kind") != "hf" or task != TASK:
        for key, default in OF_PAIRS.items():
            if (context.get(key) or default) != default:
                hint = f"remove it, or choose model.kind: hf with model.task: {TASK}"
                yield context.error(key, f"{key} is for model.task {TASK}, which this model is not for", hint)
        return
    if kind in ("text", "tokens"):
        what = f"model.task {TASK} needs sources with targets, and data.kind {kind} has none"
        yield context.error("model.task", what, "choose data.kind: dataset with rows of both, or model.task: causal_lm")


def predictions_that_can_be_written(context: RecipeTree) -> Iterator[Diagnostic]:
    """Errors where texts are to be written that no model here can write, or that nobody would see."""
    for key in ("predict.tokens", "eval.tokens"):
        if not context.whole(key):
            continue
        task = context.get("model.task") if context.get("model.kind") == "hf" else None
        if task not in (TASK, CAUSAL):
            what = f"{key} is for models of transformers that write ({CAUSAL}, {TASK}), and this one does not"
            yield context.error(key, what, "remove it")
        elif context.get("data.kind") != "dataset":
            what = f"{key} needs rows with prompts or sources, and data.kind {context.get('data.kind')} has none"
            yield context.error(key, what, "choose data.kind: dataset, or remove it")
        elif key == "predict.tokens" and context.get("predict.split") == "none":
            yield context.error(key, f"{key} requires predict.split", "set predict.split: validation")


def metrics_compare_what_there_is(context: RecipeTree) -> Iterator[Diagnostic]:
    """Errors for metrics that the task has nothing for, and for a best one that no evaluation gives."""
    kind, task = context.get("model.kind"), context.get("model.task")
    if context.incomplete or context.lacks_kind or any(key.startswith(("eval", "model")) for key in context.broken):
        return
    task = task if kind == "hf" else CAUSAL
    named = context.get("eval.metrics")
    names = list(BY_ITSELF.get(task, ()) if named is None and kind != "target" else named or ())
    can = comparable(
        task, kind, own_loss=context.get("train.loss") is not None, has_rows=context.get("data.kind") == "dataset"
    )
    for name in names if named is not None else ():
        if is_own(name):
            if not {"labels", "texts"} & {*can}:
                what = f"eval.metrics {name} needs predictions: labels, or texts for rows with prompts or sources"
                yield context.error("eval.metrics", what, f"remove it{_others(can)}")
        elif not {*METRICS[name].of} & {*can}:
            needs = {"labels": "a classifier", "texts": "a model of transformers that writes, with data.kind dataset",
                     "tokens": "a language model", "loss": "a language model with its own loss"}  # fmt: skip
            what = f"eval.metrics {name} is for {needs[METRICS[name].of[0]]}, and this is none"
            yield context.error("eval.metrics", what, f"remove it{_others(can)}")
    best, key = context.get("eval.best_metric"), "eval.best_metric"
    given = (LOSS, *values_of([name for name in names if is_own(name) or {*METRICS[name].of} & {*can}]))
    if best not in given and not any(map(is_own, names)):
        several = SEVERAL.get(best)
        hint = f"name one of {join_names(several)}" if several and several[0] in given else None
        hint = hint or did_you_mean(best, given, f"name one of {join_names(given)}, or add it to eval.metrics")
        yield context.error(key, f"{key} {best} is no number that an evaluation gives", hint)
    steps, every = context.get("train.steps"), context.get("eval.every_steps")
    for each in ("eval.metrics", "eval.tokens"):
        if context.get(each) and every == 0 and steps != 0:
            yield context.error(each, f"{each} requires eval.every_steps > 0", "set eval.every_steps, as to 100")
    if best == LOSS and context.get("eval.greater_is_better") is not None:
        what = "eval.greater_is_better is about eval.best_metric, which is the loss: the lowest is the best"
        yield context.error("eval.greater_is_better", what, "remove it, or name a metric in eval.best_metric")


def _others(can: Sequence[str]) -> str:
    fitting = [name for name, each in METRICS.items() if {*each.of} & {*can}]
    return f", or choose of {join_names(fitting, 12)}" if fitting else ""


def labels_for_classifiers(context: RecipeTree) -> Iterator[Diagnostic]:
    labelled = context.get("model.kind") == "hf" and context.get("model.task") == "sequence_classification"
    columns = context.get("data.columns")
    named = "data.columns" if isinstance(columns, Mapping) and "label" in columns else "data.labels"
    if not labelled and (named == "data.columns" or context.get("data.labels")):
        what = f"{named}: labels are for model.task sequence_classification, which this model is not for"
        yield context.error(named, what, "remove them, or choose model.kind: hf and that task")
    kind = context.get("data.kind") if labelled else None
    if kind in ("text", "tokens"):
        hint = "choose model.task: causal_lm, or data.kind: dataset with rows of text and label"
        yield context.error("model.task", f"model.task sequence_classification needs labels, and {kind} has none", hint)


def prompts_of_causal_models(context: RecipeTree) -> Iterator[Diagnostic]:
    key, task = "data.train_on_prompts", context.get("model.task")
    if context.get(key) is True and context.get("model.kind") == "hf" and task not in (None, "causal_lm"):
        what = f"{key} is for model.task causal_lm, and {task} learns no prompt"
        yield context.error(key, what, "remove it, or choose model.task: causal_lm")


def streams_know_lengths_late(context: RecipeTree) -> Iterator[Diagnostic]:
    if context.get("data.streaming") is True:
        for key in ("data.sequence_length", "data.target_length"):
            if context.get(key) == "auto":
                what = f"{key} is auto, and how long the texts of a stream are is not known before its end"
                yield context.error(key, what, "write a number of tokens")


def native_models_have_a_length(context: RecipeTree) -> Iterator[Diagnostic]:
    if context.get("model.kind") == "gpt" and context.get("data.sequence_length") == "auto":
        what = "data.sequence_length is auto, and a gpt has as many positions as that says"
        yield context.error("data.sequence_length", what, "write a number of tokens")


def streams_have_no_length(context: RecipeTree) -> Iterator[Diagnostic]:
    """What needs the length of the data has none of a stream; and its settings do nothing without one."""
    if context.incomplete:
        return
    if context.get("data.streaming") is not True and not context.get("data.mix"):  # which requires it
        for key in ("data.shuffle_buffer", "data.shuffle_files", "data.validation_rows"):
            if _changed(context, key):
                yield context.error(key, f"{key} requires data.streaming: true", "set it, or remove this line")
        return
    why = "how many samples a stream has is not known before its end"
    if context.get("train.steps") is None and "train.steps" not in context.broken:
        key = "data.streaming" if context.get("train.epochs") is None else "train.epochs"
        hint = "set train.steps; a source that ends before begins again"
        yield context.error(key, "data.streaming requires train.steps", hint, why=why)
    if _changed(context, "data.validation_fraction"):
        what, hint = "data.validation_fraction is a share of data whose size is known", "set data.validation_rows"
        yield context.error("data.validation_fraction", what, hint, why=why)
    if context.get("predict.split") in ("train", "all"):
        what = f"predict.split {context.get('predict.split')} is for every training sample, and a stream has no end"
        yield context.error("predict.split", what, "set predict.split: validation")


def named_evaluation_rows_are_no_share(context: RecipeTree) -> Iterator[Diagnostic]:
    named = next((key for key in ("data.validation_path", "data.validation_split") if context.get(key)), None)
    for key in ("data.validation_fraction", "data.split_seed"):
        if named and context.get("data.streaming") is not True and _changed(context, key):
            what = f"{key} has no effect: {named} says what is evaluated on"
            yield replace(context.error(key, what, f"remove it, or {named}"), severity="warning")


def _changed(context: RecipeTree, key: str) -> bool:
    """Whether a layer gives it another value than its default; a recipe that was written out gives every one."""
    return value_at(context.tree, key) not in (None, value_at(context.defaults, key))


def masked_models_hide_tokens_themselves(context: RecipeTree) -> Iterator[Diagnostic]:
    if context.get("model.kind") != "hf" or context.get("model.task") != "masked_lm":
        return
    known = context.get("model.mask_token") is not None or context.get("data.tokenizer") not in (None, BYTES)
    if not known and context.get("data.kind") != "target":
        what = "model.task masked_lm requires model.mask_token"
        hint = "set it, or name a tokenizer that has a mask token in data.tokenizer"
        yield context.error("model.mask_token", what, hint)


def samples_need_a_causal_model(context: RecipeTree) -> Iterator[Diagnostic]:
    """Only models that give the next token can continue a text, or write one for a source."""
    kind = context.get("model.kind")
    other = kind == "target" or (kind == "hf" and context.get("model.task") not in ("causal_lm", TASK))
    if context.get("sample.prompt") and other:
        what = "a model of the user's own" if kind == "target" else f"a model for {context.get('model.task')}"
        hint = "remove sample.prompt, or choose model.task: causal_lm"
        yield context.error("sample.prompt", f"{what} cannot continue a text", hint)


def reduction_of_an_own_loss(context: RecipeTree) -> Iterator[Diagnostic]:
    given = context.get("train.loss_reduction") != "mean"
    if given and context.get("train.loss") is None and context.get("model.kind") != "target":
        what = "train.loss_reduction is about a loss or a model of the user's own, and there is neither"
        yield context.error("train.loss_reduction", what, "remove it, or name the function in train.loss")


def profile_fits_the_run(context: RecipeTree) -> Iterator[Diagnostic]:
    watched, after, steps = (context.whole(key) for key in ("profile.steps", "profile.after", "train.steps"))
    if watched and after and steps and after + watched > steps:
        what = f"profile.steps {watched} after {after} others do not fit in a run of {steps} steps"
        hint = f"set train.steps to {after + watched} or more: the run would watch what it has"
        yield replace(context.error("profile.steps", what, hint), severity="warning")


RULES: tuple[RecipeRule, ...] = (
    length_is_given,
    profile_fits_the_run,
    labels_for_classifiers,
    native_models_have_a_length,
    streams_have_no_length,
    prompts_of_causal_models,
    streams_know_lengths_late,
    masked_models_hide_tokens_themselves,
    metrics_compare_what_there_is,
    named_evaluation_rows_are_no_share,
    pairs_for_encoder_decoders,
    predictions_that_can_be_written,
    reduction_of_an_own_loss,
    samples_need_a_causal_model,
)
