"""One measurement in a process of its own; the answer is a JSON file.

`problems` in it are what is wrong, `said` is one line for people, the rest are tables. torch is imported where it is
needed: the tables of this module are read without it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "bench")]

import nvml  # noqa: E402

if TYPE_CHECKING:
    from trainkit.trainer.setup import Parts

Row = dict[str, Any]  # of a table
Found = TypeVar("Found")
MIB = 2**20
OF_TORCH = ("PYTORCH_", "CUDA_", "OMP_")  # variables of a plan that torch reads as it starts
RECIPE = """\
version: 1
name: measured
model: {layers: 2, heads: 2, hidden_size: 32, vocab_size: 512}
data: {kind: random, samples: 4096, low: 0, high: 512, sequence_length: 64}
optimizer: {name: adamw_torch, lr: 3.0e-4, weight_decay: 0.1}
train: {steps: 4, max_grad_norm: 1.0}
logging: {every_steps: 10}
"""
SHAPES = {  # layers, heads, width
    "tiny": (2, 2, 32),
    "small": (4, 4, 128),
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "760M": (24, 16, 1536),
    "1300M": (24, 16, 2048),
}
EVERY = "efficiency.gradient_checkpointing.every=true"
SELECTIVE = "efficiency.gradient_checkpointing.selective=true"
BF16, EAGER, COMPILED = "precision.dtype=bf16", "efficiency.attention=eager", "efficiency.compile.enabled=true"
FUSED = "optimizer.name=adamw_torch_fused"


@dataclass(frozen=True)
class Asked:
    """A measurement. which: a size or a part; scratch: a folder that goes with this process."""

    which: str
    device: str
    tiny: bool
    scratch: Path

    @property
    def cuda(self) -> bool:
        """Whether there is a card; else only the measuring itself is tried."""
        return self.device == "cuda"

    def gpt(self, shape: str, micro: int, *words: str, length: int = 1024, recipe: str = RECIPE) -> list[str]:
        """The words of trainkit's command line for a GPT of a shape, of the smallest one where that is asked for."""
        shape, length, micro = ("tiny", 32, 2) if self.tiny else (shape, length, micro)
        path = self.scratch / "measured.yaml"
        path.write_text(recipe)
        layers, heads, width = SHAPES[shape]
        sizes = [f"model.layers={layers}", f"model.heads={heads}", f"model.hidden_size={width}"]
        return [str(path), *sizes, f"batch.micro={micro}", f"data.sequence_length={length}", *words]

    def vocabulary(self) -> list[str]:
        """The words that set how many tokens a GPT on random ones chooses from."""
        size = 128 if self.tiny else 50304
        return [f"model.vocab_size={size}", f"data.high={size}"]


def tried(problems: list[str], what: str, work: Callable[[], Found]) -> Found | None:
    """What some work finds; what it raises becomes a problem, and costs nothing else."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        problems.append(f"{what}: {type(error).__name__}: {error}"[:400])
        return None


# A plan's parts in this process, the time of their steps, and the card's memory.


def plan(asked: Asked, words: Sequence[str], name: str) -> Path:
    """trainer.json (and deepspeed.json) of a plan, as `trainkit run` writes them. RuntimeError if it is refused."""
    place = ["devices.when_busy=warn"] if asked.cuda else ["--with", "devices/cpu"]
    argv = [sys.executable, "-m", "trainkit", "plan", *words, *place, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"trainkit plan: exit code {done.returncode}: {done.stderr[-1500:] or done.stdout[-1500:]}")
    found, folder = json.loads(done.stdout), asked.scratch / name
    variables = found["environment"]["set"].items()
    os.environ.update(
        {name: value for name, value in variables if name.startswith(OF_TORCH) and isinstance(value, str)}
    )
    folder.mkdir()
    for path, content in found["files"].items():
        (folder / path).write_text(content)
    return folder / "trainer.json"


@contextlib.contextmanager
def parts_of(file: Path) -> Iterator[list[Parts]]:
    """The assembled parts of a single process, in a list: who takes them out gives their memory back at the end."""
    import torch

    from trainkit.trainer.distributed import device_of, process_group
    from trainkit.trainer.parallel import STRATEGIES
    from trainkit.trainer.settings import World, read_settings
    from trainkit.trainer.setup import assemble

    settings, world = read_settings(file), World()
    device = device_of(settings.device, world)
    # What a configuration before has left, also one that failed, is given back, and memory is counted anew.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tf32, needed = torch.backends.cuda.matmul.allow_tf32, STRATEGIES[settings.recipe.strategy.kind].needs_group
    try:
        with process_group(world, device, needed=needed):
            yield [assemble(settings, world, device)]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def each_built(
    asked: Asked, configurations: Mapping[str, Sequence[str]], work: Callable[[str, Parts], Row], problems: list[str]
) -> list[Row]:
    """What `work` finds of the parts of each configuration; what cannot be planned, built or run becomes a problem."""

    def of_plan(name: str, file: Callable[[], Path]) -> Row:
        with parts_of(file()) as held:
            return work(name, held.pop())

    with ThreadPoolExecutor(4) as pool:  # planning is processes of its own
        files = {
            name: pool.submit(plan, asked, words, f"plan-{number}")
            for number, (name, words) in enumerate(configurations.items())
        }
        found = [tried(problems, name, lambda: of_plan(name, file.result)) for name, file in files.items()]  # noqa: B023
    return [row for row in found if row is not None]


def synchronize(device: str) -> None:
    """Wait for the card."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of_step(parts: Parts, count: int, warm: int) -> float:
    """Seconds of one optimizer step, over `count` after `warm`, with the trainer's own step and batches."""
    from trainkit.trainer.loop import batches, optimizer_step

    device, given, began = parts.device.type, batches(parts, 0), 0.0
    for step in range(warm + count):
        if step == warm:
            synchronize(device)
            began = time.perf_counter()
        batch = next(given)
        optimizer_step(parts, step, batch, batch.counted)
    synchronize(device)
    return (time.perf_counter() - began) / count


def occupied(asked: Asked) -> float | None:
    """MiB that are occupied on the card as the driver sees it; None without one."""
    return nvml.used(shown_card()) / MIB if asked.cuda else None


def shown_card() -> int | str:
    """The card of this process for NVML: the first that CUDA shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(shown or 0) if not shown or shown.isdecimal() else shown


def peaks(asked: Asked, before: float | None) -> dict[str, Any]:
    """Highest memory since the parts were built, in MiB; nothing on a CPU."""
    import torch

    if not asked.cuda:
        return {}
    return {
        "allocated MiB": torch.cuda.max_memory_allocated() / MIB,
        "reserved MiB": torch.cuda.max_memory_reserved() / MIB,
        "NVML MiB": (occupied(asked) or 0.0) - (before or 0.0),
    }


# What trainkit says of the machine beside what NVML and torch say, the ceilings of the card, and what asking costs.

PRODUCT = "bf16 product, TFLOP/s"
SIDE = 8192  # of the square matrices whose product is timed
MOST_MS = 1.0  # of CPU time for a sample of the cards


def facts(asked: Asked) -> dict[str, Any]:
    """trainkit's facts are those of NVML and torch, and a data sheet is known for the card."""
    told = json.loads(trainkit("env", "facts"))
    before = occupied(asked)
    import torch

    from trainkit.machine.accelerators import peak

    if not asked.cuda:
        return {"said": f"{told['hostname']}, {len(told['gpus'])} cards"}
    problems: list[str] = []
    card = torch.cuda.get_device_name(0)
    pairs = tried(problems, "facts", lambda: compared(told)) or {}
    problems += [f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    limits = dict(tried(problems, "ceilings", lambda: [*ceilings(asked, before)]) or ())
    sheet = tried(problems, "data sheet", lambda: peak(card, "16 bits"))
    problems += [] if sheet else ["no data sheet is known for this card, so no MFU is shown"]
    limits["data sheet, 16 bits, TFLOP/s"] = (sheet or 0.0) / 1e12
    return {
        "problems": problems,
        "said": f"{card}, torch {torch.__version__}, {limits.get(PRODUCT, 0.0):.0f} TFLOP/s in bf16",
        "compared": [{"fact": name, "trainkit": ours, "NVML or torch": other} for name, (ours, other) in pairs.items()],
        "doctor": tried(problems, "doctor", doctor),
        "ceilings": [{"what": name, "value": value} for name, value in limits.items()],
        "attention kernels": tried(problems, "attention kernels", attention_kernels),
    }


def trainkit(*words: str) -> str:
    """What a command of trainkit's prints."""
    argv = [sys.executable, "-m", "trainkit", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def compared(told: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts as trainkit has them, and as NVML or torch has them."""
    import pynvml
    import torch

    handle = nvml.handle(shown_card())
    uuid = nvml.text(pynvml.nvmlDeviceGetUUID(handle))
    card = next(each for each in told["gpus"] if each["uuid"] == uuid)
    sheet = torch.cuda.get_device_properties(0)
    return {
        "cards": (len(told["gpus"]), pynvml.nvmlDeviceGetCount()),
        "uuid": (card["uuid"], uuid),
        "uuid of torch": (card["uuid"], f"GPU-{sheet.uuid}"),
        "name": (card["name"], torch.cuda.get_device_name(0)),
        "memory": (card["memory_total"], int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "compute capability": (tuple(card["compute_capability"]), torch.cuda.get_device_capability(0)),
        "driver": (told["driver"], nvml.driver()),
        "torch": (told["torch"]["version"], torch.__version__),
        "cuda": (told["torch"]["cuda"], torch.version.cuda),
        "bus": (card["pci_bus_id"], nvml.text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
    }


def ceilings(asked: Asked, before: float | None) -> Iterator[tuple[str, float]]:
    """What the card can do at best: products, copies, starts of kernels. before: MiB occupied before CUDA began."""
    import torch

    torch.zeros(1, device="cuda")
    yield "context, MiB", (occupied(asked) or 0.0) - (before or 0.0)
    first, second = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield PRODUCT, 2 * SIDE**3 / timed(lambda: first @ second, 20) / 1e12
    wide, other = first.float(), second.float()
    yield "fp32 product, TFLOP/s", 2 * SIDE**3 / timed(lambda: wide @ other, 3) / 1e12
    torch.backends.cuda.matmul.allow_tf32 = True
    yield "tf32 product, TFLOP/s", 2 * SIDE**3 / timed(lambda: wide @ other, 5) / 1e12
    torch.backends.cuda.matmul.allow_tf32 = False
    part = 1 << 28
    big = torch.empty(4 * part, device="cuda", dtype=torch.uint8)
    pinned, pageable = (torch.empty(part, dtype=torch.uint8, pin_memory=pin) for pin in (True, False))
    there = big[:part]
    yield "copy on the card, GB/s read and written", 2 * big.numel() / timed(big.clone, 10) / 1e9
    yield "to the card, pinned, GB/s", part / timed(lambda: there.copy_(pinned), 5) / 1e9
    yield "to the card, pageable, GB/s", part / timed(lambda: there.copy_(pageable), 3) / 1e9
    yield "from the card, pinned, GB/s", part / timed(lambda: pinned.copy_(there), 3) / 1e9
    yield "from the card, fresh pageable, GB/s", part / timed(lambda: there.to("cpu", copy=True), 3) / 1e9
    small, began = torch.zeros(1, device="cuda"), time.perf_counter()
    for _ in range(2000):
        small.add_(1)
    yield "start of a kernel, us of the host", (time.perf_counter() - began) / 2000 * 1e6


def timed(work: Callable[[], object], times: int) -> float:
    """Median seconds of some work on the card, by CUDA events, after two calls."""
    import torch

    for _ in range(2):
        work()
    spans = []
    for _ in range(times):
        first, last = (cast("Any", torch.cuda.Event)(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        spans.append(float(first.elapsed_time(last)) / 1000)
    return statistics.median(spans)


def attention_kernels() -> list[dict[str, str]]:
    """Which of its kernels torch chooses for fused attention."""
    import torch

    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    query = torch.randn(2, 16, 1024, 64, device="cuda", dtype=torch.bfloat16)
    wide = query.float()
    chosen = {
        "bf16, causal": torch._fused_sdp_choice(query, query, query, is_causal=True),
        "bf16, dropout": torch._fused_sdp_choice(query, query, query, dropout_p=0.1),
        "fp32, causal": torch._fused_sdp_choice(wide, wide, wide, is_causal=True),
    }
    return [{"case": case, "kernel": names.get(number, str(number))} for case, number in chosen.items()]


def doctor() -> list[dict[str, str]]:
    """What `trainkit doctor` finds wrong with the machine: told, and no failure of trainkit's."""
    judged = json.loads(trainkit("doctor", "--json"))
    return [
        {"check": check["title"], "level": each["level"], "what": each["what"]}
        for check in judged["checks"]
        for each in check["verdicts"]
        if each["level"] in ("problem", "warning")
    ]


def sampling(asked: Asked) -> dict[str, Any]:
    """CPU and wall milliseconds of one sample of cards.jsonl."""
    import pynvml

    from trainkit.launch_plan.model import PlannedGpu
    from trainkit.runner.report.gpu_watch import GpuWatch

    uuid = nvml.text(pynvml.nvmlDeviceGetUUID(nvml.handle(shown_card())))
    watch = GpuWatch([PlannedGpu(0, uuid, "")], asked.scratch / "cards.jsonl")
    if not watch.open():
        return {"problems": ["NVML does not know the card by its UUID"], "said": ""}
    cpu, wall = [], []
    with (asked.scratch / "cards.jsonl").open("a") as lines:
        for _ in range(300):
            busy, began = time.thread_time(), time.perf_counter()
            lines.write(json.dumps({"time": round(time.time(), 3), "cards": watch.sample()}) + "\n")
            lines.flush()
            cpu.append(1e3 * (time.thread_time() - busy))
            wall.append(1e3 * (time.perf_counter() - began))
    row = {"cpu ms": statistics.median(cpu), "wall ms": statistics.median(wall), "wall ms, highest": max(wall)}
    problems = [] if row["cpu ms"] < MOST_MS else [f"{row['cpu ms']:.2f} ms of CPU time a sample"]
    return {"problems": problems, "said": f"{row['cpu ms']:.3f} ms of CPU time a sample", "cost": [row]}


# Speed of the built-in trainer in 16 bits, compiled, with the fused optimizer, and where its time goes.

BERT = "bert-large"
MICRO = {"124M": 64, "350M": 32, "760M": 16, "1300M": 16}  # by shape
# What an H100 (SXM) or H200 must reach: share of its data sheet's peak (MFU), and samples a second.
GATED = re.compile(r"NVIDIA H100( 80GB HBM3| SXM.*)|NVIDIA H200")
LEAST_MFU = {"124M": 0.33, "350M": 0.40, "760M": 0.40, "1300M": 0.40}
LEAST_SAMPLES = {BERT: 357.0}
CLOCK = 0.1  # how far the metrics may be from this kit's own clock, relative


def speed_words(asked: Asked, steps: int) -> list[str]:
    """The recipe of a size, in words."""
    fast = [BF16, "eval.every_steps=0", "checkpoint.every_steps=0", f"train.steps={steps}"]
    fast += ["logging.every_steps=5", COMPILED, FUSED] if asked.cuda else ["logging.every_steps=2"]
    if asked.which == BERT:
        layers, batch = (2, 2) if asked.tiny else (24, 64)
        return ["efficiency-table", *fast, "efficiency.attention=sdpa", f"batch.global={batch}", f"batch.micro={batch}",
                f"model.config.num_hidden_layers={layers}", "data.samples=4096"]  # fmt: skip
    micro = MICRO[asked.which]
    return asked.gpt(asked.which, micro, *asked.vocabulary(), "batch.accumulation=1", *fast)


def trained(parts: Any) -> tuple[list[Row], float]:
    """Train with the trainer's own loop: its metrics lines, and seconds of compiling."""
    from trainkit.trainer.loop import SignalRequests, train
    from trainkit.trainer.metrics.writers import Metrics

    metrics = Metrics(parts.settings.run_dir, [], main=True)
    progress = train(parts, 0, metrics, SignalRequests())
    metrics.close()
    lines = (parts.settings.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], progress.compiling.seconds


def warm(asked: Asked) -> dict[str, Any]:
    """Compile, so that what is timed later finds it in the cache."""
    with parts_of(plan(asked, speed_words(asked, 2), "run")) as held:
        _, seconds = trained(held.pop())
    return {"said": f"{seconds:.0f} s of compiling"}


def speed(asked: Asked) -> dict[str, Any]:
    """Speed as the metrics tell it, beside a clock of this kit's own; and where the time goes."""
    with parts_of(plan(asked, speed_words(asked, 6 if asked.tiny else 30), "run")) as held:
        row, where = speed_of(asked, held.pop())
    problems = [] if asked.tiny else missed(asked, row.pop("card"), row)
    said = f"{row['samples/s, clock']:.1f} samples/s, {row['TFLOP/s']:.3g} TFLOP/s, MFU {row['MFU, metrics']:.1%}"
    return {"problems": problems, "said": said, "speed": [row], "where the time goes": where}


def speed_of(asked: Asked, parts: Any) -> tuple[Row, list[Row]]:
    """The row of a size, and the kernels in which its time goes."""
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


# The built-in loop beside a bare one, Accelerate's and HF Trainer's: those of scripts/bench/loop_peers.py.

LOOPED = {"small": ("small", 128, 4), "86M": ("124M", 1024, 8)}  # shape, length, micro batch; 86M: without embeddings
OURS, BARE = "built-in", "bare PyTorch"
LEAST_OF_BARE, LEAST = 0.99, 0.995  # their time over ours; the second is 1.00 to two digits
TOLERANCE = 1e-2  # of losses in 16 bits, relative
LOOPS_RECIPE = """\
version: 1
name: loops
batch: {accumulation: 2}
data: {kind: text, include: "*.txt", validation_fraction: 1.0e-6}
optimizer: {name: adamw_torch_fused, lr: 3.0e-4, weight_decay: 0.1}
train: {max_grad_norm: 1.0}
logging: {every_steps: 10}
eval: {every_steps: 0}
precision: {dtype: bf16}
"""


def loop_words(asked: Asked, name: str, steps: int) -> list[str]:
    """The recipe of a size, in words."""
    shape, length, micro = LOOPED[name]
    places = (f"data.path={asked.scratch / 'corpus'}", f"data.cache={asked.scratch / 'cache'}")
    return asked.gpt(shape, micro, *places, f"train.steps={steps}", length=length, recipe=LOOPS_RECIPE)


def loop(asked: Asked) -> dict[str, Any]:
    """Their time over ours, in rounds in which every loop runs the same steps."""
    from loop_peers import LOOPS, Rows, timed_round, write_text
    from loop_peers import compared as losses_compared

    write_text(asked.scratch / "corpus")
    rows: list[Row] = []
    problems: list[str] = []
    steps, rounds = (2, 1) if asked.tiny else (20, 7)
    for name in ("small",) if asked.tiny else LOOPED:
        with parts_of(plan(asked, loop_words(asked, name, steps), name)) as held:
            parts = held.pop()
            far, _ = losses_compared(parts)
            loops = {peer: make(parts, Rows(parts)) for peer, make in LOOPS.items()}
            seconds = [timed_round(parts.model, loops, turn) for turn in range(-1, rounds)][1:]  # the first warms up
            del parts, loops
        ours = statistics.median(each[OURS] for each in seconds) / steps * 1e3
        for peer, apart in far.items():
            ratio = statistics.median(each[peer] / each[OURS] for each in seconds)
            if not apart < TOLERANCE:
                problems.append(f"{name}: {peer}: losses differ by {apart:.1e}")
            if asked.cuda and not asked.tiny and ratio < (LEAST_OF_BARE if peer == BARE else LEAST):
                problems.append(f"{name}: {peer}: {ratio:.3f} of our time")
            rows.append(
                {"size": name, "loop": peer, "ms of our step": ours, "their time over ours": ratio,
                 "losses differ by": apart}
            )  # fmt: skip
    said = ", ".join(f"{row['size']} {row['loop']} {row['their time over ours']:.3f}" for row in rows)
    return {"problems": problems, "said": said, "loops": rows}


# The rows of recipes/efficiency-table.yaml, and techniques that it leaves out: each alone on the card.

VARIANTS = ("accumulation", "checkpointing", "fp16", "all", "adafactor", "all-adafactor", "adam-8bit", "all-8bit",
            "bf16", "tf32", "sdpa", "fused", "compile")  # fmt: skip
# By part: row -> words beyond the recipe's own.
ROWS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "recipe": {"base": (), **{name: ("--variant", name) for name in VARIANTS}},
    "more": {
        "base": (),
        "bf16": (BF16,),
        "checkpointing": ("batch.micro=1", EVERY),
        "selective": ("batch.micro=1", EVERY, SELECTIVE),
        "foreach": ("optimizer.name=adamw_torch_foreach",),
        "sgd": ("optimizer.name=sgd",),
        "bf16-weights": (BF16, "precision.weights=bf16"),
        "compile": (COMPILED,),
        "whole-model": (COMPILED, "efficiency.compile.scope=model"),
        "graphs": (COMPILED, "efficiency.compile.mode=reduce-overhead"),
        "fsdp": ("--with", "strategy/fsdp"),
        "fsdp-offload": ("--with", "strategy/fsdp-offload"),
    },
}
SMALL_BERT = ("model.config.num_hidden_layers=2", "model.config.hidden_size=64", "model.config.intermediate_size=128",
              "model.config.num_attention_heads=2", "data.sequence_length=64")  # fmt: skip
ON_CPU = ("base", "accumulation", "fused")  # enough to try the measuring


def table(asked: Asked) -> dict[str, Any]:
    """Speed and memory of each row."""
    small = SMALL_BERT if asked.tiny else ()
    chosen = {
        name: ("efficiency-table", *small, *words)
        for name, words in ROWS[asked.which].items()
        if asked.cuda or name in ON_CPU
    }
    problems: list[str] = []
    before = occupied(asked)

    def row_of(name: str, parts: Any) -> Row:
        seconds = seconds_of_step(parts, *((2, 1) if asked.tiny else (12, 4)))
        return {"row": name, "samples/s": parts.settings.batch.global_ / seconds, **peaks(asked, before)}

    rows = each_built(asked, chosen, row_of, problems)
    base = next((row["samples/s"] for row in rows if row["row"] == "base"), None)
    for row in rows:
        row["speed over base"] = row["samples/s"] / base if base else None
    return {"problems": problems, "said": f"{len(rows)} of {len(chosen)} rows", "rows": rows}


# Memory of a step by category: measured after and within each phase, beside what trainkit says of it.

# Shape, micro batch, more words.
CONFIGURATIONS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "124M fp32": ("124M", 16, ("precision.dtype=fp32",)),
    "124M bf16": ("124M", 16, (BF16,)),
    "124M bf16, micro 4": ("124M", 4, (BF16,)),
    "124M bf16, checkpointing": ("124M", 16, (BF16, EVERY)),
    "124M bf16, selective": ("124M", 16, (BF16, EVERY, SELECTIVE)),
    "124M bf16, eager": ("124M", 8, (BF16, EAGER)),
    "350M bf16": ("350M", 8, (BF16,)),
    "350M bf16, fused": ("350M", 8, (BF16, FUSED)),
    "350M pure bf16": ("350M", 8, ("--with", "precision/pure-bf16")),
    "350M bf16, fsdp": ("350M", 8, (BF16, "--with", "strategy/fsdp")),
    "350M bf16, ddp": ("350M", 8, (BF16, "--with", "strategy/ddp")),
    "1300M bf16": ("1300M", 4, (BF16,)),
}


def memory_words(asked: Asked, name: str) -> list[str]:
    """The recipe of a configuration, in words."""
    shape, micro, more = CONFIGURATIONS[name]
    return asked.gpt(shape, micro, *asked.vocabulary(), "batch.accumulation=2", "data.samples=64", *more)


def memory(asked: Asked) -> dict[str, Any]:
    """Bytes of each configuration."""
    names = list(CONFIGURATIONS)[:1] if asked.tiny else list(CONFIGURATIONS)
    problems: list[str] = []
    before = occupied(asked)

    def row_of(name: str, parts: Any) -> Row:
        phases = Phases(asked)
        phases.note("built")
        step_in_phases(parts, phases)
        highest = max(phases.highest, default=None)
        told = parts.memory.record(parts.strategy, highest)
        return {
            "configuration": name,
            "parameters": parts.parameters.training,
            "micro": parts.settings.batch.micro,
            **phases.row,
            **{f"trainkit {key} MiB": value / MIB for key, value in told.items() if value is not None},
            **peaks(asked, before),
            "allocated MiB": None if highest is None else highest / MIB,
        }

    rows = each_built(asked, {name: memory_words(asked, name) for name in names}, row_of, problems)
    return {"problems": problems, "said": f"{len(rows)} of {len(names)} configurations", "memory": rows}


class Phases:
    """What is allocated after each phase, and at its highest in it."""

    def __init__(self, asked: Asked) -> None:
        self.row: dict[str, float] = {}
        self.highest: list[int] = []
        self._asked = asked

    def note(self, phase: str) -> None:
        """A phase is over."""
        import torch

        if self._asked.cuda:
            torch.cuda.synchronize()
            self.highest.append(torch.cuda.max_memory_allocated())
            self.row[f"{phase} MiB"] = torch.cuda.memory_allocated() / MIB
            self.row[f"{phase} peak MiB"] = self.highest[-1] / MIB
            torch.cuda.reset_peak_memory_stats()


def step_in_phases(parts: Any, phases: Phases) -> None:
    """Two whole steps, then one in its phases, as `trainkit.trainer.loop.optimizer_step` does it."""
    from trainkit.trainer.loop import batches, optimizer_step, split_micro
    from trainkit.trainer.optim import cached_casts

    given, strategy = batches(parts, 0), parts.strategy
    for number in range(2):
        batch = next(given)
        optimizer_step(parts, number, batch, batch.counted)
    phases.note("first steps")
    batch = next(given)
    micros = split_micro(batch, parts)
    with cached_casts():
        for index, inputs in enumerate(micros):
            last = index + 1 == len(micros)
            with strategy.micro_step(last=last):
                with parts.autocast:
                    loss = strategy.model(**inputs)
                phases.note(f"forward {index}")
                strategy.backward(loss / max(1, batch.counted), last=last)
                del loss
            phases.note(f"backward {index}")
    strategy.update(1e-4)
    phases.note("update")


MEASUREMENTS: Mapping[str, Callable[[Asked], dict[str, Any]]] = {
    each.__name__: each for each in (facts, sampling, speed, warm, loop, table, memory)
}


def main() -> int:
    """Measure, and write the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("which", nargs="?", default="", help="a size, or a part of the table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--answer", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainkit-measured-") as scratch:
        answer = MEASUREMENTS[asked.what](Asked(asked.which, asked.device, asked.tiny, Path(scratch)))
    asked.answer.write_text(json.dumps({"problems": [], **answer}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
