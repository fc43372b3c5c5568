"""What a person should know of prepared data: what it is, what is cut or left out, and what is odd about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from trainkit.data.encode import RowEncoder
from trainkit.data.formats import RowFormat
from trainkit.data.prepare import asked_view, known_already, own_source, row_files
from trainkit.data.prepared import Prepared, View, known_labels
from trainkit.data.tokenizer import Encoder
from trainkit.errors import TrainingError
from trainkit.recipe.schema import DatasetData, Recipe
from trainkit.recipe.schema.data import BYTES
from trainkit.tasks import CAUSAL, task_of
from trainkit.text import join_names, pluralize, strip_control, table

MANY = 0.01  # share of the texts, above which it is a warning that they are cut or left out


def described(prepared: Prepared, encoder: RowEncoder, names: Sequence[str]) -> str:
    """``1,200 chats of 345,678 tokens, 123,456 of them learned (3 cut at 512 tokens)``."""
    view, meta = prepared.view, prepared.tokens.meta
    train, validation = view.train, view.validation
    noun = encoder.form.format.what.partition(" (")[0]
    size = int(meta["arrays"]["ids"]["shape"][0])
    text = f"{meta['rows']:,} {noun} of {size:,} {meta['unit']}"
    learned = train.learned + validation.learned
    if encoder.task == CAUSAL and learned < size:
        text += f", {learned:,} of them learned"
    if encoder.data.train_on_prompts:
        text += ", all of them learned"
    if names:
        text += f" with {len(names)} labels ({join_names([f'{number} {name}' for number, name in enumerate(names)])})"
    limit = encoder.data.limit_in_words
    notes = [
        f"data.max_rows: {limit}" if limit else "",
        f"{cut:,} cut at {view.sequence_length} tokens{_of_targets(view)}"
        if (cut := train.cut + validation.cut)
        else "",
        f"{train.pieces + validation.pieces:,} in pieces" if train.pieces + validation.pieces else "",
        f"{train.without + validation.without:,} left out: nothing to learn within {view.sequence_length} tokens"
        if train.without + validation.without
        else "",
        f"{pluralize(meta['skipped'], 'empty row')} skipped" if meta["skipped"] else "",
    ]
    return text + "".join(f" ({note})" for note in notes if note)


def _of_targets(view: View) -> str:
    """Where targets are cut, if elsewhere than sources."""
    return "" if view.target_length in (None, view.sequence_length) else f", or a target at {view.target_length}"


def remarks(prepared: Prepared, encoder: RowEncoder, names: Sequence[str]) -> list[str]:
    """What of the data a person should know before the training: losses above 1 %, missing classes, equal rows."""
    view, found = prepared.view, list[str]()
    texts = max(1, int(prepared.tokens.meta["arrays"]["starts"]["shape"][0]) - 1)
    for count, what in (
        (
            view.train.cut + view.validation.cut,
            f"is cut at data.sequence_length {view.sequence_length}{_of_targets(view)}",
        ),
        (
            view.train.without + view.validation.without,
            f"is left out, for it has nothing to learn within data.sequence_length {view.sequence_length}",
        ),
    ):
        if count > MANY * texts:
            longest = f"the longest has {view.lengths.longest:,} tokens"
            longest += f", the longest target {view.targets.longest:,}" if view.targets else ""
            found.append(f"{count / texts:.1%} of the texts {what}: {longest}")
    called = [names[number] if number < len(names) else str(number) for number in range(len(view.labels))]
    lacking = {
        "to train on": [name for name, (trains, _) in zip(called, view.labels, strict=True) if not trains],
        "to evaluate on": [name for name, (trains, n) in zip(called, view.labels, strict=True) if trains and not n],
    }
    for side, missing in lacking.items():
        if missing:
            each = join_names(missing)
            found.append(f"no row with label {each} is left {side}: provide more rows, or data.validation_path")
    if view.equal_rows:
        have = "has" if view.equal_rows == 1 else "have"
        found.append(f"{pluralize(view.equal_rows, 'row')} to evaluate on {have} an equal row that is trained on")
    return [*found, *prepared.tokens.meta["remarks"]]


BAR = 40  # columns of the longest bar
LEARNED, PLAIN = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")  # around what is learned


def page(
    prepared: Prepared, files: Sequence[Path], encoder: RowEncoder, names: Sequence[str], rows: int, *, colour: bool
) -> str:
    """All of it for a person."""
    view = prepared.view
    facts = [
        ("Files", join_names([str(path) for path in files], 3)),
        ("Format", encoder.form.described),
        ("Rows", described(prepared, encoder, names)),
        ("Split", f"{view.train.rows:,} train, {view.validation.rows:,} evaluate"),
        ("Tokenizer", _tokenizer(encoder)),
        ("Samples", _samples(prepared)),
        ("Kept in", str(prepared.tokens.folder)),
    ]
    parts = [table(facts).rstrip("\n"), *(["\n".join(_histogram(prepared))] if view.lengths.longest else [])]
    parts += ["\n".join(f"warning: {each}" for each in remarks(prepared, encoder, names))]
    marks = LEARNED if colour else PLAIN
    for number, text in enumerate(_shown(prepared, encoder, names, rows, marks), start=1):
        head = f"Text {number} of those to train on, with what is learned {'in green' if colour else 'in brackets'}:"
        parts.append(f"{head if number == 1 else f'Text {number}:'}\n{text}")
    return "\n\n".join(part for part in parts if part)


def as_json(
    prepared: Prepared, files: Sequence[Path], encoder: RowEncoder, names: Sequence[str], rows: int
) -> dict[str, Any]:
    """The same for programs. Lengths are in tokens; a text is a list of [text, learned] pieces."""
    view, meta = prepared.view, prepared.tokens.meta
    return {
        "files": [str(path) for path in files],
        "format": encoder.form.name,
        "columns": dict(encoder.form.columns),
        "rows": meta["rows"],
        "skipped": meta["skipped"],
        "labels": list(names),
        "folder": str(prepared.tokens.folder),
        "view": asdict(view),
        "warnings": remarks(prepared, encoder, names),
        "texts": [
            list(_pieces(prepared, encoder.form, encoder.encoder.shown, names, number))
            for number in range(min(rows, view.train.samples))
        ],
    }


def _tokenizer(encoder: RowEncoder) -> str:
    if encoder.encoder.unit == "bytes":
        return "each byte a token"
    own = " by its own template" if encoder.data.chat_template is None else f" by template {encoder.data.chat_template}"
    return f"{encoder.data.tokenizer}, {encoder.encoder.size:,} ids" + (f"; chats{own}" if encoder.template else "")


def _samples(prepared: Prepared) -> str:
    view = prepared.view
    size = f"{view.sequence_length:,} tokens"
    if view.target_length is not None:
        size += f", targets of {view.target_length:,}"
    if view.packing == "isolated":
        bins = max(1, sum(view.train.bins))
        fill = (view.train.tokens - view.train.samples) / (bins * view.sequence_length)
        return f"{bins:,} of {size}, several whole texts in each, {fill:.1%} full"
    if view.packing == "dense":
        return f"{view.train.window:,} of {size}, texts end to end"
    return f"{view.train.samples:,} of at most {size}, one text in each"


def _histogram(prepared: Prepared) -> Iterator[str]:
    """How many texts have up to how many tokens."""
    lengths, view = prepared.view.lengths, prepared.view
    yield (
        f"Lengths in tokens: half have up to {lengths.median:,}, 99 of 100 up to {lengths.p99:,}, the longest "
        f"{lengths.longest:,}"
    )
    most, width = max(lengths.counts, default=1), len(f"{lengths.bounds[-1]:,}")
    for bound, count in zip(lengths.bounds, lengths.counts, strict=True):
        bar = "█" * round(BAR * count / max(1, most)) or ("▏" if count else "")
        limit = "  ← data.sequence_length" if bound // 2 < view.sequence_length <= bound else ""
        yield f"  {bound:>{width},} {bar} {count:,}{limit}"


def _shown(
    prepared: Prepared, encoder: RowEncoder, names: Sequence[str], rows: int, marks: tuple[str, str]
) -> Iterator[str]:
    for number in range(min(rows, prepared.view.train.samples)):
        pieces = _pieces(prepared, encoder.form, encoder.encoder.shown, names, number)
        yield "".join(
            f"{marks[0]}{strip_control(text)}{marks[1]}" if learned else strip_control(text) for text, learned in pieces
        )


def _pieces(
    prepared: Prepared, form: RowFormat, shown: Callable[[list[int]], str], names: Sequence[str], number: int
) -> Iterator[tuple[str, bool]]:
    """A sample's text, in pieces that are learned and others; of a labelled one its label is.

    shown: makes a text of ids.
    """
    start, stop = prepared.spans("train").array[number].tolist()
    ids = prepared.tokens.ids[start:stop].tolist()
    learned = prepared.tokens.learned[start:stop].tolist()
    first = 0
    label = int(prepared.labels("train").array[number]) if "label" in form.columns else None
    if label is not None:
        yield f"{shown(ids)} ", False
        yield names[label] if names else str(label), True
        return
    for place in range(1, len(ids) + 1):
        if place == len(ids) or learned[place] != learned[first]:
            yield shown(ids[first:place]), bool(learned[first])
            first = place


def learned_pieces(recipe: Recipe, environ: Mapping[str, str], rows: int) -> list[list[tuple[str, bool]]]:
    """The first texts of a recipe's rows that were prepared before, in pieces: text, and whether it is learned.

    Nothing is prepared, and neither torch nor transformers is loaded. TrainingError says why there are none.
    """
    data = cast("DatasetData", recipe.data)
    if data.mix or data.streaming:
        raise TrainingError("only rows of one source that are prepared before a run can be shown")
    found = row_files(own_source(data), data, task_of(recipe))
    prepared = known_already(recipe, found.files, found.held_out, environ)
    if prepared is None:
        raise TrainingError("the rows have changed since the run, or what was prepared of them is gone")
    kept = [label for label, _ in prepared.tokens.meta["labels"]]
    of_head = tuple(asked_view(recipe)["labels"])
    asked = tuple(data.labels) or found.names or (of_head if {*kept} <= {*of_head} else ())
    names = known_labels(kept, asked)[0] if "label" in found.form.columns else ()
    shown = _decoder(data.tokenizer)
    count = min(rows, prepared.view.train.samples)
    return [list(_pieces(prepared, found.form, shown, names, number)) for number in range(count)]


def _decoder(folder: str | None) -> Callable[[list[int]], str]:
    """What makes a text of ids, all special tokens shown. TrainingError where it is not in a tokenizer.json."""
    if folder in (None, BYTES):
        return Encoder().shown
    path = Path(folder) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise TrainingError(f"the tokenizer cannot be read from {path}: {error}") from error
    return lambda ids: str(inner.decode(ids, skip_special_tokens=False))
