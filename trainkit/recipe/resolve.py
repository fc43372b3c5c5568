"""From layers to a validated recipe: the one function that does it, and every error that can be known at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from trainkit.errors import Diagnostic, Origin, RecipeError
from trainkit.recipe.assignment import environment_layer
from trainkit.recipe.described import described
from trainkit.recipe.extends import Sources
from trainkit.recipe.flags import argument_layer, override_layers
from trainkit.recipe.implied import imply
from trainkit.recipe.interpolation import interpolate, interpolated
from trainkit.recipe.layer import Layer, origin_at
from trainkit.recipe.merge import Merge, merge
from trainkit.recipe.paths import FileChecks, absent_inputs, absolute, attach, script_source
from trainkit.recipe.resolved import MadeRecipe, Request, Resolved
from trainkit.recipe.rules import KindOf, RecipeTree, contradictions, no_kind, recipe_rules, written_secrets
from trainkit.recipe.schema.fields import defaults, schema, tagged_sections
from trainkit.recipe.secrets import mask_values
from trainkit.recipe.validate import default_kind, likely_kind, unknown_keys, validate, validate_layer, without_unknown
from trainkit.rule import check


def resolve(request: Request, files: FileChecks, kind_of: KindOf = no_kind) -> Resolved:
    """The recipe that a request means.

    kind_of: what kind a script or module is, for the error where nothing says so.
    Raises RecipeError with every error that can be known at once.
    """
    layers, found, sources = _layers(request, files)
    # A mistake in a variant that is not chosen is reported too, before the day on which it is.
    judged = [*layers, *sources.other_variants(request.variant)]
    state = merge(layers)
    found += [*state.errors, *written_secrets(judged, state)]
    found += [each for layer in judged for each in unknown_keys(layer)]
    # Reported above at the place of each layer; interpolation and validation would report them once more.
    state.tree = without_unknown(state.tree)
    if sources.incomplete:
        _assume_kinds(state)
    imply(state)
    unresolved = interpolate(state, request.environ, defaults(_kinds(state)))
    found += unresolved
    kinds = _kinds(state)
    # Each layer alone, before the whole: a wrong value that a stronger layer replaces is wrong all the same.
    found += [
        each
        for layer in judged
        for each in validate_layer(layer, _kinds_of(layer, layers, state.begun, kinds), interpolated)
    ]
    locate = partial(origin_at, state.places)
    found += contradictions(state)
    attachments, diagnostics = attach(state, {each.strength: each.base for each in layers}, request.cwd, files)
    found += diagnostics
    broken, on_disk = frozenset(_broken(found)), partial(absolute, base=request.cwd)
    context = RecipeTree(state.tree, defaults(kinds), locate, files, on_disk, broken, sources.incomplete, kind_of)
    found += check(recipe_rules(context), context)
    recipe, wrong = validate(state.tree, locate)
    # The text of a reference that leads nowhere is no value, so its type is not judged.
    silent = {each.key for each in unresolved if each.severity == "error"}
    found += [each for each in wrong if each.key not in silent]
    found = _distinct(found, Origin("the recipe as a whole", len(layers), request.named or "command line"))
    if any(each.severity == "error" for each in found):
        raise RecipeError(found)
    assert recipe is not None, "a recipe is refused without a diagnostic"
    history = {key: tuple(entries) for key, entries in state.history.items()}
    absent, script = absent_inputs(recipe, files, on_disk), script_source(recipe, files, on_disk)
    more = (tuple(found), state.places, absent, sources.descriptions(), script, request.cwd)
    return Resolved(recipe, state.tree, history, attachments, *more, described(recipe, files, on_disk))


def _layers(request: Request, files: FileChecks) -> tuple[list[Layer], list[Diagnostic], Sources]:
    """All layers, weakest first: what the recipe extends, the recipe, presets, a variant, the environment, flags.

    Also what is wrong with them, and the files that they are from.
    """
    # Weakest first: what is asked for at the command line counts more than what the file says.
    sources = Sources(files, request.cwd)
    if isinstance(request.recipe, MadeRecipe):
        sources.add_made(request.recipe)
    elif request.recipe is not None:
        sources.add_recipe(request.recipe)
    for preset in request.presets:
        sources.add_preset(preset)
    if request.variant is not None:
        sources.add_variant(request.variant)
    found = [*sources.errors, *sources.warnings]
    strength = len(sources.layers)
    environment, diagnostics = environment_layer(request.environ, strength, request.cwd)
    found += diagnostics
    layers = [*sources.layers, environment]
    if request.overrides:
        below = merge(layers).get
        typed, diagnostics = override_layers(request.overrides, strength + 1, request.cwd, files, below)
        found += diagnostics
        layers += typed
    if request.arguments:
        layers.append(argument_layer(request.arguments, strength + 1, request.cwd, merge(layers).get))
    return layers, found, sources


def _broken(found: Iterable[Diagnostic]) -> Iterator[str]:
    return (each.key for each in found if each.severity == "error")


def _kinds(state: Merge) -> Mapping[str, str]:
    """The kind of each tagged section, by what is merged so far."""
    given = {section: state.get(f"{section}.kind") for section in tagged_sections()}
    return {section: kind if isinstance(kind, str) else default_kind(section) for section, kind in given.items()}


def _kinds_of(
    layer: Layer, layers: Sequence[Layer], begun: Mapping[str, int], kinds: Mapping[str, str]
) -> Mapping[str, str]:
    """The kinds by which a layer is validated that gives none itself: those of the merged recipe.

    Two exceptions are validated by the layer's own settings: a section that a stronger layer replaces as a whole or
    begins again, and a section whose kind does not exist.
    """
    stronger = [each.tree for each in layers if each.strength > layer.strength]
    apart = [
        section
        for section, kind in kinds.items()
        if kind not in schema().sections[section].kinds
        or any(f"{section}!" in tree for tree in stronger)
        or layer.strength < begun.get(section, 0)
    ]
    return {**kinds, **{section: likely_kind(section, layer.tree.get(section)) for section in apart}}


def _assume_kinds(state: Merge) -> None:
    """What a layer that could not be read may have said: a kind that has the settings which the other layers give."""
    for section in tagged_sections():
        given = state.get(section)
        if isinstance(given, dict) and "kind" not in given:
            given["kind"] = likely_kind(section, given)


def _distinct(found: Iterable[Diagnostic], whole: Origin) -> list[Diagnostic]:
    """Each finding once and without secrets, in the order of the layers and then of the lines.

    whole: the place of those without one.
    """
    unique: dict[tuple[str, str, str], Diagnostic] = {}
    for each in found:
        what, key, why, hint = map(mask_values, (each.what, each.key, each.why, each.hint))
        placed = Diagnostic(each.severity, what, key, each.origin or whole, why, hint)
        unique.setdefault((placed.what, placed.key, placed.origin.place if placed.origin else ""), placed)

    def position(found: Diagnostic) -> tuple[bool, int, str, int, int]:
        origin = found.origin
        assert origin is not None
        return (found.severity != "error", origin.strength, origin.source, origin.line, origin.column)

    return sorted(unique.values(), key=position)
