"""The lines that a user reads at the end of a run, from its summary alone: `trainkit runs show` prints them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.runner.report.progress_line import count, duration, size
from trainkit.runner.report.summary import NOT_FINITE
from trainkit.text import counted

Summary = Mapping[str, Any]
PEAKS = (("allocated", "peak_allocated"), ("reserved", "peak_reserved"), ("resident", "rss"))


def render_summary(summary: Summary, run_dir: Path) -> str:
    """The summary as a table of two columns, then the sample of generated text. Rows without a value are left out."""
    rows = [
        ("Time", _time(summary)),
        ("Samples/second", _rate(summary, "samples_per_second")),
        ("Tokens/second", _rate(summary, "tokens_per_second")),
        ("MFU", _utilization(summary)),
        ("Steps", _steps(summary)),
        ("In force", _in_force(summary)),
        ("Micro batch", _micro_batch(summary)),
        ("Parameters training", _trained(summary)),
        ("Skipped steps", str(summary.get("skipped_steps") or "")),
        ("Final loss", _final_loss(summary)),
        ("Evaluation loss", _evaluation_loss(summary)),
        ("Waiting for data", _waiting(summary)),
        *_memory(summary),
        *profile_rows(summary.get("profile")),
        ("Run directory", str(run_dir)),
    ]
    shown = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in shown)
    table = "\n".join(f"{name:<{width}}  {value}" for name, value in shown)
    # A model may have learned escape sequences, which the terminal must not obey.
    sample = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in str(summary.get("sample") or "")
    )
    return f"{table}\n\nSample of generated text:\n{sample}" if sample else table


def profile_rows(profile: Summary | None) -> Iterator[tuple[str, str]]:
    """Time by groups of operators: a row for forward, backward and the rest, for one step of those watched."""
    if not profile:
        return
    steps = profile["steps"]
    for phase, groups in profile["operators"].items():
        whole = sum(groups.values())
        shares = ", ".join(f"{seconds / whole:.1%} {group}" for group, seconds in groups.items()) if whole else "none"
        yield f"Operators, {phase}", f"{whole / steps:.4f} s: {shares}"
    yield "Profiled", f"{counted(steps, 'step')}, {profile['seconds'] / steps:.4f} s each"
    yield "Trace", profile["trace"] or ""


def _has_stepped(summary: Summary) -> bool:
    """False where it is known that no step was run: such a run has no rates."""
    steps = summary.get("steps")
    return steps is None or steps != summary.get("first_step")


def _time(summary: Summary) -> str:
    trained, wall = summary.get("train_seconds"), float(summary["wall_seconds"])
    if not isinstance(trained, int | float) or not _has_stepped(summary):
        return f"{wall:.2f} s" if wall < 60 else duration(wall)
    compiling = summary.get("compile_seconds")
    inside = f" ({compiling:.2f} s of it compiling)" if compiling else ""
    return f"{trained:.2f} s of training{inside}, {duration(wall)} in all"


def _rate(summary: Summary, name: str) -> str:
    value = summary.get(name)
    return count(value) if isinstance(value, int | float) and _has_stepped(summary) else ""


def _utilization(summary: Summary) -> str:
    """Model FLOPs utilization, where the peak of the card is known."""
    share, peak = summary.get("mfu"), summary.get("peak_flops_per_second")
    return f"{share:.1%} of {peak / 1e12:.0f} TFLOP/s a card" if share is not None and peak else ""


def _steps(summary: Summary) -> str:
    steps = summary.get("steps")
    if steps is None:
        return ""
    ranks = f"{counted(summary['world_size'], 'rank')} ({summary['strategy']}, {summary['launcher']})"
    if steps == 0:
        return f"none, on {ranks}: only evaluated"
    nothing = "" if _has_stepped(summary) else "; nothing was left to train"
    return f"{steps} of {summary['global_batch']} samples on {ranks}{nothing}"


def _in_force(summary: Summary) -> str:
    """What was seen to run, where the plan promised to look."""
    seen = summary.get("in_force")
    if seen is None:
        return ""
    if not seen:
        return "not shown: no step of an optimizer of torch was seen"
    errors = [account["error"] for account in seen.values() if "error" in account]
    if errors:
        return f"not shown: {errors[0]}"
    facts = ("strategy", "device", "dtype")
    found = {", ".join(str(account[name]) for name in facts if account[name]) for account in seen.values()}
    verdict = "not as planned" if any(account["differences"] for account in seen.values()) else "as planned"
    unknown = "; the strategy is unknown" if any(account["strategy"] is None for account in seen.values()) else ""
    of = f" of {world}" if (world := summary["world_size"]) > len(seen) else ""
    return f"{verdict}, seen in {len(seen)}{of} rank{'s' if world != 1 else ''}: {'; '.join(sorted(found))}{unknown}"


def _micro_batch(summary: Summary) -> str:
    """How the micro batch was found, where the recipe left it open."""
    found = summary.get("micro_search")
    if not found:
        return ""
    text = f"{found['micro']}, accumulation {found['accumulation']}: "
    if found["source"] == "remembered":
        return f"{text}remembered in {found['remembered_in']}"
    tried = ", ".join(f"{trial['micro']}{'' if trial['fits'] else ' (too large)'}" for trial in found["tried"])
    kept = f"; remembered in {found['remembered_in']}" if found["remembered_in"] else ""
    return f"{text}the largest that fits of {tried}{kept}"


def _trained(summary: Summary) -> str:
    """The share that trains, where some parameters do not."""
    trained, frozen = summary.get("parameters"), summary.get("frozen_parameters")
    if not trained or not frozen:
        return ""
    return f"{trained:,} of {trained + frozen:,} ({trained / (trained + frozen):.2%})"


def _loss(summary: Summary, name: str) -> str:
    value, reasons = summary.get(name), summary.get("reasons") or {}
    if isinstance(value, int | float):
        return f"{value:.4f}"
    return NOT_FINITE if reasons.get(name) == NOT_FINITE else ""


def _final_loss(summary: Summary) -> str:
    corpus, loss = summary.get("corpus") or {}, summary.get("final_loss")
    entropy = corpus.get("unigram_entropy")
    if not isinstance(loss, int | float) or not isinstance(entropy, int | float):
        return _loss(summary, "final_loss")
    unit = "token" if "tokens" in corpus else "byte"
    return f"{loss:.4f} nats per {unit} (unigram entropy of the corpus: {entropy:.4f})"


def _evaluation_loss(summary: Summary) -> str:
    text, best = _loss(summary, "eval_loss"), summary.get("best_eval_loss")
    if best is not None and best != summary.get("eval_loss"):
        text += f" (lowest: {_loss(summary, 'best_eval_loss')} at step {summary.get('best_step')})"
    return f"{text}; early stopping: no improvement" if summary.get("stopped_early") else text


def _waiting(summary: Summary) -> str:
    share = summary.get("data_wait_share")
    return f"{share:.1%} of the training" if isinstance(share, int | float) and _has_stepped(summary) else ""


def _memory(summary: Summary) -> Iterator[tuple[str, str]]:
    """Of each card what the driver saw, of each rank its peaks, then what they are made of."""
    for uuid, used in (summary.get("gpu_memory_occupied") or {}).items():
        yield "GPU memory occupied", f"{size(used)}  {uuid}"
    for uuid, mean in (summary.get("gpu_utilization") or {}).items():
        yield "GPU utilization", f"{mean:g} %  {uuid}"
    ranks = summary.get("memory") or []
    for entry in ranks:
        figures = [f"{size(entry[key])} {word}" for word, key in PEAKS if entry.get(key)]
        yield f"Peak memory, rank {entry.get('rank')}", ", ".join(figures)
    for entry in ranks:
        parts = {name.replace("_", " "): used for name, used in (entry.get("anatomy") or {}).items()}
        figures = [f"{_amount(used)} {name}" for name, used in parts.items() if used is not None]
        yield f"Memory of rank {entry.get('rank')}", ", ".join(figures)


def _amount(used: int) -> str:
    return size(used) if used >= 10 * 2**20 else f"{used / 2**10:.0f} KiB"
