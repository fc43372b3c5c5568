"""Cards that are too old, or too new, for what the installed libraries were compiled for.

A kernel of compute capability x.y runs on cards of x.y and of later minor numbers (CUDA C programming guide, binary
compatibility), so that a build serves a range of cards, from the oldest that its toolkit targets on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from trainkit.launch_plan.context import Context, Dtype
from trainkit.launch_plan.model import Notice
from trainkit.machine.facts import Facts, Gpu, at_least, release
from trainkit.optimizers import optimizer
from trainkit.planner.compile_backends import backend_in_use
from trainkit.recipe.schema import HfModel, Recipe
from trainkit.tools.deepspeed.fields import formats, leaves_open

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


LOW: tuple[Dtype, ...] = ("bf16", "fp16")
VOLTA = (7, 0)  # first compute capability with tensor cores, for fp16
AMPERE = (8, 0)  # first compute capability with bf16 and tf32 units (CUDA C programming guide, arithmetic instructions)
# Cards of Turing's small chips, TU116 and TU117, which have 7.5 and no tensor cores (NVIDIA Turing GPU architecture).
_SMALL_TURING = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


def choose_dtype(
    recipe: Recipe, device: str, cards: Sequence[Gpu], in_file: object = None, own: Dtype | None = None
) -> Dtype:
    """The format of forward and backward; `auto` is what the cards are fast at, and fp32 off CUDA.

    in_file: a DeepSpeed file of the user's, and own: what the program's own words say, where no layer gives a format.
    """
    if own:
        return own
    for dtype in LOW:
        if dtype in formats(in_file):
            return dtype
    if in_file is not None and recipe.program.kind != "builtin" and not leaves_open(in_file):
        return "fp32"  # DeepSpeed's, whatever the cards have
    if recipe.precision.dtype != "auto":
        return recipe.precision.dtype
    if recipe.program.kind in ("accelerate", "torch"):  # nothing is decided in the script's stead
        return "fp32"
    # Off CUDA the facts do not tell which formats have units; an emulated one would be slower than fp32.
    return fast_format(cards) if device == "cuda" else "fp32"


def fast_format(cards: Sequence[Gpu]) -> Dtype:
    """bf16 where every card has units for it, else fp16 where every card has tensor cores, else fp32."""
    if cards and all(gpu.compute_capability >= AMPERE for gpu in cards):
        return "bf16"
    return "fp16" if cards and all(map(has_tensor_cores, cards)) else "fp32"


def has_tensor_cores(gpu: Gpu) -> bool:
    """Whether a card computes 16-bit products on units of their own. Of AMD's, the ones that PyTorch runs on have."""
    return gpu.vendor == "amd" or (gpu.compute_capability >= VOLTA and not _SMALL_TURING.search(gpu.name))


def precision_notices(context: Context) -> Iterator[Notice]:
    """What the chosen cards lack for the chosen formats, and settings that do nothing or little on this device."""
    precision, device, dtype = context.recipe.precision, context.topology.device, context.dtype
    old = next((gpu for gpu in context.cards if gpu.compute_capability < AMPERE), None)
    if old is not None:
        has = f"requires compute capability 8.0; {named(old)}"
        if dtype == "bf16":
            yield Notice("blocker", f"bf16 {has}", f"set precision to {fast_format(context.cards)}")
        elif precision.eval == "bf16":
            yield Notice("blocker", f"precision.eval bf16 {has}", "set precision.eval to same")
        if precision.tf32:
            yield Notice("blocker", f"tf32 {has}", "leave precision.tf32 out")
        if dtype == "fp16" and precision.dtype == "auto":
            what = f"precision auto is fp16 here, for {old.name} has no bf16: the loss is scaled"
            hint = "set precision to fp32 where many steps are skipped because they overflow"
            yield Notice("note", what, hint)
    yield from _speed(context)
    if precision.tf32 is not None and device != "cuda":
        yield Notice("warning", f"precision.tf32 does nothing on {device}", "leave it out: only CUDA cards have it")
    if dtype == "fp16" and device == "cpu":
        yield Notice("warning", "fp16 on a CPU is slower than fp32", "set precision to fp32 or bf16")
    # bf16 has 8 bits of mantissa: an update below 1/512 of a weight leaves it as it is.
    builtin, name = context.recipe.program.kind == "builtin", context.recipe.optimizer.name
    if builtin and precision.weights == "bf16" and not optimizer(name).keeps_rounding:
        what = f"precision.weights bf16 rounds small updates of {name} away: training may not progress"
        yield Notice("warning", what, "set optimizer.name to adamw_anyprecision, which keeps what rounding loses")


def _speed(context: Context) -> Iterator[Notice]:
    """Formats in which the chosen cards are slower than they could be. What the recipe asks for in words is meant."""
    precision, cards = context.recipe.precision, context.cards
    plain = next((gpu for gpu in cards if not has_tensor_cores(gpu)), None)
    if plain is not None and context.dtype == "fp16":
        what = f"{plain.name} has no tensor cores: fp16 saves memory there, and is hardly faster than fp32, or slower"
        yield Notice("note", what, "set precision to fp32 where it fits")
    asked = context.resolved.given("precision.dtype") is not None or precision.tf32 is not None
    faster = fast_format(cards)
    if context.recipe.program.kind == "builtin" and context.dtype == "fp32" != faster and not asked:
        what = (
            f"no format is asked for, so {cards[0].name} computes in fp32; it computes {faster} several times as fast"
        )
        yield Notice("note", what, "set precision to auto, or to fp32 where that is meant")
