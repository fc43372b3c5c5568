"""The command line: the commands, and how a call reaches one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import click

from trainkit import __version__
from trainkit.cli.options import CommandGroup, ImportCommand, LaunchCommand, RecipeCommand, Row
from trainkit.errors import UsageError

_LAUNCHED = "RECIPE [OVERRIDE]... [-- ARGS] | [OVERRIDE]... PROGRAM [ARGS]..."
_RUNS: Mapping[str, Row] = {
    "list": Row("runs:list_runs"),
    "show": Row("runs:show"),
    "prune": Row("runs:prune"),
}
_JOB: Mapping[str, Row] = {
    "resume": Row("job:resume"),
    "batch": Row("job:batch"),
    "signal": Row("job:signal_run"),
    "node": Row("job:node"),
}
# In the order of the help.
COMMANDS: Mapping[str, Row | CommandGroup] = {
    "run": Row("run:run", LaunchCommand, _LAUNCHED),
    "plan": Row("plan:plan", LaunchCommand, _LAUNCHED),
    "submit": Row("submit:submit", LaunchCommand, "RECIPE [OVERRIDE]... [-- ARGS]"),
    "status": Row("jobs:status"),
    "logs": Row("jobs:logs"),
    "checkpoint": Row("jobs:checkpoint"),
    "cancel": Row("jobs:cancel"),
    "attach": Row("jobs:attach", arguments="[RUN] [-- COMMAND]"),
    "bench": Row("bench:bench", LaunchCommand, "RECIPE [OVERRIDE]... [-- ARGS]"),
    "check": Row("recipes:check", RecipeCommand, "RECIPE... [OVERRIDE]... | PROGRAM [ARGS]..."),
    "explain": Row("recipes:explain", RecipeCommand, "RECIPE [KEY] [OVERRIDE]... | [KEY] PROGRAM [ARGS]..."),
    "gpus": Row("machine:gpus"),
    "env": Row("machine:env"),
    "facts": Row("machine:facts"),
    "ls": Row("recipes:ls"),
    "cp": Row("recipes:cp"),
    "config": Row("config:config"),
    "schema": Row("recipes:schema"),
    "doctor": Row("doctor:doctor", RecipeCommand, "[RECIPE] [OVERRIDE]... | PROGRAM [ARGS]..."),
    "export": Row("export:export"),
    "import": Row("import_:import_", ImportCommand, "FILE [-- SCRIPT ARGS...] | COMMAND..."),
    "dump": Row("runs:dump"),
    "runs": CommandGroup("runs", _RUNS, "List, show and prune run directories."),
    # Called by scripts and jobs, not by users.
    "job": CommandGroup("job", _JOB, "Commands for scripts and jobs.", hidden=True),
}
_WORD = re.compile(r"'[^']+'|--\S+")
_ADVICE = re.compile(r" \(?(?:Did you mean|Possible options).*")


def _show_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"trainkit {__version__}")
        ctx.exit()


app = CommandGroup(
    "trainkit",
    COMMANDS,
    "A training launcher driven by config files: what the plan says is what happens.",
    epilog="Start with: trainkit config · trainkit plan quickstart · trainkit run quickstart",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_version,
            help="Show the version and exit.",
        )
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)


def invoke(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name; returns its exit code.

    Usage errors end with code 2. Raises BrokenPipeError when the reader of the output is gone.
    """
    argv = list(arguments)
    # What follows the first `--` belongs to the program, untouched.
    at = argv.index("--") if "--" in argv else len(argv)
    try:
        with app.make_context("trainkit", argv[:at], obj=tuple(argv[at + 1 :])) as context:
            app.invoke(context)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.Abort as abort:  # Ctrl-C or Ctrl-D at a question
        raise KeyboardInterrupt from abort
    except click.UsageError as error:
        raise usage_error(error) from error
    return 0


def usage_error(error: click.UsageError) -> UsageError:
    """An error of click, with a hint: the nearest command or option, or where the help is."""
    message, context = _ADVICE.sub("", error.format_message()).rstrip(". "), error.ctx
    hint = f"`{context.command_path if context else 'trainkit'} --help` lists them"
    unknown = _WORD.search(message)
    if unknown and context and message.startswith("No such"):
        from trainkit.recipe.suggestions import did_you_mean

        options = [name for each in context.command.params for name in each.opts]
        commands = context.command.list_commands(context) if isinstance(context.command, CommandGroup) else []
        hint = did_you_mean(unknown[0].strip("'"), [*commands, *options], hint)
    return UsageError(f"{message[:1].lower()}{message[1:]}", hint=hint)
