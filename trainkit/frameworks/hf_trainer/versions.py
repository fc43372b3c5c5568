"""What differs by version of transformers, as data. Held against the installed library by the tests.

Seen in 4.50.3, 4.53.3, 4.57.6, 5.0.0, 5.5.0, 5.12.0, 5.18.0 and 5.23.0; a change between two of them is taken to have
come with the later one, whose new form the earlier does not know.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.machine.versions import at_least

OLDEST, BEYOND = "4.50", "6"  # the versions that the tables speak of: from the first up to and without the second
NEWEST_SEEN = "5.23.0"

# Field of TrainingArguments -> its names, newest first, each with the first version that has it.
NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "activation_checkpointing": (("5.23", "activation_checkpointing"), ("0", "gradient_checkpointing")),
}

# What a version can do: feature -> first version.
FEATURES: Mapping[str, str] = {
    "fsdp is a switch": "5.12",  # before, the words of --fsdp say what is done
    "fsdp_config has a version": "5.0",  # before, accelerate reads it from the environment
    "optim_args reach torch's optimizers": "5.5",  # sgd and adagrad
}

# What a version can do no more: feature -> first version without it, seen to be so up to the newest.
LOST: Mapping[str, str] = {
    "an optimizer for torch_xla's FSDP": "5.3",  # Trainer makes one only for models that accelerate wraps
}

# Names that a program's arguments may still have: the version that no longer has it, and what to write.
GONE: Mapping[str, tuple[str, str]] = {
    "evaluation_strategy": ("4.53", "eval_strategy, or eval.every_steps in the recipe"),
    "no_cuda": ("5.0", "devices.type: cpu in the recipe"),
    "use_mps_device": ("5.0", "devices.type: mps in the recipe"),
    "overwrite_output_dir": ("5.0", "nothing: every run has a folder of its own"),
    "per_gpu_train_batch_size": ("5.0", "batch.micro in the recipe"),
    "per_gpu_eval_batch_size": ("5.0", "batch.eval_micro in the recipe"),
    "fp16_backend": ("5.0", "precision: fp16 in the recipe"),
    "half_precision_backend": ("5.0", "precision: fp16 in the recipe"),
    "fp16_opt_level": ("5.0", "precision: fp16 in the recipe"),
    "fsdp_min_num_params": ("5.0", "strategy.auto_wrap: size with strategy.min_params in the recipe"),
    "fsdp_transformer_layer_cls_to_wrap": ("5.0", "strategy.wrap_classes in the recipe"),
    "adafactor": ("5.0", "optimizer.name: adafactor in the recipe"),
    "torchdynamo": ("5.0", "efficiency.compile in the recipe"),
    "save_safetensors": ("5.0", "nothing: weights are always saved so"),
    "push_to_hub_model_id": ("5.0", "hub_model_id"),
    "push_to_hub_organization": ("5.0", "hub_model_id, with the organization before a slash"),
    "include_inputs_for_metrics": ("5.0", "include_for_metrics: [inputs]"),
    "group_by_length": ("5.5", "train_sampling_strategy: group_by_length"),
    "warmup_ratio": ("5.18", "warmup_steps: a number below 1 is a share of the steps"),
    "tpu_num_cores": ("5.0", "nothing: one process has every chip"),
    "tpu_metrics_debug": ("5.0", "debug: tpu_metrics_debug"),
    "logging_dir": ("5.18", "nothing: TENSORBOARD_LOGGING_DIR under env says where TensorBoard's files go"),
}


def name_of(field: str, version: str) -> str:
    """What a version calls a field."""
    return next((name for since, name in NAMES.get(field, ()) if at_least(version, since)), field)


def names_of(field: str) -> tuple[str, ...]:
    """Every name that a field has or had."""
    return (field, *(name for _, name in NAMES.get(field, ()) if name != field))


def can(feature: str, version: str) -> bool:
    """Whether a version has a feature of the tables."""
    return not at_least(version, LOST[feature]) if feature in LOST else at_least(version, FEATURES[feature])
