"""The CUDA toolkits: whether PATH, CUDA_HOME and LD_LIBRARY_PATH agree on one, and whether it is that of torch."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.doctor.check import Check, Finding, Level, ok, requirement_level, skipped, without_cuda_builds
from trainkit.doctor.cuda import (
    Pick,
    Toolkit,
    exports,
    find_toolkits,
    fitting,
    has_headers,
    install_lines,
    picks,
    torch_pick,
)
from trainkit.doctor.host import Host, Target
from trainkit.machine.versions import release

# Major versions within which DeepSpeed takes any minor one (deepspeed/ops/op_builder/builder.py,
# cuda_minor_mismatch_ok); torch refuses another major and only warns of another minor (torch/utils/cpp_extension.py).
MINORS_MIX = frozenset({10, 11, 12})


def agreement(host: Host, target: Target) -> list[Finding]:
    """Toolkits that do not answer, settings that disagree or lead nowhere, else the list."""
    toolkits = find_toolkits(host)
    chosen = picks(host, toolkits)
    if not toolkits and not chosen:
        return [skipped("no CUDA toolkit is installed")]
    build = host.facts.torch
    listed = tuple(each.label for each in toolkits) + tuple(each.label for each in chosen)
    if build and not build.cuda:
        return [ok(f"{len(toolkits)} installed; {build.label}, uses none", *listed)]
    newest = next((each for each in reversed(toolkits) if has_headers(each.home)), None)
    right = fitting(toolkits, build.cuda) if build and build.cuda else newest
    fix = exports(right) if right else ()
    level = requirement_level(target)
    found = [*_broken(toolkits), *_nowhere(host, toolkits, level, fix), *_apart(chosen, listed, level, fix)]
    if found:
        return found
    if len(toolkits) == 1:
        return [ok(toolkits[0].label, *listed)]
    return [Finding("note", f"{len(toolkits)} toolkits are installed", listed, fix)]


def _broken(toolkits: tuple[Toolkit, ...]) -> Iterator[Finding]:
    for toolkit in toolkits:
        if not toolkit.version:
            look = f"{toolkit.root}/bin/nvcc --version      # should print its release"
            yield Finding("warning", f"nvcc of {toolkit.root} does not tell its version", (toolkit.why,), (look,))


def _nowhere(host: Host, toolkits: tuple[Toolkit, ...], level: Level, fix: tuple[str, ...]) -> Iterator[Finding]:
    """What torch would compile with lacks the compiler or the headers."""
    pick = torch_pick(host, toolkits)
    if pick is None:
        return
    if pick.toolkit is None:
        what = f"torch would look for a CUDA toolkit by {pick.by} and find none"
        yield Finding(level, what, (pick.label,), fix or ("unset CUDA_HOME CUDA_PATH",))
    elif not has_headers(pick.folder):
        what = f"torch would compile with the toolkit in {pick.folder}, which has no CUDA headers"
        evidence = (pick.label, f"missing: {pick.folder}/include/cuda_runtime.h")
        yield Finding(level, what, evidence, fix)


def _apart(chosen: tuple[Pick, ...], listed: tuple[str, ...], level: Level, fix: tuple[str, ...]) -> Iterator[Finding]:
    versions = {each.version for each in chosen if each.version}
    if len(versions) > 1:
        names = " and ".join((", ".join(each.by for each in chosen[:-1]), chosen[-1].by))
        yield Finding(level, f"{names} pick different CUDA toolkits", listed, fix)


def version(host: Host, target: Target) -> list[Finding]:
    """The same version, one that will do, or one that torch or DeepSpeed refuses."""
    build = host.facts.torch
    if build is None:
        return [skipped("torch is not installed")]
    if not build.cuda:
        return [skipped(f"{build.label}: no CUDA extension is compiled")]
    level = requirement_level(target)
    toolkits = find_toolkits(host)
    pick = torch_pick(host, toolkits)
    if pick is None or pick.toolkit is None:
        what = "no CUDA toolkit is found, so no CUDA extension can be compiled (DeepSpeed's ops, apex)"
        return [Finding(level, what, (build.label,), _remedy(build.cuda, toolkits))]
    if not pick.version:
        return [skipped(f"nvcc of {pick.toolkit.root} does not tell its version")]
    return [_compared(build.cuda, pick.toolkit, (build.label, pick.label), toolkits, level)]


def _compared(
    cuda: str, toolkit: Toolkit, evidence: tuple[str, ...], toolkits: tuple[Toolkit, ...], level: Level
) -> Finding:
    ours, theirs = release(toolkit.version)[:2], release(cuda)[:2]
    fix = _remedy(cuda, toolkits)
    if ours == theirs:
        return ok(f"both are CUDA {cuda}", *evidence)
    if ours[0] != theirs[0]:
        what = f"torch was built with CUDA {cuda} and refuses to build with toolkit {toolkit.version}"
        return Finding(level, what, evidence, fix)
    if ours[0] in MINORS_MIX:
        return ok(f"CUDA {toolkit.version} builds extensions for torch's {cuda} (same major version)", *evidence)
    what = f"torch only warns of toolkit {toolkit.version} beside its CUDA {cuda}, but DeepSpeed refuses it"
    return Finding(level, what, evidence, (*fix, "export DS_SKIP_CUDA_CHECK=1      # at your own risk, instead"))


def _remedy(cuda: str, toolkits: tuple[Toolkit, ...]) -> tuple[str, ...]:
    right = fitting(toolkits, cuda)
    exact = right is not None and (right.version == cuda or release(cuda)[0] in MINORS_MIX)
    return exports(right) if right is not None and exact else install_lines(cuda)


TOOLKITS = Check("toolkits", "CUDA toolkits", 10.0, agreement, without_cuda_builds)
TOOLKIT_VERSION = Check("toolkit-version", "CUDA of torch and toolkit", 10.0, version, without_cuda_builds)
