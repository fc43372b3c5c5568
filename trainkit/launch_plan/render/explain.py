"""What `trainkit explain` prints: where each setting comes from, and how two plans differ."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainkit.errors import UsageError
from trainkit.launch_plan.model import Job, Plan, plan_to_json
from trainkit.launch_plan.render.shell import quoted
from trainkit.recipe.schema.fields import lies_in, schema
from trainkit.recipe.suggestions import nearest_key

if TYPE_CHECKING:
    from trainkit.launch_plan.model import Planned
    from trainkit.recipe.resolved import Entry, Resolved


# Parts that are compared value by value, in the order of the page.
PARTS = (
    "name", "strategy.kind", "launcher.kind", "program.kind", "program.reason", "topology", "batch", "resume",
    "output_root", "rendezvous", "max_restarts", "grace_seconds", "hang",
    "preparations", "repositories", "container",
)  # fmt: skip
TRAINING = "The settings that decide training differ: neither resumes from the other's checkpoints on its own."


def render_diff(other: Plan, plan: Plan) -> str:
    """What changes from `other` to `plan`: lines with ``-`` are only in the first, with ``+`` only in the second."""
    old, new = ({file.path: file.content for file in one.files} for one in (other, plan))
    sections = {
        "Decisions": _values(decisions(other), decisions(plan)),
        "Command": _sequence(*([quoted(word) for each in one.commands for word in each.argv] for one in (other, plan))),
        "Environment": _values(_environment(other), _environment(plan)),
        **{f"File {path}": _file(path, old.get(path), new.get(path)) for path in sorted({*old, *new})},
        "Remarks": _sequence(*([f"{each.severity}: {each.what}" for each in one.notices] for one in (other, plan))),
        "Training": [] if other.training_digest == plan.training_digest else [TRAINING],
    }
    found = {title: lines for title, part in sections.items() if (lines := list(part))}
    if not found:
        return "The plans are the same.\n"
    return "\n".join("\n".join([title, *(f"  {line}" for line in lines)]) + "\n" for title, lines in found.items())


def decisions(plan: Plan) -> dict[str, Any]:
    """The parts of a plan that are compared, by dotted keys."""
    flat = leaves(plan_to_json(plan))
    return {key: value for part in PARTS for key, value in flat.items() if lies_in(key, (part,))}


def _environment(plan: Plan) -> dict[str, str]:
    values = {name: str(value) for name, value in plan.environment.set}
    values |= dict.fromkeys(plan.environment.take, "(taken from the caller)")
    values |= {name: str(value) if value else "(the launcher's own)" for name, value in plan.environment.added}
    return values | dict.fromkeys((f"unset {name}" for name in plan.environment.unset), "")


def _values(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*before, *after)):
        if key not in before or key not in after:
            sign, value = ("-", _plain(before[key])) if key in before else ("+", _plain(after[key]))
            yield f"{sign} {key}: {value}" if value else f"{sign} {key}"
        elif before[key] != after[key]:
            yield f"~ {key}: {_plain(before[key])} -> {_plain(after[key])}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, ensure_ascii=False)


def _sequence(before: list[str], after: list[str]) -> Iterator[str]:
    return (line for line in difflib.ndiff(before, after) if line[:1] in "+-")


def _file(path: str, old: str | None, new: str | None) -> Iterator[str]:
    if old is None or new is None:
        yield f"{'+' if old is None else '-'} the whole file"
        return
    trees = [_tree(path, content) for content in (old, new)]
    if None in trees:
        yield from _sequence(old.splitlines(), new.splitlines())
    else:
        yield from _values(*map(leaves, trees))


def _tree(path: str, content: str) -> Any:
    """What a JSON file holds; None for any other, which is compared line by line."""
    try:
        return json.loads(content) if path.endswith(".json") else None
    except ValueError:
        return None


def leaves(value: Any, prefix: str = "", whole: Container[str] = ()) -> dict[str, Any]:
    """The values of a tree by dotted key; lists of plain values stay whole. whole: keys of other lists that do."""
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list) and prefix not in whole and any(isinstance(item, Mapping) for item in value):
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= leaves(item, f"{prefix}.{key}" if prefix else str(key), whole)
    return found


OPEN = "the script's own"  # a size that nobody has given


def _side(size: int | None) -> int | str:
    return OPEN if size is None else size


# Settings that the plan decides: `auto`, and the corner of the batch triangle that gives way.
DECIDED_BY_THE_PLAN: Mapping[str, Callable[[Plan], object]] = {
    "batch.global": lambda plan: _side(plan.batch.global_),
    "batch.micro": lambda plan: (
        f"the largest of {', '.join(map(str, plan.batch.search))} that fits"
        if plan.batch.search
        else _side(plan.batch.micro)
    ),
    "batch.accumulation": lambda plan: "what micro leaves" if plan.batch.search else _side(plan.batch.accumulation),
    "batch.eval_micro": lambda plan: _side(plan.batch.eval_micro),
    "devices.type": lambda plan: plan.topology.device,
    "launcher.kind": lambda plan: plan.launcher.kind,
    "nodes.processes_per_node": lambda plan: plan.topology.groups[0].processes,
}


def render_all(resolved: Resolved) -> str:
    """Every key that some layer gives, with its winner."""
    winners = ((key, entries[-1]) for key, entries in resolved.history.items() if entries and not entries[-1].dropped)
    return "".join(f"{key} = {_shown(entry.value)}   {_place(entry)}{_why(entry)}\n" for key, entry in winners)


def _why(entry: Entry) -> str:
    return f" ({entry.note})" if entry.implied else ""


def render(query: str, resolved: Resolved, planned: Planned) -> str:
    """Explain a recipe key (a section too), or a word, a variable or a file's key of the plan.

    Raises UsageError with suggestions when it is neither.
    """
    settings = leaves(
        resolved.recipe.model_dump(mode="json", by_alias=True), whole={*schema().settings, *resolved.history}
    )
    keys = [key for key in dict.fromkeys((*settings, *resolved.history)) if lies_in(key, (query,))]
    if keys:
        return "".join(f"{line}\n" for key in keys for line in _history(key, resolved, settings, planned.plan))
    lines: list[str] = []
    for part, shown in _matching(query, planned):
        lines.append(shown)
        if rule := planned.provenance.rules.get(part):
            lines.append(f"  because: {rule}")
        for key in planned.provenance.parts.get(part, ()):
            origin = resolved.given(key) or resolved.places.get(key)  # of what a list holds, the place alone is known
            value = f" = {_shown(settings[key])}" if key in settings else ""
            lines.append(f"  from {key}{value}   {origin.place if origin else 'default'}")
    if lines:
        return "\n".join(lines) + "\n"
    known = (*settings, *(name for name, _ in planned.plan.environment.set))
    # What the query may mean: names that end with it, what other tools call so, names that look like it.
    near = [name for name in known if name.endswith(f".{query}")]
    if not near:
        familiar = nearest_key(query)
        near = [familiar] if familiar and familiar in known else difflib.get_close_matches(query, known)
    hint = f"did you mean {' or '.join(near)}?" if near else "without a key, all values that are set are listed"
    raise UsageError(f"`{query}` is neither a key of the recipe nor a word of the plan", hint=hint)


def _history(key: str, resolved: Resolved, settings: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    entries = resolved.history.get(key, ())
    if key in settings:
        yield f"{key} = {_shown(settings[key])}"
    else:
        yield f"{key} is not in force"
    if key in settings and (not entries or entries[-1].dropped):
        yield "  the default: no layer in force gives it"
    for position, entry in enumerate(reversed(entries)):
        wins = position == 0 and not entry.dropped
        note = f" ({' '.join(entry.note.splitlines())})" if entry.note else ""
        how = "follows from" if entry.implied else "given by"
        yield f"  {how if wins else 'beaten: ' + _shown(entry.value) + ' of'} {_place(entry)}{note}"
    if key in DECIDED_BY_THE_PLAN and (decided := DECIDED_BY_THE_PLAN[key](plan)) != settings[key]:
        yield "  the plan leaves it to the script" if decided == OPEN else f"  the plan makes it {_shown(decided)}"


def _place(entry: Entry) -> str:
    """Layer and place; a file's layer names the file, which is not repeated."""
    layer = entry.origin.layer.removesuffix(entry.origin.source).strip()
    return f"{layer} {entry.origin.place}".strip()


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _of_job(query: str, job: Job) -> Iterator[tuple[str, str]]:
    """The lines and words of what is submitted that the query names."""
    for number, line in enumerate(str(job.content).splitlines()):
        named = {word.partition("=")[0].lstrip("-") for word in line.split()}
        if query in {line, *line.split()} or query.lstrip("-") in named - {""}:
            yield f"job.content.{number}", f"{line}   line {number + 1} of {job.file}"
    for name, words in (("submit", job.submit), ("step", job.step)):
        for position, word in enumerate(map(quoted, words)):
            if query == word or query.lstrip("-") == word.partition("=")[0].lstrip("-"):
                yield f"job.{name}.{position}", f"{word}   word {position} of {quoted(words[0])}"
    for node, host in enumerate(job.hosts):
        if query == host:
            yield f"job.hosts.{node}", f"{host}   node {node}"


def _matching(query: str, planned: Planned) -> list[tuple[str, str]]:
    """(part, how it is shown) of every part of the plan that the query names."""
    plan, found = planned.plan, []
    for group, command in enumerate(plan.commands):
        for position, word in enumerate(command.argv):
            shown = quoted(word)
            if query in {str(word), shown} or query.lstrip("-") == shown.partition("=")[0].lstrip("-") != "":
                found.append((f"commands.{group}.argv.{position}", f"{shown}   word {position} of the command"))
    found += _of_job(query, plan.job) if plan.job else []
    for name, value in plan.environment.set:
        if query == name:
            found.append((f"environment.{name}", f"{name}={quoted(value)}   in the ranks' environment"))
    for name, own_value in plan.environment.added:
        if query == name:
            own = f"{name}={quoted(own_value)}" if own_value else name
            found.append((f"environment.{name}", f"{own}   given to the ranks by {plan.launcher.kind} itself"))
    given = {name for name, _ in (*plan.environment.set, *plan.environment.added)}
    gone = (name for name in (*plan.environment.unset, *plan.environment.take) if name not in given)
    found += [
        (f"environment.{name}", f"{name}   of the caller's environment")
        for name in gone
        if query == name or (name.endswith("*") and query.startswith(name[:-1]))  # the plan unsets `PET_*` as a pattern
    ]
    files = (part for part in {**planned.provenance.parts, **planned.provenance.rules} if part.startswith("files."))
    for part in sorted(files):
        key = part.removeprefix("files.")
        if lies_in(key, (query,)) or key.endswith(f".{query}"):
            found.append((part, f"{key}   in a generated file"))
    return found
