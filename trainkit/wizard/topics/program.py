"""What the processes execute: trainkit's own trainer, or a script with its command line."""

from __future__ import annotations

import shlex

from trainkit.wizard.question import AnswerError, Question, Settings, Topic, View, offered


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


PROGRAM = Topic("program", ("program.kind",), lambda view: True, _kinds, planned=False)
COMMAND_KEYS = ("program.script", "program.module", "program.args")
COMMAND = Topic("command", COMMAND_KEYS[:-1], lambda view: not view.builtin, _command, _read_command, COMMAND_KEYS)
