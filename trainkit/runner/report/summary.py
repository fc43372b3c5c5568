"""summary.json: everything known about a run at its end; and the same as text.

``python -m trainkit.runner.report.summary RUN_DIR`` writes it from a run's files when trainkit was killed. The
guardian starts this when all processes have ended.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.decode import decode
from trainkit.files import LARGEST, RECORD, parse_json, read_json, read_record, read_whole, write_json
from trainkit.launch_plan.model import Plan, plan_from_json
from trainkit.planner.expected import EXPECTED
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.foresight import compared
from trainkit.runner.report.foresight import rows as foresight_rows
from trainkit.runner.report.gpu_watch import GpuWatch
from trainkit.runner.report.progress import Progress, read_progress
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.records import NOT_OBSERVED, UNSEEN, Count, Seconds, read_observations
from trainkit.runner.watch.timing import saved_paces, stragglers
from trainkit.text import (
    KIB,
    MIB,
    format_duration,
    format_measure,
    format_memory,
    format_rate,
    pluralize,
    strip_control,
    table,
)

Summary = Mapping[str, Any]

# Names in Trainer's result files -> those of a summary (transformers, trainer.py: TrainOutput, speed_metrics).
OF_TRAINER = {
    "train_loss": "mean_loss",
    "train_runtime": "train_seconds",
    "train_samples_per_second": "samples_per_second",
    "eval_loss": "eval_loss",
}
SPLITS = (
    "train_results.json",
    "eval_results.json",
)  # Trainer.save_metrics writes these, and merges all of them into the next file
COMBINED = "all_results.json"
STATE = "trainer_state.json"

MANY = 64  # more ranks than this are not shown one by one
UNTRAINED = "0 steps were requested: the run only evaluated"
FOREIGN = "only the built-in trainer, trainkit.log, Trainer's result files, and steps seen by the proof report it"
OWN_BATCH = "it is the script's own: the recipe does not set it"
NO_STEP = "no steps were left to run"
NOT_FINITE = "it is infinite or not a number"
WHOLE_SAMPLES = "its samples are predicted as a whole, not token by token"
UNFINISHED = "the run ended before the trainer could report it"
# Present in every summary: null if unknown, with the reason in `reasons`.
REPORTED = ("steps", "final_loss", "eval_loss", "train_seconds", "samples_per_second", "tokens_per_second", "memory")
# Their names in the metrics.
LOGGED = {
    "steps": "step",
    "final_loss": "loss",
    "train_seconds": "elapsed",
    "samples_per_second": "samples_per_second",
    "tokens_per_second": "tokens_per_second",
}
# What samples_per_second covers (`rates_cover`): global batch times steps, by the seconds of these.
STEPS_ALONE = "the steps after the first ones, without evaluation and saving"
LATEST_STEPS = "the latest logged steps"
COUNTED_STEPS = "the steps after the first, with evaluation and saving between them"
COUNTED_WITHOUT_EVALUATION = "the steps after the first, with saving and without evaluation between them"
WHOLE_TRAINING = "the whole training, with its start, evaluation and saving, as Trainer reports it"
MOST_STRAGGLERS = 4  # that are shown
# Parts of the memory that few runs have.
SELDOM = frozenset({"recomputed block", "weight copies", "update temporaries"})
PEAKS = (("allocated", "peak_allocated"), ("reserved", "peak_reserved"), ("resident", "rss"))


class StepCount(NamedTuple):
    """Steps counted by the hook in a user's program (trainkit/verify/observe.py)."""

    steps: Count
    seconds: Seconds = 0.0
    first_seconds: Seconds = 0.0


class TrainerResult(NamedTuple):
    """The validated part of the built-in trainer's result; the rest is only shown."""

    steps: Count | None = None
    first_step: Count | None = None
    not_finite: tuple[str, ...] = ()
    train_seconds: Seconds | None = None
    memory: tuple[Mapping[str, Any], ...] | None = None
    profile: Mapping[str, Any] | None = None


def own_results(plan: Plan, layout: RunLayout, started: float) -> dict[str, Any]:
    """Steps, losses and times of a user's own program, by their names in a summary, as far as they are known.

    started: seconds since the epoch; result files from before are another run's.
    """
    if plan.program.kind == "builtin" or not layout.attempts:
        return {}
    seen = _counted_by_hook(plan, layout)
    if plan.program.kind != "hf":
        return seen
    found, log = next(
        filter(any, (_trainer_results(each, started) for each in _output_folders(plan, layout))), ({}, [])
    )
    counts = [each for each in (seen.get("steps"), found.get("steps")) if each is not None]
    if "samples_per_second" in seen:  # one definition for every program
        found.pop("samples_per_second", None)
        if found.get("steps") == found.get("total_steps"):  # else the log ends before the last step
            seen |= _without_evaluation(seen, log)
    elif "samples_per_second" in found:
        found["rates_cover"] = WHOLE_TRAINING
    return {**seen, **found, **({"steps": max(counts)} if counts else {})}


def _without_evaluation(seen: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rates of counted steps without the evaluations between them. log: Trainer's, to its last step."""
    steps = {each.get("step"): _number(each.get("eval_runtime")) or 0.0 for each in log if "eval_runtime" in each}
    last = max((step for each in log if (step := _number(each.get("step"))) is not None), default=0)
    timed = seen["steps"] - 2
    begin = last - timed  # the step after which the time was taken: Trainer's count goes on from a checkpoint
    spent = sum(seconds for step, seconds in steps.items() if begin <= (_number(step) or 0) < last)
    seconds = seen["step_seconds"] * timed - spent
    if not log or seconds <= 0:
        return {}
    rate = seen["samples_per_second"] * seen["step_seconds"] * timed / seconds
    return {"step_seconds": seconds / timed, "samples_per_second": rate, "rates_cover": COUNTED_WITHOUT_EVALUATION}


def _counted_by_hook(plan: Plan, layout: RunLayout) -> dict[str, Any]:
    """Steps of this node's first rank. The first step warms up, and is not counted in the step time."""

    def rank_of(file: Path) -> int:
        number = file.stem.rpartition("-")[2]
        return int(number) if number.isdecimal() else 0

    first = min(layout.attempts[-1].shown.glob("steps-rank-*.json"), key=rank_of, default=None)
    known = read_record(first, StepCount, below=layout.root) if first else None
    if known is None:
        return {}
    found: dict[str, Any] = {"steps": known.steps}
    if known.steps > 2 and known.seconds > known.first_seconds:
        found["step_seconds"] = (known.seconds - known.first_seconds) / (known.steps - 2)
        if plan.batch.global_ is not None:
            found["samples_per_second"] = plan.batch.global_ / found["step_seconds"]
            found["rates_cover"] = COUNTED_STEPS
    return found


def _trainer_results(folder: Path, started: float) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """From the files that Trainer has written into a folder in this run; and the entries of its log."""
    found, history = dict[str, Any](), list[Mapping[str, Any]]()
    if states := list(_newer(started, folder / STATE, *folder.glob(f"checkpoint-*/{STATE}"))):
        state = max(states, key=lambda state: _number(state.get("global_step")) or 0)
        for ours, name in (("steps", "global_step"), ("total_steps", "max_steps")):
            if isinstance(steps := state.get(name), int):
                found[ours] = steps
        log = state.get("log_history")
        history = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
        for entry in history:  # the latest losses count
            named = (("final_loss", "loss"), ("eval_loss", "eval_loss"))
            found |= {ours: entry[name] for ours, name in named if _number(entry.get(name)) is not None}
    results = list(_newer(started, *(folder / name for name in SPLITS)))
    for each in results or _newer(started, folder / COMBINED):
        found |= {ours: each[name] for name, ours in OF_TRAINER.items() if _number(each.get(name)) is not None}
    return found, history


def trainer_log(plan: Plan, layout: RunLayout, started: float) -> list[Mapping[str, Any]]:
    """What Trainer has logged in a run, each entry with its `step`; empty for other programs. started: as above."""
    if plan.program.kind != "hf" or not layout.attempts:
        return []
    return next(filter(None, (_trainer_results(each, started)[1] for each in _output_folders(plan, layout))), [])


def _output_folders(plan: Plan, layout: RunLayout) -> Iterator[Path]:
    """Folders that Trainer may have written to: seen in the ranks, given in the arguments, or the plan's default."""
    for shown in read_observations(str(layout.attempts[-1].root)).values():
        if shown.output_dir:
            yield Path(shown.output_dir)
    words = [str(word) for word in plan.commands[0].program]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--output_dir" and (given := value if equals else following):
            yield Path(given.replace("<run_dir>", str(layout.root))).absolute()
    yield layout.root / "output"


def _newer(started: float, *files: Path) -> Iterator[dict[str, Any]]:
    for file in files:
        with contextlib.suppress(OSError):
            if file.stat().st_mtime >= started - 1:  # some file systems keep whole seconds
                yield read_json(file, LARGEST)  # Trainer's state has every line of its log


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def build_summary(
    plan: Plan, layout: RunLayout, verdict: Verdict, seconds: float, progress: Progress, watch: GpuWatch
) -> dict[str, Any]:
    """The summary. Times are seconds, memory is bytes."""
    result, damage = _result(layout)
    latest = progress.latest or {}  # for a run that has not finished
    evaluated = dict(progress.evaluation)
    known: dict[str, Any] = {name: latest.get(key) for name, key in LOGGED.items()}
    known |= {
        "eval_loss": evaluated.pop("loss", None),
        "rates_cover": STEPS_ALONE if result else LATEST_STEPS,
        **result,
    }
    not_finite = result.pop("not_finite", ())
    own = own_results(plan, layout, time.time() - seconds)
    known |= own
    if plan.program.kind != "builtin":
        why = FOREIGN
    elif not result:
        why = UNFINISHED
    else:
        why = NO_STEP if result.get("steps") else UNTRAINED
    # An evaluation that was not requested needs no reason.
    missing = [name for name in REPORTED if known.get(name) is None and not (result and name == "eval_loss")]
    whole = [name for name in missing if name == "tokens_per_second" and result.get("samples_per_second")]
    reasons = {
        **dict.fromkeys(missing, damage or why),
        **dict.fromkeys(whole, WHOLE_SAMPLES),
        **({"global_batch": OWN_BATCH} if plan.batch.global_ is None else {}),
    }
    found = {
        **({"metrics": evaluated} if evaluated else {}),
        **result,
        "total_steps": progress.total,
        **own,
        **({"training": dict(plan.training)} if plan.training else {}),
        "exit_code": verdict.exit_code,
        "failure": verdict.failure,
        "why": verdict.why,
        **{name: known.get(name) for name in REPORTED},
        "rates_cover": known["rates_cover"] if known.get("samples_per_second") is not None else None,
        "reasons": reasons | dict.fromkeys(not_finite, NOT_FINITE),
        "wall_seconds": round(seconds, 3),
        "gpu_memory_occupied": dict(watch.peak) or None,
        "gpu_utilization": dict(watch.utilization) or None,
        "name": plan.name,
        "strategy": plan.strategy.kind,
        "launcher": plan.launcher.kind,
        "program": plan.program.kind,
        "device": plan.topology.device,
        "world_size": plan.topology.world_size,
        "global_batch": plan.batch.global_,
        **_seen_in_ranks(plan, layout),
        "stragglers": stragglers(saved_paces(str(layout.attempts[-1].root))) if layout.attempts else [],
        **({"damaged": damage} if damage else {}),
        "training_digest": plan.training_digest,
        "recipe_digest": plan.recipe_digest,
    }
    beside = compared(plan, found)
    return {**found, "foresight": beside} if beside else found


def _result(layout: RunLayout) -> tuple[dict[str, Any], str]:
    """The built-in trainer's result, empty if there is none; if it is damaged, nothing and what is wrong with it."""
    try:
        content = parse_json(read_whole(layout.result, RECORD, below=layout.root))
        decode(TrainerResult, content)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, f"{layout.result.name} is damaged: {getattr(error, 'strerror', None) or error}"
    return dict(content), ""


def _seen_in_ranks(plan: Plan, layout: RunLayout) -> dict[str, Any]:
    """What the proof saw in this node's ranks, if the plan verifies it."""
    if all(file.path != EXPECTED for file in plan.files):
        return {}
    shown = read_observations(str(layout.attempts[-1].root)) if layout.attempts else {}
    ranks = {str(rank): each.as_data() for rank, each in shown.items() if rank < plan.topology.world_size}
    return {"in_force": ranks if len(ranks) <= MANY else by_ranks(ranks)}


def by_ranks(accounts: Mapping[str, Summary]) -> dict[str, Summary]:
    """The accounts of ranks, equal ones grouped under all their ranks: ``0-7,9``."""
    alike: dict[str, list[int]] = {}
    for rank, account in accounts.items():
        alike.setdefault(json.dumps(account, sort_keys=True), []).append(int(rank))
    found = {}
    for ranks in map(sorted, alike.values()):
        starts = [rank for before, rank in zip((-2, *ranks), ranks, strict=False) if rank != before + 1]
        ends = [rank for rank, after in zip(ranks, (*ranks[1:], -2), strict=False) if after != rank + 1]
        name = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
        found[name] = accounts[str(ranks[0])]
    return found


def render_summary(summary: Summary, run_dir: Path) -> str:
    """The summary as text; for a damaged one, only that it is damaged."""
    try:
        rows = [
            *_speed(summary),
            *_training(summary),
            *_losses(summary),
            *_memory(summary),
            *foresight_rows(summary.get("foresight")),
            *profile_rows(summary.get("profile")),
            *_trackers(summary),
            ("Damaged", str(summary.get("damaged") or "")),
            ("Run directory", str(run_dir)),
        ]
        shown = table(row for row in rows if row[1]).rstrip("\n")
        # A model may generate escape sequences, which the terminal must not obey.
        sample, outcome = str(summary.get("sample") or ""), list(_outcome(summary, run_dir))
        parts = [shown, f"Sample of generated text:\n{sample}" if sample else "", table(outcome).rstrip("\n")]
        return strip_control("\n\n".join(part for part in parts if part))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return strip_control(f"{run_dir / 'summary.json'} is damaged ({type(error).__name__}: {error})")


def _trackers(summary: Summary) -> Iterator[tuple[str, str]]:
    """Where the metrics are seen, beside metrics.jsonl."""
    for name, each in (summary.get("reporters") or {}).items():
        yield f"Metrics ({name})", str(each["address"])


def _outcome(summary: Summary, run_dir: Path) -> Iterator[tuple[str, str]]:
    """In five lines what has been trained on what, with what success, where the model is, and how it is used."""
    training, data = summary.get("training"), summary.get("data")
    if not isinstance(training, Mapping) or not data or not _has_stepped(summary):
        return
    yield "Trained", f"{training.get('model')}: {str(training.get('method')).partition(';')[0]}, on {data}"
    ends = [("loss", summary.get("first_loss"), summary.get("final_loss"))]
    ends += [("evaluation loss", summary.get("first_eval_loss"), summary.get("eval_loss"))]
    first = summary.get("first_metrics") or {}
    ends += [(name, first.get(name), value) for name, value in (summary.get("metrics") or {}).items()]
    shown = [f"{name} {found}" for name, *values in ends if (found := _from_to(*values))]
    if shown:
        yield "Success", ", ".join(shown)
    best, value = summary.get("best_step"), summary.get("best_value")
    if best is not None and isinstance(value, int | float):
        yield "Best", f"step {best}, evaluation {summary.get('best_metric')} {format_measure(value)}"
    saved = summary.get("saved")
    yield "Model", str(run_dir / str(saved)) if saved else "not saved (checkpoint.at_end is false)"
    words = shlex.quote(str(run_dir))
    for number, use in enumerate(summary.get("uses") or () if saved else ()):
        command = f"trainkit {use} {words}{' FOLDER' if use.startswith('export') else ''}"
        yield "" if number else "Use it", command


def headline(summary: Summary) -> tuple[str, float] | None:
    """The one number that says how good a run's model is: what decides the best, else the first metric, else the loss.

    Its name, and its value at the last evaluation. None for a run without an evaluation.
    """
    measured, best = summary.get("metrics"), summary.get("best_metric")
    measured = measured if isinstance(measured, Mapping) else {}
    name = best if isinstance(best, str) and best in measured else str(next(iter(measured), "loss"))
    value = summary.get("eval_loss") if name == "loss" else measured.get(name)
    return (name, float(value)) if isinstance(value, int | float) else None


def _from_to(first: object, last: object) -> str:
    """``5.7701 → 4.1234``; the last alone where nothing was measured before."""
    known = [format_measure(value) for value in (first, last) if isinstance(value, int | float)]
    return " → ".join(known if len({*known}) > 1 else known[-1:])


def _has_stepped(summary: Summary) -> bool:
    """False if it is known that no step was run, so that there are no rates."""
    steps = summary.get("steps")
    return steps is None or steps != summary.get("first_step")


def _speed(summary: Summary) -> Iterator[tuple[str, str]]:
    trained, wall = summary.get("train_seconds"), float(summary["wall_seconds"])
    if not isinstance(trained, int | float) or not _has_stepped(summary):
        yield "Time", f"{wall:.2f} s" if wall < 60 else format_duration(wall)
    else:
        spent = (("compiling", summary.get("compile_seconds")), ("evaluating and saving", summary.get("aside_seconds")))
        parts = [f"{seconds:.2f} s of it {what}" for what, seconds in spent if seconds and seconds >= 0.005]
        inside = f" ({', '.join(parts)})" if parts else ""
        yield "Time", f"{trained:.2f} s of training{inside}, {format_duration(wall)} in total"
    for title, name in (("Samples/second", "samples_per_second"), ("Tokens/second", "tokens_per_second")):
        value = summary.get(name)
        yield title, format_rate(value) if isinstance(value, int | float) and _has_stepped(summary) else ""
    # Model FLOPs utilization, if the peak of the GPU is known.
    share, peak = summary.get("mfu"), summary.get("peak_flops_per_second")
    yield "MFU", f"{share:.1%} of {peak / 1e12:.0f} TFLOP/s a GPU" if share is not None and peak else ""


def _training(summary: Summary) -> Iterator[tuple[str, str]]:
    steps, strategy = summary.get("steps"), f"{summary['strategy']}, {summary['launcher']}"
    ranks = f"{pluralize(summary['world_size'], 'rank')} ({strategy})"
    if steps == 0:
        yield "Steps", f"none, on {ranks}: only evaluated"
    elif steps is not None:
        nothing = "" if _has_stepped(summary) else "; no steps were left"
        size, each = summary["global_batch"], summary.get("step_seconds")
        pace = f", {each:.3g} s each" if isinstance(each, int | float) else ""
        yield "Steps", f"{steps}{f' of {size} samples' if size else ''} on {ranks}{pace}{nothing}"
    else:
        yield "Ranks", f"{summary['world_size']} ({strategy})"
    if (seen := summary.get("in_force")) is not None:
        yield "In force", _in_force(seen, summary["world_size"])
    if found := summary.get("micro_search"):
        text = f"{found['micro']}, accumulation {found['accumulation']}: "
        if found["source"] == "remembered":
            yield "Micro batch", f"{text}remembered in {found['remembered_in']}"
        else:
            tried = ", ".join(f"{trial['micro']}{'' if trial['fits'] else ' (too large)'}" for trial in found["tried"])
            kept = f"; remembered in {found['remembered_in']}" if found["remembered_in"] else ""
            yield "Micro batch", f"{text}the largest that fits of {tried}{kept}"
    trained, frozen = summary.get("parameters"), summary.get("frozen_parameters")
    if trained and frozen:
        whole = trained + frozen
        yield "Parameters training", f"{trained:,} of {whole:,} ({trained / whole:.2%})"
    yield "Skipped steps", str(summary.get("skipped_steps") or "")


def _in_force(seen: Summary, world_size: int) -> str:
    """What the proof saw, if the plan verifies it. seen: the accounts of ranks by their numbers, as in `by_ranks`."""
    if not seen:
        return f"{NOT_OBSERVED}{UNSEEN}"
    errors = [account["error"] for account in seen.values() if "error" in account]
    if errors:
        return f"{NOT_OBSERVED}{errors[0]}"
    facts = ("strategy", "device", "dtype")
    found = {", ".join(str(account[name]) for name in facts if account[name]) for account in seen.values()}
    resumed = {f", from step {account['step']}" for account in seen.values() if account.get("step")}
    differs = any(account["differences"] or account.get("warnings") for account in seen.values())
    verdict = "not as planned" if differs else "as planned"
    unknown = "; the strategy is unknown" if any(account["strategy"] is None for account in seen.values()) else ""
    ranges = [part.split("-") for name in seen for part in name.split(",")]
    count = sum(int(each[-1]) - int(each[0]) + 1 for each in ranges)
    of = f" of {world_size}" if world_size > count else ""
    ranks = f"{count}{of} rank{'s' if world_size != 1 else ''}"
    group = max((account.get("world_size") or 1 for account in seen.values()), default=1)
    own = f"; the script itself started {group} ranks" if world_size == 1 < group and not differs else ""
    return f"{verdict}, seen in {ranks}: {'; '.join(sorted(found))}{''.join(sorted(resumed))}{unknown}{own}"


def _losses(summary: Summary) -> Iterator[tuple[str, str]]:
    """Losses, and the waiting: for data, and for slower ranks."""
    reasons = summary.get("reasons") or {}

    def loss(name: str) -> str:
        value = summary.get(name)
        if isinstance(value, int | float):
            return format_measure(value)
        return NOT_FINITE if reasons.get(name) == NOT_FINITE else ""

    corpus, final = summary.get("corpus") or {}, loss("final_loss")
    entropy = corpus.get("unigram_entropy")
    if isinstance(entropy, int | float) and isinstance(summary.get("final_loss"), int | float):
        unit = "token" if "tokens" in corpus else "byte"
        final += f" nats per {unit} (unigram entropy of the corpus: {entropy:.4f})"
    yield "Final loss", final
    yield "Mean loss", loss("mean_loss")
    best, decides = summary.get("best_value"), summary.get("best_metric", "loss")
    for name, value in {"loss": summary.get("eval_loss"), **(summary.get("metrics") or {})}.items():
        text = format_measure(value) if isinstance(value, int | float) else NOT_FINITE
        if name == "loss":
            text = loss("eval_loss")
        if name == decides and best is not None and best != value:
            text += f" (best: {format_measure(best)} at step {summary.get('best_step')})"
        if name == decides and summary.get("stopped_early"):
            text += "; early stopping: no improvement"
        yield f"Evaluation {name}", text
    share = summary.get("data_wait_share")
    if isinstance(share, int | float) and _has_stepped(summary):
        yield "Waiting for data", f"{share:.1%} of the training"
    for each in (summary.get("stragglers") or [])[:MOST_STRAGGLERS]:
        text = f"{each['own_seconds']:.4f} s of its own a step, the median of all is {each['median_seconds']:.4f} s"
        yield "Straggler", f"rank {each['rank']} ({each['host']}): {text}"


def _memory(summary: Summary) -> Iterator[tuple[str, str]]:
    """The driver's figures of each GPU, the peaks of each rank, and the parts of these."""
    for uuid, used in (summary.get("gpu_memory_occupied") or {}).items():
        yield "GPU memory occupied", f"{format_memory(used)}  {uuid}"
    for uuid, mean in (summary.get("gpu_utilization") or {}).items():
        yield "GPU utilization", f"{mean:g} %  {uuid}"
    ranks: Sequence[Summary] = summary.get("memory") or []
    of = f" of {len(ranks)}" if len(ranks) > MANY else ""
    if of:  # the one with the highest peak, and the one with the lowest; summary.json has them all
        key = next((key for _, key in PEAKS if all(entry.get(key) for entry in ranks)), None)
        ends: Iterable[Any] = (max, min) if key else ()
        ranks = [end(ranks, key=lambda entry: entry[key]) for end in ends] or ranks[:1]
    for entry in ranks:
        figures = [f"{format_memory(entry[key])} {word}" for word, key in PEAKS if entry.get(key)]
        yield f"Peak memory, rank {entry.get('rank')}{of}", ", ".join(figures)
    for entry in ranks:
        parts = {name.replace("_", " "): used for name, used in (entry.get("anatomy") or {}).items()}
        figures = [
            f"{format_memory(used) if used >= 10 * MIB else f'{used / KIB:.0f} KiB'} {name}"
            for name, used in parts.items()
            if used is not None and (used >= 512 or name not in SELDOM)  # half a KiB
        ]
        yield f"Memory of rank {entry.get('rank')}", ", ".join(figures)


def profile_rows(profile: Summary | None) -> Iterator[tuple[str, str]]:
    """Time of one step by groups of operators: a row each for forward, backward and the rest."""
    if not profile:
        return
    steps = profile["steps"]
    for phase, groups in profile["operators"].items():
        whole = sum(groups.values())
        shares = ", ".join(f"{seconds / whole:.1%} {group}" for group, seconds in groups.items()) if whole else "none"
        yield f"Operators, {phase}", f"{whole / steps:.4f} s: {shares}"
    yield "Profiled", f"{pluralize(steps, 'step')}, {profile['seconds'] / steps:.4f} s each"
    yield "Trace", profile["trace"] or ""


def write_summary(layout: RunLayout) -> None:
    """Write the summary of a run that has ended. Raises OSError, and ValueError, KeyError or TypeError for no run."""
    plan, status = plan_from_json(read_json(layout.plan)), read_json(layout.status)
    watch = GpuWatch(plan.cards, layout.cards)
    watch.recall()
    verdict = Verdict(**{name: status[name] for name in Verdict._fields})
    seconds = (status["ended"] or time.time()) - status["started"]
    write_json(layout.summary, build_summary(plan, layout, verdict, seconds, read_progress(layout.metrics), watch))


if __name__ == "__main__":
    write_summary(RunLayout(Path(sys.argv[1])))
