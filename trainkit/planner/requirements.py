"""The packages that a plan needs, as data; a package that is missing on this machine blocks the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from trainkit.distribution import RELEASES, install, pip
from trainkit.errors import Diagnostic, blocker, warning
from trainkit.launch_plan.context import Context
from trainkit.lazy import call
from trainkit.machine.capability import has_flash_attention
from trainkit.machine.facts import at_least
from trainkit.metrics import METRICS
from trainkit.optimizers import ON_DEEPSPEED, OPTIMIZERS, ZERO
from trainkit.planner.techniques import value_of
from trainkit.recipe.address import PACKAGES, scheme
from trainkit.recipe.grid import grid_sizes
from trainkit.recipe.schema import Fsdp, Image
from trainkit.recipe.schema.model import quantized_bits
from trainkit.tools.base.own_scripts import of_trl
from trainkit.tools.registry import LAUNCHERS, PROGRAMS
from trainkit.tools.torch_xla import is_spmd


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that some plans need.

    needed_by: what of a plan needs it, as a sentence begins; empty where nothing. install: the command, with {pip} for
    the interpreter's, where its name is not enough.
    """

    package: str
    minimum: str
    needed_by: Callable[[Context], str]
    install: str = ""


widths = call("trainkit.tools.accelerate.importer:widths")


def _strategy(c: Context) -> str:
    return f"strategy {c.strategy}" if c.strategy in ON_DEEPSPEED else ""


def _fully_shard_on_cpu(c: Context) -> str:
    strategy = c.recipe.strategy
    shards = isinstance(strategy, Fsdp) and strategy.version == 2 and c.program != "torch"
    return "fsdp on cpu" if shards and c.device == "cpu" else ""


def _optimizer(name: str) -> Callable[[Context], str]:
    """Of the built-in trainer, and of Trainer where a layer names the optimizer."""

    def needed(c: Context) -> str:
        makes = c.program == "builtin" or (c.program == "hf" and c.resolved.given("optimizer.name"))
        return f"optimizer.name {name}" if makes and c.recipe.optimizer.name == name else ""

    return needed


def _builtin(key: str, *values: str) -> Callable[[Context], str]:
    """One of these values of a setting of the built-in trainer; a program of the user's own decides what it uses."""

    def needed(c: Context) -> str:
        chosen = value_of(c, key) if c.program == "builtin" else None
        found = chosen if isinstance(chosen, list) else [chosen]
        return next((f"{key} {value}" for value in values if value in found), "")

    return needed


def _quantized(c: Context) -> str:
    bits = quantized_bits(c.recipe) if c.program == "builtin" else 0
    return f"model.quantize {bits} bits" if bits else ""


def _flash_attention(c: Context) -> str:
    """What no GPU here can run need not be installed."""
    return _builtin("efficiency.attention", "flash_attention_2")(c) if has_flash_attention(c.cards) else ""


METRIC_PACKAGES = sorted({each.package for each in METRICS.values() if each.package})


def _metric(package: str) -> Callable[[Context], str]:
    """The metrics that a layer names; those of the task by itself are left out where nothing computes them."""

    def needed(c: Context) -> str:
        named = (c.recipe.eval.metrics or ()) if c.program == "builtin" else ()
        return next(
            (f"eval.metrics {name}" for name in named if name in METRICS and METRICS[name].package == package), ""
        )

    return needed


def _storage(package: str) -> Callable[[Context], str]:
    """An address that fsspec reads by a package."""

    def needed(c: Context) -> str:
        address = c.recipe.checkpoint.copy_to if c.program == "builtin" else None
        kind = scheme(address or "")
        return f"checkpoint.copy_to {kind}://" if PACKAGES.get(kind) == package else ""

    return needed


OTHER_IMAGE = "take an image that has it, and say so in container.packages"
SOUND_DEEPSPEED = "0.19.4"  # the first release without the faults below
TORCH_XLA = "{pip} install 'torch_xla[tpu]', in the release of the installed torch"
REQUIREMENTS: tuple[Requirement, ...] = (
    # accelerate makes transformers' description of the file before DeepSpeed sees it
    Requirement(
        "transformers",
        "4.50",
        lambda c: f"strategy of Accelerator() {c.strategy}" if c.program == "accelerate" and _strategy(c) else "",
    ),
    # SPMD of Trainer: transformers, trainer.py (XLA_FSDPV2_MIN_VERSION)
    Requirement("torch-xla", "2.2", lambda c: "fsdp on xla, version 2" if is_spmd(c) else "", install=TORCH_XLA),
    Requirement("torch-xla", "2.0", lambda c: "devices.type xla" if c.device == "xla" else "", install=TORCH_XLA),
    # fully_shard records events on streams, which torch.cpu.Stream of 2.6 cannot
    Requirement("torch", "2.7", _fully_shard_on_cpu),
    # before, GradScaler takes float64, which MPS has not (https://github.com/pytorch/pytorch/pull/150255)
    Requirement(
        "torch",
        "2.8",
        lambda c: "fp16 on mps" if c.program == "builtin" and c.device == "mps" and c.dtype == "fp16" else "",
    ),
    # before, accelerate reads none of the mesh's variables (utils/launch.py), or none of those of sequence parallelism
    Requirement(
        "accelerate",
        "1.12",
        lambda c: "sequence parallelism over ranks" if c.recipe.env and widths(c).get("sp_size", 1) > 1 else "",
    ),
    Requirement(
        "accelerate",
        "1.10",
        lambda c: "a mesh of ranks" if c.recipe.env and widths(c) else "",
    ),
    # DeepSpeed 0.18.0 by itself loses gradients in stage 2 with accumulation; 0.19.0 and 0.19.2 fail at NVMe on a CPU
    Requirement(
        "deepspeed",
        SOUND_DEEPSPEED,
        lambda c: f"program builtin under {c.strategy}" if c.program == "builtin" and c.strategy in ZERO else "",
    ),
    Requirement("deepspeed", "0.16", _strategy),
    *(
        Requirement(need.name, need.minimum, _optimizer(name), need.install)
        for name, each in OPTIMIZERS.items()
        if (need := each.requires)
    ),
    Requirement("peft", "0.15", _builtin("peft.kind", "lora")),
    Requirement("bitsandbytes", "0.50", _quantized),
    # which quantises weights while it reads them, and is asked for no format
    Requirement("transformers", "5", _quantized),
    # before, fully_shard makes parameters that require gradients, which integers cannot (pytorch, issue 177844)
    Requirement(
        "torch",
        "2.12",
        lambda c: "model.quantize under fsdp" if _quantized(c) and c.strategy == "fsdp" else "",
    ),
    Requirement(
        "transformers",
        "4.50",
        lambda c: "data.tokenizer a folder" if c.program == "builtin" and value_of(c, "data.tokenizer") else "",
    ),
    Requirement("pyarrow", "15", _builtin("data.kind", "dataset")),
    Requirement("transformers", "4.50", _builtin("model.kind", "hf")),
    # before, models of folders are built whole
    Requirement(
        "transformers",
        "5.10",
        lambda c: (
            "a model in parts over ranks"
            if c.program == "builtin" and c.recipe.model.kind == "hf" and grid_sizes(c.recipe).divides_blocks
            else ""
        ),
    ),
    Requirement("trl", "0.12", lambda c: f"program.module {c.recipe.program.module}" if of_trl(c) else ""),
    Requirement(
        "flash-attn",
        "2.3",
        _flash_attention,
        install="{pip} install flash-attn --no-build-isolation",  # it is compiled for the torch that is there
    ),
    *(Requirement(package, RELEASES[package][0], _metric(package)) for package in METRIC_PACKAGES),
    Requirement(
        "fsspec",
        RELEASES["fsspec"][0],
        lambda c: "checkpoint.copy_to" if c.program == "builtin" and c.recipe.checkpoint.copy_to is not None else "",
    ),
    Requirement("s3fs", RELEASES["s3fs"][0], _storage("s3fs")),
    # never tried here
    *(Requirement(name, "2024.4", _storage(name), install=f"{{pip}} install {name}") for name in ("adlfs", "gcsfs")),
    Requirement("tensorboard", "2.18", _builtin("logging.report_to", "tensorboard")),
    Requirement("trackio", "0.43", _builtin("logging.report_to", "trackio")),
    Requirement("wandb", "0.19", _builtin("logging.report_to", "wandb")),
)


def of_tool(choice: Literal["launcher", "program"], name: str) -> tuple[Requirement, ...]:
    """What a launcher itself, or programs of a kind, need."""
    packages = (LAUNCHERS if choice == "launcher" else PROGRAMS)[name].REQUIRES
    needed = f"{choice} {name}"
    return tuple(Requirement(package, minimum, lambda _: needed) for package, minimum in packages.items())


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
    lacking: dict[str, tuple[Requirement, str]] = {}
    for requirement, needed_by in _needed(context):
        if not at_least(context.facts.packages.get(requirement.package), requirement.minimum):
            lacking.setdefault(requirement.package, (requirement, needed_by))
    python, minima = context.facts.executable, dict(needed_packages(context))
    # One command for all of them.
    together = [f"{name}>={minima[name]}" for name, (requirement, _) in lacking.items() if not requirement.install]
    found: dict[str, Diagnostic] = {}
    for name, (requirement, needed_by) in lacking.items():
        installed = context.facts.packages.get(name)
        state = f"{installed} is installed" if installed else "it is not installed"
        what = f"{needed_by} requires {name} >= {requirement.minimum}; {state}"
        found[name] = blocker(what, requirement.install.format(pip=pip(python)) or install(python, *together))
    torch = context.facts.packages.get("torch", "")
    if context.device == "cuda" and torch.endswith("+cpu"):
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


def _needed(context: Context) -> Iterator[tuple[Requirement, str]]:
    """Each requirement that the plan has, with what needs it."""
    rows = (*of_tool("program", context.program), *REQUIREMENTS, *of_tool("launcher", context.launcher))
    return ((row, needed_by) for row in rows if (needed_by := row.needed_by(context)))


def doubtful_releases(context: Context) -> Iterator[Diagnostic]:
    """A warning for programs of the user's own under a DeepSpeed that was seen to train wrongly."""
    installed = context.facts.packages.get("deepspeed")
    if context.program == "builtin" or context.strategy not in ON_DEEPSPEED or not installed:
        return
    if not at_least(installed, SOUND_DEEPSPEED):
        what = (
            f"deepspeed {installed} is installed, and releases before {SOUND_DEEPSPEED} were seen to train wrongly: "
            "0.18.0 loses gradients at stage 2 with accumulation"
        )
        yield warning(what, install(context.facts.executable, "deepspeed"))
