"""Whether some machine could run a recipe: an import writes nothing that `trainkit plan` refuses on every one."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.errors import Diagnostic, RecipeError
from trainkit.machine.facts import Facts, Gpu
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.text import GIB

# Cards of the machines that are tried where the recipe takes as many as there are, the likely ones first.
CARDS = (8, 1, 2, 4, 3, 6, 16)
MOST = 4096  # cards of a machine, as many as a recipe can count


def refusals(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """What the plan says on the likeliest machine, where it is refused on all; nothing where one could run it."""
    found: tuple[Diagnostic, ...] | None = None
    for facts in _machines(resolved):
        try:
            build_plan(resolved, facts)
        except RecipeError as error:
            found = found or error.diagnostics
        else:
            return ()
    return found or ()


def _machines(resolved: Resolved) -> Iterator[Facts]:
    devices, nodes = resolved.recipe.devices, resolved.recipe.nodes
    select = devices.select
    if devices.type in ("cpu", "mps", "xla") or select == "none":
        yield _machine(())
    elif isinstance(select, list):
        numbers = [int(each) for each in select if str(each).isdecimal()]
        names = {f"card-{number}": number for number in range(min(max(numbers, default=-1) + 1, MOST))}
        yield _machine([*names, *(str(each) for each in select if not str(each).isdecimal())])
    elif isinstance(select, int) or nodes.processes_per_node != "auto":
        count = select if isinstance(select, int) else nodes.processes_per_node
        yield _machine([f"card-{number}" for number in range(int(count))])
    else:
        yield from (_machine([f"card-{number}" for number in range(count)]) for count in CARDS)


def _machine(names: list[str] | tuple[()]) -> Facts:
    """One with cards of these UUIDs, which can do all that cards can."""
    cards = tuple(
        Gpu(index, name, "H100", 80 * GIB, 80 * GIB, compute_capability=(9, 0)) for index, name in enumerate(names)
    )
    return Facts(
        platform="linux",
        machine="x86_64",
        hostname="trial",
        python="3.11",
        executable="python",
        cpu_cores=64,
        memory_total=1024 * GIB,
        gpus=cards,
        mps=True,
        origin="trial",
    )
