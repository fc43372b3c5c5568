"""Pieces of a plan together with what made each of them: recipe keys, or a rule of trainkit's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.plan.context import Context
from trainkit.plan.model import Job, Text, Variable, text
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
