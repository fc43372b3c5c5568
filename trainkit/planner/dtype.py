"""The format of the computation, and what the chosen GPUs lack for it or for the installed kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.launch_plan.context import Context
from trainkit.lazy import call
from trainkit.machine.capability import (
    AMPERE,
    FIRST,
    OLDEST,
    TRITON,
    Dtype,
    cuda_of,
    dotted,
    fast_format,
    has_tensor_cores,
    named,
    oldest_in_wheels,
)
from trainkit.machine.facts import Gpu, at_least, release
from trainkit.recipe.schema import Recipe
from trainkit.tools.compile_backends import backend_in_use


def kernel_notices(context: Context) -> Iterator[Diagnostic]:
    """What the chosen GPUs cannot run of the installed torch, of inductor and of FlashAttention-2."""
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
        yield blocker(what, "leave efficiency.compile out")


def _of_torch(cards: Sequence[Gpu], torch: str, cuda: str) -> Iterator[Diagnostic]:
    """Kernels of the installed torch, for the oldest GPU and for the newest."""
    oldest = min(cards, key=lambda gpu: gpu.compute_capability)
    newest = max(cards, key=lambda gpu: gpu.compute_capability)
    targets = OLDEST.get(release(cuda)[0], (0, 0))
    least = oldest_in_wheels(torch, cuda)
    older = "12.6" if oldest.compute_capability >= OLDEST[12] else "11.8"
    if oldest.compute_capability < targets:
        what = f"torch {torch} is built for CUDA {cuda}, which has no code for GPUs before {dotted(targets)}"
        yield blocker(f"{what}; {named(oldest)}", f"install a torch that is built for CUDA {older}")
    elif oldest.compute_capability < least:
        what = f"PyTorch's own wheels of torch {torch} for CUDA {cuda} have no kernels for GPUs before {dotted(least)}"
        hint = f"install a torch for CUDA {older}, unless yours was compiled for this GPU"
        yield warning(f"{what}; {named(oldest)}", hint)
    first = FIRST.get(newest.compute_capability[0], "0")
    if not at_least(cuda, first):
        what = f"torch {torch} is built for CUDA {cuda}, and GPUs such as {newest.name} have code from {first} on"
        hint = f"install a torch for CUDA {first} or newer, unless yours brings PTX, which the driver can compile"
        yield warning(what, hint)


LOW: tuple[Dtype, ...] = ("bf16", "fp16")
# Of a DeepSpeed file, which few recipes name.
formats: Callable[[object], tuple[str, ...]] = call("trainkit.tools.deepspeed.fields:formats")
leaves_open: Callable[[object], bool] = call("trainkit.tools.deepspeed.fields:leaves_open")


def choose_dtype(
    recipe: Recipe, device: str, cards: Sequence[Gpu], in_file: object = None, own: Dtype | None = None
) -> Dtype:
    """The format of forward and backward; `auto` is what the GPUs are fast at, and fp32 off CUDA.

    in_file: a DeepSpeed file of the user's, and own: what the program's own words say, where no layer gives a format.
    """
    if own:
        return own
    if in_file is not None:
        if enabled := [dtype for dtype in LOW if dtype in formats(in_file)]:
            return enabled[0]
        if recipe.program.kind != "builtin" and not leaves_open(in_file):
            return "fp32"  # DeepSpeed's, whatever the GPUs have
    if recipe.precision.dtype != "auto":
        return recipe.precision.dtype
    if recipe.program.kind in ("accelerate", "torch"):  # nothing is decided in the script's stead
        return "fp32"
    # Off CUDA the facts do not tell which formats have units; an emulated one would be slower than fp32.
    return fast_format(cards) if device == "cuda" else "fp32"


def precision_notices(context: Context) -> Iterator[Diagnostic]:
    """What the chosen GPUs lack for the chosen formats, and settings that do nothing or little on this device."""
    precision, device, dtype = context.recipe.precision, context.topology.device, context.dtype
    old = next((gpu for gpu in context.cards if gpu.compute_capability < AMPERE), None)
    if old is not None:
        has = f"requires compute capability 8.0; {named(old)}"
        if dtype == "bf16":
            yield blocker(f"bf16 {has}", f"set precision to {fast_format(context.cards)}")
        elif precision.eval == "bf16":
            yield blocker(f"precision.eval bf16 {has}", "set precision.eval to same")
        if precision.tf32:
            yield blocker(f"tf32 {has}", "leave precision.tf32 out")
        if dtype == "fp16" and precision.dtype == "auto":
            what = f"precision auto is fp16 here, for {old.name} has no bf16: the loss is scaled"
            hint = "set precision to fp32 where many steps are skipped because they overflow"
            yield note(what, hint)
    plain = next((gpu for gpu in context.cards if not has_tensor_cores(gpu)), None)
    if plain is not None and dtype == "fp16":
        what = f"{plain.name} has no tensor cores: fp16 saves memory there, and is hardly faster than fp32, or slower"
        yield note(what, "set precision to fp32 where it fits")
    if precision.tf32 is not None and device != "cuda":
        yield warning(f"precision.tf32 does nothing on {device}", "leave it out: only CUDA GPUs have it")
    if dtype == "fp16" and device == "cpu":
        yield warning("fp16 on a CPU is slower than fp32", "set precision to fp32 or bf16")
