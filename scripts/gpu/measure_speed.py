"""Speed of the built-in trainer in 16 bits, compiled, with the fused optimizer, and where its time goes."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

from measure_parts import MIB, Asked, Row, parts_of, plan, seconds_of_step

SIZES = {  # layers, heads, width, micro batch of 1024 tokens
    "124M": (12, 12, 768, 64),
    "350M": (24, 16, 1024, 32),
    "760M": (24, 16, 1536, 16),
    "1300M": (24, 16, 2048, 16),
}
BERT = "bert-large"
VOCABULARY, LENGTH = 50304, 1024
# What an H100 (SXM) or H200 must reach: share of its data sheet's peak (MFU), and samples a second.
GATED = re.compile(r"NVIDIA H100( 80GB HBM3| SXM.*)|NVIDIA H200")
LEAST_MFU = {"124M": 0.33, "350M": 0.40, "760M": 0.40, "1300M": 0.40}
LEAST_SAMPLES = {BERT: 357.0}
CLOCK = 0.1  # how far the metrics may be from this kit's own clock, relative


def words_of(asked: Asked, steps: int) -> list[str]:
    """The recipe of a size, in words."""
    fast = ["precision.dtype=bf16", "eval.every_steps=0", "checkpoint.every_steps=0", f"train.steps={steps}"]
    fast += ["logging.every_steps=5"] if asked.cuda else ["logging.every_steps=2"]
    if asked.cuda:
        fast += ["efficiency.compile.enabled=true", "optimizer.name=adamw_torch_fused"]
    if asked.which == BERT:
        layers, batch = (2, 2) if asked.tiny else (24, 64)
        return ["efficiency-table", *fast, "efficiency.attention=sdpa", f"batch.global={batch}", f"batch.micro={batch}",
                f"model.config.num_hidden_layers={layers}", "data.samples=4096"]  # fmt: skip
    layers, heads, width, micro = (2, 2, 64, 2) if asked.tiny else SIZES[asked.which]
    length, vocabulary = (64, 512) if asked.tiny else (LENGTH, VOCABULARY)
    return [asked.recipe(), *fast, f"model.layers={layers}", f"model.heads={heads}", f"model.hidden_size={width}",
            f"model.vocab_size={vocabulary}", f"batch.global={micro}", f"batch.micro={micro}",
            f"data.high={vocabulary}", f"data.sequence_length={length}"]  # fmt: skip


def trained(parts: Any) -> tuple[list[Row], float]:
    """Train with the trainer's own loop: its metrics lines, and seconds of compiling."""
    from trainkit.trainer.loop import Requests, train
    from trainkit.trainer.metrics.writers import Metrics

    metrics = Metrics(parts.settings.run_dir, [], main=True)
    progress = train(parts, 0, metrics, Requests())
    metrics.close()
    lines = (parts.settings.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], progress.compiling.seconds


def warm(asked: Asked) -> dict[str, Any]:
    """Compile, so that what is timed later finds it in the cache."""
    with parts_of(plan(asked, words_of(asked, 2), "run")) as held:
        _, seconds = trained(held.pop())
    return {"said": f"{seconds:.0f} s of compiling"}


def speed(asked: Asked) -> dict[str, Any]:
    """Speed as the metrics tell it, beside a clock of this kit's own."""
    with parts_of(plan(asked, words_of(asked, 6 if asked.tiny else 30), "run")) as held:
        row, where = timed(asked, held.pop())
    problems = [] if asked.tiny else missed(asked, row.pop("card"), row)
    said = f"{row['samples/s, clock']:.1f} samples/s, {row['TFLOP/s']:.3g} TFLOP/s, MFU {row['MFU, metrics']:.1%}"
    return {"problems": problems, "said": said, "speed": [row], "where the time goes": where}


def timed(asked: Asked, parts: Any) -> tuple[Row, list[Row]]:
    """The row of a size, and where its time goes."""
    import torch

    lines, compiling = trained(parts)
    rated = [line for line in lines if "samples_per_second" in line]
    later = rated[2:] or rated[-1:]  # the first ones warm up
    seconds = seconds_of_step(parts, *((3, 1) if asked.tiny else (15, 2)))
    batch, length = parts.settings.batch.global_, parts.settings.recipe.data.sequence_length
    row = {
        "size": asked.which,
        "parameters": parts.parameters.training,
        "tokens a step": batch * length,
        "samples/s, metrics": statistics.median(line["samples_per_second"] for line in later),
        "samples/s, clock": batch / seconds,
        "tokens/s, clock": batch * length / seconds,
        "MFU, metrics": statistics.median(line.get("mfu") or 0.0 for line in later),
        "TFLOP/s": (parts.work.flops_per_token or 0.0) * batch * length / seconds / 1e12,
        "compile s": compiling,
        "allocated MiB": torch.cuda.max_memory_allocated() / MIB if asked.cuda else None,
        "card": torch.cuda.get_device_name(0) if asked.cuda else "",
    }
    return row, kernels(parts) if asked.cuda else []


def missed(asked: Asked, card: str, row: Row) -> list[str]:
    """What is not reached, in words. Other cards than those of the gates are told, not judged."""
    shown, clock = row["samples/s, metrics"], row["samples/s, clock"]
    far = abs(shown - clock) > CLOCK * clock
    found = [f"the metrics say {shown:.1f} samples/s, the clock {clock:.1f}"] if far else []
    if not GATED.fullmatch(card):
        return found
    least, samples = LEAST_MFU.get(asked.which, 0.0), LEAST_SAMPLES.get(asked.which, 0.0)
    found += [f"less than {least:.0%} MFU"] if row["MFU, metrics"] < least else []
    return found + ([f"less than {samples:.0f} samples/s"] if clock < samples else [])


def kernels(parts: Any) -> list[Row]:
    """Share of three steps in which the card computes, and the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            wall = 3 * seconds_of_step(parts, 3, 0)
    except RuntimeError as error:  # where the driver lets only administrators profile
        return [{"kernel": f"no profile: {error}"}]
    total: dict[str, float] = {}
    for event in seen.events() or ():
        if "CUDA" in str(event.device_type):
            total[event.name] = total.get(event.name, 0.0) + event.device_time / 1e6
    longest = sorted(total.items(), key=lambda item: -item[1])[:14]
    return [
        {"kernel": name[:110], "share of wall": spent / wall, "ms a step": spent / 3 * 1e3}
        for name, spent in [("all", sum(total.values())), *longest]
    ]
