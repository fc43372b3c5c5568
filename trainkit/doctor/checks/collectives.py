"""Whether two processes of this machine can reduce a tensor together: by gloo, by NCCL where there are two cards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from trainkit.doctor.check import Check, Finding, Host, Level, Target, ok, skipped
from trainkit.doctor.checks.stale_settings import matching
from trainkit.machine.selection import allocation
from trainkit.planner.env import LEAKS

LIMIT = 17.0
SECONDS = 8.0  # for the ranks; importing torch comes on top
FIX: Mapping[str, tuple[str, ...]] = {
    "gloo": (
        "export GLOO_SOCKET_IFNAME=lo      # one machine: does it help? then the host name leads to a wrong address",
        'getent hosts "$(hostname)"      # gloo listens on the address of the machine\'s own name',
    ),
    "nccl": (
        "export NCCL_DEBUG=INFO      # then run the doctor again, or the recipe: NCCL says where it stops",
        "export NCCL_P2P_DISABLE=1      # does it help? then the cards cannot reach each other directly (IOMMU, ACS)",
    ),
}


def run(host: Host, target: Target) -> Iterator[Finding]:
    """One finding for each backend that would be used."""
    plan = target.plan
    if plan and target.ranks == 1 and plan.topology.nodes == 1:
        yield skipped("one process has no collectives")
        return
    if "torch" not in host.facts.packages:
        yield skipped("torch is not installed")
        return
    several = len(allocation(host.facts)) > 1
    # gloo also for a plan with cards that are not here: the network is then all that can be tried
    if plan is None or plan.topology.device != "cuda" or not several:
        yield _tried(host, target, "gloo")
    if target.cuda and several:
        yield _tried(host, target, "nccl")


def _tried(host: Host, target: Target, backend: str) -> Finding:
    # -P: a torch.py or random.py in the working folder must not be imported.
    program = (host.facts.executable, "-P", "-m", "trainkit.doctor.all_reduce", backend, f"{SECONDS:g}")
    done = host.run(program, LIMIT - 1, environ=_environment(host, target))
    try:
        answer = json.loads(done.output)
    except ValueError:
        level: Level = "warning" if done.code is None else "problem"  # a slow disk may be all that is wrong
        fix = (f"{host.python} -c 'import torch.distributed'", "ip address show lo")
        return Finding(level, f"{backend}: the trial could not be made", (done.said,), fix)
    if answer["fine"]:
        return ok(f"2 processes reduced a tensor with {backend} in {answer['seconds']:.1f} s")
    what = f"2 processes on this machine cannot reduce a tensor with {backend}"
    reached = [stages[-1] if stages else "has not reached the store" for stages in answer["stages"]]
    each = "; ".join(f"rank {rank} {stage}" for rank, stage in enumerate(reached))
    summary = f"each rank {reached[0]}" if len(set(reached)) == 1 else each
    evidence = (summary, f"after {answer['seconds']:.1f} s of at most {SECONDS:g} s")
    names = sorted(name for name in host.environ if name.startswith(f"{backend.upper()}_"))
    unset = (f"unset {' '.join(names)}",) if names else ()  # the backend's own settings may be what is wrong
    return Finding("problem", what, evidence, (*unset, *FIX[backend]))


def _environment(host: Host, target: Target) -> dict[str, str]:
    """As a rank of trainkit's would have it: without what plans remove, with what the recipe sets."""
    kept = {
        name: value for name, value in host.environ.items() if not any(matching(name, pattern) for pattern in LEAKS)
    }
    own = {name: str(value) for name, value in target.recipe.env.items()} if target.recipe else {}
    if target.plan:  # the same cards
        own |= {name: str(value) for name, value in target.plan.environment.set if name.startswith("CUDA_")}
    return kept | own | {"OMP_NUM_THREADS": "1"}


COLLECTIVES = Check("collectives", "collectives", LIMIT, run)
