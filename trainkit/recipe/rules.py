"""Rules over the settings of a recipe, whatever runs it: contradictions, secrets in files, the batch."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.batch import Sides, solve
from trainkit.errors import Diagnostic, Origin
from trainkit.lazy import Registry
from trainkit.recipe.address import UNFIT, has_credentials, scheme
from trainkit.recipe.hub_name import has_owner, is_on
from trainkit.recipe.layer import ARGUMENTS, Layer
from trainkit.recipe.merge import Merge, value_at
from trainkit.recipe.paths import FileChecks
from trainkit.recipe.schema.fields import lies_in, schema
from trainkit.recipe.secrets import public_names, secret_keys, why_secret
from trainkit.recipe.validate import Locate, refused
from trainkit.recipe.yaml_reader import NO_TEXT, WRITE_TEXT, is_text
from trainkit.rule import Check
from trainkit.text import pluralize

# Key and value of program.script or program.module -> its program.kind, with what tells it; empty where nothing does.
KindOf = Callable[[str, str], str]


def no_kind(key: str, target: str) -> str:
    """For callers who look into no program."""
    return ""


@dataclass(frozen=True)
class RecipeTree:
    """What a rule may look at: the merged tree above defaults, places, and whether files exist."""

    tree: Mapping[str, Any]
    defaults: Mapping[str, Any]
    locate: Locate
    files: FileChecks
    absolute: Callable[[str], str]
    broken: frozenset[str] = frozenset()  # keys with an error of their own
    incomplete: bool = False  # whether a layer could not be read, and what it gives is not known
    kind_of: KindOf = no_kind

    def get(self, key: str) -> Any:
        """The value at a key, or its default. It may be of a wrong type: that is reported elsewhere."""
        value = value_at(self.tree, key)
        return value_at(self.defaults, key) if value is None else value

    def unknown(self, key: str) -> bool:
        """Whether no layer gives the key, and one that could not be read may have meant to."""
        return self.incomplete and value_at(self.tree, key) is None

    def whole(self, key: str) -> int | None:
        """The value at a key if it is a whole number."""
        value = self.get(key)
        return value if type(value) is int else None

    @property
    def lacks_kind(self) -> bool:
        """Whether there is a program of the user's own, and nothing says of which kind it is."""
        own = any(self.get(f"program.{name}") for name in ("script", "module"))
        return own and not self.incomplete and value_at(self.tree, "program.kind") is None

    def origin(self, key: str) -> Origin | None:
        """Where the value of a key comes from."""
        return self.locate(key)

    def error(self, key: str, what: str, hint: str, *, why: str = "", at: Origin | None = None) -> Diagnostic:
        """An error at a key's place."""
        return Diagnostic("error", what, key, at or self.locate(key), why, hint)


RecipeRule = Check[RecipeTree]

# Where layers of equal strength disagree, the first of these gives way.
GIVES_WAY = ("accumulation", "global", "micro")


def contradictions(state: Merge) -> list[Diagnostic]:
    """An error where one layer gives all three corners, all three count, and they cannot agree.

    global = micro x accumulation x ranks. Without knowing the ranks, global must be a multiple of micro x accumulation;
    with them (`nodes.count` x `nodes.processes_per_node`, where both are numbers) the product must be equal. Corners
    from different layers are left to planning, where the weakest gives way.
    """
    corners = [f"batch.{name}" for name in ("global", "micro", "accumulation")]
    winners = [state.history[corner][-1] for corner in corners if state.history.get(corner)]
    if len(winners) < 3 or len({entry.origin.strength for entry in winners}) > 1:
        return []
    total, micro, accumulation = (entry.value for entry in winners)
    if not all(type(value) is int and value > 0 for value in (total, micro, accumulation)):
        return []
    processes = 1 if state.get("strategy.kind") == "single" else state.get("nodes.processes_per_node")
    nodes = 1 if state.get("strategy.kind") == "single" else state.get("nodes.count") or 1
    ranks = nodes * processes if type(nodes) is int and type(processes) is int else None  # which the recipe alone says
    known = Sides(total, micro, accumulation, ranks)
    if solve(known):
        return []
    given = (f"{key} at {entry.origin.place}" for key, entry in zip(corners[1:], winners[1:], strict=True))
    fit = f"{known.factor} * ranks" if ranks is None else f"{known.factor} with {pluralize(ranks, 'rank')}"
    what = f"batch.global {total}, batch.micro {micro} and batch.accumulation {accumulation} contradict each other"
    why = f"global = micro * accumulation * ranks, and {micro} * {accumulation} makes {fit} ({', '.join(given)})"
    hint = "give any two of the three; the third follows"
    return [Diagnostic("error", what, corners[0], winners[0].origin, why, hint)]


def yielding_corner(strengths: Mapping[str, int]) -> str | None:
    """The corner that gives way, by the strength of what gives each; None unless three disagree in it."""
    if len(strengths) < len(GIVES_WAY) or len(set(strengths.values())) == 1:
        return None
    return next(name for name in GIVES_WAY if strengths[name] == min(strengths.values()))


def _program(context: RecipeTree) -> Iterator[Diagnostic]:
    if "program.kind" in context.broken:
        return
    kind = context.get("program.kind")
    given = [name for name in ("script", "module") if context.get(f"program.{name}")]
    if given and context.lacks_kind:
        key = f"program.{given[0]}"
        folder = str(context.get("program.folder") or "") if given[0] == "script" else ""
        found = context.kind_of(key, posixpath.join(folder, str(context.get(key))))
        hint = f"set program.kind: {found or 'hf, accelerate, deepspeed or torch'}"
        yield context.error(key, f"{key} requires program.kind", hint, why="it says how settings reach the program")
    elif kind == "builtin" and given and not context.unknown("program.kind"):
        hint = "set program.kind: hf, accelerate, deepspeed or torch to run it, or remove it"
        yield context.error(f"program.{given[0]}", f"program.kind builtin takes no {given[0]}", hint)
    if kind != "builtin" and not given and not context.incomplete:
        hint = "add program.script: train.py, or program.module: pkg.mod"
        yield context.error("program.kind", f"program.kind {kind} requires a script or a module", hint)
    if kind != "builtin" and len(given) > 1:
        yield context.error("program.module", "program.script and program.module are both given", "keep one of the two")
    module = context.get("program.module")
    if isinstance(module, str) and ("/" in module or module.endswith(".py")):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        hint = f"write program.script: {module}, or program.module: {dotted}"
        yield context.error("program.module", f"program.module takes a dotted name, and {module} is a path", hint)


# Control characters: C0, DEL and C1, with the two line ends that Unicode adds.
_CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029]")


def _characters(context: RecipeTree) -> Iterator[Diagnostic]:
    """What no text of a recipe may hold: it becomes a word, a path, a line of a job script, and is shown."""
    for key, text, several in _texts(context.tree, "", several=False):
        shown = _CONTROL.sub("\ufffd", key)
        found = _CONTROL.search(text)
        if "\0" in text:
            what = f"{shown} holds a NUL byte, which no path, word or variable of a program can hold"
            yield context.error(key, what, "remove it")
        elif key in context.broken:
            continue
        elif not is_text(text):  # a variable's, or behind `--`
            yield context.error(key, f"the value of {shown} cannot be read: {NO_TEXT}", WRITE_TEXT)
        elif found and not several:
            name = "a line end" if found[0] in "\n\r\x85\u2028\u2029" else "a control character"
            what = f"{shown} holds {name} (U+{ord(found[0]):04X})"
            yield context.error(key, what, "remove it", why="it is one line, which is written into scripts and shown")


def _texts(value: Any, key: str, *, several: bool) -> Iterator[tuple[str, str, bool]]:
    """Every text below a key, names of the user's own too, and whether it may have several lines."""
    several = several or any(setting.lines for setting in schema().settings.get(key, ()))
    if isinstance(value, Mapping):
        for name, each in value.items():
            below = f"{key}.{name}".lstrip(".")
            yield below, name, False
            yield from _texts(each, below, several=several)
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _texts(each, f"{key}.{position}", several=several)
    elif isinstance(value, str):
        yield key, value, several


def _script(context: RecipeTree) -> Iterator[Diagnostic]:
    script = context.get("program.script")
    if not isinstance(script, str) or "${" in script:
        return
    shipped = {context.absolute(path) for path in context.files.shipped().values()}
    origin = context.locate("program.script")
    if origin and (origin.layer.startswith("shipped ") or context.absolute(origin.source) in shipped):
        return  # a shipped recipe is for a script that its user brings; the plan says where it is not there
    path = context.absolute(posixpath.join(str(context.get("program.folder") or ""), script))
    if not context.files.exists(path):
        start = "program.folder" if context.get("program.folder") else "the current folder"
        hint = f"check the path; it starts from {start}"
        yield context.error("program.script", f"there is no file {script}", hint, why=f"it would be {path}")


def _warmup(context: RecipeTree) -> Iterator[Diagnostic]:
    warmup, steps = context.whole("schedule.warmup_steps"), context.whole("train.steps")
    if warmup and steps and warmup > steps:
        what = f"schedule.warmup_steps {warmup} is longer than the whole run of {steps} steps"
        # A few steps of a long recipe are a fair thing to try: the rate just never reaches its peak.
        yield replace(
            context.error("schedule.warmup_steps", what, "make it a small part of train.steps"), severity="warning"
        )
    if warmup and context.get("schedule.name") == "constant":
        hint = "choose schedule.name: constant_with_warmup, or remove schedule.warmup_steps"
        yield context.error("schedule.warmup_steps", "schedule.name constant has no warm-up", hint)


def _decay(context: RecipeTree) -> Iterator[Diagnostic]:
    """`wsd` decays, and the others' shapes are their own."""
    if context.get("schedule.name") != "wsd":
        for key in ("schedule.decay_steps", "schedule.decay_type"):
            # a run's own recipe.yaml has every setting
            if context.get(key) != value_at(context.defaults, key) and "schedule.name" not in context.broken:
                what = f"schedule.name {context.get('schedule.name')} has no {key.partition('.')[2]}"
                yield context.error(key, what, f"choose schedule.name: wsd, or remove {key}")
        return
    decay, warmup, steps = (
        context.whole(key) for key in ("schedule.decay_steps", "schedule.warmup_steps", "train.steps")
    )
    if decay and steps and decay + (warmup or 0) > steps:
        what = f"warm-up and decay take {decay + (warmup or 0)} steps, and the whole run has {steps}"
        hint = "make schedule.decay_steps a small part of train.steps"
        # as with a warm-up: a few steps are a fair thing to try
        yield replace(context.error("schedule.decay_steps", what, hint), severity="warning")


def _evaluation(context: RecipeTree) -> Iterator[Diagnostic]:
    for key in ("eval.patience", "checkpoint.keep_best"):
        if context.get(key) and context.get("eval.every_steps") == 0 and not context.incomplete:
            hint = "set eval.every_steps, for example to 100"
            yield context.error(key, f"{key} requires eval.every_steps > 0", hint, why="it compares evaluation losses")


def _compile(context: RecipeTree) -> Iterator[Diagnostic]:
    key, backend = "efficiency.compile.backend", context.get("efficiency.compile.backend")
    known = refused(key, backend)
    if known:
        why, hint = known
        yield context.error(key, f"{key} {backend} cannot train", hint, why=why)
    mode = context.get("efficiency.compile.mode")
    if mode != "default" and backend not in ("inductor", "nvfuser", "aot_nvfuser"):
        what = f"efficiency.compile.mode {mode} is one of inductor's, and the backend is {backend}"
        yield context.error("efficiency.compile.mode", what, "remove the mode, or choose the backend inductor")


def _wrapping(context: RecipeTree) -> Iterator[Diagnostic]:
    key, wrap = "strategy.wrap_classes", context.get("strategy.auto_wrap")
    if context.get("strategy.kind") == "fsdp" and wrap != "transformer" and context.get(key):
        what = f"{key} counts only with auto_wrap: transformer, not {wrap}"
        yield context.error(key, what, "set strategy.auto_wrap: transformer, or remove wrap_classes")


def _nvme(context: RecipeTree) -> Iterator[Diagnostic]:
    if context.get("strategy.kind") != "zero3":
        return
    swapped = [key for key in ("offload_optimizer", "offload_param") if context.get(f"strategy.{key}") == "nvme"]
    path = context.get("strategy.nvme_path")
    if swapped and path is None and not context.incomplete:
        key = f"strategy.{swapped[0]}"
        hint = "add strategy.nvme_path: a folder on a fast local disk"
        yield context.error(key, f"{key} nvme requires strategy.nvme_path", hint)
    if path is not None and not swapped:
        what = "strategy.nvme_path is for what is offloaded to nvme, and nothing is"
        hint = "set strategy.offload_optimizer or strategy.offload_param to nvme, or remove nvme_path"
        yield context.error("strategy.nvme_path", what, hint)


def _devices(context: RecipeTree) -> Iterator[Diagnostic]:
    select, kind = context.get("devices.select"), context.get("devices.type")
    if isinstance(select, list) and len({str(each) for each in select}) < len(select):
        yield context.error("devices.select", "devices.select names a GPU twice", "list each GPU once")
    if kind == "cuda" and select == "none":
        what = "devices.type cuda with devices.select none leaves no GPU"
        yield context.error("devices.select", what, "choose devices.type: cpu, or select GPUs")


def _nodes(context: RecipeTree) -> Iterator[Diagnostic]:
    if context.get("strategy.kind") == "single" and not context.unknown("strategy.kind"):
        for key in ("nodes.count", "nodes.processes_per_node"):
            if (context.whole(key) or 1) > 1 and key not in context.broken:
                what = f"strategy single is one process, and {key} is {context.get(key)}"
                yield context.error(key, what, "choose strategy.kind: ddp, or one process")


def _env(context: RecipeTree) -> Iterator[Diagnostic]:
    env, taken = context.get("env"), context.get("env_from")
    if not isinstance(env, Mapping):
        return
    for name in env:
        key = f"env.{name}"
        if not name or "=" in name or "\0" in name:
            yield context.error(key, f"{name[:80]!r} cannot be the name of a variable", "remove `=` from the name")
        elif isinstance(taken, list) and name in taken:
            yield context.error(key, f"{name} is under env and under env_from", "keep one of the two")


def written_secrets(layers: Sequence[Layer], merged: Merge) -> Iterator[Diagnostic]:
    """An error for each literal secret that a layer writes out, whether or not a stronger layer replaces it.

    merged: all layers together, whose program.public excepts names.
    """
    harmless = public_names(merged.get("program.public"))
    for layer in layers:
        yield from _secrets_of(layer, harmless)


def _secrets_of(layer: Layer, harmless: Collection[str]) -> Iterator[Diagnostic]:
    for key, held in secret_keys(layer.tree):
        own = lies_in(key, ("env", ARGUMENTS))
        paired = key.startswith("cluster.pod.") and key.endswith(".value")  # beside the name of a variable
        # Settings of trainkit's have no secret names.
        if held.name in harmless if own else held.by == "name" and not paired:
            continue
        what, variable = key, held.name.replace("-", "_").replace(".", "_").upper()
        hint = f"list {variable} under env_from, and export it before the run"
        if own and key.rpartition(".")[0] == ARGUMENTS and key.rpartition(".")[2].isdecimal():
            what = f"the value of --{held.name} in {ARGUMENTS}" if held.by == "name" else f"a word of {ARGUMENTS}"
            hint = "hand it on by env_from, from where the program can read it"
        elif paired and held.by == "name":
            what = f"the value of {held.name} in {key.removesuffix('.value')}"
            hint = "name a Secret that has it: valueFrom, or env_from and cluster.secret"
        elif not own or not held.name:
            hint = "take it out; what asks for it finds it in a variable that env_from lists, or in a file of your own"
        if own and held.name:
            hint = f"{hint}; where it is none, list {held.name} under program.public"
        yield Diagnostic(
            "error",
            f"{what} is a secret by its {held.by}, written out in the recipe",
            key,
            layer.origin(key),
            "recipes, plans and run directories are kept and shared",
            hint,
        )


def _pushing(context: RecipeTree) -> Iterator[Diagnostic]:
    section = "checkpoint.push_to_hub"
    repo = context.get(f"{section}.repo")
    switches = ("env.HF_HUB_OFFLINE", "env.TRANSFORMERS_OFFLINE")  # the second counts where the first is not set
    offline = next((key for key in switches if context.get(key) not in (None, "")), switches[0])
    if repo is None and not context.incomplete:
        for key in (f"{section}.strategy", f"{section}.private"):
            if context.get(key) != value_at(context.defaults, key):  # a run's own recipe.yaml has every setting
                hint = f"set {section}.repo: owner/name, or remove it"
                yield context.error(key, f"{key} is about a repository, and {section}.repo names none", hint)
    elif isinstance(repo, str) and not has_owner(repo):
        hint = "write it as owner/name, in letters, digits and single `-`, `_` or `.` between them"
        yield context.error(f"{section}.repo", f"{repo} cannot be the name of a repository of the Hub", hint)
    elif repo is not None and is_on(str(context.get(offline))):
        what = f"{section} uploads to the Hub, and {offline} keeps away from it"
        yield context.error(offline, what, "remove one of the two; `trainkit export --push` uploads later")


def _copying(context: RecipeTree) -> Iterator[Diagnostic]:
    key = "checkpoint.copy_to"
    address = context.get(key)
    if not isinstance(address, str):
        return
    if has_credentials(address) and not why_secret("", address):  # else `written_secrets` names it
        hint = "take what stands before the @ out: the provider's package finds credentials in the environment"
        yield context.error(key, f"{key} names a user: addresses land in plans and logs", hint)
    elif why := UNFIT.get(scheme(address)):
        hint = "name a folder that can be written to, such as s3://bucket/path"
        yield context.error(key, f"{key}: nothing can be kept in {scheme(address)}://, because {why}", hint)


RULES: tuple[RecipeRule, ...] = (
    _program,
    _characters,
    _script,
    _warmup,
    _decay,
    _evaluation,
    _compile,
    _wrapping,
    _nvme,
    _devices,
    _nodes,
    _env,
    _pushing,
    _copying,
)
# Rules of a kind of program alone; they stand with the tool, and are imported where a recipe is for it.
OF_PROGRAM: Mapping[str, Sequence[RecipeRule]] = Registry({"builtin": "trainkit.tools.builtin.recipe_rules:RULES"})


def recipe_rules(tree: RecipeTree) -> tuple[RecipeRule, ...]:
    """The rules for a recipe, with those of its kind of program."""
    kind = tree.get("program.kind")
    known = isinstance(kind, str) and kind in OF_PROGRAM and not tree.lacks_kind
    return (*RULES, *(OF_PROGRAM[kind] if known else ()))
