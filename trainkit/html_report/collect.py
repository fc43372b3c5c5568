"""What a report shows of a run, from the files of its directory: each may be missing, damaged, or another user's."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from trainkit.decode import finite, whole
from trainkit.errors import MachineError, TrainingError
from trainkit.files import read_json, read_json_lines, read_whole
from trainkit.launch_plan.model import Plan
from trainkit.launch_plan.render import table
from trainkit.recipe.schema import Recipe
from trainkit.recipe.schema.data import BYTES
from trainkit.recipe.secrets import mask_line, mask_private_keys, mask_values
from trainkit.runner.report.difference import recipe_values
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.failure import LINES, describe_failure, log_of_rank
from trainkit.runner.report.history import Curve, History, trainer_curves
from trainkit.runner.report.progress import last_lines
from trainkit.runner.rundir.code_state import read_code
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.listing import RunInfo, read_plan
from trainkit.runner.rundir.records import RankRecord, read_records
from trainkit.schedulers.jobs.run_state import RunState
from trainkit.schedulers.jobs.standing import Standing, standing_of
from trainkit.tools.builtin.program import SETTINGS

PREDICTIONS = "predictions.jsonl"
READ = 20_000  # lines of the predictions
FIRST, WORST = 10, 10  # that are shown
ROWS = 3  # of the data, that are shown with what is learned
CULPRITS = 4  # ranks of an attempt whose last lines are shown
Pieces = tuple[tuple[str, bool], ...]  # of a row: text, and whether it is learned


@dataclass(frozen=True, slots=True)
class Predictions:
    """first: the first lines. worst: those that are furthest off. count: how many were read; more: whether not all."""

    first: Sequence[Mapping[str, Any]] = ()
    worst: Sequence[Mapping[str, Any]] = ()
    count: int = 0
    right: int | None = None  # of labels
    more: bool = False


@dataclass(frozen=True, slots=True)
class Collected:
    """One run. times: seconds since 1970 by step. settings: values of the recipe by their keys, as JSON.

    failures: title and text of each. why_no_rows: why `rows` is empty. Texts are without secrets.
    """

    label: str
    standing: Standing
    curves: Mapping[str, Curve] = field(default_factory=dict)
    times: Curve = field(default_factory=Curve)
    start: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 0  # after which it began
    plan: str = ""
    recipe: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    code: str = ""
    failures: Sequence[tuple[str, str]] = ()
    predictions: Predictions = Predictions()
    rows: Sequence[Pieces] = ()
    why_no_rows: str = ""
    refusal: str = ""  # why the metrics could not be read


def collect(info: RunInfo, label: str, environ: Mapping[str, str]) -> Collected:
    """Everything about a run. environ: the caller's, which names the cache of prepared rows."""
    layout, standing = info.layout, standing_of(info)
    history = History(layout.metrics)
    history.read()
    recipe, (plan, shown) = _text(layout.recipe), _plan(layout)
    rows, why_no_rows = _rows(layout, environ)
    code = read_code(layout)
    return Collected(
        label,
        standing,
        {
            **trainer_curves(plan, layout, info.started or 0.0),
            **history.curves,
            **_of_steps(history),
            **_of_cards(layout, history.times),
        },
        history.times,
        history.start,
        history.first_step,
        shown,
        _masked(recipe),
        {key: mask_values(json.dumps(value)) for key, value in recipe_values(layout).items()},
        _masked(_text(layout.environment)),
        str(code or ""),
        list(_failures(layout, standing.state)) if standing.exit_code != 0 and standing.state.is_over else [],
        _predictions(layout),
        rows,
        why_no_rows,
        history.refusal,
    )


def labels_of(infos: Sequence[RunInfo]) -> list[str]:
    """What runs are called beside each other: their names, with their short ids where names are equal."""
    names = [info.layout.name for info in infos]
    return [
        name if names.count(name) == 1 else f"{name} {info.layout.short_id}"
        for name, info in zip(names, infos, strict=True)
    ]


def _of_steps(history: History) -> dict[str, Curve]:
    """The time of a step: a record may be of several."""
    curve, found = history.curves.get("seconds", Curve()), Curve()
    for before, step, seconds in zip([history.first_step, *curve.steps], curve.steps, curve.values, strict=False):
        found.add(step, None if seconds is None else seconds / max(1, step - before))
    return {"step_seconds": found}


def _of_cards(layout: RunLayout, times: Curve) -> dict[str, Curve]:
    """The most memory of a GPU, and the mean utilization of all, by the step in which they were sampled."""
    memory, busy = dict[int, int](), dict[int, list[int]]()
    moments = [moment or 0.0 for moment in times.values]
    for sample in read_json_lines(layout.cards):
        at, cards = sample.get("time"), sample.get("cards")
        if not isinstance(at, int | float) or not isinstance(cards, list) or not moments or at < moments[0]:
            continue
        if (place := bisect_left(moments, at)) == len(moments):
            break
        step = times.steps[place]
        for card in (each for each in cards if isinstance(each, dict)):
            if (used := whole(card.get("memory_bytes"))) is not None:
                memory[step] = max(memory.get(step, 0), used)
            if (share := whole(card.get("utilization"))) is not None:
                busy.setdefault(step, []).append(share)
    return {
        "gpu_memory": Curve([*memory], [*memory.values()]),
        "gpu_utilization": Curve([*busy], [sum(each) / len(each) for each in busy.values()]),
    }


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return read_whole(path).decode("utf-8", "replace")
    return ""


def _plan(layout: RunLayout) -> tuple[Plan | None, str]:
    """The plan, and as `trainkit plan` shows it, or why it cannot be read."""
    try:
        plan = read_plan(layout)
        return plan, mask_values(table.render(plan))
    except MachineError as error:
        return None, str(error)


def _failures(layout: RunLayout, state: RunState) -> Iterator[tuple[str, str]]:
    """Title and text of each failure: the run's reason, then the last lines of other ranks that failed by attempt."""
    attempts, status, told = layout.attempts, read_json(layout.status), None
    if attempts and status.get("failure"):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # damaged, or of another version
            verdict = Verdict(**{name: status[name] for name in Verdict._fields})
            yield "At the end", _masked(describe_failure(verdict, attempts[-1], None))
            told = verdict.rank
    elif state.why:
        yield "At the end", _masked(state.why)
    for attempt in attempts:
        yield from _of_attempt(attempt, told if attempt == attempts[-1] else None)


def _of_attempt(attempt: AttemptLayout, told: int | None) -> Iterator[tuple[str, str]]:
    failed = list[RankRecord]()
    with contextlib.suppress(OSError):
        failed = [each for each in read_records(str(attempt.root)) if each.failed]
    # A launcher ends the others: who failed by itself, and first, is to blame.
    blamed = [each for each in failed if not each.told_to_stop] or failed
    for each in sorted(blamed, key=lambda each: each.ended or 0.0)[:CULPRITS]:
        if each.rank != told:
            log = log_of_rank(attempt, each.rank)
            lines = [f"{log}:", *last_lines(log, LINES)] if log else ["it has written nothing"]
            title = f"Attempt {attempt.root.name}: rank {each.rank} on {each.host}, exit code {each.code}"
            yield title, _masked("\n".join(lines))


def _masked(text: str) -> str:
    return "\n".join(map(mask_line, mask_private_keys(text).splitlines()))


def _predictions(layout: RunLayout) -> Predictions:
    lines = read_json_lines(layout.root / PREDICTIONS)
    first, worst = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    count = judged = right = 0
    for count, line in enumerate(islice(lines, READ), start=1):
        if line.get("target") is not None and "label" in line:
            judged, right = judged + 1, right + (line["label"] == line["target"])
        if count <= FIRST:
            first.append(line)
        elif _badness(line) > 0:
            worst = sorted([*worst, line], key=_badness, reverse=True)[:WORST]
    more = next(lines, None) is not None
    return Predictions(first, worst, count, right if judged else None, more)


def _badness(line: Mapping[str, Any]) -> float:
    """Of a wrong label its probability, of a right one 0; of a text its loss."""
    shares, label = line.get("probabilities"), line.get("label")
    if isinstance(shares, list) and isinstance(label, int) and 0 <= label < len(shares):
        return finite(shares[label]) or 0.0 if label != line.get("target") else 0.0
    return finite(line.get("loss")) or 0.0


def _rows(layout: RunLayout, environ: Mapping[str, str]) -> tuple[list[Pieces], str]:
    """Some rows as the model reads them, with what it learns; else why there are none. Nothing is prepared for it."""
    settings = layout.root / SETTINGS
    if not settings.is_file():
        return [], ""  # a program of the user's own reads its own data
    try:
        from trainkit.trainer.settings import read_settings

        recipe = read_settings(settings).recipe
        if recipe.data.kind != "dataset":
            return [], ""
        from trainkit.data.report import learned_pieces

        return [tuple(pieces) for pieces in learned_pieces(_from_its_folder(recipe, layout), environ, ROWS)], ""
    except TrainingError as error:
        return [], mask_values(str(error))
    except ImportError as error:
        return [], f"reading them needs {error.name}, which is not installed here"
    except (OSError, ValueError, LookupError) as error:
        return [], f"the prepared rows cannot be read: {error}"


def _from_its_folder(recipe: Recipe, layout: RunLayout) -> Recipe:
    """The recipe with paths of data from the folder that the run was started in, as far as its own path tells that."""
    root = Path(recipe.output.root)
    if root.is_absolute() or layout.root.parents[1].parts[-len(root.parts) :] != root.parts:
        return recipe
    folder = layout.root.parents[len(root.parts) + 1]

    def moved(value: str | list[str]) -> str | list[str]:
        return [str(folder / each) for each in value] if isinstance(value, list) else str(folder / value)

    named = {name: getattr(recipe.data, name, None) for name in ("path", "validation_path", "tokenizer", "cache")}
    paths = {name: moved(value) for name, value in named.items() if value not in (None, BYTES)}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=paths)})
