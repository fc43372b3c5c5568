"""What a Python file names of libraries, and which other files of its program it imports: read, never executed."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from trainkit.frameworks.base.draft import ImportContext
from trainkit.recipe.layers.paths import absolute

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
