"""The account of a finished run: summary.json, and the lines that the user reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.plan.model import Plan
from trainkit.planner.verification import EXPECTED
from trainkit.runner.rank.proof import read
from trainkit.runner.report.card_watch import CardWatch
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.profile_rows import profile_rows
from trainkit.runner.report.progress_line import Progress, count, duration, size
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_json

UNTRAINED = "the run was asked for 0 steps: it only evaluated"
FOREIGN = "only the built-in trainer reports it; this run executed a program of its own"
ELSEWHERE = "rank 0 reports it, in the run directory of its node"
NO_STEP = "no step was left to run"
NOT_FINITE = "it is infinite or no number"
UNFINISHED = "the run ended before the trainer could report it"
SHOWN = ("strategy", "device", "dtype")
REPORTED = ("steps", "final_loss", "eval_loss", "train_seconds", "samples_per_second", "tokens_per_second", "memory")
CARRIED = (
    "best_eval_loss",
    "best_step",
    "stopped_early",
    "compile_seconds",
    "corpus",
    "data_wait_share",
    "first_step",
    "flops_per_token",
    "frozen_parameters",
    "mfu",
    "micro_batch",
    "accumulation",
    "micro_search",
    "parameters",
    "peak_flops_per_second",
    "profile",
    "sample",
    "samples",
    "skipped_steps",
    "stopped_by",
)


def build_summary(
    plan: Plan,
    layout: RunLayout,
    verdict: Verdict,
    seconds: float,
    progress: Progress,
    watch: CardWatch,
    has_rank_0: bool = True,
) -> dict[str, Any]:
    """Everything that is known at the end. What is not known is null, and `reasons` says why. Seconds and bytes."""
    result = read_json(layout.result)
    known: dict[str, Any] = {**_so_far(progress), **result}
    reason = _reason(plan, has_rank_0, result)
    lost = result.get("not_finite", ())
    # An evaluation that was not asked for needs no reason.
    missing = [name for name in REPORTED if known.get(name) is None and not (result and name == "eval_loss")]
    return {
        "exit_code": verdict.exit_code,
        "failure": verdict.failure,
        "why": verdict.why,
        **{name: known.get(name) for name in REPORTED},
        "reasons": dict.fromkeys(missing, reason) | dict.fromkeys(lost, NOT_FINITE),
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
        **_in_force(plan, layout),
        "training_digest": plan.training_digest,
        "recipe_digest": plan.recipe_digest,
        **{name: result[name] for name in CARRIED if name in result},
    }


def _in_force(plan: Plan, layout: RunLayout) -> dict[str, Any]:
    """What the ranks of this node were seen to run, where the plan promises to look."""
    if all(file.path != EXPECTED for file in plan.files):
        return {}
    shown = layout.attempts[-1].shown if layout.attempts else None
    files = sorted(shown.glob("rank-*.json")) if shown else []
    return {"in_force": {file.stem.removeprefix("rank-"): read(str(file)) for file in files}}


def _reason(plan: Plan, has_rank_0: bool, result: Mapping[str, Any]) -> str:
    if plan.program.kind != "builtin":
        return FOREIGN
    if not has_rank_0:
        return ELSEWHERE
    if not result:
        return UNFINISHED
    if not result.get("steps"):
        return UNTRAINED
    return NO_STEP


def _so_far(progress: Progress) -> dict[str, Any]:
    """What the metrics of an unfinished run say."""
    latest = progress.latest
    if latest is None:
        return {}
    return {
        "steps": progress.step,
        "final_loss": latest.get("loss"),
        "train_seconds": latest.get("elapsed"),
        "samples_per_second": latest.get("samples_per_second"),
        "tokens_per_second": latest.get("tokens_per_second"),
    }


def render_summary(summary: Mapping[str, Any], run_dir: Path) -> str:
    """The summary as a table of two columns, then the sample of generated text."""
    stepped = _has_stepped(summary)
    rows = [
        ("Time", _time(summary)),
        ("Samples/second", _rate(summary.get("samples_per_second")) if stepped else ""),
        ("Tokens/second", _rate(summary.get("tokens_per_second")) if stepped else ""),
        ("MFU", _utilisation(summary)),
        ("Steps", _steps(summary)),
        ("In force", _shown(summary)),
        ("Micro batch", _micro_batch(summary)),
        ("Parameters training", _trained(summary)),
        ("Skipped steps", str(summary.get("skipped_steps") or "")),
        ("Final loss", _loss(summary)),
        ("Evaluation loss", _evaluation(summary)),
        ("Waiting for data", _share(summary.get("data_wait_share")) if stepped else ""),
        *_memory(summary),
        *_anatomy(summary),
        *profile_rows(summary.get("profile")),
        ("Run directory", str(run_dir)),
    ]
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in shown)
    sample = _harmless(str(summary.get("sample") or ""))
    return f"{text}\n\nSample of generated text:\n{sample}" if sample else text


def _harmless(text: str) -> str:
    """A model may have learned escape sequences; a terminal should not obey them."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _has_stepped(summary: Mapping[str, Any]) -> bool:
    """False where it is known that no step was run: such a run has no rates."""
    steps = summary.get("steps")
    return steps is None or steps != summary.get("first_step")


def _time(summary: Mapping[str, Any]) -> str:
    trained, wall = summary.get("train_seconds"), float(summary["wall_seconds"])
    if not isinstance(trained, int | float) or not _has_stepped(summary):
        return f"{wall:.2f} s" if wall < 60 else duration(wall)
    compiling = summary.get("compile_seconds")
    inside = f" ({compiling:.2f} s of it compiling)" if compiling else ""
    return f"{trained:.2f} s of training{inside}, {duration(wall)} in all"


def _rate(value: object) -> str:
    return count(value) if isinstance(value, int | float) else ""


def _share(value: object) -> str:
    return f"{value:.1%} of the training" if isinstance(value, int | float) else ""


def _decimal(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _steps(summary: Mapping[str, Any]) -> str:
    steps = summary.get("steps")
    if steps is None:
        return ""
    if steps == 0:
        return f"none, on {_ranks(summary)}: only evaluated"
    nothing = "; nothing was left to train" if 0 < steps == summary.get("first_step") else ""
    return f"{steps} of {summary['global_batch']} samples on {_ranks(summary)}{nothing}"


def _utilisation(summary: Mapping[str, Any]) -> str:
    """Model FLOPs utilisation, where the peak of the card is known."""
    share, peak = summary.get("mfu"), summary.get("peak_flops_per_second")
    return f"{share:.1%} of {peak / 1e12:.0f} TFLOP/s a card" if share is not None and peak else ""


def _shown(summary: Mapping[str, Any]) -> str:
    """What was seen to run, where the plan promised to look."""
    seen = summary.get("in_force")
    if seen is None:
        return ""
    if not seen:
        return "not shown: no step of an optimizer of torch was seen"
    errors = [account["error"] for account in seen.values() if "error" in account]
    if errors:
        return f"not shown: {errors[0]}"
    found = {", ".join(str(account[name]) for name in SHOWN if account[name]) for account in seen.values()}
    verdict = "not as planned" if any(account["differences"] for account in seen.values()) else "as planned"
    untold = "; the strategy cannot be told" if any(account["strategy"] is None for account in seen.values()) else ""
    of = f" of {world}" if (world := summary["world_size"]) > len(seen) else ""
    return f"{verdict}, seen in {len(seen)}{of} rank{'s' if world != 1 else ''}: {'; '.join(sorted(found))}{untold}"


def _trained(summary: Mapping[str, Any]) -> str:
    """The share that trains, where some do not."""
    trained, frozen = summary.get("parameters"), summary.get("frozen_parameters")
    if not trained or not frozen:
        return ""
    return f"{trained:,} of {trained + frozen:,} ({trained / (trained + frozen):.2%})"


def _micro_batch(summary: Mapping[str, Any]) -> str:
    """How the micro batch came about, where the recipe left it open."""
    found = summary.get("micro_search")
    if not found:
        return ""
    text = f"{found['micro']}, accumulation {found['accumulation']}: "
    if found["source"] == "remembered":
        return f"{text}remembered in {found['remembered_in']}"
    words = [f"{trial['micro']}{'' if trial['fits'] else ' (too large)'}" for trial in found["tried"]]
    kept = f"; remembered in {found['remembered_in']}" if found["remembered_in"] else ""
    return f"{text}the largest that fits of {', '.join(words)}{kept}"


def _ranks(summary: Mapping[str, Any]) -> str:
    world = summary["world_size"]
    return f"{world} rank{'s' if world != 1 else ''} ({summary['strategy']}, {summary['launcher']})"


def _loss(summary: Mapping[str, Any]) -> str:
    loss = _decimal(summary.get("final_loss"))
    corpus = summary.get("corpus") or {}
    entropy = corpus.get("unigram_entropy")
    if not loss or not isinstance(entropy, int | float):
        return loss or _lost(summary, "final_loss")
    return f"{loss} nats per {'token' if 'tokens' in corpus else 'byte'} (unigram entropy of the corpus: {entropy:.4f})"


def _lost(summary: Mapping[str, Any], name: str) -> str:
    """What became of a loss that has no value to show."""
    reasons = summary.get("reasons") or {}
    return NOT_FINITE if reasons.get(name) == NOT_FINITE else ""


def _anatomy(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the memory of each rank is for."""
    rows = []
    for entry in summary.get("memory") or []:
        known = {name: used for name, used in (entry.get("anatomy") or {}).items() if used is not None}
        figures = [f"{_amount(used)} {name.replace('_', ' ')}" for name, used in known.items()]
        rows.append((f"Memory of rank {entry.get('rank')}", ", ".join(figures)))
    return rows


def _amount(used: int) -> str:
    return size(used) if used >= 10 * 2**20 else f"{used / 2**10:.0f} KiB"


def _evaluation(summary: Mapping[str, Any]) -> str:
    last, best, step = (summary.get(name) for name in ("eval_loss", "best_eval_loss", "best_step"))
    text = _decimal(last) or _lost(summary, "eval_loss")
    if best is not None and best != last:
        text += f" (lowest: {_decimal(best)} at step {step})"
    return f"{text}; stopped early, for it fell no further" if summary.get("stopped_early") else text


def _memory(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    occupied = summary.get("gpu_memory_occupied") or {}
    rows = [("GPU memory occupied", f"{size(used)}  {uuid}") for uuid, used in occupied.items()]
    rows += [
        ("GPU utilization", f"{mean:g} %  {uuid}") for uuid, mean in (summary.get("gpu_utilization") or {}).items()
    ]
    for entry in summary.get("memory") or []:
        named = (("allocated", "peak_allocated"), ("reserved", "peak_reserved"), ("resident", "rss"))
        figures = [f"{size(entry[key])} {word}" for word, key in named if entry.get(key)]
        rows.append((f"Peak memory, rank {entry.get('rank')}", ", ".join(figures)))
    return rows
