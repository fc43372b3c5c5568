"""The tables of the launchers' flags: they read what they write, and have the installed tools' flags and defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.launch_plan.context import Context
from trainkit.machine.facts import Facts
from trainkit.planner.build import decide
from trainkit.recipe.resolved import Resolved
from trainkit.tools import torchrun
from trainkit.tools.accelerate import launcher as accelerate
from trainkit.tools.base.fields import UNSET
from trainkit.tools.base.launcher_flags import LauncherFlag, find_flag
from trainkit.tools.deepspeed import launcher as deepspeed

FLAGS = {"torchrun": torchrun.FLAGS, "accelerate": accelerate.FLAGS, "deepspeed": deepspeed.FLAGS}
small = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parser_of(tool: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The installed tool's own parser; DeepSpeed makes it where it parses."""
    if tool == "torchrun":
        return pytest.importorskip("torch.distributed.run").get_args_parser()  # type: ignore[no-any-return]
    if tool == "accelerate":
        return pytest.importorskip("accelerate.commands.launch").launch_command_parser()  # type: ignore[no-any-return]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runner, caught = pytest.importorskip("deepspeed.launcher.runner"), list[argparse.ArgumentParser]()

    def keep(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        caught.append(self)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", keep)
    with pytest.raises(SystemExit):
        runner.parse_args([])
    return caught[0]


def flags_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                yield name[2:].replace("-", "_"), action


@pytest.mark.torch
@pytest.mark.parametrize("tool", FLAGS)
def test_the_table_has_every_flag_of_the_installed_launcher_and_its_default(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, action in flags_of(parser_of(tool, monkeypatch)):
        flag = find_flag(FLAGS[tool], name)
        assert flag, name
        assert flag.switch is (action.nargs == 0), name
        if flag.default is not UNSET:
            assert action.default == flag.default, name


def decided(layered: Callable[..., Resolved], machine: Callable[..., Facts], *layers: Mapping[str, object]) -> Context:
    return decide(layered({"strategy": {"kind": "ddp"}}, *layers), machine(8), ())[0]


def read_back(flags: Sequence[LauncherFlag], context: Context) -> dict[str, object]:
    """What an import makes of the flags that the plan passes."""
    found: dict[str, object] = {}
    for flag in flags:
        value = flag.encode(context)
        if flag.keys and isinstance(value, (int, str)):
            settings = flag.decode(str(value))
            assert isinstance(settings, dict), flag.name
            found |= settings
    return found


@small
@given(nodes=st.integers(2, 64), ranks=st.integers(1, 8), restarts=st.integers(0, 9))
def test_torchruns_flags_are_read_as_they_were_written(
    layered: Callable[..., Resolved], machine: Callable[..., Facts], nodes: int, ranks: int, restarts: int
) -> None:
    chosen = {"nodes": {"count": nodes, "processes_per_node": ranks}, "launcher": {"max_restarts": restarts}}
    assert read_back(torchrun.FLAGS, decided(layered, machine, chosen)) == {
        "nodes.count": nodes,
        "nodes.processes_per_node": ranks,
        "launcher.max_restarts": restarts,
    }


@small
@given(cards=st.sets(st.integers(0, 7), min_size=1))
def test_deepspeeds_flags_are_read_as_they_were_written(
    layered: Callable[..., Resolved], machine: Callable[..., Facts], cards: set[int]
) -> None:
    chosen = {"devices": {"select": sorted(cards), "order": "fastest"}, "launcher": {"kind": "deepspeed"}}
    found = read_back(deepspeed.FLAGS, decided(layered, machine, chosen))
    assert found == {"devices.select": sorted(cards)}


def test_the_flags_of_one_launcher_have_names_of_their_own() -> None:
    for flags in FLAGS.values():
        names = [name for flag in flags for name in (flag.name, *flag.aliases)]
        assert sorted(names) == sorted(set(names))
