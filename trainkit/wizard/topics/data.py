"""Which text the built-in trainer reads."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.recipe.layers.paths import absolute
from trainkit.wizard.question import AnswerError, Question, Settings, Topic, View

# By the ending of a file: the kind of data that reads it.
DATA_KINDS: Mapping[str, str] = {".jsonl": "jsonl", ".npy": "tokens"}
WILD = frozenset("*?[")
# What `save_to_disk` of Hugging Face's datasets leaves in a folder, and what else that kind of data reads.
SAVED = ("dataset_dict.json", "state.json")
ROWS = (".parquet", ".jsonl")


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


DATA = Topic(
    "data", ("data.path", "data.kind", "data.target"), _is_text, _data, _read_data, ("data.path", "data.include")
)
