"""What trainkit says of the machine beside what NVML and torch say, the ceilings of the card, and what asking costs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import nvml
from measure_parts import Asked, occupied, shown_card

Found = TypeVar("Found")
SIDE = 8192  # of the square matrices whose product is timed
MOST_MS = 1.0  # of CPU time for a sample of the cards


def facts(asked: Asked) -> dict[str, Any]:
    """trainkit's facts are those of NVML and torch, and a data sheet is known for the card."""
    told = json.loads(trainkit("facts"))
    before = occupied(asked)
    import torch

    if not asked.cuda:
        return {"said": f"{told['hostname']}, {len(told['gpus'])} cards"}
    problems: list[str] = []
    card = torch.cuda.get_device_name(0)
    pairs = tried(problems, "facts", lambda: compared(told)) or {}
    problems += [f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    limits = dict(tried(problems, "ceilings", lambda: [*ceilings(asked, before)]) or ())
    sheet = tried(problems, "data sheet", data_sheet)
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


def tried(problems: list[str], what: str, work: Callable[[], Found]) -> Found | None:
    """What some work finds; what it raises becomes a problem, and costs nothing else."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        problems.append(f"{what}: {type(error).__name__}: {error}"[:400])
        return None


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
        "driver": (told["driver"], nvml.text(pynvml.nvmlSystemGetDriverVersion())),
        "torch": (told["torch"]["version"], torch.__version__),
        "cuda": (told["torch"]["cuda"], torch.version.cuda),
        "bus": (card["pci_bus_id"], nvml.text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
    }


def data_sheet() -> float | None:
    """Operations a second of the card in 16 bits, as trainkit knows them."""
    import torch

    from trainkit.trainer.metrics.mfu import peak

    return peak(torch.cuda.get_device_name(0), "16 bits")


PRODUCT = "bf16 product, TFLOP/s"


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

    from trainkit.launch_plan.model import Card
    from trainkit.runner.report.gpu_watch import GpuWatch

    uuid = nvml.text(pynvml.nvmlDeviceGetUUID(nvml.handle(shown_card())))
    watch = GpuWatch([Card(0, uuid, "")], asked.scratch / "cards.jsonl")
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
