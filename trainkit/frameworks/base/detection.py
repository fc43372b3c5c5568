"""What kind of program a script is, as its source tells; where there is no source, the flags behind its name.

A script that is there is the same kind whatever its flags. Programs are read, never imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainkit.frameworks.base.argv_reader import script_flags
from trainkit.frameworks.base.draft import ImportContext
from trainkit.frameworks.base.interface import Detection
from trainkit.frameworks.base.python_source import MOST, PythonSource, module_file, names_used, read_source
from trainkit.frameworks.registry import PROGRAMS
from trainkit.recipe.layers.paths import absolute, seen_from

LEVELS = 3  # of imports below the files that a script imports


@dataclass(frozen=True, slots=True)
class DetectedKind:
    """kind: of the program, empty where nothing tells. by: what tells; of no kind, the library that the program uses in
    its own way. remark: why it is not another."""

    kind: str = ""
    by: str = ""
    remark: str = ""


def program_kind(
    context: ImportContext,
    argv: Sequence[str],
    otherwise: str = "torch",
    *,
    module: bool = False,
    told: Collection[str] = (),
) -> DetectedKind:
    """What kind of program a script or module with these arguments is; `otherwise` where nothing tells.

    told: what a file in their place says, by the names of flags.
    """
    path = module_file(context, argv[0]) if module else absolute(argv[0], context.cwd)
    source = read_source(context, path) if path else None
    if source is not None and source.imports:
        given = frozenset(f"--{flag.name}" for flag in script_flags(argv[1:]))
        found = _kind_of(context, source, argv[0], given)
        if found.kind:
            return found
        # accelerate's launcher starts any program, and tells Accelerator() alone, which Trainer makes itself.
        if otherwise == "accelerate" and not _names([found.by.partition(" in ")[0]], "hf"):
            otherwise = "torch"
        return DetectedKind(otherwise, "", found.remark or _doubt(argv[1:], otherwise))
    kind, flag = _kind_by_flags(argv, told)
    if kind:
        return DetectedKind(kind, f"--{flag}")
    return DetectedKind(otherwise, "", _doubt(argv[1:], otherwise))


def names_library(text: str, detection: Detection) -> bool:
    """Whether a Python text names the library of a kind of programs."""
    return any(fnmatchcase(name, wanted) for name in names_used(text) for wanted in detection.imports)


def _kind_of(context: ImportContext, source: PythonSource, name: str, given: frozenset[str]) -> DetectedKind:
    """What the source uses, else what the files of the same program use that it imports.

    given: flags of the command, each of which shows that the program has it.
    """
    beside = _imported(context, [source])
    everywhere = source.used.union(given, *(each.used for each in beside))
    for each, shown in ((source, name), *((each, seen_from(context.cwd, each.path)) for each in beside)):
        found = _kind_by_names(each.used, everywhere, shown)
        if found.kind or found.remark:
            return found if each is source else DetectedKind(found.kind, found.by and f"{found.by} in {shown}")
    return _further_down(context, [source, *beside])


def _further_down(context: ImportContext, known: list[PythonSource]) -> DetectedKind:
    """Some levels down the program's package: Accelerator(); and beside their parser, Trainer's arguments."""
    parses = not _unread(PROGRAMS["hf"].DETECTION, (name for each in known for name in each.used))
    for _ in range(LEVELS):
        new = _imported(context, known)
        for kind in ("hf", "accelerate") if parses else ("accelerate", "hf"):
            for each in new:
                if found := _names(each.used, kind):
                    by = f"{found[0]} in {seen_from(context.cwd, each.path)}"
                    return DetectedKind(kind if parses or kind == "accelerate" else "", by)
        known = known + new
    return DetectedKind()


def _imported(context: ImportContext, sources: list[PythonSource]) -> list[PythonSource]:
    """The files of the same program that these import, without these."""
    paths = dict.fromkeys(path for each in sources for path in each.local)
    new = [path for path in paths if path not in {each.path for each in sources}][:MOST]
    return [each for path in new if (each := read_source(context, path)) is not None]


def _names(used: Iterable[str], kind: str) -> list[str]:
    """The names among these that tell of a kind."""
    wanted = PROGRAMS[kind].DETECTION.imports
    return sorted(name for name in used if any(fnmatchcase(name, each) for each in wanted))


def _kind_by_names(used: Iterable[str], everywhere: Iterable[str], shown: str) -> DetectedKind:
    # The registry's order is from the outermost library: Trainer uses the others by itself.
    for kind, program in PROGRAMS.items():
        found = _names(used, kind)
        if found and (how := _unread(program.DETECTION, everywhere)):
            library = program.DETECTION.library
            remark = f"{shown} uses {found[0]} {how}: settings of {library} do not reach it."
            return DetectedKind(by=found[0], remark=remark)
        if found:
            return DetectedKind(kind, found[0])
    return DetectedKind()


def _unread(detection: Detection, used: Iterable[str]) -> str:
    """How a program takes its settings, where not from its command line; empty where it does."""
    parsers, names = detection.parsers, {name.rpartition(".")[2] for name in used}
    if parsers and not names & parsers:
        return f"without {min(each for each in parsers if not each.startswith('--'))}"
    of_file = names & detection.of_file
    return f"with {min(of_file)} alone" if of_file and not names & detection.of_line else ""


def _kind_by_flags(argv: Sequence[str], told: Collection[str]) -> tuple[str, str]:
    """The kind and the flag that tells; empty where none does."""
    flags = {each.name: each for each in script_flags(argv[1:]) if each.name}
    for kind, program in PROGRAMS.items():
        found = sorted(program.DETECTION.flags & {*flags, *told})
        # transformers' examples come in pairs: run_glue.py on Trainer, run_glue_no_trainer.py on Accelerator().
        if found and (kind != "hf" or "no_trainer" not in argv[0]):
            return kind, found[0]
        if kind == "hf" and "deepspeed" in flags and flags["deepspeed"].values:
            return "hf", "deepspeed"  # Trainer's takes a file, DeepSpeed's own is a switch
    return "", ""


def _doubt(argv: Sequence[str], taken: str) -> str:
    """A remark on a flag that a library has too, which the script is not taken to be on; empty without one."""
    for flag in script_flags(argv):
        for kind, program in PROGRAMS.items():
            if kind != taken and flag.name in program.DETECTION.shared:
                library = program.DETECTION.library
                return (
                    f"--{flag.name} is also a flag of {library}: import with --kind {kind} where the script is on it."
                )
    return ""
