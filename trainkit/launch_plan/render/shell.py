"""The plan as a POSIX shell script that runs it without trainkit's command line; words of a command, quoted."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from trainkit.launch_plan.model import Plan, PlannedFile, Text, Variable
from trainkit.text import pluralize, script_word, shown_word

WIDTH = 100
# The script keeps run-time values in lower-case variables of its own: the plan may unset MASTER_ADDR and the like.
OF_CONTAINERS = {
    Variable.ATTEMPT: "attempt=1",
    Variable.USER: "user=$(id -u):$(id -g)",
    Variable.WORKING_DIR: "working_dir=$(pwd)",
    Variable.CACHE_DIR: (
        'cache_dir=${CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/trainkit/containers}\nmkdir -p "$cache_dir"'
    ),
    Variable.PACKAGE: (
        "package=${TRAINKIT_PACKAGE:-$(python3 -c 'import os, trainkit; print(os.path.dirname(trainkit.__file__))')}"
    ),
    Variable.HOST: "host=$(hostname)",
}
FREE_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"


def render(plan: Plan, recipe_yaml: str | None = None) -> str:
    """The script. recipe_yaml: the resolved recipe, from which the run goes on.

    Programs start as the bare command: no wrapper, so no logs by rank, exit records or grace time of trainkit's.
    """
    recipe = () if recipe_yaml is None else (PlannedFile("recipe.yaml", recipe_yaml),)
    taken = (
        f': "${{{name}:?the recipe takes it from the environment (env_from)}}"\nexport {name}'
        for name in plan.environment.take
    )
    exported = (f"export {name}={_quoted(value)}" for name, value in plan.environment.set)
    files = _files((*recipe, *plan.files))
    resume, handed = _resume(plan, recipe_yaml), _handed_in(plan)
    parts = (_head(plan), _run_time(plan), taken, _unset(plan), exported, handed, files, resume, _commands(plan))
    return "\n".join("\n".join(part) + "\n" for part in map(list, parts) if part)


def _head(plan: Plan) -> Iterator[str]:
    nodes = plan.topology.nodes
    yield "#!/bin/sh"
    ranks = pluralize(plan.topology.world_size, "rank")
    yield f"# {plan.name}: strategy {plan.strategy.kind}, launcher {plan.launcher.kind}, {ranks}."
    if nodes > 1:
        yield f"# Start it on each of {nodes} nodes, with NODE_RANK from 0 to {nodes - 1} and one RUN_ID for all."
    for notice in plan.notices:
        if notice.severity == "blocker":
            yield f"# Cannot run where it was planned: {' '.join(notice.what.split())}"
    yield "set -eu"


def _run_time(plan: Plan) -> Iterator[str]:
    one_node = plan.topology.nodes == 1
    yield "# What is known only now. Each value can be given in the environment under its upper-case name."
    run_id = "-$(date +%Y%m%d-%H%M%S)-$$" if one_node else "?one name for this run on all nodes"
    yield f"run_id=${{RUN_ID:{run_id}}}"
    yield "run_dir=${RUN_DIR:-}"
    yield f'[ -n "$run_dir" ] || run_dir={script_word(f"{plan.output_root}/{plan.name}")}/$run_id'
    yield 'mkdir -p "$run_dir/attempts/1"'
    yield 'run_dir=$(CDPATH="" cd -- "$run_dir" && pwd)'
    yield "attempt_dir=$run_dir/attempts/1"
    if plan.container:
        yield from _of_container(plan)
    if not one_node:
        host, _, port = plan.rendezvous.rpartition(":")
        address = f"-{host.strip('[]')}" if host else "?host name or address of node 0"
        yield "node_rank=${NODE_RANK:?the number of this node, from 0}"
        yield f"master_addr=${{MASTER_ADDR:{address}}}"
        yield f"port=${{PORT:{f'-{port}' if host else '?a free port of node 0'}}}"
        yield "local_addr=${LOCAL_ADDR:-$(hostname)}"
        yield 'if [ "$node_rank" -eq 0 ]; then is_host=true; else is_host=false; fi'
    texts = (*plan.commands[0].bare, *(value for _, value in plan.environment.set))
    # Free when asked for; another program may still take it before the launcher does.
    if one_node and any(Variable.PORT in text.parts for text in texts):
        python = "python3" if plan.container else _quoted(plan.commands[0].program[0])
        yield f"port=${{PORT:-$({python} -c {shlex.quote(FREE_PORT)})}}"


def _of_container(plan: Plan) -> Iterator[str]:
    preparations = (word for each in plan.preparations for word in each.argv)
    texts = (*plan.commands[0].bare, *preparations, *(value for _, value in plan.environment.set))
    used = {part for text in texts for part in text.parts}
    for variable, line in OF_CONTAINERS.items():
        if variable in used:
            yield line


def _handed_in(plan: Plan) -> Iterator[str]:
    """The variables under the names by which the engine hands them in."""
    if plan.container and plan.container.prefix:
        for name in plan.container.handed_in:
            yield f'export {plan.container.prefix}{name}="${name}"'


def _unset(plan: Plan) -> Iterator[str]:
    kept = {*plan.environment.take, *(name for name, _ in plan.environment.set)}
    exact = [name for name in plan.environment.unset if not name.endswith("*") and name not in kept]
    prefixes = [name for name in plan.environment.unset if name.endswith("*")]
    if exact:
        yield "# What must not leak in."
        yield from lines(("unset", *exact), WIDTH, "    ")
    if prefixes:
        yield "for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do"
        yield "    case $name in"
        if plan.environment.take:
            yield f"        {'|'.join(plan.environment.take)}) ;;"
        yield f'        {"|".join(prefixes)}) unset "$name" ;;'
        yield "    esac"
        yield "done"


def _files(files: tuple[PlannedFile, ...]) -> Iterator[str]:
    for file in files:
        target = f'"$run_dir"/{script_word(file.path)}'
        word = script_word(file.content)
        # A here-document would add a line end, and show a terminal what it obeys.
        if not file.content.endswith("\n") or word != shlex.quote(file.content):
            yield f"printf %s {word} > {target}"
            continue
        end = "END_OF_FILE"
        while end in file.content.splitlines():
            end += "_"
        yield f"cat > {target} <<'{end}'"
        yield f"{file.content}{end}"


def _resume(plan: Plan, recipe_yaml: str | None) -> Iterator[str]:
    """The checkpoint, chosen when the script runs: by then there may be a newer one."""
    if recipe_yaml is None or not any(Variable.RESUME in word.parts for word in plan.commands[0].argv):
        return
    python = _quoted(plan.commands[0].wrapper[0])
    yield "# The checkpoint to go on from, as checkpoint.resume says; RESUME names another, and empty is none."
    yield f'resume=${{RESUME-$({python} -P -m trainkit job resume "$run_dir/recipe.yaml")}}'


def _commands(plan: Plan) -> Iterator[str]:
    for item in plan.preparations:
        yield f"# Before the ranks start: {item.title}."
        yield from lines((_word(word) for word in item.argv), WIDTH, "    ")
    # Node groups differ only in number so far; the first one's command is that of every node.
    yield from lines(("exec", *map(_word, plan.commands[0].bare)), WIDTH, "    ")


def _word(word: Text) -> str:
    """One word of the command; that of the checkpoint is left out where there is none."""
    shown = _quoted(word)
    return f"${{resume:+{shown}}}" if Variable.RESUME in word.parts else shown


def quoted(word: Text) -> str:
    """One word for people, quoted where a shell needs it."""
    return "".join(shown_word(part) if isinstance(part, str) else f"<{part.value}>" for part in word.parts) or "''"


def _quoted(word: Text) -> str:
    """One word of the script, with the variables that it keeps run-time values in."""
    return "".join(script_word(part) if isinstance(part, str) else f'"${part.value}"' for part in word.parts) or "''"


def lines(words: Iterable[str], width: int, indent: str = "") -> Iterator[str]:
    """Words packed into lines of at most `width` columns, joined by backslashes; a longer word has its own.

    indent: put before every line but the first.
    """
    line = ""
    for word in words:
        if line.strip() and len(line) + 1 + len(word) > width - 2:
            yield f"{line} \\"
            line = f"{indent}{word}"
        else:
            line = f"{line} {word}" if line else word
    yield line
