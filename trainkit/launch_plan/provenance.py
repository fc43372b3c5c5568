"""Pieces of a plan together with what made each of them: recipe keys, or a rule of trainkit's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Job, Text, Variable, text
from trainkit.recipe.schema import Image
from trainkit.recipe.schema.fields import nest

INTERPRETER = "the interpreter that plans is the interpreter that runs"
SAFE_PATH = "a logging.py or json.py in the working folder must not be taken for the standard library's"
OWN_INTERPRETER = "the program brings its own interpreter, so the command works with and without the wrapper"


@dataclass(frozen=True, slots=True)
class Source:
    """What made a piece of the plan: dotted recipe keys, or a rule that says why. One of the two is not empty."""

    keys: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    """One word of a command line, with its source."""

    text: Text
    source: Source


@dataclass(frozen=True, slots=True)
class SourcedVariable:
    """One environment variable that the plan sets, or that the launcher gives each rank by itself, with its source.

    value: without parts where ranks differ or only the start decides. yields: whether one that is there already stays.
    """

    name: str
    value: Text
    source: Source
    yields: bool = False


@dataclass(frozen=True, slots=True)
class SourcedFile:
    """One generated file; sources maps dotted keys inside it to what made them."""

    path: str
    content: str
    sources: Mapping[str, Source] = field(default_factory=dict)


def json_file(path: str, entries: Mapping[str, tuple[Any, Source]]) -> SourcedFile:
    """A JSON file of values by dotted key, each with what made it."""
    tree = nest({key: value for key, (value, _) in entries.items()})
    content = json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    return SourcedFile(path, content, {key: source for key, (_, source) in entries.items()})


def token(*parts: str | Variable, keys: tuple[str, ...] = (), rule: str = "") -> Token:
    """A word of the command line made of literals and run-time variables."""
    return Token(text(*parts), Source(keys, rule))


def variable(
    name: str, *parts: str | Variable, keys: tuple[str, ...] = (), rule: str = "", yields: bool = False
) -> SourcedVariable:
    """An environment variable, its value made of literals and run-time variables; without parts it is not known."""
    return SourcedVariable(name, text(*parts), Source(keys, rule), yields)


@dataclass(frozen=True, slots=True)
class SourcedJob:
    """What a scheduler is given; sources maps parts of it (`content.3`: a line, `step.0`) to what made them."""

    job: Job
    sources: Mapping[str, Source]


def sourced_job(
    scheduler: str, file: str, content: Sequence[Token], submit: Sequence[Token], step: Sequence[Token], **terms: Any
) -> SourcedJob:
    """The job of a file's lines and of commands. A line is without its end. terms: the other fields of a job."""
    text_ = text(*(part for line in content for part in (*line.text.parts, "\n")))
    lists = {"content": content, "submit": submit, "step": step}
    sources = {f"{name}.{place}": each.source for name, items in lists.items() for place, each in enumerate(items)}
    sources |= {f"hosts.{place}": Source(("cluster.hosts",)) for place in range(len(terms.get("hosts", ())))}
    return SourcedJob(Job(scheduler, file, text_, texts(tuple(submit)), texts(tuple(step)), **terms), sources)


def setup_lines(lines: Sequence[str], end: Token) -> list[Token]:
    """The recipe's lines of Bash, of which one that fails, or ends the shell, is named. end: the last command then.

    The shell says what fails (ERR in bash(1)): no condition, and nothing before && or ||. A function and a sourced
    file fail by what they return, whatever fails within. end: has the sentence as $1. EXIT knows no line, so DEBUG
    keeps the last one that began; a line that Bash cannot read does not. No signal is caught: the shell would first
    wait for its child.
    """
    before = (
        "trainkit_ended() {  # what line of cluster.setup did, exit code, line here",
        '    if [ "$1" = failed ]; then',
        '        [ "${FUNCNAME[1]-main}" = main ] || return 0  # functions and sourced files go on',
        "    else  # a signal ends the shell while it waits for a child, and is no line's fault",
        "        read -r trainkit_children 2>/dev/null </proc/$$/task/$$/children || true",
        '        [ -z "${trainkit_children-}" ] || return 0',
        "    fi",
        "    trap - ERR EXIT DEBUG",
        '    mapfile -t trainkit_text <<<"${BASH_EXECUTION_STRING:-$(<"$0")}"',
        '    set -- "cluster.setup line $(($3 - trainkit_start)) $1 with exit code $2: ${trainkit_text[$3 - 1]-}"',
        '    echo "$1" >&2',
    )
    traps = (
        "trap 'trainkit_ended failed $? $LINENO' ERR",
        "trap 'trainkit_ended \"or one after it ended the shell\" $? $trainkit_line' EXIT",
        'trap \': "$((LINENO > trainkit_start ? trainkit_line = LINENO : 0))" "$_"\' DEBUG  # and $_ stays',
        "trainkit_start=$LINENO trainkit_line=$((LINENO + 1))",
    )
    replaced = "cluster.setup sets a trap on ERR itself: lines after it that fail are not named, and the job goes on"
    after = (
        "",  # which a backslash at the end of the lines goes on with
        f'[[ $(trap -p ERR) =~ ^$|trainkit_ended ]] || echo "{replaced}" >&2',
        "trap - ERR EXIT DEBUG",
    )
    rule = "a line of cluster.setup that fails or ends the shell is named, and ends the job"
    if not lines:
        return []
    found = [*(token(each, rule=rule) for each in before), Token(text("    ", *end.text.parts), end.source)]
    found += [token(each, rule=rule) for each in ("}", *traps)]
    found += [token(line, keys=("cluster.setup",)) for line in lines]
    return [*found, *(token(each, rule=rule) for each in after)]


def resume_word(context: Context, flag: str) -> tuple[Token, ...]:
    """The word for the checkpoint to go on from, which `auto` chooses when the run starts; none where it never does."""
    named, queued = context.recipe.checkpoint.resume, context.recipe.cluster.kind != "none"
    if chosen_at_start(context):
        rule = "a job that is queued again goes on from its own newest checkpoint" if queued else ""
        return (token(f"{flag}=", Variable.RESUME, keys=("checkpoint.resume",), rule=rule),)
    return () if named == "never" else (token(f"{flag}={named}", keys=("checkpoint.resume",)),)


def chosen_at_start(context: Context) -> bool:
    """Whether the checkpoint is known only when the run starts."""
    return context.recipe.checkpoint.resume == "auto" or context.recipe.cluster.kind != "none"


def texts(tokens: tuple[Token, ...]) -> tuple[Text, ...]:
    """The texts alone, as the plan keeps them."""
    return tuple(item.text for item in tokens)


def interpreter(context: Context) -> Token:
    """The interpreter that runs: the one that plans, or the image's."""
    if isinstance(context.recipe.container, Image):
        return token(context.facts.executable, keys=("container.python",))
    return token(context.facts.executable, rule=INTERPRETER)


def module(context: Context, name: str, *, keys: tuple[str, ...] = (), rule: str = "") -> tuple[Token, ...]:
    """`python -P -m NAME` with the interpreter that plans; keys and rule say what made the name."""
    return (
        interpreter(context),
        token("-P", rule=SAFE_PATH),
        token("-m", rule=INTERPRETER),
        token(name, keys=keys, rule=rule),
    )
