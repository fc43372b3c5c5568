"""The table of accelerate's settings: it reads what it writes, and has the defaults of the installed accelerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.convert.reading import imported, read
from trainkit.launch_plan.context import Context
from trainkit.machine.facts import Facts
from trainkit.planner.build import decide
from trainkit.recipe.merge import value_at
from trainkit.recipe.resolved import Resolved
from trainkit.tools.accelerate.fields import SETTINGS
from trainkit.tools.accelerate.launcher import entries
from trainkit.tools.base.fields import UNSET

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
SCRIPT = {"kind": "accelerate", "script": "train.py"}
small = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
switch = st.booleans()
shared = {
    "kind": st.just("fsdp"),
    "sharding": st.sampled_from(["full_shard", "shard_grad_op"]),
    "offload": switch,
    "state_dict_type": st.sampled_from(["full", "sharded"]),
    "cpu_ram_efficient_loading": st.just(False),
}
first = {
    "version": st.just(1),
    "backward_prefetch": st.sampled_from(["backward_pre", "backward_post", "no_prefetch"]),
    **dict.fromkeys(("forward_prefetch", "use_orig_params", "sync_module_states"), switch),
}
wrapped = st.one_of(
    st.fixed_dictionaries({"auto_wrap": st.just("size"), "min_params": st.integers(1, 10**9)}),
    st.fixed_dictionaries(
        {
            "auto_wrap": st.just("transformer"),
            "wrap_classes": st.lists(st.sampled_from(["Block", "BertLayer", "X"]), min_size=1, unique=True),
        }
    ),
    st.fixed_dictionaries({"auto_wrap": st.just("none")}),
)
strategies = st.builds(
    lambda known, wrap: {**known, **wrap},
    st.one_of(st.fixed_dictionaries({**shared, "version": st.just(2)}), st.fixed_dictionaries(shared | first)),
    wrapped,
)
compiled = st.fixed_dictionaries(
    {
        "enabled": st.just(True),
        "backend": st.sampled_from(["inductor", "aot_eager"]),
        "mode": st.sampled_from(["default", "max-autotune", "reduce-overhead"]),
        "dynamic": switch,
        "scope": st.sampled_from(["model", "blocks"]),
    }
)


def decided(layered: Layered, machine: Machine, recipe: Mapping[str, Any]) -> Context:
    return decide(layered({"program": SCRIPT}, recipe), machine(2), ())[0]


@small
@given(
    strategy=strategies, compile_=st.none() | compiled, dtype=st.sampled_from(["fp32", "bf16", "fp16"]), every=switch
)
def test_what_the_file_says_is_read_as_the_recipe_that_it_was_made_of(
    layered: Layered, machine: Machine, strategy: dict[str, Any], compile_: Any, dtype: str, every: bool
) -> None:
    efficiency = {"compile": compile_ or {"enabled": False}, "gradient_checkpointing": {"every": every}}
    recipe = {"strategy": strategy, "precision": {"dtype": dtype}, "efficiency": efficiency}
    context = decided(layered, machine, recipe)
    found: dict[str, Any] = {}
    for name, (value, _) in entries(context).items():
        field = next(each for each in SETTINGS if each.name == name)
        if field.keys and name not in ("distributed_type", "num_processes", "gpu_ids"):
            decoded = field.decode(value)
            assert isinstance(decoded, dict), name
            found |= decoded
    assert found.pop("nodes.count") == 1
    assert dtype == "fp32" or found["precision.dtype"] == dtype
    assert {key: value_at(recipe, key) for key in found} == found


@small
@given(strategy=strategies, dtype=st.sampled_from(["bf16", "fp16"]))
def test_a_file_that_is_read_and_written_again_says_the_same_in_every_key_that_it_had(
    layered: Layered, machine: Machine, strategy: dict[str, Any], dtype: str
) -> None:
    made = entries(decided(layered, machine, {"strategy": strategy, "precision": {"dtype": dtype}}))
    tree: dict[str, Any] = {}
    for name, (value, _) in made.items():
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    back = read(imported("a.yaml", {"a.yaml": tree}, program=("train.py",), kind="accelerate"))
    again = entries(decide(back, machine(2), ())[0])
    assert {name: again[name][0] for name in made} == {name: value for name, (value, _) in made.items()}
    assert again.keys() == made.keys()


@pytest.mark.torch
@pytest.mark.needs("accelerate>=1.15")
def test_the_tables_defaults_are_those_of_the_installed_accelerate() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    parsed = vars(launch.launch_command_parser().parse_args(["train.py"]))
    compared = 0
    for each in SETTINGS:
        default = parsed.get(each.name.rpartition(".")[2])
        if default is not None and each.default is not UNSET:
            assert str(default).lower() == str(each.default).lower(), each.name
            compared += 1
    assert compared > 10


@pytest.mark.torch
@pytest.mark.needs("accelerate>=1.15")
def test_accelerate_reads_every_variable_of_the_table() -> None:
    pytest.importorskip("accelerate")
    from accelerate import accelerator, state
    from accelerate.utils import dataclasses, launch

    text = "".join(Path(module.__file__).read_text() for module in (accelerator, state, dataclasses, launch))
    for each in SETTINGS:
        name = each.variable.removeprefix("ACCELERATE_DYNAMO_").removeprefix("FSDP_")
        assert name in text, each.variable
