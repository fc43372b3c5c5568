"""Backends of torch.compile as data: which torch lists which, what they are for, and names that are gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.errors import Diagnostic, blocker, note, warning
from trainkit.launch_plan.context import Context
from trainkit.recipe.schema import Compile
from trainkit.recipe.suggestions import did_you_mean
from trainkit.recipe.validate import refused

KEY = "efficiency.compile.backend"
# Tagged debug in torch/_dynamo/backends: torch.compiler.list_backends() leaves them out.
_DEBUG = (
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "aot_ts",
    "eager",
    "eager_debug",
    "eager_noexcept",
    "invoke_subgraph",
    "pre_dispatch_eager",
    "ts",
)
EVERYWHERE = ("inductor", "cudagraphs")
_TRAINING = (*EVERYWHERE, "openxla")

# torch's version (major.minor) -> what torch.compiler.list_backends(exclude_tags=()) gives, less its own test devices:
# where the installed torch is not asked, for a plan for another machine or of the backends that every torch has.
LISTED: Mapping[str, frozenset[str]] = {"2.13": frozenset((*_TRAINING, *_DEBUG, "openxla_eval", "tvm"))}

# Of the listed ones, those that search for compiler bugs by failing.
NOT_FOR_RUNNING = ("minifier", "TESTING_ONLY")

# Names that are gone -> what replaces each, and why.
GONE: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("nvfuser", "aot_nvfuser", "nvprims_nvfuser", "aot_ts_nvfuser"), ("inductor", "PyTorch no longer has nvFuser")
    ),
    "aot_cudagraphs": ("cudagraphs", "PyTorch calls it cudagraphs now"),
}


# Modes of inductor that record CUDA graphs: torch._inductor.list_mode_options().
RECORDING = ("reduce-overhead", "max-autotune")


def backend_in_use(asked: str) -> str:
    """The backend that a name means."""
    return GONE[asked][0] if asked in GONE else asked


def records_graphs(settings: Compile) -> bool:
    """Whether CUDA graphs are recorded of what is compiled, on a device that has them."""
    used = backend_in_use(settings.backend)
    return settings.enabled and (used == "cudagraphs" or (used == "inductor" and settings.mode in RECORDING))


def compile_remarks(context: Context) -> Iterator[Diagnostic]:
    """Where the built-in trainer's backend is gone, absent or of no use; those for inference are refused earlier."""
    settings = context.recipe.efficiency.compile
    if not settings.enabled:
        return
    asked, used = settings.backend, backend_in_use(settings.backend)
    if asked != used:
        yield note(f"efficiency.compile.backend {asked} is gone: {GONE[asked][1]}, and {used} replaces it")
    version = ".".join(context.facts.packages.get("torch", "").split("+")[0].split(".")[:2])
    listed = context.facts.torch.backends if context.facts.torch else ()
    runs = [name for name in listed or LISTED.get(version, ()) if not any(word in name for word in NOT_FOR_RUNNING)]
    if runs and used not in runs:
        known = sorted(name for name in runs if refused(KEY, name) is None)
        hint = did_you_mean(used, known, f"choose one of {', '.join(known)}")
        yield blocker(f"torch {version} has no compile backend {used}", hint)
    if used == "cudagraphs" and context.topology.device != "cuda":
        yield warning(f"cudagraphs records nothing on {context.topology.device}", "choose inductor")
    model, data = context.recipe.model, context.recipe.data
    if getattr(model, "task", "") == "seq2seq_lm" and getattr(data, "padding", "") == "longest":
        what = "sources and targets are as long as the longest of a step: for other lengths a model is compiled again"
        yield note(what, "set data.padding: max_length, of which there is one")
    if used in _DEBUG:
        yield note(f"efficiency.compile.backend {used} is for finding faults: it makes no step faster")


def gone(asked: str, said: str) -> Iterator[Diagnostic]:
    """A blocker for the name of a backend that PyTorch no longer has. said: who names it, as a sentence begins."""
    if asked in GONE:
        yield blocker(f"{said}, which is gone: {GONE[asked][1]}", f"write {GONE[asked][0]}")
