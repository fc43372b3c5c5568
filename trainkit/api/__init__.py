"""The Python API: what the command line does, as functions that return values and raise its errors.

Recipes and overrides are what the command line takes; a dictionary of settings may stand among the overrides:
``trainkit.run("quickstart", "--bf16", {"train.steps": 50, "optimizer": {"lr": 1e-3}})``. A later one wins.
Nothing of the calling process is changed: no variable, no signal handler, no working folder.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.api.running import Command, Run, in_notebook, readable, shown_answer
from trainkit.errors import TrainkitError, UsageError

if TYPE_CHECKING:
    from trainkit.cli.line import OwnProgram
    from trainkit.launch_plan.model import Foresight, Plan
    from trainkit.recipe.resolved import Resolved
    from trainkit.recipe.schema import Recipe
    from trainkit.schedulers.jobs.standing import Standing
    from trainkit.sweeps.results import SweepResult
    from trainkit.sweeps.study import Sampler

Override = str | Mapping[str, Any]
Message = Mapping[str, str]
HEIGHT = 720  # pixels of a report in a notebook


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with everything that it extends and that overrides it, resolved and validated.

    recipe: the settings, as attributes by their keys (`loaded.recipe.train.steps`). resolved: beside them where each
    value comes from. words: what `trainkit run` would be given. folder: that relative paths start from.
    Every function that takes a recipe takes this in its place, with more overrides.
    """

    resolved: Resolved
    words: tuple[str, ...]
    folder: str
    request: Request

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def __str__(self) -> str:
        from trainkit.recipe.yaml_writer import resolved_yaml

        return resolved_yaml(self.resolved)

    def __repr__(self) -> str:
        return f"<recipe {self.recipe.name}: trainkit run {' '.join(self.words)}>"


@dataclass(frozen=True)
class Request:
    """What a caller asks for, as a line that trainkit reads.

    target: the recipe; or the words of a program, or of a launcher's command; None for presets and overrides alone.
    """

    target: str | tuple[str, ...] | None
    overrides: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    variant: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Behind `trainkit run`, `plan` or `estimate`."""
        options = [word for preset in self.presets for word in ("--with", preset)]
        options += ["--variant", self.variant] if self.variant is not None else []
        before = (*options, *self.overrides)
        if isinstance(self.target, tuple):
            return (*before, *self.target, *self.arguments)
        target = () if self.target is None else (self.target,)
        return (*target, *before, *(("--", *self.arguments) if self.arguments else ()))

    def resolve(self) -> Resolved:
        """Raises RecipeError and UsageError."""
        from trainkit.cli.line import OwnProgram
        from trainkit.cli.pipeline import no_recipe, replaces_recipe, resolve_request

        if self.target is None and not replaces_recipe(self.overrides, self.presets):
            raise no_recipe("run RECIPE")
        recipe: str | OwnProgram | None
        recipe, arguments = self.target if isinstance(self.target, str) else None, self.arguments
        if isinstance(self.target, tuple):
            recipe, arguments = OwnProgram((*self.target, *self.arguments), {}), ()
        return resolve_request(recipe, self.overrides, self.presets, arguments, self.variant, environ=os.environ)


Target = str | os.PathLike[str] | Sequence[str] | LoadedRecipe | None


def load(
    recipe: Target = None,
    /,
    *overrides: Override,
    presets: Sequence[str] = (),
    variant: str | None = None,
    arguments: Sequence[str] = (),
) -> LoadedRecipe:
    """Resolve and validate a recipe.

    recipe: a file, a shipped name, a run directory or a run's id; a script (`"train.py"`); the words of a launcher's
    command (`["torchrun", "--nproc_per_node", "2", "train.py"]`); or one that was loaded before.
    overrides: words as the command line takes them (`"train.steps=3"`, `"--bf16"`), or settings with values of Python's
    (`{"train.steps": 3}`), dotted or nested. presets: as of `--with`. arguments: for the program.

    Raises RecipeError or UsageError with everything that is wrong; warnings are given as Python's.
    """
    with _readable():
        loaded = _loaded(recipe, overrides, presets, variant, arguments)
    _warn(loaded.resolved)
    return loaded


def plan(
    recipe: Target = None,
    /,
    *overrides: Override,
    presets: Sequence[str] = (),
    variant: str | None = None,
    arguments: Sequence[str] = (),
    on: str | None = None,
) -> Plan:
    """What a run would execute; nothing starts. `print(plan)` shows it, `plan.blockers` why this machine cannot run it.

    on: another machine, as of `--on`: a profile such as `8xh100`, or a file of facts.
    """
    with _readable():
        from trainkit.cli.commands.estimate import facts_for
        from trainkit.cli.pipeline import plan_recipe

        loaded = _loaded(recipe, overrides, presets, variant, arguments)
        _warn(loaded.resolved)
        return plan_recipe(loaded.resolved, facts_for(on, loaded.resolved)).plan


def estimate(
    recipe: Target = None,
    /,
    *overrides: Override,
    presets: Sequence[str] = (),
    variant: str | None = None,
    arguments: Sequence[str] = (),
    on: str | None = None,
    quick: bool = False,
) -> Foresight:
    """What a run takes on the rank that takes most: memory by part in bytes, time in seconds, and whether it fits.

    on: as for `plan`. quick: do not trace the model, take what is known of its architecture.
    Raises MachineError where nothing can be told.
    """
    with _readable():
        from trainkit.cli.commands.estimate import estimated_plan, facts_for, tracing_of

        loaded = _loaded(recipe, overrides, presets, variant, arguments)
        _warn(loaded.resolved)
        with tracing_of(quick=quick) as tracing:
            return estimated_plan(loaded.resolved, facts_for(on, loaded.resolved), tracing).foresight()


def run(
    recipe: Target = None,
    /,
    *overrides: Override,
    presets: Sequence[str] = (),
    variant: str | None = None,
    arguments: Sequence[str] = (),
    quiet: bool | None = None,
) -> Run:
    """Start a run, as `trainkit run` does, in processes of its own, and return it while it runs.

    quiet: whether what the command line shows is kept in `run.output` instead; by default in notebooks, where the run
    shows itself. Raises RecipeError, UsageError or MachineError where nothing can be started.
    """
    with _readable():
        request = _request(recipe, overrides, presets, variant, arguments)
        if "--detach" in request.overrides:
            hint = "`trainkit run --detach` in a terminal goes on without it; trainkit.runs() finds it"
            raise UsageError("a run from Python ends with the process that has started it", hint=hint)
        return Run.start(request.words, _folder(recipe), quiet=in_notebook() if quiet is None else quiet)


def run_function(
    function: Callable[..., object],
    *overrides: Override,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    ranks: int = 1,
    presets: Sequence[str] = (),
    name: str | None = None,
    quiet: bool | None = None,
) -> Run:
    """Start a run of a function, on so many ranks: `function(*args, **kwargs)` in each, and what it returns is dropped.

    Function and arguments are written with cloudpickle into a program below `output.root`, which is started as any
    script of one's own is: several ranks by torchrun, so that the function finds RANK, WORLD_SIZE and MASTER_ADDR. It
    may stand in a cell of a notebook that has used torch already: it runs in other processes.
    name: of the run; the function's by default.

    Raises as `run` does, and MachineError where cloudpickle is not installed or cannot write something.
    """
    with _readable():
        from trainkit.api.function import write_program

        words = _words(overrides)
        roots = [word.partition("=")[2] for word in words if word.startswith("output.root=")]
        name = name or str(getattr(function, "__name__", type(function).__name__)).strip("<>")
        program = write_program(function, tuple(args), dict(kwargs or {}), name, Path((roots or ["runs"])[-1]))
    own: Mapping[str, Any] = {"name": name, "nodes.processes_per_node": ranks, "program.kind": "torch"}
    return run([str(program)], own, *overrides, presets=presets, quiet=quiet)


class Runs(list["Standing"]):
    """How runs stand; `print` and notebooks show the table of `trainkit runs list`."""

    def __str__(self) -> str:
        from trainkit.cli.commands.runs import standings_table

        return standings_table(self) if self else "no runs\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def runs(
    name: str | None = None,
    *,
    root: str | os.PathLike[str] = "runs",
    everywhere: bool = False,
    where: Sequence[str] = (),
    sort: str | None = None,
    limit: int | None = None,
) -> Runs:
    """How runs stand, the newest last: state, step, loss, time left and more of each, as `trainkit runs list` has them.

    name: only runs of this name. root: their `output.root`. everywhere: all of this user on this machine.
    where: conditions (`"state=failed"`, `"loss<2.5"`), as of `--filter`. sort: a field, `-field` for the reverse order.
    limit: the newest so many; with sort, the first.
    """
    with _readable():
        from trainkit.cli.commands.runs import chosen_runs, known_roots

        roots = known_roots() if everywhere else [os.fspath(root)]
        return Runs(chosen_runs(name, roots, where, sort, limit)[0])


@dataclass(frozen=True)
class Report:
    """A page about runs. path: its file. A notebook shows it as a cell's last line."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:{HEIGHT}px;border:0" title="report"></iframe>'


def report(
    *runs: Run | Standing | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] = "runs",
    force: bool = False,
) -> Report:
    """Write a page about runs: curves, time, predictions, plan, recipe, failures. Without a run about the newest.

    runs: directories, ids, names, or what `run` and `runs` have returned. output, force: as of `trainkit report`.
    """
    with _readable():
        from trainkit.cli.commands.report import FILE, write_report
        from trainkit.cli.commands.runs import runs_named

        infos = runs_named([_run_word(each) for each in runs], os.fspath(root))
        target = Path(output) if output else (infos[0].layout.root if len(infos) == 1 else Path()) / FILE
        write_report(infos, target, force=force)
        return Report(target)


@dataclass(frozen=True)
class Answer:
    """What a model makes of a prompt. ended: by the model itself, not by a limit of tokens.

    label, probabilities: of a classifier, which has no text.
    """

    text: str = ""
    tokens: int = 0
    ended: bool = True
    label: str | None = None
    probabilities: Mapping[str, float] | None = None

    def __str__(self) -> str:
        return self.label or self.text


def generate(
    source: Run | str | os.PathLike[str],
    *prompts: str | Sequence[Message],
    system: str = "",
    plain: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    checkpoint: int | None = None,
    best: bool = False,
    device: str | None = None,
    trust_code: bool = False,
    root: str | os.PathLike[str] = "runs",
) -> list[Answer]:
    """What a trained model answers to each of the prompts: texts, or chats as lists of messages.

    source: a run, its directory, id or name, a checkpoint's folder, or a folder of transformers or peft. The other
    arguments are the options of `trainkit generate`, which answers in a process of its own: this one needs no torch,
    and its GPU stays free.
    """
    options: dict[str, Any] = {
        "--system": system or None,
        "--temperature": temperature,
        "--top-p": top_p,
        "--max-new-tokens": max_new_tokens,
        "--seed": seed,
        "--checkpoint": checkpoint,
        "--device": device,
        "--root": os.fspath(root),
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += [name for name, given in (("--plain", plain), ("--best", best), ("--trust-code", trust_code)) if given]
    rows = [
        {"prompt": each} if isinstance(each, str) else {"messages": [dict(part) for part in each]} for each in prompts
    ]
    with _readable(), tempfile.TemporaryDirectory(prefix="trainkit-prompts-") as folder:
        if not prompts:
            raise UsageError("there is no prompt", hint="give one or more behind the run: generate(run, prompt)")
        file = Path(folder, "prompts.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        command = ["generate", _run_word(source), "--file", str(file), "--json", *words]
        lines = Command(command, os.getcwd(), answers=True).answer().splitlines()  # noqa: PTH109 - as text
    fields = Answer.__dataclass_fields__
    return [Answer(**{name: value for name, value in json.loads(line).items() if name in fields}) for line in lines]


def sweep(
    recipe: Target,
    space: Mapping[str, Any],
    /,
    *overrides: Override,
    sampler: Sampler = "grid",
    trials: int | None = None,
    seed: int = 0,
    early_stop: bool = False,
    metric: str | None = None,
    jobs: int | Literal["auto"] = 1,
    presets: Sequence[str] = (),
    variant: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    quiet: bool | None = None,
) -> SweepResult:
    """Run a recipe once for each point of a space of settings, as `trainkit sweep` does, in processes of its own.

    space: for each key, dotted or nested, its values, or the text of an override: `{"optimizer.lr": [1e-4, 3e-4],
    "train.seed": "range(3)", "optimizer.weight_decay": "uniform(0, 0.3)"}`. The other arguments are the options of the
    command; folder is its `--output`. quiet: show nothing; a notebook shows in the cell how far the sweep is.

    It returns at the end, and the same call again goes on with a sweep that was interrupted. A trial that fails raises
    nothing: it is in the result, whose `complete` is False then. What refuses the sweep raises RecipeError, UsageError
    or MachineError. An interrupt (Ctrl-C) ends the runs in order, and is raised as KeyboardInterrupt.
    """
    options: dict[str, Any] = {
        "--sampler": sampler,
        "--trials": trials,
        "--seed": seed,
        "--metric": metric,
        "--jobs": jobs,
        "--output": None if folder is None else Path(folder).absolute(),
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    with _readable():
        request = _request(recipe, [*_axes(space), *overrides], presets, variant, ())
        command = ["sweep", "--json", *words, *(["--early-stop"] if early_stop else []), *request.words]
        answer = shown_answer(command, _folder(recipe), quiet=in_notebook() if quiet is None else quiet)
        from trainkit.sweeps.results import result_of

        found = result_of(json.loads(answer))
        if found.refusal:
            raise UsageError(found.refusal, hint="set eval.best_metric, or metric=, to one that it logs")
    return found


def _axes(space: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """The words of a space. UsageError for values that YAML has no form for, and where there are none."""
    from trainkit.recipe.yaml_writer import flow

    for name, values in space.items():
        key = f"{section}{name}"
        if isinstance(values, Mapping):
            yield from _axes(values, f"{key}.")
        elif isinstance(values, str):
            yield f"{key}={values}"
        else:
            texts = [flow(_plain(each, key), key) for each in (values if isinstance(values, Iterable) else [values])]
            if not texts:
                raise UsageError(f"{key} has no values", hint="give it a list of values, or a text such as range(3)")
            yield f"{key}={','.join(texts)}"


def _run_word(run: Run | Standing | str | os.PathLike[str]) -> str:
    if isinstance(run, Run):
        return str(run.directory)
    return os.fspath(run) if isinstance(run, str | os.PathLike) else str(run.run.layout.root)


def _request(
    recipe: Target,
    overrides: Sequence[Override],
    presets: Sequence[str],
    variant: str | None,
    arguments: Sequence[str],
) -> Request:
    words = _words(overrides)
    if isinstance(recipe, LoadedRecipe):
        before = recipe.request
        return replace(
            before,
            overrides=(*before.overrides, *words),
            presets=(*before.presets, *presets),
            variant=variant if variant is not None else before.variant,
            arguments=(*before.arguments, *arguments),
        )
    target: str | tuple[str, ...] | None
    if recipe is None or isinstance(recipe, str | os.PathLike):
        from trainkit.cli.line import begins_program

        target = None if recipe is None else os.fspath(recipe)
        if target and begins_program([target]):
            target = (target,)
    else:
        target = tuple(recipe)
    return Request(target, words, tuple(presets), variant, tuple(arguments))


def _loaded(
    recipe: Target,
    overrides: Sequence[Override],
    presets: Sequence[str],
    variant: str | None,
    arguments: Sequence[str],
) -> LoadedRecipe:
    request = _request(recipe, overrides, presets, variant, arguments)
    return LoadedRecipe(request.resolve(), request.words, _folder(recipe), request)


def _folder(recipe: Target) -> str:
    """That relative paths start from."""
    return recipe.folder if isinstance(recipe, LoadedRecipe) else os.getcwd()  # noqa: PTH109 - as text


def _words(overrides: Sequence[Override]) -> tuple[str, ...]:
    """Overrides as words of a command line. UsageError for a value that YAML has no form for."""
    words: list[str] = []
    for each in overrides:
        words += [each] if isinstance(each, str) else _assignments(each)
    return tuple(words)


def _assignments(settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    from trainkit.recipe.yaml_writer import flow

    for name, value in settings.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and value and not key.endswith(("+", "!")):
            yield from _assignments(value, f"{key}.")
        else:
            yield f"{key}={flow(_plain(value, key), key.rstrip('+!'))}"


def _plain(value: Any, key: str) -> Any:
    """A value as YAML has it: numbers of numpy's or torch's, paths and tuples become Python's, texts and lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each, key) for name, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(each, key) for each in value]
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        return value.item()
    hint = "give a number, a text, a path, None, or lists and dictionaries of these"
    raise UsageError(f"{key} is {type(value).__name__}, and a recipe has no such value: {value!r:.80}", hint=hint)


@contextmanager
def _readable() -> Iterator[None]:
    """In this context trainkit's errors get their diagnostics as text."""
    try:
        yield
    except TrainkitError as error:
        raise readable(error)  # noqa: B904 - it is the same error


def _warn(resolved: Resolved) -> None:
    from trainkit.cli.diagnostics import render_diagnostic

    for each in (found for found in resolved.warnings if found.severity == "warning"):
        warnings.warn(render_diagnostic(each).rstrip("\n"), UserWarning, stacklevel=3)
