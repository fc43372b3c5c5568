"""Recipes as files, without a run: `trainkit ls`, `cp`, `check`, `explain`, `config`, `import` and `schema`."""

from __future__ import annotations

import json
import posixpath
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from trainkit.cli.diagnostics import show_diagnostics
from trainkit.cli.disk import MACHINES, MODELINE, Disk, schema_uri, working_folder, write_file
from trainkit.cli.options import Force, Json, On, Presets, Variant
from trainkit.cli.pipeline import no_recipe, plan_recipe, replaces_recipe, resolve_request, show_warnings, split_line
from trainkit.errors import Diagnostic, ExitCode, TrainkitError, UsageError
from trainkit.text import table

NewFile = Annotated[str, Option("--output", "-o", metavar="FILE", help="The recipe to write.")]
From = Annotated[str | None, Option("--from", metavar="RECIPE", help="Start from this recipe; the new one extends it.")]
Answers = Annotated[
    str | None, Option("--answers", metavar="FILE", help="Answers in YAML, by recipe key; not asked again.")
]
Given = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="One answer, or any setting; may be repeated.")
]
Output = Annotated[
    str | None, Option("--output", "-o", metavar="FILE", help="The recipe to write; default: standard output.")
]
Kind = Annotated[
    str | None, Option("--kind", metavar="KIND", help="What the program is (program.kind), where you know.")
]


def ls(
    pattern: Annotated[str, Argument(metavar="[WORD]", help="Show only names that hold this word.")] = "",
    as_json: Json = False,
) -> None:
    """List what is shipped. `trainkit cp NAME` copies a recipe or preset, `extends: NAME` builds on a preset.

    Machines are for planning: `trainkit plan RECIPE --on 8xh100`.

    Example: trainkit ls strategy
    """
    from trainkit.cli.machines import profiles

    known = {**Disk().shipped(), **{f"{MACHINES}/{name}": str(path) for name, path in profiles().items()}}
    found = [(name, path, first_comment(Path(path))) for name, path in sorted(known.items()) if pattern in name]
    if as_json:
        listing = [dict(zip(("name", "path", "description"), each, strict=True)) for each in found]
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
        return
    if not found:
        sys.stderr.write(f"nothing shipped has {pattern!r} in its name; `trainkit ls` shows all\n")
        raise typer.Exit(ExitCode.USAGE)
    sys.stdout.write(table((name, description) for name, _, description in found))


def first_comment(path: Path) -> str:
    """The first comment of a YAML file that is not an editor's modeline: what the file is for."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith(MODELINE):
            return line.lstrip("# ").rstrip()
    return ""


def cp(
    name: Annotated[str, Argument(help="A name that `trainkit ls` shows.")],
    destination: Annotated[str, Argument(help="File or folder (`new/` is made); default: here.")] = ".",
    force: Force = False,
) -> None:
    """Copy a shipped recipe or preset, to edit it.

    Example: trainkit cp quickstart my-run.yaml
    """
    shipped = Disk().shipped()
    path = shipped.get(f"recipes/{name}") or shipped.get(name)
    if path is None:
        from trainkit.recipe.validation.suggestions import did_you_mean

        names = [*shipped, *(key.removeprefix("recipes/") for key in shipped)]
        hint = did_you_mean(name, names, "`trainkit ls` shows the names")
        raise UsageError(f"nothing shipped is named {name!r}", hint=hint)
    source, target = Path(path), Path(destination)
    if destination.endswith("/") or target.is_dir():
        target = target / source.name
    # With the modeline of this installation: a copy elsewhere is as far from the schema as it may be.
    lines = [line for line in source.read_text(encoding="utf-8").splitlines(keepends=True) if MODELINE not in line]
    text = f"{MODELINE}{schema_uri()}\n{''.join(lines)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        if not target.exists():
            raise UsageError(f"{target.parent} is not a folder", hint="give another destination") from error
        raise UsageError(f"{target} exists", hint="give another name, or --force to replace it") from error
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint="give another destination") from error
    sys.stdout.write(f"{target}\n")


def check(context: typer.Context, presets: Presets = None, as_json: Json = False) -> None:
    """Validate recipes without planning or starting anything. Exit code 2 means that one of them is wrong.

    RECIPE is a file, a run directory or a shipped name. Its variants are validated with it.

    Example: trainkit check recipes/*.yaml
    """
    recipes, overrides = split_line(context.args, most=len(context.args), what="recipes")
    if not recipes:
        raise no_recipe("check RECIPE...")
    reports: list[dict[str, Any]] = []
    for recipe in recipes:
        diagnostics, valid = judge(recipe, overrides, presets)
        reports.append({"recipe": recipe, "valid": valid, "diagnostics": [asdict(item) for item in diagnostics]})
        if not as_json:
            show_diagnostics(diagnostics)
            sys.stdout.write(f"{recipe}: {'ok' if valid else 'wrong'}\n")
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    if not all(report["valid"] for report in reports):
        raise typer.Exit(ExitCode.USAGE)


def judge(recipe: str, overrides: Sequence[str], presets: Sequence[str] | None) -> tuple[list[Diagnostic], bool]:
    """The findings on a recipe and each of its variants, every one once, and whether all are valid."""
    found: list[Diagnostic] = []
    valid = True
    variants: list[str | None] = [None]
    for variant in variants:  # which grows: the recipe without a variant names them
        try:
            resolved = resolve_request(recipe, overrides, presets, variant=variant)
            found += resolved.warnings
            if variant is None:
                variants += resolved.variants
        except TrainkitError as error:
            found += error.diagnostics
            valid = False
    # Of equal ones the first stays, in its place: reversed twice.
    unique = {(each.what, each.key, each.origin.place if each.origin else ""): each for each in reversed(found)}
    return list(reversed(unique.values())), valid


def explain(
    context: typer.Context,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    token: Annotated[
        str | None,
        Option("--token", metavar="WORD", help="A word of the plan's command, also one that looks like a flag."),
    ] = None,
) -> None:
    """Say where the value of KEY in RECIPE came from: the winner, every value it beat, each with its origin.

    KEY may also name a part of the plan: a variable, a file's key, a word of the
    command. Without KEY all set values are listed.

    Example: trainkit explain quickstart optimizer.lr

    Example: trainkit explain ddp --token=--nproc-per-node=2
    """
    from trainkit.cli.machines import machine_facts
    from trainkit.plan.render import explain as renderer
    from trainkit.recipe.schema import fields

    given, overrides = split_line(context.args, most=2, what="a recipe and a key")
    recipe, *queries = given or [""]
    # Where presets or a program are in place of a recipe, one word alone may be the key.
    if replaces_recipe(overrides, presets) and not queries and (not recipe or recipe in fields.schema().settings):
        recipe, queries = "", [recipe] if recipe else []
    elif not recipe:
        raise no_recipe("explain RECIPE [KEY]")
    if token is not None:
        queries.append(token)
    resolved = show_warnings(resolve_request(recipe or None, overrides, presets, context.obj, variant))
    if not queries:
        sys.stdout.write(renderer.render_all(resolved))
        return
    planned = plan_recipe(resolved, machine_facts(machine))
    sys.stdout.write("\n".join(renderer.render(query, resolved, planned) for query in queries))


def config(
    *,
    output: NewFile = "recipe.yaml",
    base: From = None,
    on: On = None,
    answers: Answers = None,
    given: Given = None,
    defaults: Annotated[bool, Option("--defaults", help="Ask nothing: take what is proposed.")] = False,
    force: Annotated[bool, Option("--force", help="Replace an existing file without asking.")] = False,
) -> None:
    """Write a recipe from a few questions, of which this machine and your answers leave as few as possible.

    On a terminal with arrow keys and typing, in a pipe line by line. Leaving with
    Ctrl-C or Ctrl-D (exit code 130) keeps the answers in a file for --answers.

    Example: trainkit config

    Example: trainkit config --on 8xh100

    Example: trainkit config --defaults --set strategy.kind=fsdp --output fsdp.yaml
    """
    from trainkit.cli.asking.writing import ask_and_write, begin, take_defaults

    session, job = begin(output, base, on, answers, given or (), force=force)
    if defaults:
        take_defaults(session, job)
    else:
        raise typer.Exit(ask_and_write(session, job))


def import_(
    context: typer.Context,
    *,
    output: Output = None,
    kind: Kind = None,
    force: Force = False,
) -> None:
    """Write the recipe that another tool's command or file means.

    COMMAND is a line as you type it today, word for word or quoted as one:
    python, torchrun, python -m torch.distributed.launch, accelerate launch or
    deepspeed, with variables in front of it. Options come before it. FILE is
    a DeepSpeed JSON, an accelerate config, or a shell script (.sh) with one
    such command. What the other tool ignores or misreads becomes a comment in
    the recipe; what has no key is named.

    Example: trainkit import torchrun --nproc_per_node 2 train.py --do_train --bf16 --output_dir out

    Example: trainkit import ds_config.json --output recipe.yaml
    """
    from trainkit.convert.importing import import_words
    from trainkit.frameworks.base.draft import ImportContext

    argv, cwd = list(context.args), working_folder()
    refuse(argv, output, kind, force=force)
    target = posixpath.normpath(posixpath.join(cwd, output or "recipe.yaml"))
    uri = schema_uri() if output is not None else ""
    imported = import_words(argv, ImportContext(Disk(), cwd), target, program=context.obj, kind=kind, schema_uri=uri)
    show_diagnostics(imported.warnings)
    if output is None:
        sys.stdout.write(imported.text)
    else:
        write_file(Path(output), imported.text, "give another --output")
        sys.stdout.write(f"{output} is written. Next: trainkit plan {shlex.quote(output)}\n")


def refuse(argv: Sequence[str], output: str | None, kind: str | None, *, force: bool) -> None:
    """What is wrong with the call itself. Raises UsageError."""
    from trainkit.convert.command import KINDS
    from trainkit.convert.importing import is_file

    if not any(word.strip() for word in argv[:1]):
        raise UsageError("nothing to import is named", hint="name a file, or a command: trainkit import torchrun …")
    from_file = is_file(argv[0])
    if from_file and len(argv) > 1:
        hint = f"give the program's arguments after `--`: trainkit import {argv[0]} -- {shlex.join(argv[1:])}"
        raise UsageError(f"one word too many: {argv[1]!r}", hint=hint)
    own = [each for each in KINDS if each != "builtin"]
    if kind is not None and kind not in own:
        raise UsageError(f"--kind {kind!r} is unknown", hint=f"choose one of: {', '.join(own)}")
    if output is not None and Path(output).exists() and not force:
        raise UsageError(f"{output} exists", hint="give another --output, or --force to replace it")
    if output is not None and from_file and Path(output).resolve() == Path(argv[0]).resolve():
        raise UsageError(f"{output} is what is imported", hint="give another --output")


def schema(
    reference: Annotated[bool, Option("--reference", help="Print the reference of all keys as text instead.")] = False,
    flags: Annotated[
        bool, Option("--flags", help="Print the reference of all override flags as text instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors that complete and check YAML.

    Example: trainkit schema > recipe.schema.json
    """
    from trainkit.flags.registry import flag_reference
    from trainkit.recipe.schema.json_schema import json_schema
    from trainkit.recipe.schema.reference import reference_text

    if flags:
        sys.stdout.write(flag_reference())
    elif reference:
        sys.stdout.write(reference_text())
    else:
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
