"""Whether the CUDA toolkit that extensions would be built with has the version that torch was built with."""

from __future__ import annotations

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.toolkits import Toolkit, exports, find_toolkits, fitting, install_lines, torch_pick
from trainkit.doctor.units import built
from trainkit.doctor.verdict import Level, Verdict, ok, skipped
from trainkit.machine.versions import release

TITLE = "CUDA of torch and toolkit"
LIMIT = 10.0
FAST = False

# Major versions within which DeepSpeed takes any minor one (deepspeed/ops/op_builder/builder.py,
# cuda_minor_mismatch_ok); torch refuses another major and only warns of another minor (torch/utils/cpp_extension.py).
MINORS_MIX = frozenset({10, 11, 12})


def needs(aim: Aim) -> str:
    """Only what is compiled for cards needs a toolkit."""
    return "" if aim.anything or aim.compiles_cuda else "the plan compiles nothing for CUDA cards"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """The same version, one that will do, or one that torch or DeepSpeed refuses."""
    build = surroundings.facts.torch
    if build is None:
        return [skipped("torch is not installed")]
    if not build.cuda:
        return [skipped(f"{built(build)}: no CUDA extension is compiled")]
    level: Level = "problem" if aim.compiles_cuda else "warning"
    toolkits = find_toolkits(surroundings)
    pick = torch_pick(surroundings, toolkits)
    if pick is None or pick.toolkit is None:
        what = "no CUDA toolkit is found, so no CUDA extension can be compiled (DeepSpeed's ops, apex)"
        return [Verdict(level, what, (built(build),), _remedy(build.cuda, toolkits))]
    if not pick.version:
        return [skipped(f"nvcc of {pick.toolkit.root} does not tell its version")]
    return [_compared(build.cuda, pick.toolkit, (built(build), pick.label), toolkits, level)]


def _compared(
    cuda: str, toolkit: Toolkit, evidence: tuple[str, ...], toolkits: tuple[Toolkit, ...], level: Level
) -> Verdict:
    ours, theirs = release(toolkit.version)[:2], release(cuda)[:2]
    fix = _remedy(cuda, toolkits)
    if ours == theirs:
        return ok(f"both are CUDA {cuda}", *evidence)
    if ours[0] != theirs[0]:
        what = f"torch was built with CUDA {cuda} and refuses to build with toolkit {toolkit.version}"
        return Verdict(level, what, evidence, fix)
    if ours[0] in MINORS_MIX:
        return ok(f"CUDA {toolkit.version} builds extensions for torch's {cuda} (same major version)", *evidence)
    what = f"torch only warns of toolkit {toolkit.version} beside its CUDA {cuda}, but DeepSpeed refuses it"
    return Verdict(level, what, evidence, (*fix, "export DS_SKIP_CUDA_CHECK=1      # at your own risk, instead"))


def _remedy(cuda: str, toolkits: tuple[Toolkit, ...]) -> tuple[str, ...]:
    right = fitting(toolkits, cuda)
    exact = right is not None and (right.version == cuda or release(cuda)[0] in MINORS_MIX)
    return exports(right) if right is not None and exact else install_lines(cuda)
