"""LLaMA-Factory's files for `llamafactory-cli train` as recipes for the built-in trainer.

Names and defaults: LLaMA-Factory 0.9.5, src/llamafactory/hparams/*.py, data/parser.py, data/template.py, and
data/processor/*.py for what is learned.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import RecipeError, UsageError
from trainkit.tools.base import trainer_files
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, ImportedRecipe, read_mapping
from trainkit.tools.base.trainer_data import Rows, put_evaluation_rows, put_rows, put_validation_share
from trainkit.tools.base.trainer_files import (
    Decoded,
    Key,
    LeftOut,
    TrainerFile,
    accepted,
    left_out,
    maps,
    refused,
    table,
)
from trainkit.tools.hf import training_arguments
from trainkit.tools.hf.training_arguments import KEPT, ORDER, SHOWN, SPEED, number

TOOL = "LLaMA-Factory"
COMMAND = "llamafactory-cli train"  # that starts it itself, in front of a file
INFO = "dataset_info.json"
_STAGES = {
    "rm": "reward models are trained by TRL's or LLaMA-Factory's own trainer",
    "ppo": "PPO needs answers of the model while it trains, and rewards",
    "dpo": "preferences (DPO, ORPO, SimPO) need pairs of answers",
    "kto": "KTO needs answers that are marked as wanted or not",
}
_WITHOUT = "it says nothing without its switch"
_GENERATES = "it is for generating: see trainkit generate and sample"
_MIXES = "several sources are mixed by weight in data.mix alone, with data.streaming and train.steps"
_IMAGES = "the built-in trainer has models of text alone"
# Of images, sound or films, by their names in data/template.py.
_OF_IMAGES = re.compile(r"vl|llava|omni|audio|pixtral|paligemma|mllama|minicpm_[vo]|ocr|voxtral|4v|keye|gemma3n")
# Built-in templates that write what LLaMA-Factory's of that name do. Others are the model's own in most cases.
_TEMPLATES = {"alpaca": "alpaca", "chatml": "chatml", "llama3": "llama3"}
_ATTENTION = {
    "auto": "auto", "disabled": "eager", "eager": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
}  # fmt: skip


def _flash(value: Any) -> Decoded:
    found = _ATTENTION.get(str(value))
    return {"efficiency.attention": found} if found else LeftOut(f"efficiency.attention has none of this name: {SPEED}")


def _revision(value: Any) -> Decoded:
    return {} if value == "main" else {"model.revision": str(value)}


def _unless_off(why: str, *names: str) -> Sequence[Key]:
    return [accepted(name, why, False, 0, None) for name in names]


# What other methods are set by, where their switch is off.
_OF_SWITCHES = (
    *("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "loraplus_lr_embedding"),
    *("pissa_iter", "pissa_convert", "module_dropout", "oft_rank", "oft_block_size", "oft_target", "pref_beta"),
    *("pref_ftx", "pref_bco_weight", "pref_loss", "dpo_label_smoothing", "kto_chosen_weight", "kto_rejected_weight"),
    *("simpo_gamma", "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards"),
    *("ref_model", "ref_model_adapters", "ref_model_quantization_bit", "reward_model", "reward_model_adapters"),
    *("reward_model_quantization_bit", "reward_model_type", "ld_alpha", "galore_target", "galore_rank"),
    *("galore_update_interval", "galore_scale", "galore_proj_type", "galore_layerwise", "apollo_target"),
    *("apollo_rank", "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type", "apollo_scale_type"),
    *("apollo_layerwise", "apollo_scale_front", "badam_mode", "badam_start_block", "badam_switch_mode"),
    *("badam_switch_interval", "badam_update_ratio", "badam_mask_mode", "badam_verbose", "megatron_bridge_args"),
    *("hyper_parallel_args", "hyper_parallel_cp_size", "asft_alpha", "eaft_alpha", "fp8_backend"),
    *("fp8_enable_fsdp_float8_all_gather", "profiler_output_dir", "profiler_wait_steps", "profiler_warmup_steps"),
    *("profiler_active_steps", "profiler_repeat", "profiler_record_shapes", "profiler_profile_memory"),
    *("profiler_with_stack", "kt_cpu_activation", "kt_weight_path", "kt_non_expert_weight_path", "kt_config"),
    *("kt_expert_checkpoint_path", "kt_use_lora_experts", "kt_lora_expert_num", "kt_lora_expert_intermediate_size"),
    *("swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode", "swanlab_api_key", "swanlab_logdir"),
    *("swanlab_lark_webhook_url", "swanlab_lark_secret"),
)
_OF_IMAGE_MODELS = (
    *("image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches", "video_max_pixels"),
    *("video_min_pixels", "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate"),
)
_MEGATRON = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel"),
    *("context_parallel_size", "mixed_precision", "use_packed_sequences", "export_hf_on_finish", "apply_rope_fusion"),
    *("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce", "bias_activation_fusion"),
    *("moe_grouped_gemm", "moe_token_dispatcher_type", "recompute_granularity"),
)
KEYS: Mapping[str, Key] = {
    **training_arguments.KEYS,
    **table(
        maps("model_name_or_path", "model.path"),
        Key("model_revision", _revision),
        maps("cutoff_len", "data.sequence_length"),
        Key("flash_attn", _flash),
        Key("lora_rank", lambda value: {"peft.rank": value}),
        Key("lora_alpha", lambda value: {"peft.alpha": number(value)}),
        Key("lora_dropout", lambda value: {"peft.dropout": number(value)}),
        maps("use_rslora", "peft.rslora"),
        maps("use_dora", "peft.dora"),
        Key("disable_gradient_checkpointing", lambda value: {"efficiency.gradient_checkpointing.every": not value}),
        maps("early_stopping_steps", "eval.patience"),
        Key("output_dir", lambda value: {"output.root": value}),
        _unless_off("LoRA+ gives both halves of an adapter rates of their own", "loraplus_lr_ratio"),
        _unless_off("PiSSA starts adapters from the weights' own directions", "pissa_init"),
        _unless_off("the built-in trainer trains all weights, or adapters", "additional_target", "use_llama_pro"),
        _unless_off("adapters are merged first: trainkit export, then model.path", "create_new_adapter"),
        _unless_off(
            "the built-in trainer has no such optimizer", "use_galore", "use_apollo", "use_badam", "use_adam_mini",
            "use_muon",
        ),
        _unless_off("another backend trains", "use_mca", "use_megatron_bridge", "use_hyper_parallel", "use_kt"),
        _unless_off("the loss is another one", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "moe_aux_loss_coef"),
        _unless_off("it computes in 8-bit floating point", "fp8"),
        _unless_off("attention is shifted (LongLoRA)", "shift_attn"),
        _unless_off("the model is another one", "mixture_of_depths", "rope_scaling", "train_from_scratch"),
        _unless_off(
            "new tokens need new rows of the model", "resize_vocab", "add_tokens", "add_special_tokens",
            "new_special_tokens_config",
        ),
        _unless_off("the tokenizer would read other tokens", "split_special_tokens"),
        _unless_off("every answer of a chat is learned", "mask_history"),
        left_out(_IMAGES, *_OF_IMAGE_MODELS),
        refused("Megatron trains", *_MEGATRON),
        refused(_MIXES, "interleave_probs"),
        accepted("mix_strategy", _MIXES, "concat"),
        left_out(
            SPEED, "use_unsloth", "use_unsloth_gc", "enable_liger_kernel", "use_reentrant_gc", "low_cpu_mem_usage",
            "use_fast_tokenizer", "quantization_device_map", "offload_folder", "use_kv_cache", "use_v1_kernels",
            "device_map", "preprocessing_batch_size", "preprocessing_num_workers", "data_shared_file_system",
        ),
        left_out("precision.weights fp32 has them in 32 bits", "upcast_layernorm", "upcast_lmhead_output"),
        left_out("the built-in trainer decides it by precision", "compute_dtype", "infer_dtype"),
        left_out("trainkit keeps token ids by content, in data.cache", "overwrite_cache", "tokenized_path"),
        left_out("files of the Hub lie where HF_HOME says", "cache_dir", "adapter_folder"),
        left_out("the token is that of HF_TOKEN, or of `hf auth login`", "hf_hub_token"),
        left_out("trainkit knows the Hub of Hugging Face", "ms_hub_token", "om_hub_token"),
        left_out("trainkit runs no code out of a model's repository: transformers must know it", "trust_remote_code"),
        left_out("trainkit's checkpoints are read by trainkit export", "adapter_folder"),
        left_out(SHOWN, "plot_loss", "compute_accuracy", "include_effective_tokens_per_second", "print_param_status",
                 "use_swanlab", "enable_torch_profiler", "profile_modules", "eval_on_each_dataset"),
        left_out(ORDER, "disable_shuffling"),
        left_out("the chat template has the words of a prompt", "tool_format", "enable_thinking", "preserve_thinking"),
        left_out("no system message is added: write it into the rows", "default_system"),
        left_out("padding is never learned", "ignore_pad_token_for_loss"),
        left_out("there are no images", "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model",
                 "media_dir"),
        left_out("trainkit starts the ranks", "ray_num_workers", "ray_init_kwargs", "master_addr", "master_port"),
        left_out("it is the model's own", "model_max_length", "block_diag_attn"),
        left_out(_WITHOUT, *_OF_SWITCHES),
        left_out(
            _GENERATES, "eval_num_beams", "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length",
            "max_new_tokens", "repetition_penalty", "length_penalty", "skip_special_tokens", "infer_backend",
            "vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config",
            "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size", "sglang_config", "sglang_lora_backend",
        ),
        left_out(
            "see trainkit export", "export_size", "export_device", "export_quantization_bit",
            "export_quantization_dataset", "export_quantization_nsamples", "export_quantization_maxlen",
            "export_legacy_format", "export_hub_model_id", "export_dir",
        ),
        left_out(KEPT, "init_special_tokens"),
    ),
}  # fmt: skip
# Read together with others.
_APART = {
    *("stage", "finetuning_type", "adapter_name_or_path", "lora_target", "quantization_bit", "quantization_method"),
    *("quantization_type", "double_quantization", "pure_bf16", "dataset", "eval_dataset", "dataset_dir", "template"),
    *("train_on_prompt", "streaming", "buffer_size", "max_samples", "val_size", "packing", "neat_packing"),
    *("optim", "lr_scheduler_type", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "deepspeed", "fsdp"),
    *("fsdp_config", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "load_best_model_at_end"),
    *("fsdp_transformer_layer_cls_to_wrap", "lr_scheduler_kwargs", "metric_for_best_model", "greater_is_better"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"),
}
_TYPICAL = {
    *("stage", "finetuning_type", "template", "cutoff_len", "lora_target", "lora_rank", "dataset_dir", "plot_loss"),
    *("preprocessing_num_workers", "overwrite_cache", "quantization_bit", "quantization_method", "infer_backend"),
    *("export_dir", "max_samples", "neat_packing", "pure_bf16", "val_size", "freeze_vision_tower"),
}
# Of the files of its second command line (USE_V1), which are others.
_SECOND = {
    *("model", "model_class", "train_dataset", "dist_config", "peft_config", "kernel_config", "init_config"),
    *(
        "quant_config",
        "optim_config",
        "sample_backend",
        "batching_strategy",
        "cp_size",
        "cp_mode",
        "lr_scheduler_config",
    ),
}


def likeness(tree: Mapping[str, Any]) -> float:
    """The share of keys that are LLaMA-Factory's, of either of its command lines."""
    first = trainer_files.likeness(tree, {*KEYS, *_APART}, _TYPICAL)
    return max(first, trainer_files.likeness(tree, {*KEYS, *_APART, *_SECOND}, _SECOND))


def read(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """Each key as a setting, or named with the reason."""
    file = TrainerFile(TOOL, COMMAND, KEYS, draft, context, source)
    if _is_other(file):
        return
    stage = file.get("stage", "sft")
    images = next((name for name in _OF_IMAGE_MODELS if file.get(name)), None)
    if stage not in ("pt", "sft"):
        file.refuse("stage", _STAGES.get(stage, "the stages are sft, pt, rm, ppo, dpo and kto"))
        return
    if images or _OF_IMAGES.search(str(file.get("template"))):
        file.refuse(images or "template", _IMAGES)
        return
    file.leave_unread("whole texts are learned, of rows of text" if stage == "pt" else "answers are learned", "stage")
    draft.set("model.kind", "hf", source.at("model_name_or_path"))
    _read_adapters(file)
    _read_precision(file)
    training_arguments.read_epochs(file, "num_train_epochs", 3.0)
    training_arguments.read_optimizer(file, "optim", "adamw_torch")
    training_arguments.read_schedule(file, "lr_scheduler_type", "linear")
    training_arguments.read_spread(file)
    _read_data(file, stage)
    training_arguments.read_strategy(file, "eval", "no")
    training_arguments.read_strategy(file, "save", "steps")
    if file.get("compute_accuracy"):
        training_arguments.read_accuracy(file, "compute_accuracy")
    training_arguments.read_best(file)
    training_arguments.read_push(file, pushes=bool(file.get("push_to_hub")))
    training_arguments.remark_frozen_weights(file)
    file.finish()
    _assume(file)


def _is_other(file: TrainerFile) -> bool:
    """Whether the file is for no training of the first command line, which is an error."""
    tree, path, at = file.source.tree, file.source.path, file.source.at("")
    if not {"model_name_or_path", "stage", "finetuning_type", "dataset"} & tree.keys() and _SECOND & tree.keys():
        what = f"{path} is for LLaMA-Factory's second command line, which has no reader here"
        hint = f"write it with the keys of llamafactory-cli train, or run USE_V1=1 llamafactory-cli sft {path} itself"
        file.draft.fail(what, at, hint)
    elif tree.get("export_dir"):
        hint = "trainkit export RUN FOLDER merges adapters of trainkit's; llamafactory-cli export those of others"
        file.draft.fail(f"{path} exports a model, and trains none", file.source.at("export_dir"), hint)
    elif not tree.get("do_train") and not tree.get("dataset"):
        hint = "trainkit generate MODEL writes answers; do_train: true is where a file trains"
        file.draft.fail(f"{path} trains nothing", at, hint, "do_train is not true")
    else:
        return False
    return True


def _read_adapters(file: TrainerFile) -> None:
    method = file.get("finetuning_type", "lora")
    if method not in ("lora", "full"):
        file.refuse("finetuning_type", "the built-in trainer trains all weights, or adapters by LoRA")
    elif file.get("finetuning_type"):
        file.put("finetuning_type", {"peft.kind": "lora" if method == "lora" else "none"})
    else:
        file.assume({"peft.kind": "lora"})
    target = file.get("lora_target")
    names = target if isinstance(target, list) else [each.strip() for each in str(target or "all").split(",")]
    if method == "lora" and target:
        every = names == ["all"]
        file.put(
            "lora_target", {"peft.target_modules": [] if every else names}, "[] is every linear layer" if every else ""
        )
    given = file.get("adapter_name_or_path")
    if given and "," in str(given):
        file.refuse("adapter_name_or_path", "several adapters are merged first")
    elif given and method == "lora":
        file.put("adapter_name_or_path", {"peft.path": given})
    bits = file.take("quantization_bit")
    if bits:
        if file.get("quantization_method", "bnb") not in ("bnb", "bitsandbytes"):
            file.refuse("quantization_method", "the built-in trainer quantises by bitsandbytes")
        elif bits not in (4, 8) or method != "lora":
            file.refuse("quantization_bit", "frozen weights in 4 or 8 bits are for LoRA")
        else:
            file.put("quantization_bit", {"model.quantize.bits": bits})
            file.put("quantization_method", {})
            for name, key in (("quantization_type", "quant_type"), ("double_quantization", "double_quant")):
                if file.get(name) is not None and bits == 4:
                    file.put(name, {f"model.quantize.{key}": file.get(name)})
    if given and method != "lora":
        file.refuse(
            "adapter_name_or_path", "adapters are trained by LoRA alone", "merge them, and name that in model.path"
        )
    file.leave_unread("nothing is quantised by it", "quantization_type", "double_quantization", "quantization_method")
    if method != "lora":
        names = ["lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora"]
        file.leave_unread("all weights are trained", *names)
    else:
        rank = file.get("lora_rank", 8)
        file.assume({"peft.rank": rank} if not file.get("lora_rank") else {})
        file.assume({"peft.alpha": 2.0 * rank} if not file.get("lora_alpha") else {})


def _read_precision(file: TrainerFile) -> None:
    if file.get("pure_bf16"):
        file.put("pure_bf16", {"precision.dtype": "bf16", "precision.weights": "bf16"})
    elif file.get("bf16") or file.get("fp16"):
        if file.get("finetuning_type", "lora") == "full":
            file.draft.set("precision.weights", "fp32", file.source.at("bf16"), "LLaMA-Factory trains 32-bit weights")
    else:
        file.draft.set("precision.dtype", "fp32", file.source.at(""), "neither bf16 nor fp16 is on")


def _assume(file: TrainerFile) -> None:
    """What the tool takes where the file is silent."""
    draft = file.draft
    trainer = {
        "optimizer.lr": 5e-5, "optimizer.weight_decay": 0.0, "train.seed": 42, "batch.micro": 8,
        "batch.accumulation": 1, "checkpoint.keep": 0,
    }  # fmt: skip
    flat = draft.get("schedule.name") == "constant"
    file.assume(trainer | ({} if flat else {"schedule.warmup_steps": 0}), "Trainer")
    own = {"data.sequence_length": 2048, "efficiency.gradient_checkpointing.every": True}
    file.assume(own)
    training_arguments.evaluate_on_all(file)


def _read_data(file: TrainerFile, stage: str) -> None:
    names = _names(file.get("dataset"))
    sources = [each for each in (_source(file, name, stage) for name in names) if each]
    first = put_rows(file, "dataset", sources)
    if first and first.form == "alpaca" and stage == "sft":
        file.draft.remark("An input follows its instruction after an empty line; in LLaMA-Factory on the next line.")
    if first and first.is_text:
        file.draft.remark("A plain text is read on from line to line; LLaMA-Factory ends a text with each line.")
    if not names:
        file.refuse("dataset", "no data set is named")
    file.take("dataset")
    file.leave_unread("data.path names the files", "dataset_dir")
    _read_packing(file, stage)
    _read_template(file, stage)
    if file.get("streaming"):
        file.put("streaming", {"data.streaming": True})
        if file.get("buffer_size") is not None:
            file.put("buffer_size", {"data.shuffle_buffer": file.get("buffer_size")})
        else:
            file.assume({"data.shuffle_buffer": 16384})
    elif file.get("buffer_size") is not None:
        file.leave("buffer_size", "streaming is off")
    _read_evaluation(file, stage)
    if file.get("max_samples") and first and first.is_text:
        file.refuse("max_samples", "a plain text is read whole", "write its lines as rows of text")
    elif file.get("max_samples"):
        file.put("max_samples", {"data.max_rows": file.get("max_samples")})
    if file.get("train_on_prompt") and stage == "sft":
        file.put("train_on_prompt", {"data.train_on_prompts": True})
    file.leave_unread("a text is learned whole", "train_on_prompt")


def _names(given: Any) -> list[str]:
    each = given if isinstance(given, list) else str(given or "").split(",")
    return [str(name).strip() for name in each if str(name).strip()]


def _source(file: TrainerFile, name: str, stage: str) -> Rows | None:
    """A data set by its entry in dataset_info.json; None and an error where it is no rows to learn answers from."""
    folder = str(file.get("dataset_dir", "data"))
    if folder == "ONLINE":
        return Rows((name,), "alpaca", on_hub=True)
    if folder.startswith("REMOTE:"):
        file.refuse("dataset_dir", "what its data sets are stands in a file of the Hub", "name a folder with that file")
        return None
    path = posixpath.join(folder, INFO)
    try:
        entry = read_mapping(file.context, path, f"file {path}", 1).tree.get(name)
    except (UsageError, RecipeError):
        guess = posixpath.join(folder, f"{name}.json")
        file.draft.remark(f"{path} is not here: {guess} is a guess for {name}, and its columns are as they are named.")
        return Rows((guess,), "")
    if not isinstance(entry, Mapping):
        file.refuse(
            "dataset",
            f"{path} has no {name}",
            f"it has {', '.join(map(str, list(entry or [])[:5]))}" if entry else "name one of its",
        )
        return None
    columns, form = entry.get("columns") or {}, str(entry.get("formatting", "alpaca"))
    odd = [
        each for each in ("images", "videos", "audios", "chosen", "rejected", "kto_tag", "history") if columns.get(each)
    ]
    if odd or entry.get("ranking"):
        why = (
            _IMAGES
            if odd and odd[0] in ("images", "videos", "audios")
            else "the built-in trainer learns single answers"
        )
        file.refuse("dataset", f"{name} has {', '.join(odd) or 'ranking'}: {why}")
        return None
    if entry.get("num_samples"):
        file.refuse("dataset", f"{name} has num_samples, rows drawn at random", "write these rows into a file")
        return None
    found = on_hub = entry.get("hf_hub_url")
    if not found and "file_name" in entry:
        found = posixpath.join(folder, str(entry["file_name"]))
    if not found:
        file.refuse("dataset", f"{name} is neither a file nor on the Hub", "download it, and name its file")
        return None
    named = _columns(form, columns, entry.get("tags") or {}, stage, given="columns" in entry)
    if isinstance(named, str):
        file.refuse("dataset", f"{name}: {named}", "write turns of {from, value}, or of {role, content}")
        return None
    split = entry.get("split")
    wanted = None if split in (None, "train") else str(split)
    return Rows((str(found),), form, named, bool(on_hub), entry.get("subset"), wanted)


def _columns(
    form: str, columns: Mapping[str, Any], tags: Mapping[str, Any], stage: str, *, given: bool
) -> Mapping[str, str] | str:
    """data.columns for an entry, without those that have the part's own name; or what is wrong."""
    if form == "alpaca":
        text = columns.get("prompt", "instruction" if not given else None)
        parts = {"text": text} if stage == "pt" else {
            "instruction": text, "output": columns.get("response", None if given else "output"),
            "input": columns.get("query"), "system": columns.get("system"),
        }  # fmt: skip
    else:
        turns = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
        roles = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        said = {name: tags.get(name, word) for name, word in (roles if form == "openai" else turns).items()}
        if said == roles:
            part = "messages"
        elif (said["role_tag"], said["content_tag"]) == ("from", "value") and said["user_tag"] in ("human", "user"):
            part = "conversations"
        else:
            return f"its turns are of {said}"
        parts = {part: columns.get("messages", "messages" if form == "openai" else "conversations")}
        parts |= {"system": columns.get("system"), "tools": columns.get("tools")}
    return {name: str(column) for name, column in parts.items() if column and column != name}


def _read_evaluation(file: TrainerFile, stage: str) -> None:
    if names := _names(file.get("eval_dataset")):
        found = [each for each in (_source(file, name, stage) for name in names) if each]
        put_evaluation_rows(file, "eval_dataset", found, None)
        file.leave_unread("eval_dataset is evaluated on", "val_size")
    else:
        put_validation_share(file, "val_size", number(file.get("val_size", 0)))


def _read_packing(file: TrainerFile, stage: str) -> None:
    packs = file.get("neat_packing") or file.get("packing", stage == "pt")
    name = "neat_packing" if file.get("neat_packing") else "packing"
    if file.draft.get("data.kind") != "dataset":
        packing = None
    elif not packs:
        packing = "none"
    else:
        packing = "dense" if stage == "pt" else "isolated"
    if packs and stage == "sft" and not file.get("neat_packing"):
        file.draft.remark(
            "The texts in a sample see one another in LLaMA-Factory without neat_packing; here they do not."
        )
    if packing and file.get(name) is not None:
        file.put(name, {"data.packing": packing})
    elif packing:
        file.assume({"data.packing": packing})
    file.leave_unread("neat_packing says it" if name != "packing" else "see data.packing", "packing", "neat_packing")


def _read_template(file: TrainerFile, stage: str) -> None:
    name = file.take("template")
    if name is None or stage == "pt":
        if name is not None:
            file.leave("template", "texts are learned as they are")
        return
    if name in _TEMPLATES:
        file.put("template", {"data.chat_template": _TEMPLATES[name]})
        if name != "llama3":
            file.draft.remark(
                f"Line ends that the template {name} writes behind an answer are not learned; there they are."
            )
    else:
        why = "the tokenizer's own chat template, of which LLaMA-Factory has a text of its own; white space that this "
        file.leave("template", f"{why}writes behind an answer is learned there: compare them with trainkit data")
