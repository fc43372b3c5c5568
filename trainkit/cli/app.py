"""The command line: which commands there are, and how a call is handed to one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from trainkit import __version__
from trainkit.cli.commands import (
    bench,
    check,
    config,
    cp,
    doctor,
    env,
    explain,
    export,
    facts,
    gpus,
    import_,
    ls,
    plan,
    run,
    runs,
    schema,
)
from trainkit.cli.commands.import_ import ImportCommand
from trainkit.cli.grammar import Invocation
from trainkit.cli.help import Command, CommandGroup, DoctorCommand, KeyCommand, LaunchingCommand, ManyRecipesCommand
from trainkit.cli.usage import WRONG_USAGE, usage_error

app = typer.Typer(
    name="trainkit",
    cls=CommandGroup,
    help="A training launcher driven by config files: what the plan says is what happens.",
    epilog="Start with: trainkit config · trainkit plan quickstart · trainkit run quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Words that no option claims are left to us in their order: recipe, overrides and HF-named flags have a grammar.
_FREE_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command("run", cls=LaunchingCommand, context_settings=_FREE_WORDS)(run.run)
app.command("plan", cls=LaunchingCommand, context_settings=_FREE_WORDS)(plan.plan)
app.command("bench", cls=LaunchingCommand, context_settings=_FREE_WORDS)(bench.bench)
app.command("check", cls=ManyRecipesCommand, context_settings=_FREE_WORDS)(check.check)
app.command("explain", cls=KeyCommand, context_settings=_FREE_WORDS)(explain.explain)
app.command("gpus", cls=Command)(gpus.gpus)
app.command("env", cls=Command)(env.env)
app.command("facts", cls=Command)(facts.facts)
app.command("ls", cls=Command)(ls.ls)
app.command("cp", cls=Command)(cp.cp)
app.command("config", cls=Command)(config.config)
app.command("schema", cls=Command)(schema.schema)
app.command("doctor", cls=DoctorCommand, context_settings=_FREE_WORDS)(doctor.doctor)
app.command("export", cls=Command)(export.export)
app.command("import", cls=ImportCommand, context_settings=_FREE_WORDS)(import_.import_)
app.add_typer(runs.app, name="runs")


def invoke(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name; returns its exit code.

    Usage errors end with code 2. Raises BrokenPipeError where nobody reads the output any more.
    """
    words, program = split_program(arguments)
    try:
        code = app(list(words), prog_name="trainkit", obj=Invocation(program), standalone_mode=False)
    except typer.Abort as abort:  # Ctrl-C or Ctrl-D at a question
        raise KeyboardInterrupt from abort
    except WRONG_USAGE as error:
        raise usage_error(error) from error
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # what Typer and rich make of it says less
            raise leaving.__context__ from None
        raise
    return code if isinstance(code, int) else 0


def split_program(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split at the first `--`: what follows belongs to the program, untouched."""
    words = tuple(arguments)
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], words[at + 1 :]
