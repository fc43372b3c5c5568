"""The trained model's predictions: per sample, as JSON lines in order; and generated text after a prompt."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.data.encode import IGNORE_INDEX
from trainkit.errors import TrainingError
from trainkit.files import open_regular, refuse_links, remove_file, write_json
from trainkit.metrics import compares, written_tokens
from trainkit.metrics_file import finite
from trainkit.recipe.schema import Recipe
from trainkit.seeds import derived_seed
from trainkit.tasks import MASKED, task_of
from trainkit.trainer.checkpoint.manifest import newest
from trainkit.trainer.data.source import Batch, count_targets, sample_length, targets_of
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.generate import Drawing, beginning, continued
from trainkit.trainer.loop import TrainingProgress
from trainkit.trainer.metrics.evaluation import in_turn
from trainkit.trainer.metrics.memory_breakdown import memory_record
from trainkit.trainer.metrics.texts import Text, Writer, texts_of, writer_of
from trainkit.trainer.models.hf import EncoderDecoder
from trainkit.trainer.parallel import STRATEGIES
from trainkit.trainer.prompts import PromptError, encoder_of, is_of_bytes, prompt_ids, stop_ids, tokenizer_folder
from trainkit.trainer.setup import Parts, facts_of

log = logging.getLogger("trainkit.trainer")

FILE = "predictions.jsonl"


def predict(parts: Parts) -> None:
    """Write the predictions of `predict`. Every rank must call it, because weights may be sharded.

    A line has `sample`, its number in the data set (validation follows training), and where texts are known `source`
    and `reference`. For classification also `prediction`, as `reference` a name or a number, the numbers of both,
    `label` and `target`, and the `probabilities` of all labels. Else `loss`, the mean over the counted targets in nats,
    `counted`, their number, and `prediction`, what the model writes for the source; of a sample of several texts a line
    each, by `text`. TrainingError if the file cannot be written.
    """
    run_dir, main = parts.settings.run_dir, parts.world.rank == 0
    path, scratch, written = run_dir / FILE, run_dir / f".{FILE}.tmp", 0
    try:
        if main:
            remove_file(scratch, below=run_dir)  # left by an earlier start, or another user's link
            fd = open_regular(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, below=run_dir)
        else:
            fd = os.open(os.devnull, os.O_WRONLY)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            for record in records(parts):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                written += 1
        if main:
            scratch.replace(path)
            log.info("predictions for %s samples in %s", f"{written:,}", path)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror or error}") from error


@torch.no_grad()
def records(parts: Parts) -> Iterator[dict[str, Any]]:
    """The lines, in order, on every rank. Ranks take passes in turn."""
    source, recipe = parts.source, parts.settings.recipe
    split = recipe.predict.split
    # A user's own loss gives one number per batch, so each sample is a batch.
    size = 1 if parts.model.loss_function is not None else parts.settings.batch.eval_micro
    # No pass mixes training and validation samples.
    passes = [
        (samples, range(start, min(start + size, len(samples))), first)
        for name, samples, first in (("train", source.train, 0), ("validation", source.validation, len(source.train)))
        if split in (name, "all")
        for start in range(0, len(samples), size)
    ]
    writer = None
    if "texts" in compares(recipe):
        asked, sharded = recipe.predict.tokens, STRATEGIES[recipe.strategy.kind].hooks
        tokens = written_tokens(recipe) if asked is None else asked
        writer = writer_of(parts.model, source.encoder, parts.world, parts.device, tokens=tokens, sharded=sharded)
    parts.strategy.model.eval()
    for (samples, numbers, first), own in in_turn(passes, parts.world.data):
        with parts.eval_autocast:
            made = [*_judged(parts, samples[numbers], writer)]
        found = [{"sample": first + numbers[row], **record} for row, record in made]
        for each in gather_from_ranks(found if own else [], parts.world.data):
            yield from each
    parts.strategy.model.train()


Judged = tuple[int, dict[str, Any]]  # the row of a batch, and a line of it


def _judged(parts: Parts, batch: Batch, writer: Writer | None) -> Iterator[Judged]:
    inputs = batch.on(parts.device)
    if parts.model.labels is not None:
        yield from _labelled(parts, inputs)
        return
    # The ids of data of other kinds are no text that is known here.
    read = parts.settings.recipe.data.kind in ("text", "dataset")
    texts = texts_of(batch.inputs) if read else []
    wanting = [text for text in texts if len(text.source)]
    written = dict(zip(map(id, wanting), writer.write(wanting), strict=True)) if writer else {}
    losses = [*_losses(parts, inputs, texts)]
    encoder, alone = parts.source.encoder, len({text.row for text in texts}) == len(texts)
    for number, (row, loss, counted) in enumerate(losses):
        shown: dict[str, Any] = {}
        if texts:
            text = texts[number]
            order = sum(before.row == text.row for before in texts[:number])
            masked = parts.settings.recipe.model.kind == "hf" and task_of(parts.settings.recipe) == MASKED
            source = (encoder.shown if masked else encoder.decode)(text.source.tolist())
            shown = {} if alone else {"text": order}
            shown |= {"source": source, "reference": encoder.decode(text.reference.tolist())}
            shown |= {"prediction": written[id(text)]} if id(text) in written else {}
        yield row, {**shown, "loss": round(loss, 6), "counted": counted}


def _losses(parts: Parts, inputs: Mapping[str, Tensor], texts: Sequence[Text]) -> Iterator[tuple[int, float, int]]:
    """Row, mean loss and counted targets of each text, or where none is known of each row."""
    model = parts.strategy.model
    if parts.model.loss_function is not None:
        count = int(count_targets(inputs))
        yield 0, float(model(**inputs)) / max(1, count), count
        return
    truth = targets_of(inputs)
    assert truth is not None
    logits = model(**parts.model.shown(inputs)).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), truth, ignore_index=IGNORE_INDEX, reduction="none")
    # on the host, because MPS has no 64-bit floats
    losses, counts = losses.cpu().double(), (truth != IGNORE_INDEX).cpu()
    for row, start, stop in [(each.row, each.start, each.stop) for each in texts] or [
        (row, 0, truth.shape[1]) for row in range(len(truth))
    ]:
        counted = int(counts[row, start:stop].sum())
        yield row, float(losses[row, start:stop].sum()) / max(1, counted), counted


def _labelled(parts: Parts, inputs: Mapping[str, Tensor]) -> Iterator[Judged]:
    truth, names = targets_of(inputs), parts.source.labels.names if parts.source.labels else ()
    shares = parts.strategy.model(**parts.model.shown(inputs)).float().softmax(dim=-1).tolist()
    targets = truth.tolist() if truth is not None else [None] * len(shares)
    sources: list[dict[str, Any]] = [{}] * len(shares)
    if parts.settings.recipe.data.kind == "dataset":
        ids, seen = inputs["input_ids"].cpu(), inputs.get("attention_mask")
        kept = [row if seen is None else row[seen[place].cpu() == 1] for place, row in enumerate(ids)]
        sources = [{"source": parts.source.encoder.decode(row.tolist())} for row in kept]

    def named(number: int | None) -> str | int | None:
        return names[number] if number is not None and number < len(names) else number

    for row, (each, target) in enumerate(zip(shares, targets, strict=True)):
        label = max(range(len(each)), key=each.__getitem__)
        shown = {**sources[row], "reference": named(target), "prediction": named(label)}
        probabilities = [round(share, 6) for share in each]
        yield row, {**shown, "label": label, "target": target, "probabilities": probabilities}


# Not compiled: each length up to the context would compile again.
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
@torch.no_grad()
def generate(parts: Parts) -> str:
    """Continue the recipe's prompt, answer it where chats were learned, or write a target for it; "" without a prompt.

    Every rank must call it, because weights may be sharded.
    """
    recipe, encoder, model = parts.settings.recipe, parts.source.encoder, parts.strategy.model
    if not recipe.sample.prompt:
        return ""
    generator = torch.Generator().manual_seed(derived_seed(recipe.train.seed, "sample"))
    text = (getattr(recipe.data, "prompt_prefix", None) or "") + recipe.sample.prompt
    places, shown = getattr(parts.model, "context", None) or sample_length(recipe), []
    if isinstance(parts.model, EncoderDecoder):
        ids, _ = encoder.source(text, sample_length(recipe))
        source = {"input_ids": torch.tensor([ids], device=parts.device)}
        tokens, end = beginning(encoder, parts.model, parts.device)
        stops = frozenset() if end is None else frozenset((end,))
        places = parts.model.context or 1 + len(tokens[0]) + recipe.sample.tokens
    else:
        source, is_chat = {}, bool(parts.source.facts.get("chats"))
        encoder = encoder_of(recipe) if is_chat else encoder  # with the template that was chosen
        try:
            ids = prompt_ids(encoder, {"prompt": text}, plain=not is_chat)
        except PromptError as error:
            log.warning("warning: sample.prompt is not answered: %s; %s", error, error.hint)
            return ""
        tokens, stops = torch.tensor([ids], dtype=torch.int64, device=parts.device), stop_ids(encoder)
        shown = [] if is_chat else ids  # a continuation is shown with its prompt

    def logits(read: Tensor) -> Tensor:
        with parts.eval_autocast:
            found: Tensor = model(**source, decoder_input_ids=read) if source else model(read)
        return found

    model.eval()
    draw = Drawing(generator, recipe.sample.temperature)
    written = [*continued(logits, tokens, draw, count=recipe.sample.tokens, places=places, stops=stops)]
    model.train()
    return encoder.decode([*shown, *(each for each in written if each not in stops)])


def result(parts: Parts, progress: TrainingProgress) -> dict[str, Any]:
    """The facts of a finished or stopped run. Called on every rank; times are seconds, entropy is in nats per token.

    aside_seconds: the part of train_seconds spent on evaluation and saving.
    """
    settings, seconds = parts.settings, progress.elapsed()
    samples = (progress.step - progress.first) * settings.batch.global_
    stopped = progress.stopped_by
    recipe = settings.recipe
    peaks = memory_record(parts.device, parts.world)
    anatomy = parts.memory.record(parts.strategy, peaks["peak_allocated"] or peaks["rss"])
    losses = {
        "first_loss": progress.first_loss,
        "final_loss": progress.loss,
        "first_eval_loss": progress.first_eval_loss,
        "eval_loss": progress.eval_loss,
    }
    root = parts.checkpoints.root
    saved = newest(root) if root is not None else None
    return {
        "steps": progress.step,
        "first_step": progress.first,
        **{name: finite(loss) for name, loss in losses.items()},
        "not_finite": [name for name, loss in losses.items() if loss is not None and finite(loss) is None],
        "train_seconds": round(seconds, 6),
        "compile_seconds": round(progress.compiling.seconds, 3) if recipe.efficiency.compile.enabled else None,
        "samples": samples,
        "data": parts.source.description,
        "uses": uses(recipe),
        "saved": str(saved.relative_to(settings.run_dir)) if saved and saved.is_relative_to(settings.run_dir) else None,
        "metrics": {name: finite(value) for name, value in progress.metrics.items()},
        "first_metrics": {name: finite(value) for name, value in progress.first_metrics.items()},
        "best_metric": parts.best.metric,
        "best_value": parts.best.value,
        "best_step": parts.best.step if parts.best.value is not None else None,
        "stopped_early": progress.stopped_early,
        "aside_seconds": round(progress.aside_seconds, 6),
        # of steps only, without the first ones; the same for `mfu`
        **progress.steady_speed(settings.batch.global_, parts.work, parts.world.size),
        "profile": parts.profiler.report,
        # of the rank that waited longest: the others wait for it
        "data_wait_share": round(max(gather_from_ranks(progress.waiting.seconds, parts.world)) / seconds, 4),
        "memory": gather_from_ranks({**peaks, "anatomy": anatomy}, parts.world),
        "corpus": {**parts.source.facts, **progress.lost()},
        "skipped_steps": parts.strategy.skipped_steps(),
        "stopped_by": stopped.name if stopped else None,
        **facts_of(parts),
        # A run stopped by a signal has no time for it.
        "sample": "" if stopped else generate(parts),
    }


def uses(recipe: Recipe) -> list[str]:
    """The commands that use what was trained, with the option that they need: not each model answers a prompt."""
    if recipe.model.kind == "target":
        return ["export --trust-code"]
    readable = tokenizer_folder(recipe) is not None or is_of_bytes(recipe)
    answers = readable and getattr(recipe.model, "task", "") != "masked_lm"
    return [*(["generate"] if answers else []), "export"]


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write the result, complete or not at all. On a full disk only warn: the training itself is done."""
    try:
        refuse_links(path.parent)
        write_json(path, content, indent=1)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
