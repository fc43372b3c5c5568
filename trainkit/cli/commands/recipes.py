"""Recipes as files, without a run: `trainkit ls`, `cp`, `check`, `explain` and `schema`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trainkit.cli.diagnostics import show_diagnostics, write_text
from trainkit.cli.file_system import MACHINES, MODELINE, FileSystem, modeline, write_file
from trainkit.cli.line import PYTHON, OwnProgram, own_program, split_line
from trainkit.cli.options import Force, Json, On, Presets, Variant
from trainkit.cli.pipeline import (
    cluster_facts,
    decide_recipe,
    look_at_data,
    no_recipe,
    plan_recipe,
    replaces_recipe,
    resolve_request,
    show_warnings,
)
from trainkit.errors import Diagnostic, ExitCode, TrainkitError, UsageError
from trainkit.files import is_there
from trainkit.recipe.secrets import mask_words
from trainkit.text import table

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved


def ls(
    pattern: Annotated[str, Argument(metavar="[WORD]", help="Show only names that contain this word.")] = "",
    as_json: Json = False,
) -> None:
    """List the shipped recipes, presets and machines. `trainkit cp NAME` copies one, `extends: NAME` uses a preset.

    Machines are for planning: `trainkit plan RECIPE --on 8xh100`.

    Example: trainkit ls strategy
    """
    from trainkit.cli.machines import profiles

    known = {**FileSystem().shipped(), **{f"{MACHINES}/{name}": str(path) for name, path in profiles().items()}}
    found = [(name, path, first_comment(Path(path))) for name, path in sorted(known.items()) if pattern in name]
    if as_json:
        listing = [dict(zip(("name", "path", "description"), each, strict=True)) for each in found]
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
        return
    if not found:
        sys.stderr.write(f"no shipped name contains {pattern!a}; `trainkit ls` shows all\n")
        raise typer.Exit(ExitCode.USAGE)
    write_text(table((name, description) for name, _, description in found))


def first_comment(path: Path) -> str:
    """The first comment of a YAML file that is not an editor's modeline: what the file is for."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith(MODELINE):
            return line.lstrip("# ").rstrip()
    return ""


def cp(
    name: Annotated[str, Argument(help="A name from `trainkit ls`.")],
    destination: Annotated[
        str, Argument(help="File or folder (`new/` is created); default: the current folder.")
    ] = ".",
    force: Force = False,
) -> None:
    """Copy a shipped recipe, preset or machine, to edit it. A recipe is renamed after its new file.

    Example: trainkit cp quickstart my-run.yaml
    """
    from trainkit.cli.machines import profiles
    from trainkit.recipe.yaml_writer import recipe_name, scalar

    shipped = FileSystem().shipped()
    machines = {f"{MACHINES}/{stem}": str(path) for stem, path in profiles().items()}
    path = shipped.get(f"recipes/{name}") or {**machines, **shipped}.get(name)
    if path is None:
        from trainkit.recipe.suggestions import did_you_mean

        names = [*shipped, *machines, *(key.removeprefix("recipes/") for key in shipped)]
        hint = did_you_mean(name, names, "`trainkit ls` shows the names")
        raise UsageError(f"nothing shipped is named {name!r}", hint=hint)
    source, target = Path(path), Path(destination)
    if destination.endswith("/") or target.is_dir():
        target = target / source.name
    # With the modeline of this installation: a copy elsewhere is as far from the schema as it may be.
    lines = [line for line in source.read_text(encoding="utf-8").splitlines(keepends=True) if MODELINE not in line]
    text = "".join(lines) if name in machines else f"{modeline()}\n{''.join(lines)}"
    if f"recipes/{source.stem}" in shipped and target.stem != source.stem:
        text = text.replace(f"\nname: {source.stem}\n", f"\nname: {scalar(recipe_name(target.stem))}\n")
    if is_there(target) and not force:
        raise UsageError(f"{target} exists", hint="give another name, or --force to replace it")
    write_file(target, text, "give another destination")
    write_text(f"{target}\n")


def check(context: typer.Context, presets: Presets = None, as_json: Json = False) -> None:
    """Validate recipes without planning or starting anything. Exit code 2: one of them is wrong.

    RECIPE is a file, a run directory or a shipped name. A program with its
    arguments may take its place. The variants of a recipe are validated too.

    Example: trainkit check recipes/*.yaml

    Example: trainkit check torchrun --nproc_per_node 2 train.py --lr 1e-3
    """
    own = own_program(context)
    named, overrides = split_line(context.args, most=0 if own else len(context.args), what="recipes")
    recipes: Sequence[str | OwnProgram | None] = [own] if own else named
    if not recipes and not replaces_recipe(overrides, presets):
        raise no_recipe("check RECIPE...")
    if program := next((each for each in named if each.endswith(PYTHON)), None):
        raise UsageError(f"{program} is a program, and there is a recipe before it", hint="check each one separately")
    reports: list[dict[str, Any]] = []
    for recipe in recipes or (None,):
        words = mask_words(recipe.words if isinstance(recipe, OwnProgram) else (*overrides, *(presets or ())))
        shown = recipe if isinstance(recipe, str) else shlex.join(words)
        diagnostics, valid = check_recipe(recipe, overrides, presets)
        reports.append({"recipe": shown, "valid": valid, "diagnostics": [asdict(item) for item in diagnostics]})
        if not as_json:
            show_diagnostics(diagnostics)
            write_text(f"{shown}: {'ok' if valid else 'wrong'}\n")
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    if not all(report["valid"] for report in reports):
        raise typer.Exit(ExitCode.USAGE)


def check_recipe(
    recipe: str | OwnProgram | None, overrides: Sequence[str], presets: Sequence[str] | None
) -> tuple[list[Diagnostic], bool]:
    """The findings on a recipe and each of its variants, every one once, and whether all are valid."""
    found: list[Diagnostic] = []
    valid = True
    variants: list[str | None] = [None]
    for variant in variants:  # which grows: the recipe without a variant names them
        try:
            resolved = resolve_request(recipe, overrides, presets, variant=variant)
            found += (*resolved.warnings, *(refused := refused_inputs(resolved)))
            valid = valid and not refused
            if variant is None:
                variants += resolved.variants
        except TrainkitError as error:
            found += error.diagnostics
            valid = False
    # Of equal ones the first stays, in its place: reversed twice.
    unique = {(each.what, each.key, each.origin.place if each.origin else ""): each for each in reversed(found)}
    return list(reversed(unique.values())), valid


def refused_inputs(resolved: Resolved) -> list[Diagnostic]:
    """What a plan on this machine would say of a model that its task cannot train, of a tokenizer or of adapters."""
    if resolved.recipe.program.kind != "builtin":
        return []
    from trainkit.recipe.resolved import Asked
    from trainkit.rule import check
    from trainkit.tools.builtin.inputs import INPUT_RULES

    seen = look_at_data(resolved)
    asked = Asked(resolved, {}, seen=seen)
    if resolved.recipe.model.kind == "hf":
        from trainkit.machine.host import probe_packages, transformers_architectures

        if packages := probe_packages()["packages"]:
            asked = Asked(resolved, packages, transformers_architectures(), seen)
    return check(INPUT_RULES, asked)


def explain(
    context: typer.Context,
    presets: Presets = None,
    variant: Variant = None,
    machine: On = None,
    token: Annotated[
        str | None,
        Option("--token", metavar="WORD", help="An argument of the plan's command, even one that looks like a flag."),
    ] = None,
) -> None:
    """Show where the value of KEY in RECIPE comes from: the value in force and all that it overrides, with origins.

    KEY may also name a part of the plan: a variable, a file's key, an argument of the
    command. Without KEY all set values are listed.

    Example: trainkit explain quickstart optimizer.lr

    Example: trainkit explain ddp --token=--nproc-per-node=2

    Example: trainkit explain strategy.kind torchrun --nproc_per_node 2 train.py
    """
    from trainkit.cli.machines import machine_facts
    from trainkit.launch_plan.render import explain as renderer

    recipe, queries, overrides = _explained(context, presets)
    if token is not None:
        queries.append(token)
    program = context.obj if isinstance(recipe, str | None) else ()
    resolved = show_warnings(resolve_request(recipe, overrides, presets, program, variant))
    if not queries:
        write_text(renderer.render_all(resolved))
        return
    facts = machine_facts(machine) if machine else cluster_facts(resolved)
    planned = plan_recipe(resolved, facts)
    if resolved.recipe.strategy.kind == "auto":  # what the plan has chosen, and why
        resolved = decide_recipe(resolved, facts).resolved
    write_text("\n".join(renderer.render(query, resolved, planned) for query in queries))


def _explained(
    context: typer.Context, presets: Sequence[str] | None
) -> tuple[str | OwnProgram | None, list[str], list[str]]:
    """What a line of `explain` is about: the recipe or the program, the keys, the overrides."""
    from trainkit.recipe.schema import fields

    if own := own_program(context):
        return own, *split_line(context.args, most=1, what="a key in front of the program")
    given, overrides = split_line(context.args, most=2, what="a recipe and a key")
    recipe, *queries = given or [""]
    # Where presets or a program's setting are in place of a recipe, one word alone may be the key.
    if replaces_recipe(overrides, presets) and not queries and (not recipe or recipe in fields.schema().settings):
        return None, [recipe] if recipe else [], overrides
    if not recipe:
        raise no_recipe("explain RECIPE [KEY]")
    return recipe, queries, overrides


def schema(
    reference: Annotated[bool, Option("--reference", help="Print the reference of all keys as text instead.")] = False,
    flags: Annotated[
        bool, Option("--flags", help="Print the reference of all override flags as text instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of recipes, for completion and checks in editors.

    Example: trainkit schema > recipe.schema.json
    """
    from trainkit.recipe.flags import flag_reference
    from trainkit.recipe.schema.json_schema import json_schema, reference_text

    if flags:
        sys.stdout.write(flag_reference())
    elif reference:
        sys.stdout.write(reference_text())
    else:
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
