"""The pages of the site's reference, made from the code: recipe keys, commands, exit codes, files of a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperOption

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from trainkit.cli.app import COMMANDS, app  # noqa: E402
from trainkit.cli.options import CommandGroup, folded  # noqa: E402
from trainkit.recipe.schema.json_schema import reference_text  # noqa: E402

LAYOUT = ROOT / "trainkit" / "runner" / "rundir" / "layout.py"
_PATH = re.compile(r'^    \w+ = PathInRun\("([^"]+)"\)  # (.+)$', re.MULTILINE)
_EXIT_CODES = re.compile(r"^\| exit code \|.*?\n\n[^\n]+\n", re.MULTILINE | re.DOTALL)


def keys() -> str:
    """Every key of a recipe, as `trainkit schema --reference` prints it."""
    lead = "Each key with the values that it takes, its default, its unit and the flag that sets it."
    return reference_text().replace("\n", f"\n\n{lead} `trainkit schema --reference`\nprints this page.\n", 1)


def commands() -> str:
    """Every command with its arguments and options, as `--help` says them."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="trainkit")
    lines = ["# Commands", "", "What `trainkit COMMAND --help` says. Commands that take a recipe also take keys", ""]
    lines[2] += " (`train.steps=20`) and [flags](../flags.md)."
    for name in COMMANDS:
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        lines += [*_command(command, f"trainkit {name}", COMMANDS[name].help, context), ""]
    return "\n".join(lines)


def _command(command: Any, path: str, line: str, above: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=path.rpartition(" ")[2], parent=above)
    params = command.get_params(context)
    yield from (f"## {path}", "")
    if isinstance(command, CommandGroup):
        yield from (line, "")
        for name in command.list_commands(context):
            below: Any = command.get_command(context, name)
            yield from _command(below, f"{path} {name}", "", context)
        return
    text, _, examples = folded(command.help or "").partition("$ ")
    yield from (text.strip(), "")
    yield from ("```text", f"{path} {' '.join(command.collect_usage_pieces(context))}", "```", "")
    if examples:
        yield from ("```sh", *examples.replace("$ ", "").splitlines(), "```", "")
    options = [each for each in params if isinstance(each, TyperOption) and not each.hidden]
    yield from ("| option | |", "| --- | --- |")
    for each in options:
        word = "" if each.is_flag else f" {each.metavar or each.display_type_rich(context)}"
        yield f"| {_code(', '.join(each.opts) + word)} | {_cell(each.help or '')} |"
    yield ""


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def exit_codes() -> str:
    """The table of exit codes, which stands in the page about runs."""
    found = _EXIT_CODES.search((ROOT / "docs" / "runs.md").read_text(encoding="utf-8"))
    assert found, "docs/runs.md has no table of exit codes"
    return f"# Exit codes\n\nOf `trainkit run` and of every other command.\n\n{found[0]}"


def run_files() -> str:
    """Every path of a run directory, with the comment at its declaration."""
    text = LAYOUT.read_text(encoding="utf-8")
    assert len(_PATH.findall(text)) == text.count(" = PathInRun("), "each path in layout.py needs a comment"
    attempt, run = (_PATH.findall(part) for part in text.partition("class RunLayout")[::2])
    lines = [
        "# Files of a run",
        "",
        "A run directory is `<output.root>/<name>/<timestamp>-<id>/`: `runs/quickstart/…` unless",
    ]
    lines += ["`output.root` says otherwise. [Runs](../runs.md) tells how to read the files.", ""]
    for title, found in (("In the run directory", run), ("In `attempts/<n>/`, one folder for each start", attempt)):
        lines += [f"## {title}", "", "| path | |", "| --- | --- |"]
        lines += [f"| `{name}` | {_cell(what)} |" for name, what in found]
        lines += [""]
    return "\n".join(lines)


# Where it lies in the site -> how it is made.
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/keys.md": keys,
    "reference/commands.md": commands,
    "reference/exit-codes.md": exit_codes,
    "reference/run-files.md": run_files,
}
