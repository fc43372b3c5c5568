"""The likely cause of a failure, as a log tells it, and of a run that is not as planned, as its program tells it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.frameworks.base.detection import names_library
from trainkit.frameworks.registry import PROGRAMS
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import read_run

MEMORY = "the card's memory is full: lower batch.micro, or turn on efficiency.gradient_checkpointing"
_NO_CARD = "the script computes on CUDA, and this run has no card: ask torch.cuda.is_available() in it, or choose cards"
_OF_A_LAUNCHER = r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
_FROM_A_LAUNCHER = (
    r"the script reads \1, which a launcher sets: put launcher.kind=torchrun or --nproc_per_node in front"
)
_WORDS = "`trainkit plan` shows every word that the program gets, and `trainkit explain` what made it"
# What the end of a log says -> what to do, with the pattern's groups; the first that is found is shown.
TRACES: dict[str, str] = {
    r"CUDA out of memory": MEMORY,
    r"OutOfMemoryError": MEMORY,
    rf"environment variable {_OF_A_LAUNCHER} expected": _FROM_A_LAUNCHER,
    rf"KeyError: '{_OF_A_LAUNCHER}'": _FROM_A_LAUNCHER,
    r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs": "the script asks for NCCL, which needs "
    "NVIDIA cards: on a CPU it must ask for gloo",
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available": _NO_CARD,
    r"are required: .*--local[-_]rank": "program.local_rank: true passes it",
    r"unrecognized arguments: .*--local[-_]rank": "program.local_rank: false leaves it out; torchrun and trainkit set "
    "LOCAL_RANK in the environment",
    r"unrecognized arguments: (.*)": rf"the program has no such argument (\1): {_WORDS}",
    r"Accelerator\.__init__\(\) got an unexpected keyword argument '(fp16|bf16)'": r"Accelerator no longer takes \1: "
    r"leave it out, or write mixed_precision='\1', and say precision: \1 to trainkit",
    r"has no attribute '(to|reverse)_bettertransformer'": "transformers no longer has it: leave the call out, "
    "attention is PyTorch's scaled_dot_product_attention without it (attn_implementation='sdpa')",
    r"not used by the HfArgumentParser: \[(.*)\]": rf"the program has no such argument (\1): {_WORDS}",
    r"partially initialized module '([\w.]+)'": r"a file beside the script may have the name of a module that it, or "
    r"\1, imports: rename it",
    # Libraries say in passing what they would use if it were there.
    r"(?m)^(?:\[rank\d+\]: )?\w+Error: No module named '([\w.]+)'": r"install the package that "
    r"brings \1 for the interpreter that runs trainkit, or call trainkit in the folder from which the program imports "
    r"it",
    r"ModuleNotFoundError": "install the missing package for the interpreter that runs trainkit",
    r"EADDRINUSE": "the rendezvous port was taken: run again, or name a free one with nodes.rendezvous",
    r"No space left on device": "the disk is full: point output.root at another one",
    # A worker thread lets go of its last work, which holds a Python object, when the interpreter is already ending.
    r"terminate called without an active exception": "most often a race in torch at a program's very end, between "
    "gloo's threads and the interpreter, on a CPU: let the script wait a moment after its last "
    "collective (time.sleep(1)), or end with os._exit(0)",
}


def by_trace(text: str) -> str:
    """What to do about the end of a log; empty where nothing in it is known."""
    for pattern, hint in TRACES.items():
        if found := next(iter([*re.finditer(pattern, text)][-1:]), None):  # what is said last ended the program
            return found.expand(hint) if "\\1" in hint else hint
    return ""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a program of some kinds does not run what was planned.

    differs: found in what differs. word, source: found in one of the program's words, or in its source; either is
    enough, and without both the difference alone tells. library: kind of program whose library the source must name.
    """

    kinds: tuple[str, ...]
    differs: str
    says: str
    word: str = ""
    source: str = ""
    library: str = ""


_ALONE = r"no wrapper keeps|nothing keeps"
CAUSES: tuple[Cause, ...] = (
    *(
        Cause(
            ("torch",),
            r"(?:world size|strategy) \w+ was planned",
            f"the script is on {library}{{by}}, which program.kind: {kind} tells what is planned",
            source=rf"\b{library}\(",
            library=kind,
        )
        for library, kind in (("Trainer", "hf"), ("Accelerator", "accelerate"))
    ),
    # accelerate, state.py: AcceleratorState.__init__ reads ACCELERATE_USE_DEEPSPEED `and not cpu`
    Cause(
        ("accelerate",),
        r"strategy (?:zero\d|fsdp) was planned, and (?:ddp|single|no wrapper|this rank)",
        "Accelerator(cpu=True){by} leaves DeepSpeed and FSDP out: leave it away, or plan strategy.kind: ddp",
        r"--(?:use_)?cpu",
        r"Accelerator\([^)]*\bcpu\s*=\s*True",
    ),
    Cause(
        ("accelerate",),
        r"strategy \w+ was planned",
        "the script makes a plugin of its own{by}, which counts instead of what it is told",
        source=r"(?:DeepSpeedPlugin|FullyShardedDataParallelPlugin)\(",
    ),
    Cause(
        ("accelerate",),
        rf"strategy ddp was planned, and .*(?:{_ALONE})",
        "the model, or its optimizer, did not go through accelerator.prepare()",
    ),
    Cause(
        ("accelerate",),
        r"dtype \w+ was planned",
        "the script says Accelerator(mixed_precision=…) itself{by}, which counts instead of what it is told",
        r"--mixed_precision.*",
        r"Accelerator\([^)]*\bmixed_precision\s*=",
    ),
    Cause(
        ("deepspeed",),
        r"strategy zero\d was planned",
        "deepspeed.initialize gets a configuration that is made in the script{by}, not the file of --deepspeed_config",
        source=r"\bconfig(?:_params)?\s*=\s*(?:\{|dict\()|\b(?:ds_config|deepspeed_config)\s*=\s*\{",
    ),
    Cause(
        ("hf", "accelerate", "torch"),
        r"device cuda was planned, and it is cpu",
        "the program is told to stay on the CPU{by}",
        r"--(?:use_)?cpu|--no[_-]cuda|--device=?cpu",
    ),
    Cause(
        ("torch",),
        r"world size \d+ was planned, and it is 1",
        "no process group is formed (torch.distributed.init_process_group), so each rank trains a copy by itself",
    ),
    Cause(
        ("torch",),
        rf"strategy ddp was planned, and .*(?:{_ALONE})",
        "the model is not wrapped in DistributedDataParallel",
    ),
)


def causes_of(differences: str, layout: RunLayout) -> list[str]:
    """What most likely made a program run something else than planned, as its words and its source tell."""
    run = read_run(layout.root)
    kind, source = run.launched.get("program", ""), _source(run.argv)
    for cause in CAUSES:
        if kind in cause.kinds and re.search(cause.differs, differences):
            by = next(_told_by(cause, run.argv, source), None)
            if by is not None:
                return [cause.says.format(by=by)]
    return []


def _told_by(cause: Cause, argv: Sequence[str], source: str) -> Iterator[str]:
    """Where the cause shows itself; nothing where it does not."""
    if cause.library and not names_library(source, PROGRAMS[cause.library].DETECTION):  # Lightning has a Trainer, too
        return
    if not cause.word and not cause.source:
        yield ""
    yield from (f" by {word}" for word in argv if cause.word and re.fullmatch(cause.word, word))
    if cause.source and (found := re.search(cause.source, source)):
        yield f" ({argv[0]}:{source.count(chr(10), 0, found.start()) + 1})"


def _source(argv: Sequence[str]) -> str:
    """The text of the script; empty for a module, or where it cannot be read."""
    try:
        return Path(argv[0]).read_text(encoding="utf-8", errors="replace") if argv and argv[0].endswith(".py") else ""
    except OSError:
        return ""
