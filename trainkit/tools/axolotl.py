"""axolotl's files for `axolotl train` as recipes for the built-in trainer.

Names and defaults: axolotl 0.17, src/axolotl/utils/schemas/*.py, integrations/*/args.py, core/builders/*.py,
prompters.py and prompt_strategies/*.py.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.data.chats import LEARNED
from trainkit.data.formats import SPEAKERS
from trainkit.recipe.hub_name import is_repository
from trainkit.recipe.paths import absolute
from trainkit.recipe.short_flags import ONLY_AT_THE_END
from trainkit.tools.base import trainer_files
from trainkit.tools.base.fields import Unsupported
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, ImportedRecipe
from trainkit.tools.base.trainer_data import Rows, put_evaluation_rows, put_rows, put_validation_share, sliced
from trainkit.tools.base.trainer_files import (
    Decoded,
    Key,
    LeftOut,
    TrainerFile,
    accepted,
    left_out,
    maps,
    refused,
    shown,
    table,
)
from trainkit.tools.hf import training_arguments
from trainkit.tools.hf.fields import BY_NAME
from trainkit.tools.hf.training_arguments import KEPT, ORDER, SHOWN, SPEED, number

TOOL = "axolotl"
COMMAND = "axolotl train"  # that starts it itself, in front of a file
_IMAGES = "the built-in trainer has models of text alone"
_PREFERS = "the built-in trainer learns answers, and neither preferences nor rewards"
# Parts of axolotl that compute the same, measure, or log.
_SAME = {
    "cut_cross_entropy": SPEED, "liger": SPEED, "kernels": SPEED, "swanlab": SHOWN, "lm_eval": SHOWN,
}  # fmt: skip
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2"}
_EXACT = ("xformers", "flex_attention", "flash_attention_3")  # kernels of the same attention
_LEGACY = {
    "xformers_attention": "xformers", "flex_attention": "flex_attention", "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa", "eager_attention": "eager", "sage_attention": "sage",
}  # fmt: skip
# Columns by the type of a data set, and what is said of the words around them.
_INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {}, "alpaca_chat.load": {}, "alpaca_chat.load_concise": {}, "alpaca_chat.no_system": {},
    "alpaca_w_system.load": {}, "alpaca_w_system.load_instruct": {}, "alpaca_w_system.load_chat": {},
    "alpaca_w_system.load_open_orca": {"instruction": "question", "output": "response", "system": "system_prompt"},
    "alpaca_w_system.load_open_orca_chatml": {
        "instruction": "question", "output": "response", "system": "system_prompt",
    },
    "gpteacher": {"output": "response"}, "reflection": {"output": "output"},
    "alpaca_chat.load_qa": {"prompt": "question", "completion": "answer"},
    "alpaca_chat.load_camel_ai": {"prompt": "message_1", "completion": "message_2"},
    "jeopardy": {"instruction": "question", "input": "category", "output": "answer"},
}  # fmt: skip
_CHATS = ("chat_template", "chat_template.default", "chat_template.load", "sharegpt", "sharegpt.load_role")
# Metrics of `do_causal_lm_eval`, by ours.
_METRICS = {"sacrebleu": "bleu", "ter": "ter", "chrf": "chrf", "perplexity": "perplexity"}
_BUILT_IN = {"chatml": "chatml", "llama3": "llama3", "alpaca": "alpaca"}


def _attention(value: Any) -> Decoded:
    name = str(value)
    if name in _ATTENTION:
        return {"efficiency.attention": _ATTENTION[name]}
    if name in _EXACT or name.startswith("kernels-community/"):
        return LeftOut(f"the same attention, of other kernels: {SPEED}")
    return Unsupported(f"attention of {name} rounds otherwise")


def _legacy(name: str) -> Key:
    return Key(name, lambda value: _attention(_LEGACY[name]) if value else {})


def _recomputes(value: Any) -> Decoded:
    return {"efficiency.gradient_checkpointing.every": bool(value)}


def _model_class(value: Any) -> Decoded:
    name = str(value)
    if any(word in name for word in ("ConditionalGeneration", "Vision", "ImageText", "Mamba")):
        return Unsupported("the built-in trainer has models of text that transformers knows as causal ones")
    if "Classification" in name:
        return Unsupported(_PREFERS, "model.task: sequence_classification trains classifiers of labelled texts")
    return LeftOut("config.json says the class")


def _weights_of(name: str) -> Key:
    return accepted(name, "the built-in trainer trains all weights, or adapters on whole layers", False, None)


def _plugins(value: Any) -> Decoded:
    names = value if isinstance(value, list) else [value]
    parts = [str(each).removeprefix("axolotl.integrations.").partition(".")[0] for each in names]
    others = [name for name, part in zip(names, parts, strict=True) if part not in _SAME]
    if others:
        return Unsupported(f"{others[0]} changes what is trained, or may do so")
    return LeftOut("; ".join(dict.fromkeys(f"{part}: {_SAME[part]}" for part in parts)))


def _compile(value: Any) -> Decoded:
    return {"efficiency.compile.enabled": bool(value)}


_NO_TWICE = "equal rows are trained on as often as they are there"
_OTHER_OPTIMIZERS = (
    *("embedding_lr", "embedding_lr_scale", "lr_groups", "optim_target_modules", "dion_lr", "dion_momentum"),
    *("adam_beta3", "adam_epsilon2", "loraplus_lr_ratio", "jagged_restart_steps", "jagged_restart_warmup_steps"),
    *("jagged_restart_anneal_steps", "lr_quadratic_warmup", "lr_div_factor"),
)
_OF_METHODS = (
    *("orpo_alpha", "simpo_gamma", "cpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "rl_beta"),
    *("dpo_use_weighting", "dpo_label_smoothing", "precompute_ref_log_probs", "dpo_use_liger_kernel", "dpo_beta"),
    *("dpo_padding_free", "dpo_loss_type", "dpo_loss_weights", "center_rewards_coefficient", "max_prompt_len"),
    *("dpo_use_logits_to_keep", "dpo_generate_during_eval", "dpo_norm_loss", "rpo_alpha", "num_labels", "trl", "vllm"),
    *("ebft", "loraplus_lr_embedding", "relora_prune_ratio", "relora_prune_method", "relora_cpu_offload"),
    *("lisa_layers_attribute", "eaft_alpha", "eaft_k", "pose_split_on_token_ids", "pose_max_context_len"),
    *("pose_num_chunks", "scaling_softmax_factor", "scaling_softmax_bias", "fp8_enable_fsdp_float8_all_gather"),
    *("qgalore_rank", "qgalore_update_proj_gap", "qgalore_scale", "qgalore_proj_type", "qgalore_proj_quant"),
    *("qgalore_proj_bits", "qgalore_proj_group_size", "qgalore_cos_threshold", "qgalore_gamma_proj"),
    *("qgalore_queue_size", "dion_rank_fraction", "dion_rank_multiple_of", "torchdistx_path", "ray_run_name"),
    *("ray_num_workers", "resources_per_worker", "gptq_groupsize", "gptq_model_v1", "gptq_disable_exllama"),
    *("model_quantization_config_kwargs", "kd_ce_alpha", "kd_alpha", "kd_temperature", "kd_beta", "kd_normalize_topk"),
    *("kd_online_topk", "kd_online_server", "kd_online_timeout", "kd_temperature_min", "spectrum_model_name"),
    *("nemo_gym_dir", "nemo_gym_auto_clone", "nemo_gym_config_paths", "nemo_gym_head_port", "nemo_gym_server_timeout"),
    *("nemo_gym_verify_timeout", "nemo_gym_run_timeout", "nemo_gym_datasets", "nemo_gym_auto_start"),
    *("nemo_gym_model_name", "nemo_gym_multi_turn", "nemo_gym_max_turns"),
    *("mora_type", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"),
)
KEYS: Mapping[str, Key] = {
    **training_arguments.KEYS,
    **table(
        maps("base_model", "model.path"),
        maps("revision_of_model", "model.revision"),
        maps("model_revision", "model.revision"),
        maps("tokenizer_config", "data.tokenizer"),
        maps("sequence_len", "data.sequence_length"),
        maps("micro_batch_size", "batch.micro"),
        maps("eval_batch_size", "batch.eval_micro"),
        maps("early_stopping_patience", "eval.patience"),
        Key("gradient_checkpointing", _recomputes),
        Key("output_dir", lambda value: {"output.root": value}),
        Key("attn_implementation", _attention),
        [_legacy(name) for name in _LEGACY],
        Key("torch_compile", _compile),
        Key("plugins", _plugins),
        *[Key(name, _model_class) for name in ("model_type", "type_of_model")],
        Key("profiler_steps", lambda value: {"profile.steps": value}),
        Key("auto_resume_from_checkpoints", lambda value: {"checkpoint.resume": "auto"} if value else {}),
        accepted("fp32_norms", "norms keep precision.weights", False),
        left_out(_PREFERS, "rl", "reward_model", "process_reward_model"),
        refused("the trainer is another one", "trainer_cls", "use_ray", "hatchery", "nemo_gym_enabled"),
        refused("it learns of another model's answers", "kd_trainer", "kd_online_server_base_url"),
        refused("the built-in trainer trains in 16 or 32 bits", "fp8", "qat", "use_onebitllms", "quantization"),
        refused("weights of this format are another model to train", "gptq", "model_quantization_config"),
        refused("the built-in trainer trains all weights, or adapters on whole layers", "unfrozen_parameters",
                "freeze_mm_modules", "lisa_n_layers", "lisa_step_interval", "spectrum_top_fraction", "llmcompressor"),
        refused("the learning rates or steps are others", *_OTHER_OPTIMIZERS),
        refused("a sequence stays on one rank, and so does each weight's product", "context_parallel_size",
                "sequence_parallel_degree", "tensor_parallel_size", "expert_parallel_size", "context_parapllel_size"),
        refused("the model or its loss is another one", "use_pose", "scaling_softmax", "use_eaft", "diffusion",
                "dense_mixer", "llama4_linearized_experts", "grokfast_alpha", "grokfast_lamb", "use_mora", "mora",
                "liger_use_token_scaling", "rope_scaling", "cls_model_config", "s2_attention"),
        left_out(_IMAGES, "processor_type"),
        refused(_IMAGES, "processor_kwargs", "image_size", "image_resize_algorithm",
                "role_boundaries"),
        refused("weights start as they are in model.path", "reinit_weights", "base_model_config"),
        refused("new tokens need new rows of the model", "tokens", "added_tokens_overrides"),
        refused("a part of the data alone is trained on", "dataset_shard_num", "dataset_shard_idx"),
        refused("the sampler does not go by the order of the file", "curriculum_sampling",
                "sample_packing_sequentially"),
        left_out("the plan decides it", "world_size", "device"),
        accepted("noisy_embedding_alpha", "the built-in trainer adds no noise to embeddings (NEFTune)", 0),
        accepted("context_parallel_size", "a sequence stays on one rank", 1),
        accepted("tensor_parallel_size", "a weight's product stays on one rank", 1),
        accepted("sequence_parallel_degree", "a sequence stays on one rank", 1),
        accepted("expert_parallel_size", "experts are not divided over ranks", 1),
        accepted("cosine_constant_lr_ratio", "the rate falls to the last step", 0),
        Key("tokenizer_use_mistral_common", lambda value: LeftOut("the tokenizer is transformers' own")),
        left_out("strategy says how ranks share the model", "dp_shard_size", "dp_replicate_size", "fsdp_version", "ddp",
                 "fsdp_final_state_dict_type", "device_map", "max_memory", "gpu_memory_limit", "heads_k_stride",
                 "ring_attn_func"),
        left_out(
            SPEED, "tiled_mlp", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "chunked_cross_entropy",
            "chunked_cross_entropy_num_chunks", "cut_cross_entropy", "flash_attn_cross_entropy", "flash_attn_fuse_mlp",
            "flash_attn_rms_norm", "flash_optimum", "flash_attn_d512", "large_head_attention", "sdpa_varlen",
            "fused_attn_kernel", "gemma4_hybrid_attn_impl", "flex_attn_compile_kwargs", "experts_implementation",
            "use_kernels", "liger_rope", "liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_swiglu",
            "liger_glu_activation", "liger_cross_entropy", "liger_fused_linear_cross_entropy", "use_scattermoe",
            "use_sonicmoe", "expert_backend", "nonexpert_quantization", "moe_grouped_backend", "moe_dequant_chunk_size",
            "moe_bnb_fast", "use_dsv4_kernels", "use_glm_dsa_kernels", "dsv4_fp8_nonexpert_mode",
            "dsv4_fp8_lora_kernel", "dsv4_shared_mlp_lora_kernel", "dsv4_bf16_all", "dsv4_fp4_grouped_mode",
            "gemma4_fp8_nonexpert", "gemma4_nf4_nonexpert", "nvfp4_merge_aware", "nvfp4_merge_aware_start_step",
            "expert_parallel_backend", "expert_parallel_num_nvl_bytes", "expert_parallel_num_rdma_bytes",
            "expert_parallel_token_capacity", "expert_parallel_fallback_on_unsupported", "selective_checkpointing",
            "activation_offloading", "layer_offloading", "low_cpu_mem_usage", "experimental_skip_move_to_device",
            "qlora_sharded_model_loading", "lora_on_cpu", "deepcompile", "gc_steps", "gc_collect_steps",
            "torch_compile_options", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory",
            "preprocess_iterable", "pad_to_sequence_len", "pad_to_multiple_of", "batch_flattening",
            "multipack_real_batches", "sample_packing_group_size", "sample_packing_bin_size",
            "sample_packing_mp_start_method", "sample_packing_eff_est", "sample_packing_seq_len_multiplier",
            "eval_sample_packing", "eval_sequence_len", "streaming_multipack_buffer_size",
            "pretrain_multipack_buffer_size", "shrink_embeddings", "resize_token_embeddings_to_32x",
            "embeddings_skip_upcast", "mean_resizing_embeddings", "tokenizer_use_fast", "fp32_norm_classes",
        ),
        left_out(
            SHOWN, "wandb_watch", "wandb_log_model", "use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name",
            "mlflow_run_name", "hf_mlflow_log_artifacts", "use_comet", "comet_api_key", "comet_workspace",
            "comet_project_name", "comet_experiment_key", "comet_mode", "comet_online", "comet_experiment_config",
            "trackio_project_name", "trackio_run_name", "use_otel_metrics", "otel_metrics_host",
            "otel_metrics_port", "use_swanlab", "swanlab_project", "swanlab_experiment_name", "swanlab_description",
            "swanlab_mode", "swanlab_workspace", "swanlab_api_key", "swanlab_log_model", "swanlab_web_host",
            "swanlab_api_host", "swanlab_lark_webhook_url", "swanlab_lark_secret", "swanlab_log_completions",
            "swanlab_completion_log_interval", "swanlab_completion_max_buffer", "eval_table_size",
            "eval_max_new_tokens", "do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset",
            "bench_split", "include_tkps", "profiler_steps_start", "generate_samples", "num_generation_samples",
            "generation_max_new_tokens", "generation_temperature", "generation_top_p", "generation_top_k",
            "generation_prompt_ratio", "generation_do_sample", "lm_eval_tasks", "lm_eval_batch_size",
            "lm_eval_post_train", "lm_eval_model", "gradio_title", "gradio_share", "gradio_server_name",
            "gradio_server_port", "gradio_max_new_tokens", "gradio_temperature", "debug", "strict",
            "axolotl_config_path", "total_num_tokens", "total_supervised_tokens",
        ),
        left_out("a loss that is not finite ends a run; one that is large does not", "loss_watchdog_threshold",
                 "loss_watchdog_patience"),
        left_out(KEPT, "save_first_step", "tokenizer_save_jinja_files", "dynamic_checkpoint", "merge_lora",
                 "merge_method", "torch_dtype"),
        left_out(ORDER, "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
        left_out("trainkit keeps token ids by content, in data.cache", "dataset_prepared_path", "push_dataset_to_hub",
                 "num_dataset_shards_to_save", "skip_prepare_dataset", "is_preprocess"),
        left_out(f"{_NO_TWICE}, also these", "dataset_exact_deduplication"),
        left_out("short rows are trained on, too", "min_sample_len"),
        left_out("the token is that of HF_TOKEN, or of `hf auth login`", "hf_use_auth_token"),
        left_out("trainkit runs no code out of a model's repository: transformers must know it", "trust_remote_code"),
        left_out("the tokenizer's folder says how it is made", "tokenizer_type", "tokenizer_legacy"),
        left_out("the tokenizer keeps its own tokens: an answer ends with the one that its chat template writes",
                 "special_tokens", "eot_tokens"),
        left_out("untrained rows of the model stay as they are", "fix_untrained_tokens"),
        left_out("the words of a prompt are the chat template's", "chat_template_kwargs"),
        left_out("no system message is added: write it into the rows", "default_system_message"),
        left_out("the class of the model decides it", "is_falcon_derived_model", "is_llama_derived_model",
                 "is_mistral_derived_model", "is_qwen_derived_model", "base_model_ignore_patterns"),
        left_out("adapters are named by their layers in either order", "lora_fan_in_fan_out"),
        left_out("it says nothing without its method", *_OF_METHODS),
        left_out("axolotl no longer has it", "max_packed_sequence_len", "eta_min", "project_name", "full_finetune",
                 "adam_eps", "test_value"),
        *[_weights_of(name) for name in (
            "lora_modules_to_save", "lora_target_parameters", "lora_rank_pattern", "lora_alpha_pattern",
            "peft_layers_to_transform", "peft_layers_pattern", "peft_layer_replication", "peft_init_lora_weights",
            "peft_trainable_token_indices", "peft_ensure_weight_tying", "peft", "relora", "quantize_moe_experts",
        )],
        accepted("peft_autocast_adapter_dtype", "adapters are in precision.weights", True, None),
    ),
}  # fmt: skip
_APART = {
    *("datasets", "test_datasets", "pretraining_dataset", "streaming", "sample_packing", "train_on_inputs"),
    *("chat_template", "chat_template_jinja", "excess_length_strategy", "val_set_size", "adapter", "lora_r"),
    *("lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_model_dir", "load_in_4bit"),
    *("load_in_8bit", "bnb_config_kwargs", "peft_use_dora", "peft_use_rslora", "bf16", "fp16", "bfloat16", "float16"),
    *("float32", "tf32", "batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "optimizer"),
    *("optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler", "lr_scheduler_kwargs"),
    *("cosine_min_lr_ratio", "warmup_steps", "warmup_ratio", "evals_per_epoch", "eval_steps", "eval_strategy"),
    *("saves_per_epoch", "save_steps", "save_strategy", "deepspeed", "fsdp", "fsdp_config", "load_best_model_at_end"),
    *("pretraining_sample_concatenation", "pretrain_multipack_attn", "overrides_of_model_config", "model_config"),
    *("overrides_of_model_kwargs", "model_kwargs", "metric_for_best_model", "greater_is_better"),
    *("activation_checkpointing", "evaluation_strategy", "use_wandb", "use_tensorboard", "use_trackio"),
    *("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "wandb_mode", "hub_model_id", "hub_strategy"),
}
_TYPICAL = {
    *("base_model", "datasets", "pretraining_dataset", "sequence_len", "micro_batch_size", "sample_packing"),
    *("val_set_size", "adapter", "num_epochs", "dataset_prepared_path", "lora_target_linear", "load_in_4bit"),
    *("lora_r", "evals_per_epoch", "saves_per_epoch", "train_on_inputs", "wandb_project", "pad_to_sequence_len"),
}


def likeness(tree: Mapping[str, Any]) -> float:
    """The share of keys that are axolotl's."""
    return trainer_files.likeness(tree, {*KEYS, *_APART}, _TYPICAL, 3) if "base_model" in tree else 0.0


def read(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """Each key as a setting, or named with the reason."""
    file = TrainerFile(TOOL, COMMAND, KEYS, draft, context, source)
    for name in ("rl", "reward_model", "process_reward_model", "processor_type"):
        if not trainer_files.is_off(file.get(name)):
            file.refuse(name, _IMAGES if name == "processor_type" else _PREFERS)
            return
    draft.set("model.kind", "hf", source.at("base_model"))
    _read_model(file)
    _read_adapters(file)
    _read_length(file)
    _read_data(file)
    training_arguments.read_spread(file)
    _read_precision(file)
    _read_rates(file)
    _read_intervals(file)
    _read_reports(file)
    training_arguments.read_push(file, pushes=bool(file.get("hub_model_id")))
    if draft.get("checkpoint.push_to_hub.repo"):
        file.assume({"checkpoint.push_to_hub.private": True})
    training_arguments.remark_frozen_weights(file)
    draft.remark("Over several ranks the loss is the mean of all learned tokens; in axolotl that of the ranks' means.")
    file.finish()
    flat = draft.get("schedule.name") == "constant"
    own = {
        "optimizer.weight_decay": 0.0, "train.seed": 42, "data.sequence_length": 512, "checkpoint.keep": 4,
        "batch.micro": 1, "batch.accumulation": 1,
    }  # fmt: skip
    file.assume(own)
    training_arguments.evaluate_on_all(file)
    if not flat and draft.get("schedule.warmup_steps") is None:
        steps = draft.get("train.steps")
        warmup: float = min(int(0.03 * steps), 100) if steps else 0.03
        file.assume({"schedule.warmup_steps": warmup})
        if not steps:
            draft.remark("warmup_steps: axolotl warms up in 3 % of the steps, and in 100 at most; here in 3 %.")


# wandb's variables by axolotl's names, which the run reads where it reports there.
_WANDB = {
    "wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_name": "WANDB_NAME",
    "wandb_run_id": "WANDB_RUN_ID", "wandb_mode": "WANDB_MODE",
}  # fmt: skip


def _read_reports(file: TrainerFile) -> None:
    uses = {"wandb": file.get("use_wandb", bool(file.get("wandb_project")))}
    uses |= {name: file.get(f"use_{name}") for name in ("tensorboard", "trackio")}
    if found := [name for name, on in uses.items() if on]:
        name = f"use_{found[0]}" if file.get(f"use_{found[0]}") else "wandb_project"
        file.put(name, {"logging.report_to": found})
    for name, variable in _WANDB.items():
        if uses["wandb"] and file.get(name):
            file.put(name, {f"env.{variable}": str(file.get(name))})
    file.leave_unread("see logging.report_to", *(f"use_{name}" for name in uses), *_WANDB)


def _read_model(file: TrainerFile) -> None:
    for name in ("overrides_of_model_config", "model_config"):
        if settings := file.get(name):
            file.put(name, {"model.config": dict(settings)})
    for name in ("overrides_of_model_kwargs", "model_kwargs"):
        if file.get(name):
            file.refuse(name, "the built-in trainer loads a model in a way of its own", "model.config has its settings")
    if extra := file.get("special_tokens.additional_special_tokens"):
        file.refuse("special_tokens.additional_special_tokens", f"{len(extra)} new tokens need new rows of the model")
    if isinstance(file.get("tokens"), Mapping):
        file.leave("tokens", "the tokenizer keeps its own special tokens")


def _read_adapters(file: TrainerFile) -> None:
    method, four, eight = file.get("adapter"), file.get("load_in_4bit"), file.get("load_in_8bit")
    names = (
        "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_model_dir",
        "bnb_config_kwargs", "peft_use_dora", "peft_use_rslora",
    )  # fmt: skip
    if method in ("lora", "qlora"):
        file.put("adapter", {"peft.kind": "lora"})
    elif method:
        file.refuse("adapter", "the built-in trainer's adapters are LoRA's")
        return
    else:
        file.take("adapter")
        for name in ("load_in_4bit", "load_in_8bit"):
            if file.get(name):
                file.refuse(name, "quantised weights stay as they are: adapters are trained beside them")
        file.leave_unread("no adapter is trained", *names)
        return
    for name, key in (
        ("lora_r", "peft.rank"), ("lora_alpha", "peft.alpha"), ("lora_dropout", "peft.dropout"),
        ("lora_model_dir", "peft.path"), ("peft_use_dora", "peft.dora"), ("peft_use_rslora", "peft.rslora"),
    ):  # fmt: skip
        if file.get(name) is not None:
            file.put(name, {key: file.get(name)} if file.get(name) is not False else {})
    _read_targets(file)
    if four or eight:
        name = "load_in_4bit" if four else "load_in_8bit"
        file.put(name, {"model.quantize.bits": 4 if four else 8})
    for name, key, value in (
        ("bnb_4bit_quant_type", "quant_type", None), ("bnb_4bit_use_double_quant", "double_quant", None),
    ):  # fmt: skip
        full = f"bnb_config_kwargs.{name}"
        if four and (value := file.get(full)) is not None:
            file.put(full, {f"model.quantize.{key}": value})
    rest = [
        each
        for each in file.get("bnb_config_kwargs", {})
        if each not in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    ]
    if rest and not (set(rest) <= {"llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype"}):
        file.refuse("bnb_config_kwargs", f"{rest[0]} is no setting of model.quantize")
    for name in ("bnb_config_kwargs", "load_in_4bit", "load_in_8bit"):
        file.take(name)


def _read_targets(file: TrainerFile) -> None:
    modules = file.get("lora_target_modules")
    if file.get("lora_target_linear"):
        file.put("lora_target_linear", {"peft.target_modules": []}, "[] is every linear layer of the blocks")
        if modules:
            file.leave("lora_target_modules", "lora_target_linear takes every linear layer")
    elif isinstance(modules, str) and modules != "all-linear":
        file.refuse("lora_target_modules", "a pattern names the layers", "list their names, or their last parts")
    elif modules:
        file.put("lora_target_modules", {"peft.target_modules": [] if modules == "all-linear" else modules})
    elif not file.get("lora_model_dir"):
        file.refuse(
            "adapter", "no layer is named: which ones peft takes depends on the model", "set lora_target_linear"
        )
    file.leave_unread("lora_target_modules says which", "lora_target_linear")


def _read_length(file: TrainerFile) -> None:
    training_arguments.read_epochs(file, "num_epochs", 1.0)
    micro, total = file.get("micro_batch_size"), file.get("batch_size")
    if file.get("gradient_accumulation_steps") is not None:
        file.put("gradient_accumulation_steps", {"batch.accumulation": file.get("gradient_accumulation_steps")})
        file.leave_unread("gradient_accumulation_steps counts", "batch_size")
    elif total and micro:
        file.put("batch_size", {"batch.accumulation": max(1, total // micro)}, "batch_size over micro_batch_size")


def _read_rates(file: TrainerFile) -> None:
    if file.get("learning_rate") is not None:
        file.put("learning_rate", {"optimizer.lr": number(file.get("learning_rate"))})
    if file.get("optimizer") == "muon":
        what = "axolotl's Muon is an implementation of its own, whose rate is not that of PyTorch's, which trainkit has"
        file.refuse("optimizer", what, "name another optimizer, or set optimizer.name: muon and its rate yourself")
    else:
        training_arguments.read_optimizer(file, "optimizer", str(BY_NAME["optim"].default))
    floor = number(file.get("cosine_min_lr_ratio", 0.0))
    training_arguments.read_schedule(file, "lr_scheduler", "cosine", floor)
    if floor and file.draft.get("schedule.name") == "cosine":
        file.put("cosine_min_lr_ratio", {"schedule.min_lr_ratio": floor})
    file.leave_unread("the schedule is no cosine, or ends at 0", "cosine_min_lr_ratio")
    steps, share, length = file.get("warmup_steps"), number(file.get("warmup_ratio")), file.draft.get("train.steps")
    if file.draft.get("schedule.name") == "constant":
        file.leave_unread("the rate is constant from the first step", "warmup_steps", "warmup_ratio")
    elif steps is not None:
        file.put("warmup_steps", {"schedule.warmup_steps": 2 if steps == 1 else number(steps)})
        file.leave_unread("warmup_steps counts", "warmup_ratio")
    elif share is not None:
        file.put("warmup_ratio", {"schedule.warmup_steps": int(share * length) if length else share})


def _read_precision(file: TrainerFile) -> None:
    """Weights are loaded in the format of the computation, and all of them trained in it (resolve_dtype)."""
    asked = file.get("bf16", "auto" if not file.get("fp16") else False)
    bf16 = asked or file.get("bfloat16")
    adapters, strategy = file.draft.get("peft.kind") == "lora", str(file.draft.get("strategy.kind"))
    sharded = strategy.startswith("zero") or (strategy == "fsdp" and file.get("fsdp_version", 1) == 1)
    name = "bf16" if file.get("bf16") else "bfloat16" if file.get("bfloat16") else "bf16"
    if bf16:
        auto = asked == "auto" and (adapters or sharded)
        settings = {"precision.dtype": "auto" if auto else "bf16"}
        if not adapters and not sharded:
            settings["precision.weights"] = "bf16"
        why = "axolotl loads the weights in bf16, and trains them so" if not adapters and not sharded else ""
        if file.get(name) is None:
            file.assume(settings)
        else:
            file.put(name, settings, why)
    elif file.get("fp16") or file.get("float16"):
        file.put("fp16" if file.get("fp16") else "float16", {"precision.dtype": "fp16"})
    else:
        file.draft.set("precision.dtype", "fp32", file.source.at("bf16"), "neither bf16 nor fp16 is on")
    if file.get("tf32") in (True, False):
        file.put("tf32", {"precision.tf32": file.get("tf32")} if file.get("tf32") else {})
    file.leave_unread("precision.dtype says it", "bf16", "bfloat16", "fp16", "float16", "float32", "tf32")


def _read_intervals(file: TrainerFile) -> None:
    evaluates = number(file.get("val_set_size", 0)) or file.get("test_datasets")
    epochs = number(file.get("num_epochs", 1)) or 1
    for what, plural, key in (
        ("eval", "evals_per_epoch", "eval.every_steps"),
        ("save", "saves_per_epoch", "checkpoint.every_steps"),
    ):
        if what == "eval" and not evaluates:
            file.leave_unread(
                "nothing is held out: val_set_size is 0",
                "evals_per_epoch",
                "eval_steps",
                "eval_strategy",
                "evaluation_strategy",
            )
            continue
        each = number(file.get(plural))
        if each:
            share = 1 / (each * epochs)
            if share >= 1:
                file.put(plural, {key: ONLY_AT_THE_END if what == "eval" else 0}, f"{plural}: at the end alone")
            else:
                training_arguments.set_every(file, plural, key, share)
            file.leave_unread(f"{plural} counts", f"{what}_steps", f"{what}_strategy")
            continue
        default = "epoch" if what == "save" else "no"
        training_arguments.read_strategy(file, what, "steps" if file.get(f"{what}_steps") else default)
        file.take(plural)
    if file.get("do_causal_lm_eval") and file.draft.get("eval.every_steps"):
        _read_metrics(file)
    training_arguments.read_best(file)


def _read_metrics(file: TrainerFile) -> None:
    """Metrics of texts that are written in an evaluation."""
    asked = file.get("eval_causal_lm_metrics") or list(_METRICS)
    ours = [_METRICS[name] for name in asked if name in _METRICS]
    file.put("do_causal_lm_eval", {"eval.metrics": ours})
    if others := [name for name in asked if name not in _METRICS]:
        file.leave("eval_causal_lm_metrics", f"of these, eval.metrics has no {', '.join(others)}")
    else:
        file.put("eval_causal_lm_metrics", {})
    file.put("eval_max_new_tokens", {"eval.tokens": file.get("eval_max_new_tokens", 128)})


def _read_data(file: TrainerFile) -> None:
    streams = "pretraining_dataset" if file.get("pretraining_dataset") else ""
    name = streams or "datasets"
    entries = _entries(file.get(name))
    found = [each for place, entry in enumerate(entries) if (each := _rows(file, f"{name}[{place}]", name, entry))]
    if not entries:
        file.refuse(name, "no data set is named")
    train = put_rows(file, name, found)
    file.take(name)
    if streams or file.get("streaming"):
        file.put("streaming" if file.get("streaming") else streams, {"data.streaming": True})
    if file.get("test_datasets"):
        tests = _entries(file.get("test_datasets"))
        rows = [
            each
            for place, entry in enumerate(tests)
            if (each := _rows(file, f"test_datasets[{place}]", "test_datasets", entry))
        ]
        put_evaluation_rows(file, "test_datasets", rows, train)
        file.take("test_datasets")
        file.leave_unread("test_datasets are evaluated on", "val_set_size")
    else:
        put_validation_share(file, "val_set_size", number(file.get("val_set_size", 0)))
    _read_packing(file, train, pretrains=bool(streams))
    _read_template(file, entries)
    if file.get("train_on_inputs") and train and train.form != "completion":
        file.put("train_on_inputs", {"data.train_on_prompts": True})
    file.leave_unread("a text is learned whole", "train_on_inputs")
    strategy = file.get("excess_length_strategy")
    if strategy in (None, "drop", "raise") and train and train.form != "completion":
        file.draft.remark("A row that is longer than sequence_len is cut; axolotl leaves it out by default.")
    if strategy:
        file.leave("excess_length_strategy", "a row that is longer than data.sequence_length is cut, and counted")


def _entries(given: Any) -> list[Mapping[str, Any]]:
    each = given if isinstance(given, list) else [given] if given else []
    return [one if isinstance(one, Mapping) else {"path": one} for one in each]


# Keys of a data set that say the same for the built-in trainer, and those that it cannot follow.
_ENTRY_LEFT = {
    "ds_type": "the ending of a file says its kind", "trust_remote_code": "trainkit runs no code of a data set",
    "preprocess_shards": SPEED, "conversation": "the chat template is the tokenizer's, or data.chat_template",
    "train_on_eos": "an answer is learned with the token that ends it",
    "train_on_eot": "an answer is learned with the token that ends it",
    "roles": "the speakers are known by these names",
    "template_thinking_key": "the chat template reads it by the name that it has",
    "field_thinking": "the chat template reads it by the name that it has",
    "chat_template_jinja": "see chat_template", "chat_template": "see chat_template",
}  # fmt: skip
_ENTRY_REFUSED = {
    "shards": "a part of the data alone is trained on", "shards_idx": "a part of the data alone is trained on",
    "input_transform": "rows are changed by code", "message_field_training_detail": "parts of answers are learned",
    "drop_system_message": "system messages stay", "split_thinking": "answers are taken apart",
    "logprobs_field": "it learns of another model's answers", "field_chosen": _PREFERS, "field_rejected": _PREFERS,
    "step_separator": _PREFERS, "max_completion_length": _PREFERS, "train_on_last_step_only": _PREFERS,
    "skip": "the first rows are left out", "temperature": "it learns of another model's answers",
    "input_format": "the words around a row are another template's",
}  # fmt: skip
_ENTRY_READ = {
    *("path", "type", "split", "name", "data_files", "revision", "field", "text_column", "field_messages"),
    *("message_property_mappings", "message_field_role", "message_field_content", "message_field_training"),
    *("roles_to_train", "field_tools", "field_human", "field_model"),
}


def _rows(file: TrainerFile, shown_as: str, name: str, entry: Mapping[str, Any]) -> Rows | None:
    """A data set by its entry; None and an error where the built-in trainer does not learn it."""
    what = f"{shown_as} {entry.get('path')}"
    problem = _entry_problem(entry)
    read_as = _form(entry, pretrains=name == "pretraining_dataset")
    if problem or isinstance(read_as, str):
        file.refuse(name, f"{what}: {problem or read_as}")
        return None
    form, columns = read_as
    said = {key: value for key, value in entry.items() if not trainer_files.is_off(value)}
    names = [shown(key, each) if isinstance(each, Mapping) else f"{key} {each}" for key, each in said.items()]
    file.draft.remark(f"{shown_as} has {', '.join(names)}.")
    for key in said:
        if key in _ENTRY_LEFT:
            file.draft.remark(f"Left out of {shown_as}: {key}: {_ENTRY_LEFT[key]}.")
        elif key not in _ENTRY_READ:
            file.draft.remark(f"Left out of {shown_as}: {key}: no key of axolotl that trainkit knows.")
    part = sliced(str(entry.get("split") or ""))
    if part is None:
        why = f"{what}: split {entry['split']} is a part of the rows, and data.max_rows names the first of them alone"
        file.refuse(name, why, "write train[:N], or train for all of them")
        return None
    split, first = part
    path, files = str(entry.get("path") or ""), entry.get("data_files") or []
    files = (
        [files]
        if isinstance(files, str)
        else list(files)
        if isinstance(files, list)
        else [each for values in files.values() for each in ([values] if isinstance(values, str) else values)]
    )
    here = file.context.files.exists(absolute(path, file.context.cwd))
    if files and path in ("json", "csv", "parquet", "arrow", "text"):
        paths = tuple(map(str, files))
    elif files and (here or not is_repository(path)):
        paths = tuple(posixpath.join(path, str(each)) for each in files)
    elif files:
        file.refuse(name, f"{what}: data_files of a data set of the Hub", "download them, and name them in path")
        return None
    else:
        paths = (path,)
    on_hub = not here and not files and is_repository(path)
    subset = entry.get("name") if on_hub else None
    wanted = None if split in ("", "train") or not on_hub else split
    return Rows(paths, form, columns, on_hub, subset, wanted, entry.get("revision") if on_hub else None, first)


def _entry_problem(entry: Mapping[str, Any]) -> str:
    for key, why in _ENTRY_REFUSED.items():
        if not trainer_files.is_off(entry.get(key)):
            return f"{key}: {why}"
    if (roles := entry.get("roles_to_train")) is not None and {SPEAKERS.get(str(each), each) for each in roles} != {
        "assistant"
    }:
        return "roles_to_train: the assistant's answers alone are learned"
    known = {
        str(word): role
        for role, words in (entry.get("roles") or {}).items()
        for word in (words if isinstance(words, list) else [words])
    }
    if odd := [word for word, role in known.items() if SPEAKERS.get(word) != role]:
        return f"roles: {odd[0]} is none of the speakers {', '.join(SPEAKERS)}"
    flag = entry.get("message_field_training")
    if flag and flag not in LEARNED:
        return f"message_field_training: a message says in {', '.join(LEARNED)} whether it is learned"
    return ""


def _form(entry: Mapping[str, Any], *, pretrains: bool) -> tuple[str, dict[str, str]] | str:
    """The form of an entry's rows with data.columns, or why it has none here."""
    kind = entry.get("type") or ("pretrain" if pretrains else "")
    if isinstance(kind, Mapping):
        bare = all(kind.get(name) in (None, "{instruction}") for name in ("format", "no_input_format"))
        if not bare or any(
            kind.get(name) for name in ("system_prompt", "system_format", "field_system", "field_input")
        ):
            return "type: the words around instructions are its own: write them as a Jinja template, data.chat_template"
        parts = {"instruction": "field_instruction", "output": "field_output"}
        return "bare", {part: str(kind[key]) for part, key in parts.items() if kind.get(key) and kind[key] != part}
    kind = str(kind)
    plain = kind.partition(":")[0]
    if kind in ("completion", "pretrain", "completion.load"):
        column = str(entry.get("field") or entry.get("text_column") or "text")
        return "completion", {"text": column} if column != "text" else {}
    if plain in _INSTRUCTIONS:
        return "alpaca", dict(_INSTRUCTIONS[plain])
    if kind in _CHATS or kind.startswith("sharegpt"):
        names = entry.get("message_property_mappings") or {}
        sharegpt = kind.startswith("sharegpt")
        role = names.get("role") or entry.get("message_field_role") or ("from" if sharegpt else "role")
        content = names.get("content") or entry.get("message_field_content") or ("value" if sharegpt else "content")
        part = {("role", "content"): "messages", ("from", "value"): "conversations"}.get((str(role), str(content)))
        if part is None:
            return f"its messages are of {role} and {content}: write {{role, content}}, or {{from, value}}"
        column = str(entry.get("field_messages") or ("conversations" if sharegpt else "messages"))
        tools = entry.get("field_tools") or "tools"
        return "chats", {name: value for name, value in ((part, column), ("tools", str(tools))) if value != name}
    if not kind:
        return "ids", {}
    return f"type {kind} is none that the built-in trainer has"


def _read_packing(file: TrainerFile, train: Rows | None, *, pretrains: bool) -> None:
    packs, name = file.get("sample_packing"), "sample_packing"
    if train is None or train.is_text:
        file.take(name)
    elif packs:
        file.put(name, {"data.packing": "isolated"})
    elif pretrains:
        file.put(
            name, {"data.packing": "dense"}, "texts end to end, as axolotl streams them"
        ) if packs is not None else file.assume({"data.packing": "dense"})
    elif packs is not None:
        file.put(name, {"data.packing": "none"})
    else:
        file.assume({"data.packing": "none"})
    file.leave_unread("data.packing says it", "pretraining_sample_concatenation", "pretrain_multipack_attn")


def _read_template(file: TrainerFile, entries: Sequence[Mapping[str, Any]]) -> None:
    kinds = [str(each.get("type") or "") for each in entries]
    asked = file.get("chat_template") or next(
        (each["chat_template"] for each in entries if each.get("chat_template")), None
    )
    jinja = file.get("chat_template_jinja") or next(
        (each["chat_template_jinja"] for each in entries if each.get("chat_template_jinja")), None
    )
    draft = file.draft
    if any(isinstance(each.get("type"), Mapping) for each in entries):
        why = "instructions as they are, by their format"
        draft.set("data.chat_template", "none", file.source.at("datasets"), why)
    elif any(kind.partition(":")[0] in _INSTRUCTIONS for kind in kinds):
        _instruction_template(file, kinds[0])
    elif not any(kind in _CHATS or kind.startswith("sharegpt") for kind in kinds):
        pass
    elif jinja and str(jinja).endswith((".jinja", ".jinja2", ".j2")):
        file.put("chat_template_jinja", {"data.chat_template": str(jinja)})
    elif jinja:
        file.refuse("chat_template_jinja", "a template stands in the file", "write it into a file, and name that")
    elif asked in _BUILT_IN:
        file.put("chat_template", {"data.chat_template": _BUILT_IN[str(asked)]})
        if asked == "alpaca":
            draft.remark("The template alpaca begins with Stanford Alpaca's sentence; axolotl's of that name does not.")
    elif asked not in (None, "tokenizer_default", "jinja"):
        draft.remark(
            f"chat_template {asked}: the tokenizer's own; axolotl's of this name may differ: see trainkit data."
        )
        file.take("chat_template")
    if file.get("chat_template") == "tokenizer_default":
        file.put("chat_template", {})
    file.leave_unread("the type of the data says how its texts are written", "chat_template", "chat_template_jinja")


def _instruction_template(file: TrainerFile, kind: str) -> None:
    style = kind.partition(":")[2]
    template = "chatml" if "chatml" in kind else "alpaca"
    why = f"type {kind} of the data writes it so"
    file.draft.set("data.chat_template", template, file.source.at("datasets"), why)
    if kind == "alpaca":
        text = (
            "An input follows its instruction after an empty line; in axolotl below ### Input, after another sentence."
        )
    elif kind.startswith("alpaca:") or style:
        text = (
            f"type {kind}: instructions are written as {template}; axolotl's style {style} has other words around them."
        )
    else:
        text = f"type {kind}: instructions are written as {template}; axolotl has other words around them."
    file.draft.remark(text)
