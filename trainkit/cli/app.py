"""The command line: the commands, and how a call reaches one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer import Option

from trainkit import __version__
from trainkit.cli.options import Command, CommandGroup, ImportCommand, LaunchCommand, RecipeCommand
from trainkit.errors import UsageError
from trainkit.lazy import load

_LAUNCHED = "RECIPE [OVERRIDE]... [-- ARGS] | [OVERRIDE]... PROGRAM [ARGS]..."
# Name -> where the function is, how its argv is read, and what its usage line says of that. In the order of the help.
COMMANDS: Mapping[str, tuple[str, type[Command | CommandGroup], str]] = {
    "run": ("run:run", LaunchCommand, _LAUNCHED),
    "plan": ("plan:plan", LaunchCommand, _LAUNCHED),
    "estimate": ("estimate:estimate", LaunchCommand, "RECIPE [OVERRIDE]..."),
    "submit": ("submit:submit", LaunchCommand, "RECIPE [OVERRIDE]... [-- ARGS]"),
    "status": ("jobs:status", Command, ""),
    "logs": ("jobs:logs", Command, ""),
    "checkpoint": ("jobs:checkpoint", Command, ""),
    "cancel": ("jobs:cancel", Command, ""),
    "attach": ("jobs:attach", Command, "[RUN] [-- COMMAND]"),
    "bench": ("bench:bench", LaunchCommand, "RECIPE [OVERRIDE]... [-- ARGS]"),
    "check": ("recipes:check", RecipeCommand, "RECIPE... [OVERRIDE]... | PROGRAM [ARGS]..."),
    "data": ("data:data", RecipeCommand, "RECIPE [OVERRIDE]..."),
    "explain": ("recipes:explain", RecipeCommand, "RECIPE [KEY] [OVERRIDE]... | [KEY] PROGRAM [ARGS]..."),
    "gpus": ("machine:gpus", Command, ""),
    "env": ("machine:env", Command, ""),
    "facts": ("machine:facts", Command, ""),
    "ls": ("recipes:ls", Command, ""),
    "cp": ("recipes:cp", Command, ""),
    "config": ("config:config", Command, ""),
    "schema": ("recipes:schema", Command, ""),
    "doctor": ("doctor:doctor", RecipeCommand, "[RECIPE] [OVERRIDE]... | PROGRAM [ARGS]..."),
    "export": ("export:export", Command, ""),
    "generate": ("generate:generate", Command, ""),
    "import": ("import_:import_", ImportCommand, "FILE [-- SCRIPT ARGS...] | COMMAND..."),
    "dump": ("runs:dump", Command, ""),
    "runs": ("runs:app", CommandGroup, ""),
    "report": ("report:report", Command, ""),
}
# What scripts and jobs call, and nobody types.
HIDDEN: Mapping[str, tuple[str, type[Command | CommandGroup], str]] = {"job": ("job:app", CommandGroup, "")}

# What people type who know other tools, by the command or the group in front of it: what it is called here.
FAMILIAR: Mapping[str, Mapping[str, str]] = {
    "trainkit": {
        **dict.fromkeys(("train", "launch", "start", "execute", "exec", "fit", "pretrain"), "run"),
        **dict.fromkeys(("resume", "continue", "restart"), "run RECIPE checkpoint.resume=auto"),
        **dict.fromkeys(("eval", "evaluate", "test"), "run RECIPE --do_eval"),
        **dict.fromkeys(("predict", "classify", "score"), "run RECIPE --do_predict"),
        **dict.fromkeys(("chat", "infer", "inference", "sample", "ask", "complete"), "generate"),
        **dict.fromkeys(("finetune", "fine-tune", "sft", "lora", "qlora", "new", "init", "create", "wizard"), "config"),
        **dict.fromkeys(("configure", "setup", "quickstart"), "config"),
        **dict.fromkeys(("stop", "kill", "abort", "scancel"), "cancel"),
        **dict.fromkeys(("plot", "graph", "compare", "benchmark", "profile", "sweep"), "bench"),
        **dict.fromkeys(("list", "recipes", "presets", "search"), "ls"),
        **dict.fromkeys(("history", "experiments"), "runs list"),
        **dict.fromkeys(("copy", "clone"), "cp"),
        **dict.fromkeys(("ps", "jobs", "queue", "top", "squeue"), "status"),
        **dict.fromkeys(("log", "tail", "output"), "logs"),
        **dict.fromkeys(("save", "snapshot"), "checkpoint"),
        **dict.fromkeys(("sbatch", "schedule"), "submit"),
        **dict.fromkeys(("validate", "lint", "verify"), "check"),
        **dict.fromkeys(("dry-run", "dryrun", "preview", "show"), "plan"),
        **dict.fromkeys(("merge", "publish", "push", "upload"), "export"),
        **dict.fromkeys(("convert", "migrate"), "import"),
        **dict.fromkeys(("preprocess", "tokenize", "prepare", "dataset", "inspect"), "data"),
        **dict.fromkeys(("diagnose", "health"), "doctor"),
        **dict.fromkeys(("gpu", "nvidia-smi", "devices"), "gpus"),
        **dict.fromkeys(("stacks", "py-spy", "debug"), "dump"),
        "version": "--version",
        "help": "--help",
    },
    "trainkit runs": {"ls": "list", "info": "show", **dict.fromkeys(("clean", "rm", "delete", "remove"), "prune")},
}

# Typer brings its own copy of click, or uses the installed one, by its version: the class is known by its heir only.
WRONG_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_WORD = re.compile(r"'[^']+'|--\S+")
_ADVICE = re.compile(r" \(?(?:Did you mean|Possible options).*")


class LazyCommands(CommandGroup):
    """The commands by name; a module is imported, and its signature read, when its command is looked up."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; None where there is none of this name."""
        known = COMMANDS.get(cmd_name) or HIDDEN.get(cmd_name)
        if known is None:
            return None
        place, cls, arguments = known
        found = load(f"trainkit.cli.commands.{place}")
        if issubclass(cls, CommandGroup):
            return typer.main.get_command(found)
        # An app of its own for each: Typer would read the signatures of all commands of one app.
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name, cls=cls)(found)
        command: Any = typer.main.get_command(alone)
        command.arguments = arguments
        return command


app = typer.Typer(
    name="trainkit",
    cls=LazyCommands,
    help="A training launcher driven by config files: what the plan says is what happens.",
    epilog="Start with: trainkit config · trainkit plan quickstart · trainkit run quickstart",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trainkit {__version__}")
        raise typer.Exit


# Typer shows an option of the whole program in the help only where a callback takes it.
@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def invoke(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name; returns its exit code.

    Usage errors end with code 2. Raises BrokenPipeError when the reader of the output is gone.
    """
    argv = list(arguments)
    # What follows the first `--` belongs to the program, untouched.
    at = argv.index("--") if "--" in argv else len(argv)
    try:
        code = app(argv[:at], prog_name="trainkit", obj=tuple(argv[at + 1 :]), standalone_mode=False)
    except typer.Abort as abort:  # Ctrl-C or Ctrl-D at a question
        raise KeyboardInterrupt from abort
    except WRONG_USAGE as error:
        raise usage_error(error) from error
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # what Typer and rich make of it says less
            raise leaving.__context__ from None
        raise
    return code if isinstance(code, int) else 0


def usage_error(error: Any) -> UsageError:
    """What Typer finds wrong, with a next step: the nearest command or option, or where the help is.

    An empty message is what remains of a call without arguments, whose help has been shown already.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return UsageError(())
    message, context = _ADVICE.sub("", error.format_message()).rstrip(". "), error.ctx
    hint = f"`{context.command_path if context else 'trainkit'} --help` lists them"
    unknown = _WORD.search(message)
    if unknown and context and message.startswith("No such"):
        from trainkit.recipe.suggestions import did_you_mean

        options = [name for each in context.command.params for name in each.opts]
        commands = context.command.list_commands(context) if isinstance(context.command, CommandGroup) else []
        word = unknown[0].strip("'")
        familiar = FAMILIAR.get(context.command_path, {}).get(word.lower(), "")
        if familiar.startswith("--") or familiar.partition(" ")[0] in commands:
            hint = f"did you mean {context.command_path} {familiar}?"
        else:
            hint = did_you_mean(word, [*commands, *options], hint)
    return UsageError(f"{message[:1].lower()}{message[1:]}", hint=hint)
