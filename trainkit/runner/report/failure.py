"""What a user reads after a failed run: the reason, the end of the log, the likely cause, and what to do next."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.errors import refusal_in
from trainkit.files import is_there, read_json
from trainkit.runner.report.exit_status import KILLED, Verdict
from trainkit.runner.report.progress import last_lines
from trainkit.runner.rundir.layout import AttemptLayout, RunLayout
from trainkit.runner.rundir.listing import checkpoints_of, read_run
from trainkit.runner.rundir.records import REMOVED, SAYS, RankRecord, read_observations, read_records
from trainkit.text import join_names, pluralize
from trainkit.tools.base.detection import names_library
from trainkit.tools.registry import PROGRAMS

MEMORY = "the GPU's memory is full: lower batch.micro; `trainkit estimate` with this recipe shows what else helps"
_NO_GPU = "the script uses CUDA, and this run has no GPU: check torch.cuda.is_available() in the script, or select GPUs"
_OF_A_LAUNCHER = r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
_FROM_A_LAUNCHER = (
    r"the script reads \1, which a launcher sets: put launcher.kind=torchrun or --nproc_per_node in front"
)
_ARGUMENTS = "`trainkit plan` shows every argument of the program, and `trainkit explain` where each comes from"
# Pattern for the end of a log -> what to do, with the pattern's groups; the first match is shown.
TRACES: dict[str, str] = {
    r"CUDA out of memory": MEMORY,
    r"OutOfMemoryError": MEMORY,
    rf"environment variable {_OF_A_LAUNCHER} expected": _FROM_A_LAUNCHER,
    rf"KeyError: '{_OF_A_LAUNCHER}'": _FROM_A_LAUNCHER,
    r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs": "the script asks for NCCL, which needs "
    "NVIDIA GPUs: on a CPU it must use gloo",
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available": _NO_GPU,
    r"are required: .*--local[-_]rank": "program.local_rank: true passes it",
    r"unrecognized arguments: .*--local[-_]rank": "program.local_rank: false leaves it out; torchrun and trainkit set "
    "LOCAL_RANK in the environment",
    r"unrecognized arguments: (.*)": rf"the program has no such argument (\1): {_ARGUMENTS}",
    r"Accelerator\.__init__\(\) got an unexpected keyword argument '(fp16|bf16)'": r"Accelerator no longer takes \1: "
    r"leave it out, or write mixed_precision='\1', and say precision: \1 to trainkit",
    r"has no attribute '(to|reverse)_bettertransformer'": "transformers no longer has it: leave the call out, "
    "attention is PyTorch's scaled_dot_product_attention without it (attn_implementation='sdpa')",
    r"not used by the HfArgumentParser: \[(.*)\]": rf"the program has no such argument (\1): {_ARGUMENTS}",
    r"partially initialized module '([\w.]+)'": r"a file beside the script may shadow a module that it, or "
    r"\1, imports: rename it",
    # Libraries also mention optional modules.
    r"(?m)^(?:\[rank\d+\]: )?\w+Error: No module named '([\w.]+)'": r"install the package that "
    r"provides \1 for the interpreter that runs trainkit, or start trainkit in the folder from which the program "
    r"imports it",
    r"ModuleNotFoundError": "install the missing package for the interpreter that runs trainkit",
    r"EADDRINUSE": "the rendezvous port was taken: run again, or name a free one with nodes.rendezvous",
    r"No space left on device": "the disk is full: point output.root at another one",
    # A worker thread frees its last work, which holds a Python object, when the interpreter is already ending.
    r"terminate called without an active exception": "usually a race in torch at the very end of a program, between "
    "gloo's threads and the interpreter, on a CPU: let the script wait a moment after its last "
    "collective (time.sleep(1)), or end with os._exit(0)",
}


def by_trace(text: str) -> str:
    """What to do about an error at the end of a log; empty if none is recognised."""
    for pattern, hint in TRACES.items():
        if found := [*re.finditer(pattern, text)]:
            return found[-1].expand(hint) if "\\1" in hint else hint  # the last error ended the program
    return ""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why programs of some kinds do not run what was planned.

    differs: pattern for the difference. word, source: patterns for an argument of the program and for its source. One
    match is enough; with neither pattern the difference alone is. library: kind of program whose library the source
    must name.
    """

    kinds: tuple[str, ...]
    differs: str
    says: str
    word: str = ""
    source: str = ""
    library: str = ""


_ALONE = r"no wrapper synchronises|is not synchronised"
CAUSES: tuple[Cause, ...] = (
    *(
        Cause(
            ("torch",),
            r"(?:world size|strategy) \w+ was planned",
            f"the script uses {library}{{by}}, which gets the plan only with program.kind: {kind}",
            source=rf"\b{library}\(",
            library=kind,
        )
        for library, kind in (("Trainer", "hf"), ("Accelerator", "accelerate"))
    ),
    # accelerate, state.py: AcceleratorState.__init__ reads ACCELERATE_USE_DEEPSPEED `and not cpu`
    Cause(
        ("accelerate",),
        r"strategy (?:zero\d|fsdp) was planned, and (?:ddp|single|no wrapper|this rank)",
        "Accelerator(cpu=True){by} disables DeepSpeed and FSDP: remove it, or plan strategy.kind: ddp",
        r"--(?:use_)?cpu",
        r"Accelerator\([^)]*\bcpu\s*=\s*True",
    ),
    Cause(
        ("accelerate",),
        r"strategy \w+ was planned",
        "the script creates its own plugin{by}, which overrides what trainkit passes",
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
        "the script sets Accelerator(mixed_precision=…) itself{by}, which overrides what trainkit passes",
        r"--mixed_precision.*",
        r"Accelerator\([^)]*\bmixed_precision\s*=",
    ),
    Cause(
        ("deepspeed",),
        r"strategy zero\d was planned",
        "deepspeed.initialize gets a configuration built in the script{by}, not the file of --deepspeed_config",
        source=r"\bconfig(?:_params)?\s*=\s*(?:\{|dict\()|\b(?:ds_config|deepspeed_config)\s*=\s*\{",
    ),
    Cause(
        ("hf", "accelerate", "torch"),
        r"device cuda was planned, and it is cpu",
        "the program is kept on the CPU{by}",
        r"--(?:use_)?cpu|--no[_-]cuda|--device=?cpu",
    ),
    Cause(
        ("torch",),
        r"world size \d+ was planned, and it is 1",
        "there is no process group (torch.distributed.init_process_group), so each rank trains a separate copy",
    ),
    Cause(
        ("torch",),
        rf"strategy ddp was planned, and .*(?:{_ALONE})",
        "the model is not wrapped in DistributedDataParallel",
    ),
)


def causes_of(differences: str, layout: RunLayout) -> list[str]:
    """The most likely reasons why a program differs from the plan, from its arguments and its source."""
    run, source = read_run(layout.root), ""
    with contextlib.suppress(OSError):
        if run.argv and run.argv[0].endswith(".py"):
            source = Path(run.argv[0]).read_text(encoding="utf-8", errors="replace")

    def shown_by(cause: Cause) -> Iterator[str]:
        if cause.library and not names_library(
            source, PROGRAMS[cause.library].DETECTION
        ):  # Lightning has a Trainer too
            return
        if not cause.word and not cause.source:
            yield ""
        yield from (f" by {word}" for word in run.argv if cause.word and re.fullmatch(cause.word, word))
        if cause.source and (found := re.search(cause.source, source)):
            yield f" ({run.argv[0]}:{source.count(chr(10), 0, found.start()) + 1})"

    for cause in CAUSES:
        if run.launched.get("program", "") in cause.kinds and re.search(cause.differs, differences):
            for by in shown_by(cause):
                return [cause.says.format(by=by)]
    return []


LINES = 20
_TRACEBACK = "Traceback (most recent call last)"
_PLACE = '  File "'  # the first line below it
_MARK = re.compile(r"^\[rank\d+\]:? ?")  # torch's prefix of each line
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
# Exit code of a failed rank -> what to look at. 128+n is signal n.
HINTS: dict[int, str] = {
    126: "make the program executable (chmod +x FILE); a Python script's name must end in .py",
    127: "check the program's path, which is relative to the folder where trainkit was started",
    132: "an illegal instruction: a library was built for another processor",
    134: "the program aborted: a C++ library or CUDA found an error; its message is above",
    135: "a bus error: shared memory (/dev/shm) may be full; lower data.workers or enlarge it",
    137: "something outside the run sent KILL: often the kernel, because memory ran out (see dmesg)",
    139: "a segmentation fault in a compiled library; PYTHONFAULTHANDLER=1 under env shows where",
}
LOST_NODE = "check that this machine is up and reachable; the failures on other nodes are consequences"
NOT_AS_PLANNED = (
    "make the plan and the program agree. Only the first torch optimizer that steps is checked: "
    "if there is none, or it is not the model's, set program.verify to false"
)


def describe_failure(verdict: Verdict, attempt: AttemptLayout, shown_rank: int | None) -> str:
    """A few lines for standard error. shown_rank: the rank whose output the user has seen already."""
    attempt = replace(attempt, node=verdict.node)
    outcome = "was ended" if verdict.failure in ("signal", "submitter") else "failed"
    failed = list[RankRecord]()  # of all nodes
    with contextlib.suppress(OSError):  # the run directory has been removed, or its disk fails
        failed = sorted((each for each in read_records(str(attempt.root)) if each.failed), key=lambda each: each.rank)
    alike = _alike(verdict.rank, attempt, failed) if verdict.rank is not None else []
    lines = [f"the run {outcome}: {_why(verdict, failed, shown_rank)}", *_others(verdict, failed, alike, shown_rank)]
    if verdict.failure == "program" and verdict.exit_code in (2, 3, 4):  # trainkit uses this code too: say whose it is
        lines.append(f"exit code {verdict.exit_code} is the program's own")
    log = _log(verdict, attempt)
    end = last_lines(log, LINES) if log is not None else []
    # Output that the user has just read on the terminal is not repeated.
    killed = verdict.failure == "launcher" and verdict.exit_code == KILLED  # its last output does not show the reason
    if end and shown_rank not in alike and not killed:
        lines += [f"the last lines of {log}:", *(f"  | {line}" for line in end)]
    elif log is not None:
        lines.append(f"its log: {log}")
    if unlogged := [line for each in failed if each.rank == verdict.rank for line in each.unlogged.splitlines()]:
        lines += ["its last output, which could not be written to its log:", *(f"  | {line}" for line in unlogged)]
    # The only trace of a wrapper that could not write into the run directory.
    refused = [line for line in last_lines(attempt.launcher_log) if line.startswith(SAYS)]
    said = [*lines, verdict.why]
    lines += [each for each in dict.fromkeys(refused) if not any(each.partition(": ")[2] in line for line in said)]
    shown_end, hint = "\n".join([*end, *unlogged, *refused]), NOT_AS_PLANNED if verdict.failure == "plan" else ""
    if verdict.failure in ("program", "rank", "launcher", "preparation"):
        hint = by_trace(shown_end) or _hint(verdict)
    # A launcher fails at its first error, then again in its clean-up: the first one counts.
    if verdict.failure == "launcher" and (met := refusal_in(last_lines(attempt.launcher_log))):
        lines, hint = [*lines, f"first error in {attempt.launcher_log.name}: {met[0]}"], by_trace(shown_end) or met[1]
    if verdict.failure == "node":
        hint = LOST_NODE
    run = RunLayout(attempt.root.parent.parent)
    if verdict.failure == "plan":
        lines += [f"most likely: {cause}" for cause in causes_of(verdict.why, run)]
    if hint:
        lines.append(f"next: {hint}")
    # A job that is queued again continues by itself, and prints that.
    if not read_json(run.status).get("job") and (saved := checkpoints_of(run)):
        again = "the same command with --resume_from_checkpoint true"
        lines.append(f"next: to continue after step {saved[0].step}, run {again}")
    return "\n".join(lines)


def _hint(verdict: Verdict) -> str:
    """The hint for this exit code; none if the reason already names the signal from outside."""
    killed = verdict.signal == signal.SIGKILL or (verdict.failure == "program" and verdict.signal is None)
    other = verdict.exit_code == KILLED and not killed
    return "" if other else HINTS.get(verdict.exit_code, "")


def _why(verdict: Verdict, failed: Sequence[RankRecord], shown_rank: int | None) -> str:
    """The reason; shorter if the rank that was shown has printed the same one."""
    given = {each.rank: each.not_as_planned for each in failed} if verdict.failure == "plan" else {}
    said = given.get(shown_rank) if shown_rank is not None else None
    if said and verdict.why.endswith(f": {said}"):
        return f"{verdict.why.removesuffix(f': {said}')} (see above)"
    return verdict.why


def _others(verdict: Verdict, failed: Sequence[RankRecord], alike: Sequence[int], shown_rank: int | None) -> list[str]:
    """The other ranks that failed by themselves: counted, and not quoted."""
    if verdict.failure != "program" or verdict.rank is None:
        return []
    found, same = list[str](), set(alike)
    if len(alike) > 1:
        found.append(f"{len(alike)} ranks failed in the same way: {join_names([*map(str, alike)])}")
    others = [each.rank for each in failed if not each.told_to_stop and each.rank not in same]
    if others:
        above = f" (the output above is that of rank {shown_rank})" if shown_rank in others else ""
        shown = f"{join_names([*map(str, others)])}{above}"
        found.append(f"{pluralize(len(others), 'rank')} failed after it, in another way: {shown}")
    return found


def _alike(rank: int, attempt: AttemptLayout, failed: Sequence[RankRecord]) -> list[int]:
    """The ranks whose last lines differ from this one's only in numbers, with the rank itself.

    A launcher stops the others when the first one fails: a rank that was ended by a signal has failed in the same way
    only if it has printed why.
    """
    unlogged = {each.rank: each.unlogged for each in failed}
    words = last_words(attempt, rank, unlogged.get(rank, ""))
    says_why = bool(words) and words[0].startswith(_PLACE)
    ended = [each.rank for each in failed if words and (each.signal is None or says_why)]
    return sorted({rank, *(each for each in ended if last_words(attempt, each, unlogged[each]) == words)})


def last_words(attempt: AttemptLayout, rank: int, unlogged: str = "") -> tuple[str, ...]:
    """A rank's last traceback, else its last lines, without numbers, which differ between ranks."""
    lines = [_MARK.sub("", line) for line in (*last_lines(attempt.log(rank, "err")), *unlogged.splitlines())]
    starts = [position for position, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if starts:
        block = lines[starts[-1] + 1 :]
        end = next((position for position, line in enumerate(block) if line[:1].strip()), len(block))
        lines = block[: end + 1]
    return tuple(_NUMBER.sub("0", line) for line in lines[-LINES:])


def remarks(attempt: AttemptLayout, verdict: Verdict) -> list[str]:
    """Messages of the ranks' wrappers, however the ranks ended, and why a run was not as planned."""
    try:
        records = list(read_records(str(attempt.root)))
    except OSError:  # the run directory has been removed, or its disk fails
        gone = False
        with contextlib.suppress(OSError):  # a closed folder may be there
            gone = not is_there(attempt.ranks) and REMOVED not in verdict.why
        return [f"warning: {REMOVED}: what was written there is gone"] if gone else []
    found = [f"rank {record.rank}: {record.message}" for record in records if record.message and record.pid]
    accounts = read_observations(str(attempt.root)).values()
    warned = next(("; ".join(each.warnings) for each in accounts if each.warnings), "")
    causes = causes_of(warned, RunLayout(attempt.root.parent.parent)) if warned else ()
    return found + [f"most likely: {cause}" for cause in causes]


def log_of_rank(attempt: AttemptLayout, rank: int) -> Path | None:
    """The file of a rank's errors, or of its output where it has written none; None where it has written nothing."""
    logs = (attempt.log(rank, stream) for stream in ("err", "out"))
    return next((log for log in logs if last_lines(log, 1)), None)


def _log(verdict: Verdict, attempt: AttemptLayout) -> Path | None:
    if verdict.failure in ("program", "rank") and verdict.rank is not None:
        return log_of_rank(attempt, verdict.rank)
    if verdict.failure == "launcher":
        return attempt.launcher_log
    return attempt.preparation_log if verdict.failure == "preparation" else None
