"""Which of DeepSpeed's ops would be compiled, and whether DeepSpeed says that they can be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.doctor.check import Check, Finding, Level, ok, requirement_level, skipped
from trainkit.doctor.host import Host, Target

LIMIT = 16.0
# The ops that trainkit's plans build, and what for.
USES: Mapping[str, str] = {
    "async_io": "offload to NVMe",
    "cpu_adam": "AdamW on the CPU",
    "shm_comm": "collectives of ranks on the CPU",
    "fused_adam": "AdamW on cards",
}
ANYWHERE = ("async_io", "cpu_adam")  # the others exist for one kind of device only
FIX: Mapping[str, tuple[str, ...]] = {
    "async_io": ("sudo apt-get install libaio-dev      # dnf: libaio-devel", "ds_report      # DeepSpeed's own account")
}


def run(host: Host, target: Target) -> list[Finding]:
    """What DeepSpeed cannot build, each op for itself; what it can, together."""
    version = host.facts.packages.get("deepspeed")
    if version is None:
        return [skipped("DeepSpeed is not installed")]
    ops = target.ops or ANYWHERE
    level = requirement_level(target)
    environ = dict(host.environ)
    if target.plan is not None and not target.cuda:
        environ["DS_ACCELERATOR"] = "cpu"  # as the plan sets it
    program = (host.facts.executable, "-P", "-m", "trainkit.doctor.ask_deepspeed", *ops)
    done = host.run(program, LIMIT - 1, environ=environ)
    if not done.fine:
        look = f"{host.python} -c 'import deepspeed'"
        return [Finding(level, f"DeepSpeed {version} cannot be imported", (done.said,), (look,))]
    return list(_judged(json.loads(done.output), version, level))


def _judged(found: Mapping[str, Any], version: str, level: Level) -> Iterator[Finding]:
    fine = [_named(op) for op, answer in found.items() if answer["compatible"]]
    if fine:
        yield ok(f"DeepSpeed {version} can build {', '.join(fine)}; compiled before the first run that needs it")
    for op, answer in found.items():
        if not answer["compatible"]:
            said = (answer["said"],) if answer["said"] else ()
            yield Finding(level, f"DeepSpeed {version} cannot build {_named(op)}", said, FIX.get(op, ("ds_report",)))


def _named(op: str) -> str:
    return f"{op} ({USES[op]})" if op in USES else op


def _unneeded(target: Target) -> str:
    """Only some offloads compile ops."""
    return "" if target.anything or target.ops else "the plan compiles none of DeepSpeed's ops"


DEEPSPEED_OPS = Check("deepspeed-ops", "DeepSpeed ops", LIMIT, run, _unneeded)
