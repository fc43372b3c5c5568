"""What is executed, and on what it trains: the program, its command line, the built-in trainer's data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainkit.recipe.layers.paths import absolute
from trainkit.wizard.question import AnswerError, Question, Settings, Topic, View, offered

# By the ending of a file: the kind of data that reads it.
DATA_KINDS: Mapping[str, str] = {".jsonl": "jsonl", ".npy": "tokens"}
WILD = frozenset("*?[")
# What `save_to_disk` of Hugging Face's datasets leaves in a folder, and what else that kind of data reads.
SAVED = ("dataset_dict.json", "state.json")
ROWS = (".parquet", ".jsonl")


def _kinds(view: View) -> Question:
    why = (
        "trainkit's own trainer reads the whole recipe. A script of yours is started unedited, in as many "
        "processes as you choose, and gets what its kind says."
    )
    kinds = offered(view, "program.kind", lambda kind: view.meaning("program.kind", kind))
    default, source = str(view.get("program.kind")), view.base.name or "no script needed"
    return Question("What do the processes execute?", (why,), kinds, default, source)


def _command(view: View) -> Question:
    script, module, args = (view.get(f"program.{name}") for name in ("script", "module", "args"))
    target = [script] if script else ["-m", module] if module else []
    written = shlex.join([*target, *(args if isinstance(args, list) else ())]) if target else ""
    why = (
        "What you would type behind `python`: train.py --epochs 3, or -m package.module. The words reach the "
        "program exactly as they are; quote them as in a shell."
    )
    source = view.base.name if written else ""
    return Question("Which script, with which arguments?", (why,), (), written, source, "train.py --lr 0.1")


def _read_command(view: View, text: str) -> tuple[Settings, str]:
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise AnswerError(f"the quotes do not match: {error}", "write the words as in a shell") from error
    # Pasted from a shell line; which interpreter starts it is the plan's to say.
    if argv[:1] in (["python"], ["python3"]):
        argv = argv[1:]
    if not argv:
        raise AnswerError("no script is named", "write what you would type behind `python`: train.py --lr 0.1")
    if argv == ["-m"]:
        raise AnswerError("no module is named behind -m", "write -m package.module")
    key, first = ("program.module", 1) if argv[0] == "-m" else ("program.script", 0)
    sets: dict[str, object] = {key: argv[first]}
    if argv[first + 1 :] or view.get("program.args"):
        sets["program.args"] = argv[first + 1 :]
    return sets, "started unedited"


def _data(view: View) -> Question:
    why = (
        "A text file, a folder with a pattern (corpus/**/*.txt), rows in JSON lines (*.jsonl), a folder of rows "
        "(rows/*.parquet), or token ids (*.npy). python-stdlib is 12 MB of source code that every Python brings "
        "along: good for a first try."
    )
    source = view.base.name or "always there"
    return Question("What text does it train on?", (why,), (), str(view.get("data.path")), source, "corpus.txt")


def _read_data(view: View, text: str) -> tuple[Settings, str]:
    if text == "python-stdlib":
        return {"data.kind": "text", "data.path": text}, "source code that every Python brings along"
    # A pattern begins at the first part with a wild card in it; what is above is the folder.
    parts = text.split("/")
    wild = next((index for index, part in enumerate(parts) if WILD & {*part}), len(parts))
    pattern = "/".join(parts[wild:])
    folder = "/".join(parts[:wild]) or ("/" if text.startswith("/") else ".")
    if pattern.endswith(ROWS) or any(view.files.exists(absolute(f"{text}/{name}", view.cwd)) for name in SAVED):
        return {"data.kind": "dataset", "data.path": folder}, view.meaning("data.kind", "dataset")
    if pattern:
        return {"data.kind": "text", "data.path": folder, "data.include": pattern}, "every file that fits the pattern"
    try:
        view.files.read(absolute(text, view.cwd))
    except IsADirectoryError as error:
        raise AnswerError(f"{text} is a folder", f"name files in it: {text.rstrip('/')}/**/*.txt") from error
    except OSError:
        pass  # the planner says what is wrong with a file
    kind = next((kind for ending, kind in DATA_KINDS.items() if text.endswith(ending)), "text")
    return {"data.kind": kind, "data.path": text}, view.meaning("data.kind", kind)


def _is_text(view: View) -> bool:
    return view.builtin and view.get("data.kind") == "text" and not isinstance(view.get("data.path"), list)


PROGRAM = Topic("program", ("program.kind",), lambda view: True, _kinds, planned=False)
COMMAND_KEYS = ("program.script", "program.module", "program.args")
COMMAND = Topic("command", COMMAND_KEYS[:-1], lambda view: not view.builtin, _command, _read_command, COMMAND_KEYS)
DATA = Topic(
    "data", ("data.path", "data.kind", "data.target"), _is_text, _data, _read_data, ("data.path", "data.include")
)
