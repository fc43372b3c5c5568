"""A setting that is declared to name a file is looked at everywhere: nothing else lists the settings with paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from trainkit.launch_plan.context import Context
from trainkit.machine.facts import Facts
from trainkit.planner.build import decide
from trainkit.planner.container import notices
from trainkit.planner.rules import inputs_are_there
from trainkit.recipe.paths import absent_inputs, inputs
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import TokensData, setting
from trainkit.recipe.schema.fields import path_keys, schema

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]


class Copied(TokensData):
    """What somebody adds who follows CONTRIBUTING: a kind of data whose file has a name of its own."""

    kind: Literal["copied"] = setting("copied", "A kind of data that nobody has heard of.")  # type: ignore[assignment]
    file: str = setting("", "Its file.", reads="file")


class Nothing:
    """A file system without files."""

    def read(self, path: str) -> bytes:
        raise FileNotFoundError(path)

    def exists(self, path: str) -> bool:
        return False

    def holds(self, folder: str, pattern: str) -> bool:
        return False

    def shipped(self) -> dict[str, str]:
        return {}


def planned(layered: Layered, machine: Machine, path: str, recipe: dict[str, object] | None = None) -> Context:
    """A plan whose data are read from the file of the new setting."""
    resolved = layered({"devices": {"type": "cpu"}, **(recipe or {})})
    context = decide(resolved, machine(0))[0]
    data = Copied.model_construct(**{**TokensData.model_construct().__dict__, "kind": "copied", "file": path})
    changed = resolved.recipe.model_copy(update={"data": data, "container": context.recipe.container})
    absent = absent_inputs(changed, Nothing(), lambda name: name)
    return replace(context, resolved=replace(context.resolved, recipe=changed, absent=absent))


def test_a_file_that_a_new_setting_names_is_a_blocker_where_it_is_not_there(layered: Layered, machine: Machine) -> None:
    context = planned(layered, machine, "tokens.bin")
    assert ("data.file", "tokens.bin") in [*inputs(context.recipe)]
    (found,) = inputs_are_there(context)
    assert found.what == "data.file tokens.bin does not exist on this machine"
    assert (found.severity, found.key, bool(found.hint)) == ("blocker", "data.file", True)


def test_a_container_without_its_folder_says_so(layered: Layered, machine: Machine) -> None:
    image = {"kind": "docker", "image": "a/b:1", "python": "/usr/bin/python3"}
    context = planned(layered, machine, "/far/tokens.bin", {"container": image})
    assert "data.file /far/tokens.bin is not seen inside the container" in [each.what for each in notices(context)]


def test_the_settings_with_paths_are_those_that_say_so() -> None:
    declared = {each.key for each in schema().all_settings() if each.reads}
    assert declared == {*path_keys()} >= {"data.path", "model.path", "strategy.config", "output.root", "program.script"}
