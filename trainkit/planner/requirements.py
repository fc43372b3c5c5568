"""What must be installed for a plan to run, as data; what is missing on this machine blocks the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainkit.errors import Diagnostic, blocker, warning
from trainkit.launch_plan.context import Context
from trainkit.machine.capability import has_flash_attention
from trainkit.machine.facts import at_least
from trainkit.optimizers import ON_DEEPSPEED, OPTIMIZERS, ZERO
from trainkit.planner.techniques import value_of
from trainkit.recipe.schema import Fsdp, Image
from trainkit.recipe.schema.model import quantized_bits
from trainkit.tools.accelerate.importer import widths
from trainkit.tools.registry import LAUNCHERS, PROGRAMS
from trainkit.tools.torch_xla import is_spmd


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that one choice needs. `of` names the choice, `values` are those that need it, `extra` brings it."""

    of: str
    values: tuple[str, ...]
    package: str
    minimum: str
    extra: str = "train"
    install: str = ""  # where no extra can bring it


OTHER_IMAGE = "take an image that has it, and say so in container.packages"
SOUND_DEEPSPEED = "0.19.4"  # the first release without the faults below
TORCH_XLA = "pip install 'torch_xla[tpu]', in the release of the installed torch"
REQUIREMENTS: tuple[Requirement, ...] = (
    # accelerate makes transformers' description of the file before DeepSpeed sees it
    Requirement("strategy of Accelerator()", ON_DEEPSPEED, "transformers", "4.50", extra="hf"),
    # SPMD of Trainer: transformers, trainer.py (XLA_FSDPV2_MIN_VERSION)
    Requirement("fsdp on xla, version", ("2",), "torch-xla", "2.2", install=TORCH_XLA),
    Requirement("devices.type", ("xla",), "torch-xla", "2.0", install=TORCH_XLA),
    # fully_shard records events on streams, which torch.cpu.Stream of 2.6 cannot
    Requirement("fsdp on", ("cpu",), "torch", "2.7", install="pip install 'torch>=2.7'"),
    # before, GradScaler takes float64, which MPS has not (https://github.com/pytorch/pytorch/pull/150255)
    Requirement("fp16 on", ("mps",), "torch", "2.8", install="pip install 'torch>=2.8'"),
    # before, accelerate reads none of the mesh's variables (utils/launch.py), or none of those of sequence parallelism
    Requirement(
        "sequence parallelism over", ("ranks",), "accelerate", "1.12", install="pip install 'accelerate>=1.12'"
    ),
    Requirement("a mesh of", ("ranks",), "accelerate", "1.10", install="pip install 'accelerate>=1.10'"),
    # DeepSpeed 0.18.0 by itself loses gradients in stage 2 with accumulation; 0.19.0 and 0.19.2 fail at NVMe on a CPU
    Requirement("program builtin under", ZERO, "deepspeed", SOUND_DEEPSPEED),
    Requirement("strategy", ON_DEEPSPEED, "deepspeed", "0.16"),
    *(
        Requirement("optimizer.name", (name,), need.name, need.minimum, "optimizers", need.install)
        for name, each in OPTIMIZERS.items()
        if (need := each.requires)
    ),
    Requirement("peft.kind", ("lora",), "peft", "0.15", extra="hf"),
    Requirement("model.quantize", ("4 bits", "8 bits"), "bitsandbytes", "0.50", extra="qlora"),
    # which quantises weights while it reads them, and is asked for no format
    Requirement("model.quantize", ("4 bits", "8 bits"), "transformers", "5", extra="qlora"),
    # before, fully_shard makes parameters that require gradients, which integers cannot (pytorch, issue 177844)
    Requirement("model.quantize under", ("fsdp",), "torch", "2.12", install="pip install 'torch>=2.12'"),
    Requirement("data.tokenizer", ("a folder",), "transformers", "4.50", extra="hf"),
    Requirement("data.kind", ("dataset",), "datasets", "3", extra="hf"),
    Requirement("model.kind", ("hf",), "transformers", "4.50", extra="hf"),
    Requirement(
        "efficiency.attention",
        ("flash_attention_2",),
        "flash-attn",
        "2.3",
        install="pip install flash-attn --no-build-isolation",  # it is compiled for the torch that is there
    ),
    Requirement("logging.report_to", ("tensorboard",), "tensorboard", "2.18", extra="report"),
    Requirement("logging.report_to", ("wandb",), "wandb", "0.19", extra="report"),
)


def of_tool(choice: Literal["launcher", "program"], name: str) -> tuple[Requirement, ...]:
    """What a launcher itself, or programs of a kind, need."""
    packages = (LAUNCHERS if choice == "launcher" else PROGRAMS)[name].REQUIRES
    # Other packages of launchers and programs come with `train`.
    extras = {"transformers": "hf"}
    return tuple(Requirement(choice, (name,), *each, extras.get(each[0], "train")) for each in packages.items())


def all_requirements() -> tuple[Requirement, ...]:
    """What any plan may need: of every launcher, every kind of program and every choice."""
    launchers = (each for name in LAUNCHERS for each in of_tool("launcher", name))
    return (*launchers, *(each for kind in PROGRAMS for each in of_tool("program", kind)), *REQUIREMENTS)


def missing_packages(context: Context) -> tuple[Diagnostic, ...]:
    """One blocker for each package that is absent or too old. What an image has is looked at inside, or named."""
    container = context.recipe.container
    if isinstance(container, Image):
        named = ((*each, container.packages.get(each[0])) for each in needed_packages(context))
        return tuple(
            blocker(f"the run requires {package} >= {minimum}; container.packages says {has}", OTHER_IMAGE)
            for package, minimum, has in named
            if has is not None and not at_least(has, minimum)
        )
    found: dict[str, Diagnostic] = {}
    for requirement, choice in _needed(context):
        installed = context.facts.packages.get(requirement.package)
        if requirement.package in found or at_least(installed, requirement.minimum):
            continue
        state = f"{installed} is installed" if installed else "it is not installed"
        what = f"{requirement.of} {choice} requires {requirement.package} >= {requirement.minimum}; {state}"
        install = requirement.install or f"pip install 'trainkit[{requirement.extra}]'"
        found[requirement.package] = blocker(what, install)
    torch = context.facts.packages.get("torch", "")
    if context.topology.device == "cuda" and torch.endswith("+cpu"):
        what = f"torch {torch} is a build for CPUs, and the run uses CUDA"
        found["torch"] = blocker(what, "install a CUDA build of torch, or set devices.type to cpu")
    return tuple(found.values())


def needed_packages(context: Context) -> tuple[tuple[str, str], ...]:
    """Every package that the plan needs, each once, with the oldest version that will do."""
    found: dict[str, str] = {}
    for requirement, _ in _needed(context):
        known = found.get(requirement.package, "0")
        found[requirement.package] = known if at_least(known, requirement.minimum) else requirement.minimum
    return tuple(found.items())


def _needed(context: Context) -> Iterator[tuple[Requirement, object]]:
    """Each requirement that the plan's choices have, with the choice."""
    chosen = _choices(context)
    program, launcher = of_tool("program", context.recipe.program.kind), of_tool("launcher", context.launcher)
    for requirement in (*program, *REQUIREMENTS, *launcher):
        choice = next((value for value in chosen.get(requirement.of, ()) if value in requirement.values), None)
        if choice is not None:
            yield requirement, choice


def doubtful_releases(context: Context) -> Iterator[Diagnostic]:
    """A warning for programs of the user's own under a DeepSpeed that was seen to train wrongly."""
    installed = context.facts.packages.get("deepspeed")
    if context.recipe.program.kind == "builtin" or context.recipe.strategy.kind not in ON_DEEPSPEED or not installed:
        return
    if not at_least(installed, SOUND_DEEPSPEED):
        what = (
            f"deepspeed {installed} is installed, and releases before {SOUND_DEEPSPEED} were seen to train wrongly: "
            "0.18.0 loses gradients at stage 2 with accumulation"
        )
        yield warning(what, f"pip install 'deepspeed>={SOUND_DEEPSPEED}'")


def _shards_by_fully_shard(context: Context) -> bool:
    strategy = context.recipe.strategy
    return isinstance(strategy, Fsdp) and strategy.version == 2 and context.recipe.program.kind != "torch"


def _choices(context: Context) -> dict[str, tuple[object, ...]]:
    recipe, strategy = context.recipe, context.recipe.strategy.kind
    found: dict[str, tuple[object, ...]] = {
        "program": (recipe.program.kind,),
        "launcher": (context.launcher,),
        "devices.type": (context.topology.device,),
        "fsdp on xla, version": ("2",) if is_spmd(context) else (),
        "fsdp on": (context.topology.device,) if _shards_by_fully_shard(context) else (),
        "a mesh of": ("ranks",) if widths(context) else (),
        "sequence parallelism over": ("ranks",) if widths(context).get("sp_size", 1) > 1 else (),
        "strategy": (strategy,),
        "strategy of Accelerator()": (strategy,) if recipe.program.kind == "accelerate" else (),
    }
    if recipe.program.kind == "hf":  # Trainer makes the optimizer
        found["optimizer.name"] = (recipe.optimizer.name,) if context.resolved.given("optimizer.name") else ()
    if recipe.program.kind == "builtin":  # a program of the user's own decides by itself what it uses
        keys = ("optimizer.name", "peft.kind", "data.kind", "model.kind", "efficiency.attention")
        found |= {key: (value_of(context, key),) for key in keys}
        if not has_flash_attention(context.cards):  # what no card here can run need not be installed
            del found["efficiency.attention"]
        found["program builtin under"] = (strategy,)
        found["model.quantize"] = (f"{quantized_bits(recipe)} bits",)
        found["model.quantize under"] = (strategy,) if quantized_bits(recipe) else ()
        found["fp16 on"] = (context.topology.device,) if context.dtype == "fp16" else ()
        found["data.tokenizer"] = ("a folder",) if value_of(context, "data.tokenizer") else ()
        found["logging.report_to"] = tuple(recipe.logging.report_to)
    return found
