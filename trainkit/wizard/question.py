"""What a question is, what it may depend on, and what the planner says of the answers: a plan without a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainkit.errors import Diagnostic, RecipeError, UsageError, blocker
from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.selection import allocation
from trainkit.recipe.paths import FileChecks, Overlay, absolute
from trainkit.recipe.schema.fields import Setting, nest, schema, tagged_sections
from trainkit.recipe.validate import choices, default_kind, takes_switch

if TYPE_CHECKING:
    from trainkit.data.seen import SeenData
    from trainkit.launch_plan.model import Notice, Plan
    from trainkit.recipe.resolved import Resolved

Settings = Mapping[str, Any]  # by dotted key
# Programs that train with their engine's strategy even in one process, and which is assumed until it is asked.
ENGINES: Mapping[str, str] = {"deepspeed": "zero2"}
# Programs that get nothing of the recipe but their processes: planning warns of settings, and refuses none.
UNCONFIGURED = frozenset({"torch"})


@dataclass(frozen=True)
class AnswerOption:
    """One thing to choose. word: what one types.

    sets: what it means in the recipe; reason: why one would choose it, for the recipe's comment.
    refused: why it cannot be chosen with the answers so far; remark: what this machine lacks for it.
    """

    word: str
    note: str
    sets: Settings
    reason: str
    refused: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Question:
    """One question as it is shown. topic: the name of what it settles; why: what `?` shows.

    default: the answer of Enter, as one would type it; empty where there is none. source: where that came from.
    expected: what may be typed besides the choices; empty where there is nothing else.
    """

    text: str
    why: tuple[str, ...] = ()
    choices: tuple[AnswerOption, ...] = ()
    default: str = ""
    source: str = ""
    expected: str = ""
    topic: str = ""


def _no_text(view: View, text: str) -> tuple[Settings, str]:
    hint = "type one of the words that are shown, or their first letters"
    raise UsageError(f"{text!r} is none of the choices", hint=hint)


def as_schema(view: View, key: str) -> Iterator[AnswerOption]:
    """A choice for each value of a setting, with what the schema says of it."""
    for value in view.values(key):
        meaning = view.meaning(key, value)
        yield AnswerOption(value, meaning, {key: value}, meaning)


def as_recipe(view: View, key: str, source: str = "") -> tuple[str, str]:
    """The value that the recipe would have anyway, and whose it is."""
    return str(view.get(key)), view.base.name or source


@dataclass(frozen=True)
class Topic:
    """One question as data; what depends on the answers so far is a function of the view.

    keys: the settings that it settles; where one of them is given, nothing is asked.
    open: whether the answers so far leave it open; by default, whether the program would see the first key.
    choices, default: by default what the schema says of the first key, and its value in the recipe.
    read: what a typed text sets, with the reason; raises UsageError.
    why: what `?` shows before the schema's description of what it `explains` (the keys, where none are named).
    planned: whether the planner says of each choice if it can be taken.
    """

    name: str
    keys: tuple[str, ...]
    text: str | Callable[[View], str]
    why: str | Callable[[View], Iterable[str]] = ""
    open: Callable[[View], bool] | None = None
    choices: Callable[[View], Iterable[AnswerOption]] | None = None
    default: Callable[[View], tuple[str, str]] | None = None
    expected: str = ""
    read: Callable[[View, str], tuple[Settings, str]] = _no_text
    explains: tuple[str, ...] = ()
    planned: bool = True

    def is_open(self, view: View) -> bool:
        return self.open(view) if self.open else view.reaches(self.keys[0])

    def offers(self, view: View) -> tuple[AnswerOption, ...]:
        return tuple(self.choices(view) if self.choices else as_schema(view, self.keys[0]))

    def ask(self, view: View, last: str | None) -> Question:
        """The question. last: the answer from before one went back; it is proposed while it can still be given."""
        choices = self.offers(view)
        if self.planned and choices:
            choices = validated(view, self.keys, choices)
        default, source = self.default(view) if self.default else as_recipe(view, self.keys[0])
        free = {choice.word: not choice.refused for choice in choices}
        if last is not None and free.get(last, bool(self.expected)):
            default, source = last, "your last answer"
        elif not free.get(default, True):
            default, source = next((word for word in free if free[word]), ""), ""
        own = (self.why,) if isinstance(self.why, str) else self.why(view)
        settings = {key: view.declared(key) for key in self.explains or self.keys}
        described = (f"{key}: {setting.description}" for key, setting in settings.items() if setting)
        text = self.text if isinstance(self.text, str) else self.text(view)
        return Question(text, (*filter(None, own), *described), choices, default, source, self.expected, self.name)


@dataclass(frozen=True)
class Answer:
    """What was answered to a topic, as typed, and what it sets."""

    topic: str
    typed: str
    sets: Settings
    reason: str


@dataclass(frozen=True)
class Base:
    """The recipe that the result extends. path: absolute, or the name of a shipped one; empty where there is none.

    name: as the user called it. values: what it sets, by dotted key, defaults included.
    """

    path: str = ""
    name: str = ""
    values: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """Everything that a question may depend on.

    machine: gives the facts, which the first question does without.
    given: settings from files and flags; they win over answers.
    files: to look at the recipe's files; cwd: where relative paths start; environ: for references in the base.
    look: what the heads of the files say that hold a recipe's data, its tokenizer and its model.
    pending: settings that are still to be asked about.
    """

    machine: Callable[[], Facts]
    files: FileChecks
    cwd: str
    base: Base = Base()
    given: Settings = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    look: Callable[[Resolved], SeenData] | None = None
    pending: frozenset[str] = frozenset()

    @property
    def facts(self) -> Facts:
        """The machine that the recipe is for."""
        return self.machine()

    @cached_property
    def _said(self) -> Settings:
        merged: dict[str, Any] = {}
        for answer in self.answers:
            merged.update(answer.sets)
        return {**merged, **self.given}

    @cached_property
    def chosen(self) -> Settings:
        """What answers and given settings say; a later answer wins over an earlier one, a given setting over both.

        A setting of another kind, answered before the kind was changed, means nothing. One that is given is kept:
        planning says what is wrong with it.
        """
        known = {*self.given}
        return {
            key: value
            for key, value in self._said.items()
            if key in known or key.endswith(".kind") or self.declared(key)
        }

    @cached_property
    def _implied(self) -> Settings:
        """What follows from answers, given settings and the base's kinds, as in a recipe that says no more."""
        from trainkit.recipe.implied import imply
        from trainkit.recipe.merge import Merge

        kinds = {f"{section}.kind" for section in tagged_sections()}
        base = {key: value for key, value in self.base.values.items() if key in kinds}
        state = Merge(nest({**base, **self._said}))
        imply(state)
        return {key: entries[-1].value for key, entries in state.history.items()}

    def kind(self, section: str) -> str:
        """The kind of a tagged section; empty for any other."""
        if section not in tagged_sections():
            return ""
        key = f"{section}.kind"
        said = self._said.get(key) or self.base.values.get(key) or self._implied.get(key)
        return str(said or default_kind(section))

    def declared(self, key: str) -> Setting | None:
        """The setting as the kind of its section declares it; None where that kind lacks it."""
        kind = self.kind(key.partition(".")[0])
        setting = schema().setting(key, kind)
        return setting if setting and setting.variant in ("", kind) else None

    def get(self, key: str) -> Any:
        """The value of a setting as the recipe would have it now; None where the section's kind has no such setting."""
        section, _, name = key.partition(".")
        if key in self.chosen:
            return self.chosen[key]
        # Settings of the base that belong to another kind are dropped with the kind.
        alike = name == "kind" or self.kind(section) in ("", self.base.values.get(f"{section}.kind"))
        if alike and key in self.base.values:
            return self.base.values[key]
        setting = self.declared(key)
        return self._implied.get(key, setting.default) if setting else None

    def values(self, key: str) -> list[Any]:
        """The literal values of a setting; the kinds, for the kind of a tagged section."""
        section, _, name = key.rpartition(".")
        if name == "kind" and section in tagged_sections():
            return list(schema().sections[section].kinds)
        setting = self.declared(key)
        return choices(setting.annotation) if setting else []

    def meaning(self, key: str, value: Any) -> str:
        """The part of the schema's description about one value, without the final dot; empty where there is none."""
        section, _, name = key.rpartition(".")
        if name == "kind" and section in tagged_sections():
            kind = schema().setting(key, str(value))
            return kind.description.rstrip(".") if kind else ""
        setting = self.declared(key)
        described = setting.description if setting else ""
        found = re.search(rf"(?:^|[.;,:] )`{re.escape(str(value))}`:? (.*?)(?:[.;](?: |$)|, `|$)", described)
        return found[1].replace("`", "").removeprefix("is ") if found else ""

    def written(self, key: str) -> bool:
        """Whether the recipe must say it: what was chosen is neither the base's value nor the default."""
        if key not in self.chosen:
            return False
        kind_key = f"{key.partition('.')[0]}.kind"
        kind = {kind_key: self.chosen[kind_key]} if kind_key in self.chosen and key != kind_key else {}
        return not same(self.chosen[key], replace(self, answers=(), given=kind).get(key))

    def agrees(self, sets: Settings) -> bool:
        """Whether the recipe would have these values."""
        return all(self.get(key) == value for key, value in sets.items())

    def supposing(self, sets: Settings) -> View:
        """The same with one more, nameless answer."""
        return replace(self, answers=(*self.answers, Answer("", "", sets, "")))

    @property
    def device(self) -> str:
        """The kind of device, as planning would choose it."""
        given = str(self.get("devices.type"))
        if self.get("devices.select") == "none":
            return "cpu"
        if given != "auto":
            return given
        if not isinstance(self.get("devices.select"), str) or allocation(self.facts):
            return "cuda"
        return "mps" if self.facts.mps and not self.facts.gpus else "cpu"

    @property
    def processes(self) -> int:
        """Processes on each machine, as planning would count them."""
        explicit, select = self.get("nodes.processes_per_node"), self.get("devices.select")
        if isinstance(explicit, int):
            return explicit
        # On a CPU two ranks are the fewest that a strategy other than `single` is tried with.
        if self.device != "cuda":
            return 1 if self.device == "mps" or self.get("strategy.kind") == "single" else 2
        if isinstance(select, (list, int)):
            return len(select) if isinstance(select, list) else select
        if select == "auto" and self.get("strategy.kind") == "single":
            return 1
        return max(len(allocation(self.facts)), 1)

    @property
    def ranks(self) -> int:
        """Processes over all machines."""
        return int(self.get("nodes.count")) * self.processes

    @property
    def builtin(self) -> bool:
        """Whether the program is trainkit's own trainer."""
        return bool(self.get("program.kind") == "builtin")

    @property
    def fine_tunes(self) -> bool:
        """Whether trainkit's own trainer begins with a model that others have trained."""
        return self.builtin and self.kind("model") == "hf" and not self.get("model.architecture")

    @property
    def engine(self) -> str:
        """The strategy of the program's own engine; empty where it has none."""
        return ENGINES.get(str(self.get("program.kind")), "")

    @property
    def needs_strategy(self) -> bool:
        """Whether `single` is not enough: several processes, or a program on an engine."""
        return self.ranks > 1 or bool(self.engine)

    @cached_property
    def resolved(self) -> Resolved:
        """The recipe of the answers so far, with a stand-in for what has no default and no answer yet."""
        extends = {"extends": [self.base.path]} if self.base.path else {}
        text = json.dumps({"version": 1, **extends, **nest({**self.chosen, **dict(self._stand_ins())})})
        return resolve_text(self, text, _NAME)

    @cached_property
    def seen(self) -> SeenData:
        """What the files say that this recipe names. Raises RecipeError where there is none."""
        from trainkit.data.seen import SeenData

        return self.look(self.resolved) if self.look else SeenData()

    @cached_property
    def outcome(self) -> Outcome:
        """What the planner says of the answers so far."""
        from trainkit.planner.build import build_plan  # after the first question is shown: it takes time

        # The machine with all its GPUs free: a recipe is for other days too.
        free: dict[str, Any] = {"processes": (), "held_by": None, "wanted_by": None}
        idle = []
        for gpu in self.facts.gpus:
            parts = tuple(replace(part, **free, memory_free=part.memory_total) for part in gpu.instances)
            idle.append(replace(gpu, **free, memory_free=gpu.memory_total, instances=parts))
        try:
            # What is known of rows is judged beside the model that is chosen, not beside a stand-in.
            seen = self.seen if self.get("model.path") or not self.fine_tunes else replace(self.seen, form=None)
            facts = replace(self.facts, gpus=tuple(idle))
            # Whether it fits is a question of the whole recipe, of which most is not answered yet.
            plan = build_plan(self.resolved, facts, seen=seen, foresee=lambda _: None).plan
        except RecipeError as error:
            return Outcome(tuple(each for each in error.diagnostics if each.severity == "error"))
        # A choice for which only a package is missing is offered all the same.
        missing = tuple(each for each in plan.blockers if not each.installs)
        return Outcome((), missing, tuple(each.what for each in plan.blockers if each.installs), plan)

    def _stand_ins(self) -> Iterator[tuple[str, Any]]:
        if self.builtin and self.get("train.steps") is None and self.get("train.epochs") is None:
            yield "train.steps", 1
        if not self.builtin and not self.get("program.script") and not self.get("program.module"):
            yield "program.module", "program"
        if self.kind("model") == "hf" and not self.get("model.path") and not self.get("model.architecture"):
            yield "model.architecture", _STAND_INS.get(str(self.get("model.task")), "llama")
        # An address that no one looks up while planning.
        if int(self.get("nodes.count")) > 1 and "nodes.rendezvous" not in self.chosen:
            yield "nodes.rendezvous", "host:29500"
        if "nvme" in (self.get(f"strategy.{name}") for name in ("offload_optimizer", "offload_param")):
            yield "strategy.nvme_path", self.get("strategy.nvme_path") or "nvme"
        # `single` is the schema's default and would refuse several ranks before the strategy is asked about.
        if self.get("strategy.kind") == "single" and "strategy.kind" not in self.chosen and self.needs_strategy:
            yield "strategy.kind", self.engine or "ddp"

    @property
    def used_cards(self) -> tuple[Gpu, ...]:
        """The GPUs that the run would use; all that it may use where that is decided later; none off CUDA."""
        if self.device != "cuda":
            return ()
        allowed = allocation(self.facts)
        plan = None if self.get("devices.select") == "free" else self.outcome.plan
        used = {card.uuid for card in plan.cards} if plan else set()
        return tuple(gpu for gpu in allowed if gpu.uuid in used) or allowed

    def reaches(self, key: str) -> bool:
        """Whether the program would see the setting: whether planning accepts a value that is not its default."""
        setting = self.declared(key)
        if setting is None or self.builtin or self.get("program.kind") in UNCONFIGURED:
            return setting is not None and self.builtin
        # Any value but the default shows it: a default that cannot be passed on is no error.
        literals = [each for each in choices(setting.annotation) if each not in ("auto", setting.default)]
        switch = takes_switch(setting) or isinstance(setting.default, bool)
        sample = literals[0] if literals else True if switch else 8
        return not any(each.key == key for each in self.supposing({key: sample}).outcome.errors)


_STAND_INS = {"seq2seq_lm": "t5", "masked_lm": "bert", "sequence_classification": "bert"}
_NAME = ".answers-so-far.yaml"


@dataclass(frozen=True)
class Outcome:
    """What planning gives. errors: wrong on any machine; missing: what this machine lacks; packages: to install."""

    errors: tuple[Diagnostic, ...] = ()
    missing: tuple[Notice, ...] = ()
    packages: tuple[str, ...] = ()
    plan: Plan | None = None

    def against(self, before: Outcome, later: frozenset[str]) -> list[Diagnostic]:
        """What is wrong or missing now and was not before, except where a later question settles it."""
        known = {(each.key, each.why or each.what) for each in before.errors}
        new = [each for each in self.errors if (each.key, each.why or each.what) not in known]
        missing = [blocker(each.what, each.hint) for each in self.missing if each not in before.missing]
        return [*(each for each in new if each.key not in later), *missing]


def resolve_text(view: View, text: str, name: str) -> Resolved:
    """Resolve a recipe that is not written yet, as a file of this name in the working folder."""
    from trainkit.recipe.resolve import resolve
    from trainkit.recipe.resolved import Request

    files = Overlay(view.files, {absolute(name, view.cwd): text})
    resolved = resolve(Request(name, view.cwd, environ=view.environ), files)
    # Which files another machine has cannot be seen from here.
    return replace(resolved, absent={}) if view.facts.origin else resolved


def validated(view: View, keys: Sequence[str], offered: Iterable[AnswerOption]) -> tuple[AnswerOption, ...]:
    """The choices with what the planner says of each: those that can be taken, then those that cannot.

    keys: settings of the topic that offers them.
    """
    before = view.outcome
    found = []
    for choice in offered:
        result = view.supposing(choice.sets).outcome
        against = result.against(before, view.pending - {*keys})
        refused = (against[0].why or against[0].what) if against else ""
        remark = next((each for each in result.packages if each not in before.packages), "")
        found.append(replace(choice, refused=refused, remark=remark))
    return tuple(sorted(found, key=lambda choice: bool(choice.refused)))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a recipe's tree by dotted key; unknown keys are left out."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in schema().settings:
            yield key, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same to a recipe, where `true` is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
