"""DeepSpeed's JSON from the recipe and a base file."""

from __future__ import annotations

from typing import Any

import pytest

from tests.convert.reading import imported, settings
from tests.tools.deepspeed_contexts import HERE, base_of, context_of
from trainkit.errors import Origin, RecipeError
from trainkit.machine.capability import Dtype
from trainkit.recipe.resolved import Attachment
from trainkit.tools.deepspeed.config import Sources, Tree, deepspeed_config
from trainkit.tools.deepspeed.fields import ProgramKind

# What HF's documentation shows for ZeRO-3 with offload, all "auto".
HF_FILE: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}


def strategy_of(**strategy: Any) -> dict[str, Any]:
    return {"strategy": {"kind": "zero2", **strategy}}


def made(recipe: dict[str, Any], dtype: Dtype = "fp32", base: Attachment | None = None) -> tuple[Tree, Sources]:
    return deepspeed_config(context_of(recipe, dtype, base), "builtin")


def problems(recipe: dict[str, Any], tree: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        made(recipe, base=base_of(tree))
    return [found.what for found in caught.value.diagnostics]


def test_without_a_base_file_the_recipe_says_everything() -> None:
    content, sources = made(strategy_of(bucket_mb=1.0), "fp32")
    assert content == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 262144,
            "allgather_bucket_size": 262144,
            "overlap_comm": False,
        },
        "steps_per_print": 2147483647,
        "timers": {"throughput": {"enabled": False}},
    }
    assert ("zero_optimization.stage", ("strategy.kind",)) in sources


def test_every_auto_of_a_usual_file_is_filled_and_the_rest_is_kept() -> None:
    recipe = strategy_of(kind="zero3", offload_optimizer="cpu")
    content, sources = made(recipe, "bf16", base_of(HF_FILE))
    assert "auto" not in str(content)
    assert content["bf16"] == {"enabled": True}
    assert content["fp16"]["enabled"] is False
    assert content["train_batch_size"] == 32
    assert content["zero_optimization"]["stage3_param_persistence_threshold"] == 1280
    assert content["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert content["steps_per_print"] == 2000
    assert content["zero_force_ds_cpu_optimizer"] is False
    # The trainer brings optimizer and schedule itself.
    assert "optimizer" not in content
    assert "scheduler" not in content
    assert ("zero_optimization.sub_group_size", ("strategy.config",)) in sources
    assert len({key for key, _ in sources}) == len(sources)


def test_swapping_to_nvme_is_written_out_with_what_makes_it_more_than_a_word() -> None:
    recipe = strategy_of(kind="zero3", offload_optimizer="nvme", offload_param="nvme", nvme_path="/disk")
    content, sources = made(recipe, "bf16")
    zero = content["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/disk", "buffer_count": 4}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk", "max_in_cpu": 0}
    assert content["aio"]["queue_depth"] == 32
    assert ("zero_optimization.offload_param.nvme_path", ("strategy.nvme_path",)) in sources
    base = base_of({"aio": {"queue_depth": 8}, "zero_optimization": {"offload_param": {"max_in_cpu": 5}}})
    own, _ = made(recipe, "bf16", base)
    assert (own["aio"]["queue_depth"], own["zero_optimization"]["offload_param"]["max_in_cpu"]) == (8, 5)


def test_the_base_file_is_not_changed() -> None:
    before = str(HF_FILE)
    made(strategy_of(kind="zero3", offload_optimizer="cpu"), "bf16", base_of(HF_FILE))
    assert str(HF_FILE) == before


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"train_batch_size": 64}, "train_batch_size is 64"),
        ({"train_micro_batch_size_per_gpu": "4"}, 'train_micro_batch_size_per_gpu is "4"'),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps is true"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 'offload_optimizer.device is "cpu"'),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, 'offload_param.device is "cpu"'),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5"),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type is "Lamb"'),
        ({"optimizer": {"params": {"lr": 1.0}}}, "optimizer.params.lr is 1.0"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad in the DeepSpeed file"),
        ({"scheduler": {"type": "OneCycle"}}, 'scheduler.type is "OneCycle"'),
        ({"zero_optimization": {"stage3_max_live_parameters": "auto"}}, 'is "auto", and no setting'),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing in the DeepSpeed file does",
        ),
        ({"zero_optimization": 2}, "zero_optimization in the DeepSpeed file must be a mapping"),
        ([1], "/ds.json holds list"),
    ],
)
def test_what_disagrees_with_the_recipe_is_an_error_that_names_it(tree: Any, named: str) -> None:
    assert any(named in what for what in problems(strategy_of(), tree))


def test_a_number_may_be_written_as_a_float() -> None:
    content, _ = made(strategy_of(), "fp32", base_of({"gradient_clipping": 1}))
    assert content["gradient_clipping"] == 1


def test_every_disagreement_is_reported_at_once_with_both_places() -> None:
    there = Origin("file ds.json", 0, "ds.json", 3, 5)
    base = base_of({"train_batch_size": 64, "gradient_clipping": 0.5}, train_batch_size=there)
    with pytest.raises(RecipeError) as caught:
        made({**strategy_of(), "batch": {"global": 32}}, "fp32", base)
    batch, clipping = caught.value.diagnostics
    assert (batch.origin, batch.key) == (there, "batch.global")
    assert HERE.place in batch.why
    assert "default" in clipping.why


def test_a_setting_of_speed_alone_yields_to_the_file_unless_the_recipe_states_it() -> None:
    tree = {"zero_optimization": {"reduce_bucket_size": 1000}}
    content, _ = made(strategy_of(), "fp32", base_of(tree))
    assert content["zero_optimization"]["reduce_bucket_size"] == 1000
    assert "reduce_bucket_size is 1000" in problems(strategy_of(bucket_mb=25.0), tree)[0]


@pytest.mark.parametrize("reader", ["hf", "deepspeed", "accelerate"])
def test_where_file_and_recipe_are_silent_deepspeeds_own_default_holds(reader: ProgramKind) -> None:
    base = base_of({"zero_optimization": {"stage": 3}})
    content, _ = deepspeed_config(context_of(strategy_of(kind="zero3"), "bf16", base), reader)
    assert content["zero_optimization"] == {"stage": 3}
    assert not {"data_types", "gradient_clipping", "optimizer", "scheduler"} & content.keys()


def test_beside_a_silent_file_the_trainer_exchanges_as_deepspeed_does_unless_the_recipe_says_how() -> None:
    stage2, tree = strategy_of(kind="zero2"), {"zero_optimization": {"stage": 2}}
    beside, _ = made(stage2, "fp32", base_of(tree))
    assert beside["zero_optimization"] == {"stage": 2}
    assert made(stage2)[0]["zero_optimization"]["reduce_bucket_size"] < 500_000_000
    told, _ = made(strategy_of(kind="zero2", bucket_mb=4.0), "fp32", base_of(tree))
    assert told["zero_optimization"]["reduce_bucket_size"] == 2**20


@pytest.mark.parametrize("reader", ["hf", "accelerate"])
def test_where_there_is_no_file_inputs_are_cast_to_fp16_as_by_accelerate(reader: ProgramKind) -> None:
    precision = {"precision": {"dtype": "fp16"}}
    content, _ = deepspeed_config(context_of(strategy_of() | precision, "fp16"), reader)
    assert content["fp16"]["auto_cast"] is True
    base = base_of({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}})
    content, _ = deepspeed_config(context_of(strategy_of() | precision, "fp16", base), reader)
    assert content["fp16"] == {"enabled": True}


@pytest.mark.parametrize("reader", ["hf", "accelerate"])
def test_a_library_is_asked_for_the_clipping_where_there_is_no_file(reader: ProgramKind) -> None:
    content, _ = deepspeed_config(context_of(strategy_of()), reader)
    assert content["gradient_clipping"] == "auto"


def test_what_the_recipe_gives_beside_a_silent_file_is_written_where_no_flag_says_it() -> None:
    base = base_of({"zero_optimization": {"stage": 2}, "train_batch_size": 32})
    recipe = {**strategy_of(), "train": {"max_grad_norm": 0.5}}
    found = [deepspeed_config(context_of(recipe, base=base), reader)[0] for reader in ("accelerate", "deepspeed", "hf")]
    assert [each.get("gradient_clipping") for each in found] == [0.5, 0.5, None]


def test_an_import_takes_deepspeeds_defaults_where_the_file_is_silent() -> None:
    adam = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}
    found = settings(imported("ds.json", {"ds.json": adam}))
    assert (found["optimizer.weight_decay"], found["train.max_grad_norm"]) == (0, 1)
    assert found["strategy.bucket_mb"] == 5e8 * 4 / 2**20
    adam["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    assert settings(imported("ds.json", {"ds.json": adam}))["optimizer.weight_decay"] == 0.01
