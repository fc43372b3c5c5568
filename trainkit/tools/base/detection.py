"""What a Python file names of libraries, and which other files of its program it imports: read, never executed."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainkit.recipe.paths import absolute, seen_from
from trainkit.tools.base.imported_recipe import ImportContext
from trainkit.tools.base.interface import Detection
from trainkit.tools.base.launcher_flags import script_flags
from trainkit.tools.registry import PROGRAMS

LARGEST = 2_000_000  # bytes of a file that is worth parsing
MOST = 24  # files of the same program that are looked at
ANCESTORS = 6  # folders above a script in which its package may begin
INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class PythonSource:
    """path: absolute. local: files of the same program.

    used: dotted names of libraries (`transformers.Trainer`), methods that parse (`.parse_args`), and the flags that
    stand in the text (`--lr`).

    imports: whether it imports anything; what imports nothing tells nothing.
    """

    path: str
    used: frozenset[str]
    local: tuple[str, ...]
    imports: bool


def read_source(context: ImportContext, path: str) -> PythonSource | None:
    """The file; None where it cannot be read, or is no Python."""
    try:
        text = context.files.read(path)
        tree = ast.parse(text) if len(text) <= LARGEST else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if tree is None:
        return None
    nodes = list(_walked(tree))
    imports = [
        node
        for node in nodes
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__")
    ]
    local = dict.fromkeys(file for node in imports for file in _files(context, path, node))
    return PythonSource(path, frozenset(_used(nodes)), tuple(local)[:MOST], bool(imports))


def names_used(text: str) -> frozenset[str]:
    """Dotted names of libraries in a Python text, as `PythonSource.used` has them; none where it is no Python."""
    try:
        return frozenset(_used(list(_walked(ast.parse(text)))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()


def module_file(context: ImportContext, name: str) -> str:
    """The file that `python -m name` would run, in the folder or installed; empty where it is not found."""
    folders = (context.cwd, *context.library)  # in the order of sys.path
    return next((file for folder in folders if (file := _module(context, folder, name))), "")


def package_folder(context: ImportContext, name: str) -> str:
    """The folder of an installed package; empty where it is not installed."""
    places = (posixpath.join(folder, name) for folder in context.library)
    return next((each for each in places if context.files.exists(posixpath.join(each, "__init__.py"))), "")


def _module(context: ImportContext, folder: str, name: str) -> str:
    """The file of a module below a folder; a package is run by its __main__."""
    place = posixpath.join(folder, *name.split("."))
    candidates = (f"{place}.py", posixpath.join(place, "__main__.py"))
    return next((each for each in candidates if context.files.exists(each)), "")


def _walked(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node, but for what only type checkers read."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in (getattr(node.test, name, "") for name in ("id", "attr")):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def _used(nodes: list[ast.AST]) -> Iterator[str]:
    """Dotted names of what is imported, or reached through an imported module, methods that parse, and flags."""
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module.partition('.')[0]}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            yield node.value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("parse_"):
            yield f".{node.attr}"


def _files(context: ImportContext, path: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The files of the same program that an import reads."""
    folder = posixpath.dirname(path)
    if isinstance(node, ast.ImportFrom) and node.level:
        for _ in range(node.level - 1):
            folder = posixpath.dirname(folder)
        yield from _named(context, folder, node.module or "", [each.name for each in node.names])
        return
    inner = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
    for name in names:
        root = _root(context, folder, name)
        if root:
            yield from _named(context, root, name, inner)


def _root(context: ImportContext, folder: str, name: str) -> str:
    """The folder in which a package or module of the same program lies; empty for a library."""
    top, path = name.partition(".")[0], name.replace(".", "/")
    ends = dict.fromkeys((f"{top}.py", f"{top}/__init__.py", f"{path}.py", f"{path}/__init__.py"))
    here, own = absolute(folder, context.cwd), set[str]()
    for _ in range(ANCESTORS):
        # Of what is installed only the package that the file belongs to is the same program.
        is_library = posixpath.basename(here) in INSTALLED and top not in own
        if not is_library and any(context.files.exists(posixpath.join(here, end)) for end in ends):
            return here
        own.add(posixpath.basename(here))
        here = posixpath.dirname(here)
    return context.cwd if any(context.files.exists(posixpath.join(context.cwd, end)) for end in ends) else ""


def _named(context: ImportContext, root: str, name: str, inner: list[str]) -> Iterator[str]:
    """The file of a module, and of those below it that are imported by name."""
    place = posixpath.join(root, *filter(None, name.split(".")))
    for each in (f"{place}.py", posixpath.join(place, "__init__.py"), *(f"{place}/{one}.py" for one in inner)):
        if context.files.exists(each):
            yield each


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
