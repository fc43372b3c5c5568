"""Which CUDA toolkits are installed, and whether PATH, CUDA_HOME and LD_LIBRARY_PATH agree on one of them."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.toolkits import (
    Pick,
    Toolkit,
    exports,
    find_toolkits,
    fitting,
    has_headers,
    picks,
    torch_pick,
)
from trainkit.doctor.units import built
from trainkit.doctor.verdict import Level, Verdict, ok, skipped

TITLE = "CUDA toolkits"
LIMIT = 10.0
FAST = False


def needs(aim: Aim) -> str:
    """Only what is compiled for cards needs one."""
    return "" if aim.anything or aim.compiles_cuda else "the plan compiles nothing for CUDA cards"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """Toolkits that do not answer, settings that disagree or lead nowhere, else the list."""
    toolkits = find_toolkits(surroundings)
    chosen = picks(surroundings, toolkits)
    if not toolkits and not chosen:
        return [skipped("no CUDA toolkit is installed")]
    build = surroundings.facts.torch
    listed = tuple(each.label for each in toolkits) + tuple(each.label for each in chosen)
    if build and not build.cuda:
        return [ok(f"{len(toolkits)} installed; {built(build)}, uses none", *listed)]
    right = fitting(toolkits, build.cuda) if build and build.cuda else _one(toolkits)
    fix = exports(right) if right else ()
    level: Level = "problem" if aim.compiles_cuda else "warning"
    found = [*_broken(toolkits), *_nowhere(surroundings, toolkits, level, fix), *_apart(chosen, listed, level, fix)]
    if found:
        return found
    if len(toolkits) == 1:
        return [ok(toolkits[0].label, *listed)]
    return [Verdict("note", f"{len(toolkits)} toolkits are installed", listed, fix)]


def _one(toolkits: tuple[Toolkit, ...]) -> Toolkit | None:
    """The newest one that extensions can be compiled with."""
    return next((each for each in reversed(toolkits) if has_headers(each.home)), None)


def _broken(toolkits: tuple[Toolkit, ...]) -> Iterator[Verdict]:
    for toolkit in toolkits:
        if not toolkit.version:
            look = f"{toolkit.root}/bin/nvcc --version      # should print its release"
            yield Verdict("warning", f"nvcc of {toolkit.root} does not tell its version", (toolkit.why,), (look,))


def _nowhere(
    surroundings: Surroundings, toolkits: tuple[Toolkit, ...], level: Level, fix: tuple[str, ...]
) -> Iterator[Verdict]:
    """What torch would compile with lacks the compiler or the headers."""
    pick = torch_pick(surroundings, toolkits)
    if pick is None:
        return
    if pick.toolkit is None:
        what = f"torch would look for a CUDA toolkit by {pick.by} and find none"
        yield Verdict(level, what, (pick.label,), fix or ("unset CUDA_HOME CUDA_PATH",))
    elif not has_headers(pick.folder):
        what = f"torch would compile with the toolkit in {pick.folder}, which has no CUDA headers"
        evidence = (pick.label, f"missing: {pick.folder}/include/cuda_runtime.h")
        yield Verdict(level, what, evidence, fix)


def _apart(chosen: tuple[Pick, ...], listed: tuple[str, ...], level: Level, fix: tuple[str, ...]) -> Iterator[Verdict]:
    versions = {each.version for each in chosen if each.version}
    if len(versions) > 1:
        names = " and ".join((", ".join(each.by for each in chosen[:-1]), chosen[-1].by))
        yield Verdict(level, f"{names} pick different CUDA toolkits", listed, fix)
