"""The command line: the commands, and how a call reaches one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option
from typer.core import TyperCommand

from trainkit import __version__
from trainkit.cli.options import Command, CommandGroup, ImportCommand, LaunchCommand, RecipeCommand
from trainkit.errors import UsageError
from trainkit.lazy import load

_LAUNCHED = "RECIPE [OVERRIDE]... [-- ARGS] | [OVERRIDE]... PROGRAM [ARGS]..."


class Entry(NamedTuple):
    """A command. place: module below commands/, and the function or app in it; cls: how its argv is read.

    help: its line in the table of commands, at most 64 characters, so that it fits 80 columns. group: the panel of that
    table. arguments: what its usage line shows behind the options.
    """

    place: str
    cls: type[Command | CommandGroup]
    group: str
    help: str
    arguments: str = ""


# In the order of the help; a group stands where its first command does.
COMMANDS: Mapping[str, Entry] = {
    "config": Entry("config:config", Command, "Start", "Write a recipe from a few questions."),
    "ls": Entry("recipes:ls", Command, "Start", "List the shipped recipes, presets and machines."),
    "cp": Entry("recipes:cp", Command, "Start", "Copy one of them, to edit it."),
    "check": Entry(
        "recipes:check",
        RecipeCommand,
        "Start",
        "Validate recipes; nothing is started.",
        "RECIPE... [OVERRIDE]... | PROGRAM [ARGS]...",
    ),
    "data": Entry(
        "data:data", RecipeCommand, "Start", "Show a recipe's data as the model reads them.", "RECIPE [OVERRIDE]..."
    ),
    "explain": Entry(
        "recipes:explain",
        RecipeCommand,
        "Start",
        "Show where the value of a setting comes from.",
        "RECIPE [KEY] [OVERRIDE]... | [KEY] PROGRAM [ARGS]...",
    ),
    "run": Entry("run:run", LaunchCommand, "Train", "Train from a recipe, or run a program of your own.", _LAUNCHED),
    "plan": Entry("plan:plan", LaunchCommand, "Train", "Show what a run would execute; nothing is started.", _LAUNCHED),
    "estimate": Entry(
        "estimate:estimate",
        LaunchCommand,
        "Train",
        "Predict memory and time on each rank; nothing is started.",
        "RECIPE [OVERRIDE]...",
    ),
    "bench": Entry(
        "bench:bench",
        LaunchCommand,
        "Train",
        "Run a recipe's variants one after another, and compare them.",
        "RECIPE [OVERRIDE]... [-- ARGS]",
    ),
    "sweep": Entry(
        "sweep:sweep",
        LaunchCommand,
        "Train",
        "Run a recipe once for each of several values; find the best.",
        "RECIPE OVERRIDE... [-- ARGS]",
    ),
    "export": Entry("export:export", Command, "Train", "Export a trained model for transformers or serving."),
    "generate": Entry("generate:generate", Command, "Train", "Chat with a trained model, or answer prompts."),
    "status": Entry("jobs:status", Command, "Look", "Show a run's state: queued, running, or how it ended."),
    "watch": Entry("watch:watch", Command, "Look", "Watch runs on a screen: curves, memory, ranks, logs."),
    "logs": Entry("jobs:logs", Command, "Look", "Show or follow a run's output."),
    "runs": Entry("runs:app", CommandGroup, "Look", "List, show, compare and prune run directories."),
    "report": Entry("report:report", Command, "Look", "Write a page about runs: curves, predictions, plan, recipe."),
    "dump": Entry("runs:dump", Command, "Look", "Show the stacks of all ranks of a running run."),
    "submit": Entry(
        "submit:submit",
        LaunchCommand,
        "Clusters",
        "Submit a run as a job: Slurm, PBS, Kubernetes or ssh.",
        "RECIPE [OVERRIDE]... [-- ARGS]",
    ),
    "cancel": Entry("jobs:cancel", Command, "Clusters", "End a run, here or queued, with a checkpoint."),
    "checkpoint": Entry("jobs:checkpoint", Command, "Clusters", "Make a running run save a checkpoint."),
    "attach": Entry(
        "jobs:attach", Command, "Clusters", "Open a shell on a node of a running job.", "[RUN] [-- COMMAND]"
    ),
    "import": Entry(
        "import_:import_",
        ImportCommand,
        "Tools",
        "Convert another tool's command or file into a recipe.",
        "FILE [-- SCRIPT ARGS...] | COMMAND...",
    ),
    "schema": Entry("recipes:schema", Command, "Tools", "Print the JSON Schema of recipes, all keys, or all flags."),
    "doctor": Entry(
        "doctor:doctor",
        RecipeCommand,
        "Tools",
        "Check this machine; nothing is changed.",
        "[RECIPE] [OVERRIDE]... | PROGRAM [ARGS]...",
    ),
    "env": Entry(
        "machine:app", CommandGroup, "Tools", "Show this machine: versions, GPUs and who uses them, variables."
    ),
    "completion": Entry("completion:completion", Command, "Tools", "Print the completion script of bash, zsh or fish."),
}
# What scripts and jobs call, and names of earlier releases.
HIDDEN: Mapping[str, Entry] = {
    "job": Entry("job:app", CommandGroup, "", ""),
    "gpus": Entry("machine:gpus", Command, "", ""),
    "facts": Entry("machine:facts", Command, "", ""),
}

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
        **dict.fromkeys(("benchmark", "profile"), "bench"),
        **dict.fromkeys(("search", "tune", "hpo", "grid", "optimize", "optuna", "hyperparameters"), "sweep"),
        **dict.fromkeys(("plot", "graph", "dashboard"), "report"),
        **dict.fromkeys(("compare", "diff"), "runs diff"),
        **dict.fromkeys(("list", "recipes", "presets"), "ls"),
        **dict.fromkeys(("history", "experiments"), "runs list"),
        **dict.fromkeys(("copy", "clone"), "cp"),
        **dict.fromkeys(("ps", "jobs", "queue", "squeue"), "status"),
        **dict.fromkeys(("top", "live", "monitor"), "watch"),
        **dict.fromkeys(("log", "tail", "output"), "logs"),
        **dict.fromkeys(("save", "snapshot"), "checkpoint"),
        **dict.fromkeys(("sbatch", "schedule"), "submit"),
        **dict.fromkeys(("validate", "lint", "verify"), "check"),
        **dict.fromkeys(("dry-run", "dryrun", "preview", "show"), "plan"),
        **dict.fromkeys(("merge", "publish", "push", "upload"), "export"),
        **dict.fromkeys(("convert", "migrate"), "import"),
        **dict.fromkeys(("preprocess", "tokenize", "prepare", "dataset", "inspect"), "data"),
        **dict.fromkeys(("diagnose", "health"), "doctor"),
        **dict.fromkeys(("gpu", "nvidia-smi", "devices"), "env gpus"),
        **dict.fromkeys(("completions", "autocomplete", "--install-completion", "--show-completion"), "completion"),
        **dict.fromkeys(("stacks", "py-spy", "debug"), "dump"),
        "version": "--version",
        "help": "--help",
    },
    "trainkit env": {"gpu": "gpus", "cards": "gpus", "json": "facts", "show": "--help"},
    "trainkit runs": {
        "compare": "diff",
        "ls": "list",
        "info": "show",
        **dict.fromkeys(("clean", "rm", "delete", "remove"), "prune"),
    },
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
        entry = COMMANDS.get(cmd_name) or HIDDEN.get(cmd_name)
        if entry is None:
            return None
        found = load(f"trainkit.cli.commands.{entry.place}")
        if issubclass(entry.cls, CommandGroup):
            return typer.main.get_command(found)
        # An app of its own for each: Typer would read the signatures of all commands of one app.
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name, cls=entry.cls)(found)
        command: Any = typer.main.get_command(alone)
        command.arguments = entry.arguments
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands, for which none is imported."""
        lines: dict[str, Any] = {
            name: TyperCommand(name, help=entry.help, rich_help_panel=f"[not dim bold]{entry.group}[/]")
            for name, entry in COMMANDS.items()
        }
        table = CommandGroup(name=self.name, commands=lines, params=self.params, help=self.help, epilog=self.epilog)
        table.format_help(ctx, formatter)


app = typer.Typer(
    name="trainkit",
    cls=LazyCommands,
    help="A training launcher driven by config files: what the plan says is what happens.",
    epilog="Start with: trainkit plan quickstart · trainkit run quickstart",
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
    hint = f"`{context.command_path if context else 'trainkit'} --help` shows what it takes"
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
