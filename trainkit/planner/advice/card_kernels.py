"""Cards that are too old, or too new, for what the installed libraries were compiled for.

A kernel of compute capability x.y runs on cards of x.y and of later minor numbers (CUDA C programming guide, binary
compatibility), so that a build serves a range of cards, from the oldest that its toolkit targets on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.versions import at_least, release
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.planner.advice.compile_backends import backend_in_use
from trainkit.recipe.schema import HfModel

Capability = tuple[int, int]
TRITON: Capability = (7, 0)  # torch/_inductor/scheduler.py: GPUTooOldForTriton
FLASH_ATTENTION: Capability = (8, 0)  # https://github.com/Dao-AILab/flash-attention, CUDA support
# CUDA's major number -> the oldest cards that its compiler has code for (release notes, deprecated architectures).
OLDEST: Mapping[int, Capability] = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
# Major number of cards -> the first CUDA that has code for them.
FIRST: Mapping[int, str] = {9: "11.8", 10: "12.8", 12: "12.8"}


def oldest_in_wheels(torch: str, cuda: str) -> Capability:
    """The oldest cards that PyTorch's own wheels of a release have kernels for (.ci/manywheel/build_cuda.sh)."""
    if not at_least(cuda, "12.8"):
        return (5, 0)
    # https://github.com/pytorch/pytorch/issues/157517 and, from 2.11 on, issues/172352
    return (7, 5) if at_least(cuda, "13") or at_least(torch, "2.11") else (7, 0)


def cuda_of(facts: Facts) -> str:
    """The CUDA that the installed torch is built for; empty where that is not known, or where it is none."""
    if facts.torch is not None:
        return facts.torch.cuda or ""
    tag = facts.packages.get("torch", "").partition("+cu")[2]
    return f"{tag[:-1]}.{tag[-1]}" if tag.isdecimal() and len(tag) > 2 else ""


def kernel_notices(context: Context) -> Iterator[Notice]:
    """What the chosen cards cannot run of the installed torch, of inductor and of FlashAttention-2."""
    cards = [gpu for gpu in context.cards if gpu.vendor == "nvidia"]
    if not cards:
        return
    cuda, torch = cuda_of(context.facts), context.facts.packages.get("torch", "")
    if cuda:
        yield from _of_torch(cards, torch.partition("+")[0], cuda)
    oldest = min(cards, key=lambda gpu: gpu.compute_capability)
    compiled = context.recipe.efficiency.compile
    inductor = compiled.enabled and backend_in_use(compiled.backend) == "inductor"
    if inductor and oldest.compute_capability < TRITON:
        what = f"inductor's kernels (Triton) require compute capability 7.0; {named(oldest)}"
        yield Notice("blocker", what, "leave efficiency.compile out")
    if wants_flash_attention(context) and not has_flash_attention(cards):
        what = f"FlashAttention-2 requires compute capability 8.0; {named(oldest)}"
        yield Notice("blocker", what, "set efficiency.attention to sdpa")


def _of_torch(cards: Sequence[Gpu], torch: str, cuda: str) -> Iterator[Notice]:
    """Kernels of the installed torch, for the oldest card and for the newest."""
    oldest = min(cards, key=lambda gpu: gpu.compute_capability)
    newest = max(cards, key=lambda gpu: gpu.compute_capability)
    targets = OLDEST.get(release(cuda)[0], (0, 0))
    least = oldest_in_wheels(torch, cuda)
    older = "12.6" if oldest.compute_capability >= OLDEST[12] else "11.8"
    if oldest.compute_capability < targets:
        what = f"torch {torch} is built for CUDA {cuda}, which has no code for cards before {_dotted(targets)}"
        yield Notice("blocker", f"{what}; {named(oldest)}", f"install a torch that is built for CUDA {older}")
    elif oldest.compute_capability < least:
        what = (
            f"PyTorch's own wheels of torch {torch} for CUDA {cuda} have no kernels for cards before {_dotted(least)}"
        )
        hint = f"install a torch for CUDA {older}, unless yours was compiled for this card"
        yield Notice("warning", f"{what}; {named(oldest)}", hint)
    first = FIRST.get(newest.compute_capability[0], "0")
    if not at_least(cuda, first):
        what = f"torch {torch} is built for CUDA {cuda}, and cards such as {newest.name} have code from {first} on"
        hint = f"install a torch for CUDA {first} or newer, unless yours brings PTX, which the driver can compile"
        yield Notice("warning", what, hint)


def wants_flash_attention(context: Context) -> bool:
    """Whether the built-in trainer is to compute attention with the package flash-attn."""
    recipe = context.recipe
    asked = recipe.efficiency.attention == "flash_attention_2"
    return asked and recipe.program.kind == "builtin" and isinstance(recipe.model, HfModel)


def has_flash_attention(cards: Sequence[Gpu]) -> bool:
    """Whether FlashAttention-2 runs on every card; of AMD's it is not known here."""
    return all(gpu.vendor == "amd" or gpu.compute_capability >= FLASH_ATTENTION for gpu in cards)


def named(gpu: Gpu) -> str:
    """The card with what it has, for the end of a sentence."""
    return f"{gpu.name} has {_dotted(gpu.compute_capability)}"


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
