"""The table of TrainingArguments' fields reads what it writes, knows every older name, and is what transformers has."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.convert.reading import imported
from tests.convert.reading import settings as settings_of
from trainkit.errors import Origin
from trainkit.launch_plan.context import Context
from trainkit.machine.facts import Facts
from trainkit.optimizers import OPTIMIZERS
from trainkit.planner.build import decide
from trainkit.recipe.resolved import Resolved
from trainkit.tools.base.fields import UNSET, Unsupported, is_set, setting
from trainkit.tools.base.launcher_flags import script_flags
from trainkit.tools.hf import fields as optimizer
from trainkit.tools.hf.argv_reader import newest
from trainkit.tools.hf.fields import BY_NAME, FIELDS, Argument
from trainkit.tools.hf.fsdp_config import file, read_fsdp_config
from trainkit.tools.hf.removed_arguments import GONE

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
Decided = Callable[[Mapping[str, Any]], Context]

PACKAGES = {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
HF: dict[str, Any] = {"program": {"kind": "hf", "script": "train.py"}}
SHARED = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
RATES = st.floats(1e-8, 1, allow_subnormal=False)
STEPS = st.integers(1, 10**6)
SECTIONS: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
    "batch": {"micro": st.integers(1, 64), "accumulation": st.integers(1, 8), "eval_micro": st.integers(1, 64)},
    "precision": {"dtype": st.sampled_from(("fp32", "bf16", "fp16")), "eval": st.sampled_from(("same", "bf16"))},
    "optimizer": {
        "name": st.sampled_from([name for name, each in OPTIMIZERS.items() if each.hf_unsupported is None]),
        "lr": RATES,
        "weight_decay": RATES,
        "beta1": st.floats(0, 0.99),
        "beta2": st.floats(0, 0.99),
        "eps": RATES,
        "args": st.just({}) | st.just({"nesterov": True, "dampening": 0.5}),
    },
    "schedule": {
        "name": st.sampled_from(("cosine", "linear", "constant", "constant_with_warmup", "wsd")),
        "decay_steps": STEPS | st.just(0.25),
        "decay_type": st.sampled_from(("linear", "cosine", "sqrt")),
        "warmup_steps": STEPS,
        "min_lr_ratio": st.sampled_from((0.0, 0.07, 0.5)),
    },
    "train": {
        "steps": st.none() | STEPS,
        "epochs": st.floats(0.1, 100),
        "seed": st.integers(0, 2**31),
        "deterministic": st.booleans(),
    },
    "eval": {"every_steps": STEPS},
    "checkpoint": {"every_steps": STEPS, "keep": STEPS, "resume": st.sampled_from(("never", "out/checkpoint-3"))},
    "data": {"workers": st.just(2), "pin_memory": st.booleans(), "prefetch_factor": st.integers(1, 9)},
    "logging": {
        "level": st.sampled_from(("info", "error")),
        "every_steps": STEPS,
        "each_node": st.booleans(),
        "report_to": st.lists(st.sampled_from(("tensorboard", "wandb")), unique=True),
    },
    "strategy": {"bucket_mb": st.integers(1, 99).map(float), "find_unused_parameters": st.booleans()},
}
FSDP: Mapping[str, st.SearchStrategy[Any]] = {
    "sharding": st.sampled_from(("full_shard", "shard_grad_op")),
    "offload": st.booleans(),
    "wrap_classes": st.lists(st.sampled_from(("BertLayer", "BertPooler")), unique=True),
    "min_params": st.integers(1, 10**9),
    "auto_wrap": st.sampled_from(("transformer", "size", "none")),
    "backward_prefetch": st.sampled_from((None, "backward_pre", "backward_post", "no_prefetch")),
    **dict.fromkeys(("forward_prefetch", "use_orig_params", "cpu_ram_efficient_loading"), st.none() | st.booleans()),
    "state_dict_type": st.sampled_from((None, "full", "sharded")),
    "version": st.sampled_from((1, 2)),
}
# Fields that mean something only beside others: read together, below.
TOGETHER = {"lr_scheduler_type", "lr_scheduler_kwargs", "optim_args", "metric_for_best_model", "greater_is_better"}
GONE_NAMES = {each.name for each in GONE}


def any_of(keys: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings that say some of these keys."""
    return st.fixed_dictionaries({}, optional=keys)


RECIPES = any_of({name: any_of(keys) for name, keys in SECTIONS.items()})


@pytest.fixture
def decided(layered: Layered, machine: Machine) -> Callable[[Mapping[str, Any]], Context]:
    """A recipe with all decisions taken, without asking whether they go together."""
    base, *_ = decide(layered(HF, {"strategy": {"kind": "ddp"}}), machine(2, packages=PACKAGES), ())

    def build(recipe: Mapping[str, Any]) -> Context:
        resolved = layered(HF, {"strategy": {"kind": "ddp"}, "data": {"workers": 2}}, recipe)
        batch, chosen = resolved.recipe.batch, resolved.recipe.precision.dtype
        sizes: dict[str, Any] = {name: getattr(batch, name) or 1 for name in ("micro", "accumulation", "eval_micro")}
        resume = replace(base.resume, path=None if (path := resolved.recipe.checkpoint.resume) == "never" else path)
        dtype = "fp32" if chosen == "auto" else chosen
        return replace(base, resolved=resolved, dtype=dtype, batch=replace(base.batch, **sizes), resume=resume)

    return build


@given(recipe=RECIPES)
@SHARED
def test_each_field_reads_what_it_writes(decided: Decided, recipe: Mapping[str, Any]) -> None:
    context = decided(recipe)
    for field in FIELDS:
        value = field.encode(context)
        said = field.is_given(context) and value is not UNSET and not isinstance(value, Unsupported)
        if not said or field.name in TOGETHER or field.name.endswith("_strategy"):
            continue
        decoded = field.decode(value)
        assert not isinstance(decoded, Unsupported), field.name
        batch = {f"batch.{name}": getattr(context.batch, name) for name in ("micro", "accumulation", "eval_micro")}
        known = batch | {"devices.type": context.topology.device}
        for key, each in decoded.items():
            assert each == known.get(key, setting(context, key)), field.name
        assert decoded.keys() & set(field.keys) or value is False, field.name


@given(recipe=RECIPES)
@SHARED
def test_fields_that_depend_on_one_another_are_read_together(decided: Decided, recipe: Mapping[str, Any]) -> None:
    context = decided(recipe)
    optim, schedule = context.recipe.optimizer, context.recipe.schedule
    name, floor = (BY_NAME[each].encode(context) for each in ("lr_scheduler_type", "lr_scheduler_kwargs"))
    if isinstance(floor, Mapping):
        read = optimizer.decode_schedule(name, floor, optim.lr)
        assert read["schedule.name"] == schedule.name
        floor_asked = schedule.min_lr_ratio if is_set(context, "schedule.min_lr_ratio") else 0.0  # Trainer's
        assert read["schedule.min_lr_ratio"] == pytest.approx(floor_asked)
        if schedule.name == "wsd":
            steps = schedule.decay_steps
            in_steps = steps if steps >= 1 else math.ceil((context.recipe.train.steps or 0) * steps)
            assert read["schedule.decay_steps"] == in_steps
            assert read["schedule.decay_type"] == schedule.decay_type
    arguments = BY_NAME["optim_args"].encode(context)
    if isinstance(arguments, str):
        decoded = optimizer.decode_arguments(arguments, optim.name)
        assert not isinstance(decoded, Unsupported)
        own = {f"optimizer.args.{key}": value for key, value in optim.args.items()}
        assert decoded == own | {key: setting(context, key) for key in decoded.keys() - own.keys()}


@given(strategy=any_of(FSDP))
@SHARED
def test_the_fsdp_file_reads_what_it_writes(decided: Decided, strategy: Mapping[str, Any]) -> None:
    context = decided({"strategy": {"kind": "fsdp", **strategy}})
    assignments, found = read_fsdp_config(json.loads(file(context).content), lambda key: Origin("", 0, ""))
    assert not found
    read = {each.key: each.value for each in assignments}
    assert read == {key: setting(context, key) for key in read}
    beside = {"wrap_classes": "transformer", "min_params": "size"}
    wrap = setting(context, "strategy.auto_wrap")
    said = {name for name, value in strategy.items() if value not in (None, []) and beside.get(name, wrap) == wrap}
    assert {f"strategy.{name}" for name in said} <= read.keys()


@pytest.mark.parametrize("field", [each for each in FIELDS if each.aliases], ids=lambda each: each.name)
def test_every_older_name_is_read_as_its_field(field: Argument) -> None:
    for alias in field.aliases:
        (flag,) = script_flags([f"--{alias}", "1"])
        assert newest(flag).name == field.name


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--adafactor", {"optimizer.name": "adafactor"}),
        ("--use_mps_device", {"devices.type": "mps"}),
        ("--fsdp full_shard --fsdp_min_num_params 9", {"strategy.min_params": 9, "strategy.auto_wrap": "size"}),
        ("--fsdp full_shard --fsdp_transformer_layer_cls_to_wrap A B", {"strategy.wrap_classes": ["A", "B"]}),
        ("--no_dataloader_pin_memory", {"data.pin_memory": False}),
    ],
)
def test_flags_that_later_versions_dropped_are_read(words: str, settings: dict[str, Any]) -> None:
    launcher = "python" if "mps" in words else "torchrun --nproc_per_node 2"  # which takes one process
    found = settings_of(imported(f"{launcher} run_glue.py --do_train {words}"))
    assert {key: found.get(key) for key in settings} == settings


def test_a_field_has_the_name_that_the_version_knows() -> None:
    field = BY_NAME["gradient_checkpointing"]
    assert [field.name_in(version) for version in ("5.18.0", "5.23.0")] == [
        "gradient_checkpointing",
        "activation_checkpointing",
    ]


@pytest.mark.torch
@pytest.mark.needs("transformers>=5", "torch>=2.8")  # the table's defaults are those of the newest
def test_the_table_is_what_the_installed_library_has() -> None:
    transformers = pytest.importorskip("transformers")
    declared = {each.name: each.default for each in dataclasses.fields(transformers.TrainingArguments)}
    fields = [each for each in FIELDS if each.known_to(transformers.__version__)]
    assert {each.name: each.default for each in fields} == {each.name: declared.get(each.name) for each in fields}
    assert {each.name for each in fields} <= declared.keys()
    assert {each.name for each in GONE if each.known_to(transformers.__version__)} == GONE_NAMES & declared.keys()
