"""Whether two processes of this machine can reduce a tensor together: by gloo, by NCCL where there are two cards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from trainkit.doctor.all_reduce import summary
from trainkit.doctor.checks.settings import matching
from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.verdict import Level, Verdict, ok, skipped
from trainkit.machine.selection import allocation
from trainkit.planner.env import LEAKS

TITLE = "collectives"
LIMIT = 17.0
FAST = False

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


def needs(aim: Aim) -> str:
    """A single process reduces with nobody."""
    return "" if aim.ranks > 1 or (aim.plan and aim.plan.topology.nodes > 1) else "one process reduces with nobody"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """One verdict for each backend that would be used."""
    if "torch" not in surroundings.facts.packages:
        return [skipped("torch is not installed")]
    return [_tried(surroundings, aim, backend) for backend in _backends(surroundings, aim)]


def _backends(surroundings: Surroundings, aim: Aim) -> Iterator[str]:
    cards = len(allocation(surroundings.facts))
    if aim.plan is None or aim.plan.topology.device != "cuda":
        yield "gloo"
    if aim.cuda and cards > 1:
        yield "nccl"
    elif aim.plan is not None and aim.cuda:
        yield "gloo"  # what stands in for the cards that are not here


def _tried(surroundings: Surroundings, aim: Aim, backend: str) -> Verdict:
    program = (surroundings.facts.executable, "-P", "-m", "trainkit.doctor.all_reduce", backend, f"{SECONDS:g}")
    done = surroundings.run(program, LIMIT - 1, environ=_environment(surroundings, aim))
    try:
        answer = json.loads(done.output)
    except ValueError:
        level: Level = "warning" if done.code is None else "problem"  # a slow disk may be all that is wrong
        return Verdict(level, f"{backend}: the trial could not be made", (done.said,), _look(surroundings))
    if answer["fine"]:
        return ok(f"2 processes reduced a tensor with {backend} in {answer['seconds']:.1f} s")
    what = f"2 processes on this machine cannot reduce a tensor with {backend}"
    evidence = (summary(answer), f"after {answer['seconds']:.1f} s of at most {SECONDS:g} s")
    return Verdict("problem", what, evidence, (*_own_settings(surroundings, backend), *FIX[backend]))


def _own_settings(surroundings: Surroundings, backend: str) -> tuple[str, ...]:
    """What the environment says to the backend may be what is wrong."""
    names = sorted(name for name in surroundings.environ if name.startswith(f"{backend.upper()}_"))
    return (f"unset {' '.join(names)}",) if names else ()


def _look(surroundings: Surroundings) -> tuple[str, ...]:
    return (f"{surroundings.facts.executable} -c 'import torch.distributed'", "ip address show lo")


def _environment(surroundings: Surroundings, aim: Aim) -> dict[str, str]:
    """As a rank of trainkit's would have it: without what plans remove, with what the recipe sets."""
    kept = {
        name: value
        for name, value in surroundings.environ.items()
        if not any(matching(name, pattern) for pattern in LEAKS)
    }
    own = {name: str(value) for name, value in aim.recipe.env.items()} if aim.recipe else {}
    if aim.plan:  # the same cards
        own |= {name: str(value) for name, value in aim.plan.environment.set if name.startswith("CUDA_")}
    return kept | own | {"OMP_NUM_THREADS": "1"}
