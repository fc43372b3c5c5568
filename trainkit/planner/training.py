"""What a plan trains, in words: the model, the data, the method, how long, what is evaluated and what is saved."""

from __future__ import annotations

from trainkit.data.formats import packing_of
from trainkit.data.seen import SeenModel
from trainkit.launch_plan.context import Context
from trainkit.metrics import lower_is_better, metrics_of, writes_texts, written_tokens
from trainkit.optimizers import optimizer
from trainkit.recipe.schema import DatasetData, GptModel, HfModel, RandomData, TargetModel, TextData, TokensData
from trainkit.recipe.schema.model import quantized_bits
from trainkit.text import every, format_size, join_names, pluralize
from trainkit.tools.builtin.memory import format_parameters, parameters

BYTES_OF = {"fp32": 4, "bf16": 2, "fp16": 2}


def training(context: Context) -> tuple[tuple[str, str], ...]:
    """(label, words) for each part; nothing for a program of the user's own, which has all this in its code."""
    if context.recipe.program.kind != "builtin":
        return ()
    parts = (("model", _model), ("data", _data), ("method", _method), ("length", _length), ("evaluates", _evaluates))
    return (*((label, write(context)) for label, write in parts), ("saves", _saves(context)))


def _size(context: Context) -> float | None:
    """Parameters of the model, where they are known."""
    found = context.seen.model.parameters if context.seen.model else parameters(vars(context.recipe.model))
    dense = not getattr(getattr(context.recipe.model, "moe", None), "experts", 0)
    return found if dense or context.seen.model else None


def _model(context: Context) -> str:
    model, size = context.recipe.model, _size(context)
    many = f", {format_parameters(size)} parameters" if size else ""
    if isinstance(model, GptModel):
        return f"gpt of {pluralize(model.layers, 'block')}{many}, with random weights"
    if isinstance(model, TargetModel):
        return f"your own, {model.target}"
    assert isinstance(model, HfModel)
    kind = context.model_type
    task = "" if model.task == "causal_lm" else f", as {model.task}"
    if model.path is None:
        return f"{kind} with random weights{task}"
    return f"{model.path}{f' ({kind}{many})' if kind or many else ''}{task}"


def _data(context: Context) -> str:
    data, seen = context.recipe.data, context.seen
    words: list[str] = []
    if isinstance(data, RandomData):
        return f"{data.samples:,} random samples"
    if isinstance(data, DatasetData):
        named = [data.path] if isinstance(data.path, str) else data.path
        if data.mix:
            named = [each.path if isinstance(each.path, str) else each.path[0] for each in data.mix if each.weight]
        words.append(join_names(list(named)))
        if seen.form is not None:
            count = f"{seen.rows:,} " if seen.rows is not None else ""
            files = f" in {pluralize(seen.files, 'file')} of {format_size(seen.size)}" if seen.rows is None else ""
            words[0] += f": {count}{seen.form.described}{files}"
        elif not data.mix:
            words[0] += ": rows whose format is decided before the ranks start"
        if data.max_rows is not None:
            words.append(f"{data.limit_in_words}{' of each' if data.mix else ''}")
        words.append(_held_out(data))
        if data.train_on_prompts:
            words.append("prompts are learned too")
    elif isinstance(data, TextData | TokensData):
        paths = [data.path] if isinstance(data.path, str) else data.path
        words.append(join_names(list(paths)))
        words.append(_held_out(data))
    else:
        return f"your own, {getattr(data, 'target', data.kind)}"
    if seen.tokenizer is not None:
        size = f" of {seen.tokenizer.size:,} ids" if seen.tokenizer.size else ""
        tokenizer = "each byte a token" if seen.tokenizer.name == "bytes" else f"tokenizer {seen.tokenizer.name}{size}"
        words.append(tokenizer)
    words.append(_samples(context, data.sequence_length))
    return "; ".join(words)


def _held_out(data: DatasetData | TextData | TokensData) -> str:
    own = None if isinstance(data, TokensData) else data.validation_path
    if own is not None:
        return f"evaluated on {join_names([own] if isinstance(own, str) else own)}"
    if not isinstance(data, DatasetData):
        return f"{data.validation_fraction:.2%} held out".replace(".00", "")
    if data.validation_split is not None:
        return f"evaluated on split {data.validation_split}"
    if data.streaming:
        return f"the first {data.validation_rows} rows of each source held out"
    return f"{data.validation_fraction:.2%} of the rows held out".replace(".00", "")


def _samples(context: Context, length: int | str) -> str:
    fixed = f"samples of {length:,} tokens" if isinstance(length, int) else ""
    if not isinstance(context.recipe.data, DatasetData):
        return fixed or "samples of 1,024 tokens, or what the model can read"
    packing = packing_of(context.recipe, context.model_type)
    how = {"isolated": "several whole texts in each", "dense": "texts end to end", "none": "one text in each"}[packing]
    if not fixed and context.seen.length is not None:
        fixed = f"samples of {context.seen.length:,} tokens, by the lengths of the rows"
    return f"{fixed or 'samples as long as 99 of 100 rows, decided before the ranks start'}, {how}"


def _method(context: Context) -> str:
    recipe, peft = context.recipe, context.recipe.peft
    what = "all weights"
    if peft.kind == "lora":
        bits, seen = quantized_bits(recipe), context.seen.model
        what = f"{'QLoRA' if bits else 'LoRA'} of rank {peft.rank}"
        if seen is not None and not peft.target_modules:
            what += f" ({format_parameters(seen.adapters)} parameters)"
        what += f", the model in {bits} bits" if bits else ""
    schedule = recipe.schedule
    phases = f" after {_steps(schedule.warmup_steps)} of warm-up" if schedule.warmup_steps else ""
    if schedule.name == "wsd":
        phases += f", {schedule.decay_type} decay in the last {_steps(schedule.decay_steps)}"
    rate = f"learning rate {recipe.optimizer.lr:g}, {schedule.name}{phases}"
    return f"{what}; {recipe.optimizer.name}, {rate}; computes in {context.dtype}"


def _steps(length: float) -> str:
    return f"{length:.0%} of the steps" if 0 < length < 1 else pluralize(int(length), "step")


def _length(context: Context) -> str:
    train = context.recipe.train
    if train.steps is not None:
        return pluralize(train.steps, "step") if train.steps else "no step: it only evaluates"
    epochs = train.epochs or 1.0
    return f"{epochs:g} {'epoch' if epochs == 1 else 'epochs'}"


def _evaluates(context: Context) -> str:
    asked = context.recipe.eval
    if not asked.every_steps:
        return "never (eval.every_steps is 0)"
    better = "lowest" if lower_is_better(asked.best_metric, greater=asked.greater_is_better) else "highest"
    early = f"; stops after {pluralize(asked.patience, 'evaluation')} without a new {better} {asked.best_metric}"
    names = metrics_of(context.recipe)
    writes = f" (of texts of at most {written_tokens(context.recipe)} tokens)"
    what = f"{join_names(['loss', *names])}{writes if writes_texts(context.recipe, names) else ''}"
    return f"{what}, {every(asked.every_steps)} and at the end{early if asked.patience else ''}"


def _saves(context: Context) -> str:
    asked, recipe = context.recipe.checkpoint, context.recipe
    when = [every(asked.every_steps)] if asked.every_steps else []
    when += ["at the end"] if asked.at_end or asked.every_steps else []
    when += [f"at the best evaluation (by {recipe.eval.best_metric})"] if asked.keep_best else []
    if not when:
        return "nothing (checkpoint.at_end is false)"
    size = _checkpoint_bytes(context, context.seen.model)
    large = f", some {format_size(size)} each" if size else ""
    keeps = f", the newest {asked.keep}" if asked.keep and asked.every_steps else ""
    return f"{join_names(when)}{keeps}: {recipe.output.root}/{recipe.name}/…/checkpoints{large}"


def _checkpoint_bytes(context: Context, seen: SeenModel | None) -> int | None:
    """Weights and optimizer state of what is trained; None where that is not known."""
    recipe, size = context.recipe, _size(context)
    state = optimizer(recipe.optimizer.name).state_bytes if ":" not in recipe.optimizer.name else None
    if recipe.peft.kind == "lora":
        size = seen.adapters if seen is not None and not recipe.peft.target_modules else None
    if size is None or state is None:
        return None
    return int(size * (4 + state))
