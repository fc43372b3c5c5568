"""`trainkit generate`: what a trained model answers, to a prompt, to a file of prompts, or in a chat."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trainkit.cli.commands.export import find_checkpoint
from trainkit.cli.diagnostics import show_diagnostics
from trainkit.cli.file_system import writing
from trainkit.cli.options import Force, Json, Root
from trainkit.distribution import install
from trainkit.errors import Diagnostic, MachineError, Origin, UsageError, first_line
from trainkit.files import is_there
from trainkit.lora import CONFIG as ADAPTERS
from trainkit.text import strip_control
from trainkit.trainer.prompts import PromptError

if TYPE_CHECKING:
    from trainkit.trainer.generate import Answer, Answerer, Sampling

_OTHER_FILE = "name another file"
_FORMS = 'write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]} on each line'


def generate(  # noqa: PLR0917 - a command's options
    source: Annotated[
        str,
        Argument(
            metavar="RUN_OR_FOLDER",
            help="A run directory, a run's id or name, a checkpoint folder; or a folder of transformers or peft, as "
            "`trainkit export` writes it.",
        ),
    ],
    prompt: Annotated[
        str | None,
        Argument(metavar="[PROMPT]", help="Default: a chat on a terminal, else the text on standard input."),
    ] = None,
    file: Annotated[
        str | None,
        Option("--file", metavar="FILE", help="Prompts: one a line, or JSON lines (*.jsonl) with prompt or messages."),
    ] = None,
    output: Annotated[str | None, Option("--output", metavar="FILE", help="Write the answers as JSON lines.")] = None,
    force: Force = False,
    as_json: Json = False,
    system: Annotated[str, Option("--system", metavar="TEXT", help="System message of chats without one.")] = "",
    plain: Annotated[bool, Option("--plain", help="Continue the prompt as it is, without the chat template.")] = False,
    temperature: Annotated[
        float | None,
        Option("--temperature", min=0, help="0 takes the likeliest token. Default: the model's own, else 0.7."),
    ] = None,
    top_p: Annotated[
        float | None,
        Option("--top-p", min=0, max=1, help="Draw from the likeliest tokens with this probability together."),
    ] = None,
    tokens: Annotated[int, Option("--max-new-tokens", min=1, help="The most tokens of an answer.")] = 256,
    seed: Annotated[int, Option("--seed", min=0, help="The same seed draws the same answers.")] = 0,
    step: Annotated[int | None, Option("--checkpoint", metavar="STEP", help="The checkpoint of this step.")] = None,
    best: Annotated[bool, Option("--best", help="The checkpoint with the best evaluation.")] = False,
    device: Annotated[
        str | None,
        Option("--device", metavar="DEVICE", help="Default: a GPU, but none that may be training this run, or cpu."),
    ] = None,
    trust_code: Annotated[
        bool, Option("--trust-code", help="Import and run the code that the run names as its model (model.target).")
    ] = False,
    root: Root = "runs",
) -> None:
    """Let a trained model answer: a run's newest checkpoint, with adapters and chat template, or an exported folder.

    Without a prompt it is a chat: /reset starts it over, Ctrl-C ends an answer, Ctrl-D the chat.

    Example: trainkit generate quickstart "def " --max-new-tokens 40
    """
    if prompt is not None and file is not None:
        raise UsageError("a PROMPT and --file are given: which is to be answered?", hint="leave one of them out")
    chatting = prompt is None and file is None and sys.stdin.isatty() and sys.stdout.isatty()
    if chatting and (as_json or output):
        raise UsageError("--json and --output are for prompts, and none is given", hint="add a PROMPT or --file FILE")
    if output and is_there(output) and not force:
        raise UsageError(f"{output} exists", hint="name another file, or add --force")
    if output:
        with writing(Path(output), _OTHER_FILE):
            Path(output).parent.mkdir(parents=True, exist_ok=True)  # before a model is read
    rows = {} if chatting else _prompts(prompt, file)
    with _explained():
        model = _opened(source, root, step=step, best=best, device=device, trusted=trust_code)
        from trainkit.trainer.generate import Sampling

        sampling = Sampling(tokens, temperature, top_p, seed)
        if chatting:
            _chat(model, sampling, system, plain=plain)
            return
        wrong, read = [], {}
        for place, row in rows.items():
            try:
                read[place] = model.ids(row, system=system, plain=plain)
            except PromptError as error:
                wrong.append(Diagnostic("error", str(error), origin=place, hint=error.hint))
        if wrong:
            raise UsageError(wrong)
        with _opened_output(output) as out:
            if output or as_json:
                for row, answer in zip(rows.values(), model.answers(list(read.values()), sampling), strict=True):
                    out.write(json.dumps({**row, **_as_data(answer)}, ensure_ascii=False) + "\n")
                    out.flush()
                return
            for place, row in rows.items():
                if len(rows) > 1:
                    _write(f"> {row.get('prompt') or row['messages'][-1].get('content')}\n")
                _show(model.answer(read[place], sampling, _write))


@contextlib.contextmanager
def _opened_output(output: str | None) -> Iterator[IO[str]]:
    """The file that answers are written to, or standard output."""
    if not output:
        yield sys.stdout
        return
    with writing(Path(output), _OTHER_FILE), Path(output).open("w", encoding="utf-8") as out:
        yield out


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn a missing package and a GPU without memory into errors of the machine."""
    try:
        yield
    except ModuleNotFoundError as error:
        what = f"the module {error.name} is not installed, which reads the model"
        raise MachineError(what, hint=install(sys.executable, str(error.name).partition(".")[0])) from error
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise MachineError(first_line(error), hint="name another --device, such as cpu") from error


def _prompts(prompt: str | None, file: str | None) -> dict[Origin | None, dict[str, Any]]:
    """The prompts by their places. UsageError names every line that is none."""
    if file is None:
        text = _decoded("standard input", sys.stdin.buffer.read()).removesuffix("\n") if prompt is None else prompt
        if not text:
            raise UsageError("there is no prompt", hint="give a PROMPT, --file FILE, or one on standard input")
        return {None: {"prompt": text}}
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"--file {file} cannot be read: {error.strerror}", hint="name a file of prompts") from error
    found: dict[Origin | None, dict[str, Any]] = {}
    wrong = []
    for number, line in enumerate(_decoded(f"--file {file}", content).split("\n"), start=1):
        if not line.strip():
            continue
        place = Origin("", 0, file, number, 1, 1, line)
        row: Any = {"prompt": line.rstrip("\r")}
        if file.endswith((".jsonl", ".ndjson")):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                wrong.append(Diagnostic("error", f"the line is no JSON: {error}", origin=place, hint=_FORMS))
                continue
            if fault := _fault(row):
                wrong.append(Diagnostic("error", fault, origin=place, hint=_FORMS))
                continue
        found[place] = row
    if wrong:
        raise UsageError(wrong)
    if not found:
        raise UsageError(f"--file {file} has no prompts", hint="write one on each line")
    return found


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"{name} is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        raise UsageError(what, hint="convert it: iconv -t utf-8") from error


def _fault(row: Any) -> str:
    """Why a line of JSON is no prompt; empty if it is one."""
    if not isinstance(row, dict):
        return f"the line is {type(row).__name__}, and no object"
    given = [name for name in ("prompt", "messages") if name in row]
    if len(given) != 1:
        return f"the line has {'prompt and messages' if given else 'neither prompt nor messages'}"
    if given == ["prompt"]:
        return "" if isinstance(row["prompt"], str) and row["prompt"] else "prompt is no text, or an empty one"
    chat = row["messages"]
    fine = isinstance(chat, list) and chat and all(isinstance(each, dict) and "role" in each for each in chat)
    return "" if fine else "messages is no list of messages with a role"


def _opened(source: str, root: str, *, step: int | None, best: bool, device: str | None, trusted: bool) -> Answerer:
    """The model that a word names: of a run, or in a folder. UsageError where there is none."""
    folder = Path(source)
    in_folder = any(is_there(folder / name) for name in ("config.json", ADAPTERS))
    if in_folder and (step is not None or best):
        raise UsageError(f"{source} is a folder with a model, and has no checkpoints", hint="name the run")
    checkpoint = None if in_folder else find_checkpoint(source, root, best=best, step=step)
    if checkpoint is not None and device is None:
        from trainkit.runner.rundir.layout import RunLayout
        from trainkit.runner.rundir.listing import is_running

        device = "cpu" if is_running(RunLayout(checkpoint.parents[1])) else None
    # `python -m trainkit` puts the working folder first, where a file could have the name of a library.
    here = ("", os.getcwd())  # noqa: PTH109
    sys.path[:] = [*(each for each in sys.path if each not in here), *(each for each in sys.path if each in here)]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which reads its own checkpoints, prints its guess
    from trainkit.trainer.generate import device_named, open_checkpoint, open_folder

    chosen = device_named(device or "")
    if checkpoint is None:
        return open_folder(folder.absolute(), chosen)
    return open_checkpoint(checkpoint, chosen, trusted=trusted)


def _as_data(answer: Answer) -> Mapping[str, Any]:
    if answer.labels is not None:
        return {"label": next(iter(answer.labels)), "probabilities": answer.labels}
    return {"text": answer.text, "tokens": answer.tokens, "ended": answer.ended}


def _write(text: str) -> None:
    """Write a piece at once; a terminal gets nothing that it would obey."""
    sys.stdout.write(strip_control(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _show(answer: Answer) -> None:
    """End an answer that was written piece by piece, or show a classifier's."""
    _write("".join(f"{name}  {share:.4f}\n" for name, share in (answer.labels or {}).items()) or "\n")


def _chat(model: Answerer, sampling: Sampling, system: str, *, plain: bool) -> None:
    """Answer the lines of a terminal until Ctrl-D; a model that knows chats reads those before, too."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited
    remembers = model.is_chat(plain=plain)
    if system and not remembers:
        raise UsageError("--system needs a chat template", hint="leave it out, or --plain if that is given")
    sys.stderr.write("/reset starts over, Ctrl-C ends an answer, Ctrl-D leaves\n")
    history: list[dict[str, str]] = []
    answered = 0
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        _write(piece)

    while True:
        pieces.clear()
        try:
            line = input("> ")
            if line.strip() in ("", "/reset"):
                history = history if not line.strip() else []
                continue
            asked = {"role": "user", "content": line}
            row = {"messages": [*history, asked]} if remembers else {"prompt": line}
            ids, answered = model.ids(row, system=system, plain=plain), answered + 1
            drawing = replace(sampling, seed=sampling.seed + answered - 1)
            _show(model.answer(ids, drawing, write))
        except EOFError:
            _write("\n")
            return
        except PromptError as error:
            show_diagnostics([Diagnostic("error", str(error), hint=f"{error.hint}; /reset starts over")])
            continue
        except KeyboardInterrupt:  # ends the answer, or the line that is being typed
            _write("\n")
            if not pieces:
                continue
        history += [asked, {"role": "assistant", "content": "".join(pieces)}]
