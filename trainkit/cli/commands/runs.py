"""`trainkit runs`: run directories listed, shown, compared and pruned."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trainkit.cli.diagnostics import one_line, write_text
from trainkit.cli.options import Command, CommandGroup, Json, Root, Run
from trainkit.decode import finite
from trainkit.errors import MachineError, UsageError
from trainkit.recipe.secrets import mask_words
from trainkit.text import (
    MIB,
    Column,
    fitted_table,
    format_age,
    format_duration,
    format_measure,
    format_memory,
    format_rate,
    format_size,
    join_names,
    pluralize,
    table,
)

if TYPE_CHECKING:
    from trainkit.runner.rundir.layout import AttemptLayout
    from trainkit.runner.rundir.listing import RunInfo
    from trainkit.runner.watch.hang_cause import DumpFile
    from trainkit.schedulers.jobs.standing import Standing

_LAST = 10  # lines of a log
_SHORTEST = 4  # characters of a beginning that may stand for an id
_TASK = re.compile("-[0-9]+$")
_CONDITION = re.compile(r"(\w+)\s*(<=|>=|!=|=|<|>)\s*(.+)")
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
# The columns of a list, the most important ones first.
_NEEDED = ("ID", "STATE", "STEPS", "LOSS", "NAME", "TIME", "EVALUATION", "AGE")
_EXTRA = ("EXIT", "RATE", "RUN", "STRATEGY", "PROGRAM", "LAUNCHER")
app = typer.Typer(
    name="runs",
    cls=CommandGroup,
    help="List, show, compare and prune run directories.",
    no_args_is_help=True,
    add_completion=False,
)

Name = Annotated[str | None, Argument(metavar="[NAME]", help="Only runs of this name.")]


@app.command("list", cls=Command)
def list_runs(  # noqa: PLR0917 - a command's options
    name: Name = None,
    root: Root = "runs",
    everywhere: Annotated[bool, Option("--all", help="All runs of this user on this machine, in any folder.")] = False,
    filters: Annotated[
        list[str] | None,
        Option("--filter", metavar="CONDITION", help="state=failed,cancelled; loss<2.5; name=lora*. May be repeated."),
    ] = None,
    order: Annotated[
        str | None, Option("--sort", metavar="FIELD", help="loss, steps, duration, …; -FIELD for the reverse order.")
    ] = None,
    limit: Annotated[
        int | None, Option("--limit", min=1, help="The newest N of them; with --sort, the first N.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest last: short id, state, steps, loss, evaluation, time left or spent, age, and more.

    A narrow terminal shows fewer columns; --json has everything.

    Example: trainkit runs list --filter state=failed
    """
    roots = known_roots() if everywhere else [root]
    found, any_there = chosen_runs(name, roots, filters or (), order, limit)
    if as_json:
        data = [{**each.as_data(), "summary": dict(each.run.summary)} for each in found]
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    elif not found:
        of = (
            "these conditions hold for none of the runs"
            if any_there
            else f"no runs named {name}"
            if name
            else "no runs"
        )
        write_text(one_line(f"{of} in {join_names(roots) or 'any folder'}") + "\n")
    else:
        sys.stdout.write(standings_table(found))


def chosen_runs(
    name: str | None, roots: Sequence[str], filters: Sequence[str], order: str | None, limit: int | None
) -> tuple[list[Standing], bool]:
    """The runs of a list, and whether there are any at all. The arguments are its options; roots: folders of runs."""
    from trainkit.runner.rundir import listing
    from trainkit.schedulers.jobs.run_state import Jobs
    from trainkit.schedulers.jobs.standing import standing_of

    conditions, key, jobs = [condition(each) for each in filters], sort_key(order) if order else None, Jobs()
    runs = sorted((run for each in roots for run in listing.list_runs(each, name)), key=lambda run: run.layout.id)
    if limit and not conditions and key is None:
        runs = runs[-limit:]
    found = [standing_of(run, jobs) for run in runs]
    found = [each for each in found if all(holds(each) for holds in conditions)]
    if order and key:
        found.sort(key=key, reverse=order.startswith("-"))
        found.sort(key=lambda each: key(each)[0])  # what is unknown comes last in either order
    if limit:
        found = found[:limit] if order else found[-limit:]
    return found, bool(runs)


def condition(text: str) -> Callable[[Standing], bool]:
    """The condition of a `--filter`. Raises UsageError for an unknown field or state, or a value of the wrong type."""
    from trainkit.colour import STATES
    from trainkit.recipe.suggestions import did_you_mean
    from trainkit.schedulers.jobs.standing import FIELDS, TEXTS

    match = _CONDITION.fullmatch(text)
    field, sign, value = match.groups() if match else (text, "", "")
    if match is None or field not in FIELDS:
        form = f"write FIELD=VALUE or FIELD<VALUE with one of {', '.join(FIELDS)}"
        hint = form if field in FIELDS else did_you_mean(field, FIELDS, form)
        raise UsageError(f"--filter '{text}' is no condition on a run", hint=hint)
    read = FIELDS[field]
    if field in TEXTS:
        if sign not in ("=", "!="):
            raise UsageError(f"--filter {text}: {field} is a text", hint=f"write {field}=VALUE or {field}!=VALUE")
        wanted = [each.strip() for each in value.split(",")]
        if field == "state":
            wanted = [each.replace(" ", "_").replace("-", "_") for each in wanted]
            if wrong := next((each for each in wanted if each not in STATES), None):
                hint = did_you_mean(wrong, STATES, f"the states are {', '.join(STATES)}")
                raise UsageError(f"--filter {text}: a run has no state {wrong}", hint=hint)
        return lambda each: any(fnmatch(str(read(each)), one) for one in wanted) is (sign == "=")
    try:
        numbers = [float(each) for each in value.split(",")]
    except ValueError:
        numbers = [math.nan]
    if any(map(math.isnan, numbers)):
        raise UsageError(f"--filter {text}: {value} is no number", hint=f"{field} is compared with one")
    holds = _COMPARISONS[sign]
    return lambda each: (known := read(each)) is not None and any(holds(known, number) for number in numbers)


def sort_key(order: str) -> Callable[[Standing], tuple[bool, Any]]:
    """The key of a `--sort`: whether the field is unknown, and its value. Raises UsageError for no field."""
    from trainkit.recipe.suggestions import did_you_mean
    from trainkit.schedulers.jobs.standing import FIELDS

    if (read := FIELDS.get(order.removeprefix("-"))) is None:
        hint = did_you_mean(order.removeprefix("-"), FIELDS, f"it is one of {', '.join(FIELDS)}")
        raise UsageError(f"--sort {order}: runs have no such field", hint=hint)
    return lambda each: ((value := read(each)) is None, value)


def standings_table(standings: Sequence[Standing]) -> str:
    """A line for each run, as wide as the terminal, in its colours; a pipe gets all columns."""
    from trainkit.colour import STATES, Colour

    colour = Colour(sys.stdout, os.environ)

    def painted(cell: str) -> str:
        return colour.paint(cell, STATES.get(cell.strip().replace(" ", "_"), "title"))

    def column(head: str, cell: Callable[[Standing], str], least: int = 0, **how: Any) -> Column:
        return Column(head, [one_line(cell(each)) for each in standings], least, **how)

    columns = [
        column("ID", lambda each: each.run.layout.short_id),
        column("NAME", lambda each: each.run.layout.name, 10),
        column("STATE", lambda each: each.state.title, paint=painted),
        column("EXIT", lambda each: "" if each.exit_code is None else str(each.exit_code)),
        column("STEPS", described_steps),
        column("LOSS", described_loss),
        column("EVALUATION", described_evaluation, 8, keeps="end"),
        column("TIME", described_time),
        column("AGE", lambda each: format_age(time.time() - each.run.started) if each.run.started else ""),
        column("RATE", described_rate),
        column("PROGRAM", lambda each: each.run.program, 12),
        column("STRATEGY", lambda each: each.run.launched.get("strategy", "")),
        column("LAUNCHER", lambda each: each.run.launched.get("launcher", "")),
        column("RUN", lambda each: str(each.run.layout.root), 24, keeps="end"),
    ]
    return fitted_table(columns, _NEEDED, _EXTRA, shutil.get_terminal_size((0, 0)).columns or None)


def described_steps(standing: Standing) -> str:
    """``120/1000``; empty where nothing is known."""
    return "/".join(str(each) for each in (standing.step, standing.total) if each is not None)


def described_loss(standing: Standing) -> str:
    """``2.5671``; ``nan`` also for infinity."""
    return "nan" if standing.diverged else "" if standing.loss is None else format_measure(standing.loss)


def described_evaluation(standing: Standing) -> str:
    """``accuracy 0.9150``; empty where nothing was evaluated."""
    return f"{standing.evaluation[0]} {format_measure(standing.evaluation[1])}" if standing.evaluation else ""


def described_time(standing: Standing) -> str:
    """``3:07 left`` of a run that goes on, else how long it took."""
    if standing.left is not None:
        return f"{format_duration(standing.left)} left"
    return "" if standing.duration is None else format_duration(standing.duration)


def described_rate(standing: Standing) -> str:
    """``52.3k tokens/s``, or samples where they are not tokens, or steps of a script that tells no more."""
    steps = 1 / standing.seconds_per_step if standing.seconds_per_step else None
    rates = {"tokens": standing.tokens_per_second, "samples": standing.samples_per_second, "steps": steps}
    return next((f"{format_rate(rate)} {unit}/s" for unit, rate in rates.items() if rate is not None), "")


def known_roots() -> list[str]:
    """Folders in which runs of this user lie, as each run has noted it."""
    from trainkit.runner.rundir.create import remembered_roots

    return remembered_roots(os.environ)


@app.command("show", cls=Command)
def show(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Show a run: how far it is, or who ended it and why; its program and summary, the last lines of its logs.

    Example: trainkit runs show quickstart
    """
    from trainkit.runner.report.summary import render_summary
    from trainkit.runner.rundir.code_state import read_code
    from trainkit.schedulers.jobs.standing import standing_of

    info = find_run(run, root)
    standing, code = standing_of(info), read_code(info.layout)
    if as_json:
        data = {**standing.as_data(), "summary": dict(info.summary), "code": code and code._asdict()}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return
    sys.stdout.write(headline(standing))
    is_over = standing.state.is_over
    if not is_over or not info.summary:
        write_text(table(figures(standing)))
    kind = ", ".join(filter(None, (info.launched.get(name) for name in ("program", "strategy", "launcher"))))
    own = info.argv if info.launched.get("program") != "builtin" else ()
    program = shlex.join(mask_words(own)) or info.program
    write_text(one_line(f"program: {program or '-'}" + (f" ({kind})" if kind else "")) + "\n")
    if code:
        write_text(one_line(f"code: {code}") + "\n")
    if info.summary and is_over:
        write_text(render_summary(info.summary, info.layout.root) + "\n")
    write_text("".join(f"{line}\n" for line in ends_of_logs(info)))
    run = info.layout.short_id if root == "runs" else shlex.quote(str(info.layout.root))
    write_text(f"next: trainkit report {run}\n" if is_over else f"next: trainkit watch {run}, trainkit logs {run} -f\n")


def headline(standing: Standing) -> str:
    """The first line about a run: its state, and why, in the state's colour."""
    from trainkit.colour import STATES, Colour

    state = standing.state
    parts = [f", exit code {standing.exit_code}" if standing.exit_code is not None else ""]
    parts += [f", attempt {state.attempt}" if state.attempt > 1 else ""]
    unknown = ": no reason recorded" if state.is_over and standing.exit_code else ""
    rest = one_line("".join(parts) + (f": {state.why}" if state.why else unknown))
    return f"{Colour(sys.stdout, os.environ).paint(one_line(state.title), STATES.get(state.word, 'title'))}{rest}\n"


def figures(standing: Standing) -> list[tuple[str, str]]:
    """What is known of a run beside its state, by its names."""
    from trainkit.runner.report.progress import NOW

    run, state, age = standing.run, standing.state, None
    steps, share = described_steps(standing), ""
    if standing.step is not None and standing.total:
        share = f" ({100 * standing.step // standing.total}%)"
    if state.source == "status.json" and state.at:
        age = format_age(time.time() - state.at)
    spent = "" if standing.duration is None else format_duration(standing.duration)
    left = "" if standing.left is None else format_duration(standing.left)
    rows = [
        ("Run", f"{run.layout.name} {run.layout.short_id}"),
        ("Step", f"{steps.replace('/', ' of ')}{share}{', ' * bool(now := NOW.get(standing.phase, ''))}{now}"),
        ("Loss", described_loss(standing)),
        ("Evaluation", described_evaluation(standing)),
        ("Time left", left),
        ("Time", spent),
        ("Rate", described_rate(standing)),
        ("Memory", "" if standing.memory_bytes is None else format_memory(standing.memory_bytes)),
        ("Where", standing.where),
        ("Job", state.job),
        ("Directory", str(run.layout.root)),
        ("Source", f"{state.source}, {age} ago" if age else state.source),
    ]
    return [(title, one_line(text)) for title, text in rows if text]


def ends_of_logs(info: RunInfo) -> Iterator[str]:
    """The last lines of the rank that failed, else of rank 0, and where its logs are; of a launcher where none ran."""
    from trainkit.runner.report.progress import last_lines

    for attempt in info.layout.attempts[-1:]:
        rank = info.rank or 0
        logs = [attempt.log(rank, stream) for stream in ("out", "err")]
        logs = [log for log in logs if log.exists()] or [each for each in (attempt.launcher_log,) if each.exists()]
        found = {log: last_lines(log, _LAST) for log in logs}
        for log, lines in found.items():
            if lines:
                yield f"last lines of {log}:"
            elif info.rank is not None or not any(found.values()):
                yield f"nothing in {log}"
            yield from (f"  | {one_line(line.expandtabs())}" for line in lines)


@app.command("diff", cls=Command)
def diff(
    first: Annotated[str, Argument(metavar="RUN", help="A run, as for `trainkit status`.")],
    second: Annotated[str, Argument(metavar="OTHER", help="The run to compare it with.")],
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Compare two runs: their recipes, plans, environments and results; what is equal is not shown.

    Example: trainkit runs diff 1ceb19 7f0a22
    """
    from trainkit.runner.report.difference import differences
    from trainkit.schedulers.jobs.run_state import Jobs
    from trainkit.schedulers.jobs.standing import standing_of

    jobs, infos = Jobs(), [find_run(word, root) for word in (first, second)]
    standings = [standing_of(each, jobs) for each in infos]
    parts = {**differences(infos[0], infos[1]), "results": results(standings[0], standings[1])}
    if as_json:
        data: dict[str, Any] = {"runs": [each.as_data() for each in standings]}
        for part, found in parts.items():
            data[part] = {key: dict(zip(("first", "second"), pair, strict=True)) for key, pair in found.items()}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return
    names = [f"{each.run.layout.name} {each.run.layout.short_id}" for each in standings]
    width = shutil.get_terminal_size((0, 0)).columns or None
    for number, (part, found) in enumerate(parts.items()):
        sys.stdout.write("\n" if number else "")
        if not found:
            write_text(f"{part.upper()}: nothing differs\n")
            continue
        cells = [[*found], *([shown_value(pair[side]) for pair in found.values()] for side in (0, 1))]
        heads = [part.upper(), *names] if names[0] != names[1] else [part.upper(), names[0], f"{names[1]} (2)"]
        changes = [relative_change(*pair) for pair in found.values()] if part == "results" else []
        columns = [Column(heads[0], [*map(one_line, cells[0])], 12, "end")]
        columns += [
            Column(one_line(head), [*map(one_line, each)], 10) for head, each in zip(heads[1:], cells[1:], strict=True)
        ]
        columns += [Column("CHANGE", changes)] if changes else []
        sys.stdout.write(fitted_table(columns, [each.head for each in columns], (), width))


def results(first: Standing, second: Standing) -> dict[str, tuple[Any, Any]]:
    """Differences between the results of two runs, at their ends or so far."""
    from trainkit.runner.report.difference import compared

    def known(standing: Standing) -> dict[str, Any]:
        measured = standing.run.summary.get("metrics") if standing.state.is_over else None
        evaluated = dict([standing.evaluation] if standing.evaluation else [])
        evaluated |= measured if isinstance(measured, Mapping) else {}
        if standing.state.is_over and standing.run.summary.get("eval_loss") is not None:
            evaluated["loss"] = standing.run.summary["eval_loss"]
        memory, seconds = standing.memory_bytes, standing.duration
        return {
            "state": standing.state.title,
            "steps": standing.step,
            "loss": standing.loss,
            **{f"evaluation {name}": value for name, value in evaluated.items()},
            "samples/s": standing.samples_per_second,
            "tokens/s": standing.tokens_per_second,
            "peak memory, MiB": None if memory is None else round(memory / MIB),
            "seconds": None if seconds is None else round(seconds, 1),
        }

    one, other = known(first), known(second)
    found = compared(one, other)
    return {name: found[name] for name in dict.fromkeys((*one, *other)) if name in found}


def shown_value(value: Any) -> str:
    """A value of a comparison; empty for none."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def relative_change(first: Any, second: Any) -> str:
    """``+12.5%`` from the first number to the second; empty where either is none."""
    before, after = finite(first), finite(second)
    return f"{(after - before) / abs(before):+.1%}" if before and after is not None else ""


@app.command("prune", cls=Command)
def prune(
    name: Name = None,
    root: Root = "runs",
    keep: Annotated[int, Option("--keep", min=0, help="How many of the newest runs of each name to keep.")] = 5,
    yes: Annotated[bool, Option("--yes", help="Remove without asking.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only show what would be removed, and how much that frees.")
    ] = False,
) -> None:
    """Remove old run directories, after showing how much space that frees. Runs that may go on are never removed.

    Example: trainkit runs prune --keep 3
    """
    from trainkit.runner.rundir import listing
    from trainkit.schedulers.jobs.run_state import older, prunable, remove_run

    runs = listing.list_runs(root, name)
    chosen = prunable(runs, keep)
    if stay := len(older(runs, keep)) - len(chosen):
        why = "runs that may still be running, whose scheduler does not answer, of other users, or behind links"
        write_text(f"{pluralize(stay, 'older run')} {'stays' if stay == 1 else 'stay'}: {why}\n")
    if not chosen:
        write_text("nothing to remove\n")
        return
    sizes, freed = listing.disk_use([run.layout.root for run in chosen])
    write_text(table((format_size(size), str(run.layout.root)) for size, run in zip(sizes, chosen, strict=True)))
    write_text(f"{'removing this run' if len(chosen) == 1 else 'removing these'} frees {format_size(freed)}\n")
    if dry_run:
        return
    if not yes:
        what = "this run" if len(chosen) == 1 else f"these {len(chosen)} runs"
        try:
            yes = typer.confirm(f"remove {what} with all checkpoints?")
        except typer.Abort as abort:  # Ctrl-D leaves the cursor behind the question
            sys.stdout.write("\n")
            raise UsageError("nothing is removed without an answer", hint="--yes removes without asking") from abort
    if not yes:
        write_text("nothing removed\n")
        return
    removed = 0
    for run in chosen:
        try:
            removed += remove_run(run.layout)
        except OSError as error:
            sys.stderr.write(f"{run.layout.root} cannot be removed: {error.strerror}: {error.filename}\n")
    write_text(f"removed {removed} of {len(chosen)} runs\n")


def find_run(word: str | None, root: str) -> RunInfo:
    """The run that a word means, as in `find_runs`. UsageError for an array job of several."""
    found, is_array = find_runs(word, root)
    if is_array:
        several = join_names([job_of(run) or run.layout.short_id for run in found])
        raise UsageError(f"{word} is an array job of {pluralize(len(found), 'run')}", hint=f"name one: {several}")
    return found[0]


def runs_named(words: Sequence[str] | None, root: str) -> list[RunInfo]:
    """The runs that several words mean, each once; without a word the newest of all."""
    named: Sequence[str | None] = words or [None]
    return [*{run.layout.root: run for word in named for run in find_runs(word, root)[0]}.values()]


def find_runs(word: str | None, root: str) -> tuple[list[RunInfo], bool]:
    """The runs that a word means, and whether they are those of an array job; without a word the newest of all.

    In this order: a run directory; under the root a name (its newest run), an id, a short id; the number of a job; the
    beginning of an id. UsageError if there is none, or if a beginning is that of several runs.
    """
    from trainkit.runner.rundir import listing

    if word is None:
        if not (runs := listing.list_runs(root)):
            hint = "start one (`trainkit run quickstart`), or name their folder with --root"
            raise UsageError(f"no runs in {root}{lacking(Path(root))}", hint=hint)
        return runs[-1:], False
    # A path first: a name may be that of a folder here. ValueError is a NUL byte in the word.
    with contextlib.suppress(OSError, ValueError):
        if listing.is_run(Path(word)):
            return [listing.read_run(Path(word))], False
    runs = listing.list_runs(root)
    if named := [run for run in runs if word == run.layout.name]:
        return named[-1:], False
    if known := [run for run in runs if word in (run.layout.id, run.layout.short_id)]:
        return one_of(word, known)
    for searched in itertools.chain([runs], runs_with_jobs(word)):
        if named := [run for run in searched if is_of_job(run, word)]:
            return named[-1:], False
        if tasks := tasks_of(word, searched):
            return tasks, True
    if begun := [run for run in runs if any(each.startswith(word) for each in (run.layout.id, run.layout.short_id))]:
        if len(word) < _SHORTEST:
            what = f"{word or 'an empty word'} is too short for the beginning of a run's id"
            raise UsageError(what, hint=f"give {_SHORTEST} characters of it, or more")
        return one_of(word, begun)
    if elsewhere := [run for each in known_roots() for run in listing.runs_of_id(word, each)]:
        return one_of(word, elsewhere)
    what = f"{word} is neither a run directory nor a run in {root}{lacking(Path(word))}"
    raise UsageError(what, hint="`trainkit runs list` shows them")


def lacking(root: Path) -> str:
    """What is missing in the first folder that would be a run's, at or below a path."""
    from trainkit.runner.rundir.listing import incomplete_runs

    with contextlib.suppress(OSError, ValueError):  # a word that is no path
        for path, missing in incomplete_runs(root):
            return f": {path} has no {join_names(missing)}"
    return ""


def one_of(word: str, found: list[RunInfo]) -> tuple[list[RunInfo], bool]:
    """The only run of these, or all tasks of one array; UsageError for several runs."""
    if len(found) == 1:
        return found, False
    arrays = {each.layout.root.with_name(each.layout.id.rpartition("-")[0]) for each in found}
    if len(arrays) == 1 and all(_TASK.search(each.layout.short_id) for each in found):
        return sorted(found, key=lambda each: int(each.layout.id.rpartition("-")[2])), True
    alike = join_names([f"{each.layout.short_id} ({each.layout.name}, {each.layout.id})" for each in found])
    raise UsageError(f"{word} may be any of {len(found)} runs: {alike}", hint="give more of the id")


def runs_with_jobs(number: str) -> Iterator[list[RunInfo]]:
    """Where else the run of a job may be: in folders that runs have noted, and in the one that its scheduler knows."""
    from trainkit.runner.rundir.listing import list_runs
    from trainkit.schedulers.jobs.run_state import root_of_job, schedulers_with_job

    if any(schedulers_with_job(number)):
        runs = [run for root in known_roots() for run in list_runs(root)]
        yield sorted(runs, key=lambda run: run.layout.id)
        if root := root_of_job(number):
            yield list_runs(str(root))


def job_of(run: RunInfo) -> str:
    """The number of its job; empty for a run that was not submitted."""
    from trainkit.schedulers.jobs.records import submitted

    found = submitted(run.layout.root)
    return found[1].job if found else ""


def is_of_job(run: RunInfo, word: str) -> bool:
    """Whether a run was submitted as the job that a word names."""
    from trainkit.schedulers.jobs.records import submitted

    return (found := submitted(run.layout.root)) is not None and found[0].is_named(found[1].job, word)


def tasks_of(word: str, runs: Sequence[RunInfo]) -> list[RunInfo]:
    """The runs of an array job that a word names, by their tasks; none where it names none."""
    from trainkit.schedulers.jobs.records import submitted

    found: dict[int, RunInfo] = {}
    for run in runs:
        if (known := submitted(run.layout.root)) and (task := known[0].task_of(known[1].job)):
            array, number = task
            if known[0].is_named(array, word):
                found[number] = run
    return [run for _, run in sorted(found.items())]


ANSWER_SECONDS = 30.0  # the guardian looks once a second, and waits twelve for other nodes
LOOK_SECONDS = 0.1
STILL_SECONDS = 10.0  # a run whose ranks have all moved since is called one that moves


def dump(
    run: Run = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Show what every rank of a running run is doing, and save their stacks. The run continues.

    Example: trainkit dump quickstart
    """
    from trainkit.decode import DecodeError, decode
    from trainkit.runner.watch.hang_cause import DumpFile, describe
    from trainkit.schedulers.jobs.run_state import state_of

    layout = find_run(run, root).layout
    # Whether a run of another machine is still there cannot be seen from here: its guardian answers, or does not.
    found = state_of(layout)
    if found.is_over or not layout.attempts:
        what = f"{layout.root} is not running: it is {found.title}"
        raise UsageError(what, hint="`trainkit runs list` shows those that are")
    attempt = layout.attempts[-1]
    answer = ask(attempt)
    try:
        account: DumpFile = decode(DumpFile, answer)
    except DecodeError as error:
        raise MachineError(f"the answer in {attempt.root / 'dumps'} is not the guardian's: {error}") from error
    if as_json:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return
    write_text("".join(f"{one_line(describe(each))}\n" for each in account.ranks))
    write_text(f"{one_line(_outcome(account))}\n{attempt.root / 'dumps'}\n")


def _outcome(account: DumpFile) -> str:
    """Which rank blocks the run, if it does not move."""
    seconds = min((each.seconds for each in account.ranks if each.is_rank), default=None)
    missing = f"; {', '.join(account.missing)} did not answer" if account.missing else ""
    if seconds is None:
        return f"no rank runs{missing}"
    return account.line if seconds > STILL_SECONDS else f"the run moves{missing}"


def ask(attempt: AttemptLayout) -> dict[str, Any]:
    """Leave an order for the run's guardian, and wait for what it finds. Raises MachineError without an answer."""
    from trainkit.files import make_folder, parse_json, publish, read_whole
    from trainkit.runner.rundir.records import DUMPS, ORDERS, run_of

    token, orders = os.urandom(16).hex(), attempt.root / ORDERS
    answer, order = attempt.root / DUMPS / "asked.json", orders / "dump"
    run = run_of(str(attempt.root))
    try:
        make_folder(orders, below=run)
        publish(order, token, below=run)
    except OSError as error:
        why = f"{orders} cannot be written: {error.strerror}"
        raise MachineError(why, hint="a dump requires write access to the run directory") from error
    until = time.monotonic() + ANSWER_SECONDS
    try:
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):  # there is none yet
                account = parse_json(read_whole(answer, below=run))
                if isinstance(account, dict) and account.get("asked") == token:
                    return account
            time.sleep(LOOK_SECONDS)
    finally:
        remove(order, run)
    raise MachineError(
        f"the run's guardian has not answered for {ANSWER_SECONDS:.0f} s",
        hint="check that it still runs; on several nodes, that node 0 sees this folder",
    )


def remove(order: Path, run: str) -> None:
    """Take an order back that nobody has taken, and the folder with it."""
    from trainkit.files import remove_file

    with contextlib.suppress(OSError):
        remove_file(order, below=run)
        order.parent.rmdir()
