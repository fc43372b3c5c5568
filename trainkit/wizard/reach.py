"""Whether a setting would reach the program: what it never sees need not be asked."""

from __future__ import annotations

from typing import Any

from trainkit.recipe.schema.fields import schema, tagged_sections
from trainkit.recipe.validation.type_errors import choices, takes_switch
from trainkit.wizard.trial import judge
from trainkit.wizard.view import View

# Programs that read nothing of the recipe but what starts them; planning refuses no setting, and says so in a remark.
DEAF = frozenset({"torch"})


def reaches(view: View, key: str) -> bool:
    """Whether planning takes the setting for this kind of program, going by a value that is not its default."""
    if view.builtin:
        return True
    if view.get("program.kind") in DEAF:
        return False
    errors = judge(view.supposing({key: _sample(view, key)})).errors
    return not any(each.key == key for each in errors)


def _sample(view: View, key: str) -> Any:
    section = key.rpartition(".")[0]
    setting = schema().setting(key, view.kind(section) if section in tagged_sections() else "")
    assert setting is not None, key
    literal = [each for each in choices(setting.annotation) if each not in ("auto", setting.default)]
    if literal:
        return literal[0]
    return True if takes_switch(setting) or isinstance(setting.default, bool) else 8
