"""The end of the conversation: the recipe's text, resolved and planned as it would run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.layers.merge import Merge
from trainkit.recipe.layers.paths import seen_from
from trainkit.wizard.given import placed
from trainkit.wizard.recipe_text import compose
from trainkit.wizard.trial import judge, resolve_text
from trainkit.wizard.view import View

if TYPE_CHECKING:
    from trainkit.plan.model import Plan


@dataclass(frozen=True)
class Finished:
    """A recipe that resolves, what it would run, and what is to be said about it."""

    text: str
    plan: Plan
    warnings: tuple[Diagnostic, ...]


def check_given(view: View, places: Merge) -> None:
    """Raise RecipeError where the settings that were given cannot go together, whatever the answers will be."""
    if not view.given:
        return
    wrong = [each for each in judge(view).errors if each.key in view.given]
    if wrong:
        raise RecipeError(placed(wrong, places))


def finish(view: View, path: str, places: Merge, schema_uri: str = "") -> Finished:
    """Make the recipe to be written at a path (absolute). places: of the settings that were given.

    Raises RecipeError with what is wrong, at the places where it was given.
    """
    from trainkit.planner.build import build_plan

    text = compose(view, path, schema_uri)
    try:
        resolved = resolve_text(view, text, seen_from(view.cwd, path))
        plan = build_plan(resolved, view.facts).plan
    except RecipeError as error:
        raise RecipeError(placed(error.diagnostics, places)) from error
    return Finished(text, plan, resolved.warnings)
