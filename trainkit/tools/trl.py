"""TRL's files (`trl sft --config FILE`): a recipe for the built-in trainer, or why only TRL itself can train that.

Names and defaults: TRL 1.16, SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig, the configs of its other
trainers, and trainer/sft_trainer.py for what is learned of a row.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.data.chats import BUILT_IN
from trainkit.recipe.paths import absolute
from trainkit.tools.base import trainer_files
from trainkit.tools.base.fields import Unsupported
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, ImportedRecipe
from trainkit.tools.base.trainer_data import ONE_HELD_OUT, Rows, put_rows, put_validation_share, sliced
from trainkit.tools.base.trainer_files import Decoded, Key, TrainerFile, accepted, left_out, maps, refused, table
from trainkit.tools.hf import training_arguments
from trainkit.tools.hf.training_arguments import ORDER, SPEED, number

TOOL = "TRL"
COMMAND = "trl sft --config"  # that starts it itself, in front of a file
# Settings that other trainers of TRL's have and `sft` has not: the command, the shipped recipe for it, and their names.
_REFERENCE = (
    "precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
)
_GENERATES = """
    num_generations num_generations_eval max_prompt_length max_completion_length generation_batch_size temperature
    top_p top_k min_p repetition_penalty cache_implementation generation_kwargs chat_template_kwargs use_vllm
    vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_max_model_length vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_structured_outputs_regex vllm_tensor_parallel_size use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged num_iterations steps_per_generation
    reward_model_name_or_path reward_funcs reward_weights epsilon epsilon_high log_completions log_multimodal
    log_unique_prompts mask_truncated_completions num_completions_to_print ds3_gather_for_generation
"""
_OF_GRPO = """
    beta disable_dropout delta cast_lm_head_to_fp32 entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min
    entropy_target importance_sampling_level log_completions_hub_repo max_tool_calling_iterations
    multi_objective_aggregation off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos scale_rewards
    top_entropy_quantile use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg
    vespo_lambda_pos vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode
"""
_OF_DPO = """
    beta disable_dropout label_smoothing loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting
    discopop_tau max_prompt_length max_completion_length label_pad_token_id generate_during_eval rpo_alpha
    reference_free model_adapter_name ref_adapter_name force_use_ref_model
"""
METHODS: Mapping[str, tuple[str, frozenset[str]]] = {
    name: (recipe, frozenset(words.split()))
    for name, recipe, words in (
        ("dpo", "dpo", f"{_REFERENCE} {_OF_DPO}"),
        ("kto", "dpo", f"{_REFERENCE} beta disable_dropout desirable_weight undesirable_weight"),
        ("reward", "reward-model", "disable_dropout center_rewards_coefficient"),
        ("grpo", "grpo", f"{_GENERATES} {_OF_GRPO}"),
        ("rloo", "grpo", f"{_GENERATES} beta disable_dropout normalize_advantages reward_clip_range"),
        ("distillation", "", f"{_GENERATES} teacher_model_name_or_path teacher_model_revision lmbda"),
    )
}
# Values of loss_type, which several trainers have, and the command that each is of; others are of dpo.
_LOSSES = {
    **dict.fromkeys(("nll", "chunked_nll", "dft"), "sft"),
    **dict.fromkeys(("kto", "apo_zero_unpaired"), "kto"),
    **dict.fromkeys(("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"), "grpo"),
}
_STRATEGIES = {
    "single_gpu": "single", "multi_gpu": "ddp", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero1": "zero1", "zero2": "zero2",
    "zero3": "zero3",
}  # fmt: skip
_PEFTS_LAYERS = (
    "the file names none: those that peft takes for Llama, Qwen, Mistral and Gemma; other models have others"
)
_PACKING = {"bfd": "isolated", "wrapped": "dense"}
_NO_ADAPTERS = "use_peft is not true: all weights are trained"


def _attention(value: Any) -> Decoded:
    known = ("sdpa", "eager", "flash_attention_2")
    return {"efficiency.attention": value} if value in known else Unsupported(f"the built-in trainer has {known}")


def _strategy(value: Any) -> Decoded:
    if value in _STRATEGIES:
        return {"strategy.kind": _STRATEGIES[value]}
    return Unsupported(
        "it is a file of accelerate's", "set strategy.kind in the recipe, or import that file for itself"
    )


KEYS: Mapping[str, Key] = {
    **training_arguments.KEYS,
    **table(
        maps("model_name_or_path", "model.path"),
        Key("model_revision", lambda value: {} if value == "main" else {"model.revision": str(value)}),
        Key("attn_implementation", _attention),
        Key("output_dir", lambda value: {"output.root": value}),
        Key("accelerate_config", _strategy),
        maps("num_processes", "devices.select"),
        left_out("trainkit runs no code out of a model's repository: transformers must know it", "trust_remote_code"),
        accepted("router_aux_loss_coef", "the loss is that of the tokens alone", 0),
        refused("further settings of the model are not read", "model_init_kwargs"),
        refused("trainkit prepares rows in its own way", "dataset_kwargs"),
        refused("answers would end with another token than the tokenizer's own", "eos_token"),
        left_out("padding is never learned, whatever its token", "pad_token"),
        left_out(ORDER, "shuffle_dataset"),
        left_out(
            SPEED, "dataset_num_proc", "dataset_batch_size", "padding_free", "pad_to_multiple_of",
            "activation_offloading", "ignore_bias_buffers", "bnb_4bit_quant_storage", "eval_packing",
        ),
        left_out(
            "trainkit starts the ranks", "num_machines", "machine_rank", "config_file", "main_process_ip",
            "main_process_port", "mixed_precision", "dynamo_backend", "rdzv_backend", "same_network",
        ),
        accepted("truncation_mode", "trainkit cuts off the end", "keep_start"),
        accepted("loss_type", "the built-in trainer's loss is cross entropy", "nll", "chunked_nll"),
        accepted("lora_task_type", "sft trains causal language models", "CAUSAL_LM"),
        accepted("dataset_streaming", "rows of a stream are mixed in another way", False),
    ),
}  # fmt: skip
# Read together with others.
_APART = (
    *("env", "datasets", "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "streaming"),
    *("test_split_size", "dataset_text_field", "max_length", "max_seq_length", "packing", "packing_strategy", "dtype"),
    *("torch_dtype", "assistant_only_loss", "completion_only_loss", "chat_template_path", "use_peft", "use_rslora"),
    *("use_dora", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "lora_r", "optim"),
    *("lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save"),
    *("optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "eval_strategy", "eval_steps", "save_strategy"),
    *("save_steps", "deepspeed", "fsdp", "fsdp_config", "adam_beta1", "adam_beta2", "adam_epsilon", "max_steps"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "num_train_epochs"),
)
NAMES = frozenset((*KEYS, *_APART, *(name for _, names in METHODS.values() for name in names)))
# Beside a model's name, which files of other scripts on Trainer have as well: data in TRL's words, or how it loads.
_TYPICAL = ("dataset_name", "datasets", "dataset_mixture", "dtype", "torch_dtype", "use_peft", "assistant_only_loss")
# Of transformers' example scripts (run_clm.py and its like), which TRL refuses.
_OF_EXAMPLES = {"block_size", "config_name", "dataset_config_name", "max_source_length", "overwrite_cache", "task_name",
                "train_file"}  # fmt: skip


def likeness(tree: Mapping[str, Any]) -> float:
    """The share of keys that are TRL's, of a file that names a model, and data or more of it in TRL's words."""
    if "model_name_or_path" not in tree or _OF_EXAMPLES & tree.keys():
        return 0.0
    return trainer_files.likeness(tree, {*NAMES, *_TYPICAL}, _TYPICAL, 1)


def command_of(tree: Mapping[str, Any]) -> str:
    """Which of TRL's commands a file is for: the one with most settings of its own in it."""
    counted = {"sft": 0, **{name: len(own & tree.keys()) for name, (_, own) in METHODS.items()}}
    losses = tree.get("loss_type") or []
    for each in losses if isinstance(losses, list) else [losses]:
        counted[_LOSSES.get(str(each), "dpo")] += 1
    if len(own := [name for name in counted if counted[name]]) > 1 and "sft" in own:
        counted["sft"] = 0
    return max(counted, key=counted.__getitem__)


def read(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """Each key as a setting, or named with the reason."""
    command = command_of(source.tree)
    file = TrainerFile(TOOL, COMMAND.replace("sft", command), KEYS, draft, context, source)
    if command != "sft":
        recipe, own = METHODS[command]
        named = [each for each in source.tree if each in own] or ["loss_type"]
        why = f"{', '.join(named)} are of `trl {command}`, which learns in another way"
        file.refuse(named[0], why, f"start from `trainkit cp {recipe}`" if recipe else "")
        return
    draft.set("model.kind", "hf", source.at("model_name_or_path"))
    adapters = _read_adapters(file)
    _read_precision(file, adapters=adapters)
    training_arguments.read_epochs(file, "num_train_epochs", 3.0)
    training_arguments.read_optimizer(file, "optim", "adamw_torch")
    training_arguments.read_schedule(file, "lr_scheduler_type", "linear")
    if file.get("accelerate_config") is None:
        training_arguments.read_spread(file)
    training_arguments.read_strategy(file, "eval", "no")
    training_arguments.read_strategy(file, "save", "steps")
    _read_data(file)
    training_arguments.read_best(file)
    training_arguments.read_push(file, pushes=bool(file.get("push_to_hub")))
    for name, value in (file.take("env") or {}).items():
        file.put(f"env.{name}", {f"env.{name}": str(value)})
    file.finish()
    _assume(file)


def _assume(file: TrainerFile) -> None:
    """What TRL takes where the file is silent."""
    file.assume({
        "optimizer.lr": 2e-5, "optimizer.weight_decay": 0.0, "train.seed": 42, "train.max_grad_norm": 1.0,
        "batch.micro": 8, "batch.accumulation": 1, "checkpoint.keep": 0, "logging.every_steps": 10,
        "precision.dtype": "bf16", "efficiency.gradient_checkpointing.every": True, "data.sequence_length": 1024,
        "data.packing": "none",
        **({} if file.draft.get("schedule.name") == "constant" else {"schedule.warmup_steps": 0}),
    })  # fmt: skip
    training_arguments.evaluate_on_all(file)


def _read_adapters(file: TrainerFile) -> bool:
    """LoRA and the bits of frozen weights; whether there are adapters."""
    bits = 4 if file.get("load_in_4bit") else 8 if file.get("load_in_8bit") else 0
    named = {
        "lora_r": "peft.rank", "lora_alpha": "peft.alpha", "lora_dropout": "peft.dropout", "use_rslora": "peft.rslora",
        "use_dora": "peft.dora",
    }  # fmt: skip
    if not file.take("use_peft"):
        file.leave_unread(_NO_ADAPTERS, *named, "lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
        file.leave_unread(_NO_ADAPTERS, "lora_task_type")
        if bits:
            file.refuse(
                f"load_in_{bits}bit", "weights in few bits are frozen, and trained beside", "set use_peft: true"
            )
    else:
        file.put("use_peft", {"peft.kind": "lora"})
        for name, key in named.items():
            if file.get(name) is not None:
                file.put(name, {key: number(file.get(name))})
        file.assume({"peft.rank": 16, "peft.alpha": 32.0, "peft.dropout": 0.05})
        for name in ("lora_target_parameters", "lora_modules_to_save"):
            if file.get(name):
                file.refuse(name, "adapters are for linear layers, and nothing is trained beside them")
        layers = file.get("lora_target_modules")
        chosen = [layers] if isinstance(layers, str) else layers or ["q_proj", "v_proj"]
        every = chosen == ["all-linear"]
        reason = "[] is every linear layer" if every else "" if layers else _PEFTS_LAYERS
        settings = {"peft.target_modules": [] if every else chosen}
        if layers:
            file.put("lora_target_modules", settings, reason)
        else:
            file.draft.set("peft.target_modules", settings["peft.target_modules"], file.source.at("use_peft"), reason)
        if bits:
            file.put(f"load_in_{bits}bit", {"model.quantize.bits": bits})
        if bits == 4:
            for name, key in (("bnb_4bit_quant_type", "quant_type"), ("use_bnb_nested_quant", "double_quant")):
                if file.get(name) is not None:
                    file.put(name, {f"model.quantize.{key}": file.get(name)})
            file.assume({"model.quantize.double_quant": False})
    file.leave_unread("nothing is quantised by it", "bnb_4bit_quant_type", "use_bnb_nested_quant", "load_in_8bit")
    return bool(file.get("use_peft"))


def _read_precision(file: TrainerFile, *, adapters: bool) -> None:
    if not file.get("fp16") and file.get("bf16") is not None:
        file.put("bf16", {"precision.dtype": "bf16" if file.get("bf16") else "fp32"})
    name = "torch_dtype" if file.get("torch_dtype") else "dtype"
    weights = file.get(name, "float32")
    if weights == "float32":
        file.put(name, {}) if file.get(name) else None
    elif adapters and weights in ("bfloat16", "float16", "auto"):
        file.leave(name, "frozen weights are the same numbers in 32 bits")
        training_arguments.remark_frozen_weights(file)
    elif weights == "bfloat16":
        file.put(name, {"precision.weights": "bf16"})
    else:
        file.refuse(name, "weights are trained in 32 bits or in bfloat16", f"write {name}: bfloat16 or float32")


def _read_data(file: TrainerFile) -> None:
    """Where rows come from, how long they are, and what of them is learned."""
    sources, key = _sources(file)
    first = put_rows(file, key, sources)
    says = "max_seq_length" if file.get("max_seq_length") else "max_length"
    if says in file.source.tree and file.get(says) is None:
        file.refuse(says, "TRL cuts no row then, and samples here have a length", "write that of the longest row")
    elif file.get(says):
        file.put(says, {"data.sequence_length": file.get(says)})
    file.draft.remark("A row that is cut keeps a token more than by TRL: data.sequence_length counts what is read.")
    packing, way = file.get("packing"), file.get("packing_strategy", "bfd")
    if packing and way not in _PACKING:
        why = "what a sample has no room for is cut off here, and becomes a sample there"
        file.refuse("packing_strategy", why, "write packing_strategy: bfd")
    elif packing:
        file.put("packing", {"data.packing": _PACKING[way]})
        file.put("packing_strategy", {}) if file.get("packing_strategy") else None
        if way == "bfd":
            file.draft.remark("Whole rows fill the samples in another company than by TRL's bfd.")
    file.leave_unread("packing is off", "packing_strategy")
    if inline := file.get("chat_template"):
        why = "data.chat_template names a template that is built in, or a file"
        if inline in BUILT_IN:
            file.put("chat_template", {"data.chat_template": inline})
        else:
            file.refuse("chat_template", why, "write it into a file .jinja, and name that in chat_template_path")
    template = file.get("chat_template_path")
    if template and str(template).endswith((".jinja", ".j2")):
        file.put("chat_template_path", {"data.chat_template": template})
    elif template:
        why = "it takes over the template and the tokens of another tokenizer"
        file.refuse("chat_template_path", why, "write the template into a file .jinja")
    _read_learned(file, first)
    if share := file.get("test_split_size"):
        put_validation_share(file, "test_split_size", number(share))
    elif file.draft.get("data.validation_fraction") is not None:
        pass  # a mixture says it
    elif file.draft.get("eval.every_steps"):
        split = {"data.validation_split": file.get("dataset_test_split", "test")}
        file.put("dataset_test_split", split) if file.get("dataset_test_split") else file.assume(split)
    else:
        reason = "nothing is evaluated, and trainkit holds out one row at least"
        file.draft.set("data.validation_fraction", ONE_HELD_OUT, file.source.at(""), reason)
    file.leave_unread("nothing is evaluated", "dataset_test_split")


def _sources(file: TrainerFile) -> tuple[Sequence[Rows], str]:
    """The data sets of `datasets`, of a mixture, or the one of `dataset_name`, and the key that names them."""
    key = "datasets" if file.get("datasets") else "dataset_mixture" if file.get("dataset_mixture") else "dataset_name"
    column = file.get("dataset_text_field", "text")
    columns = {} if column == "text" else {"text": str(column)}
    if file.get("dataset_text_field"):
        file.put("dataset_text_field", {})
    if key == "dataset_name":
        for name in ("dataset_train_split", "dataset_config"):
            if file.get(name):
                file.put(name, {})
        file.leave_unread("it is said of datasets, and there are none", "test_split_size", "streaming")
        one = {
            "path": file.get(key, ""),
            "name": file.get("dataset_config"),
            "split": file.get("dataset_train_split", "train"),
        }
        return [each for each in [_rows(file, key, one, columns)] if each], key
    file.leave_unread(f"{key} counts", "dataset_name", "dataset_config", "dataset_train_split")
    if file.get("streaming"):
        file.refuse("streaming", "rows of a stream are mixed in another way", "write streaming: false")
    given = file.get(key)
    if key == "dataset_mixture":
        given, share = given.get("datasets"), given.get("test_split_size")
        if share:
            put_validation_share(file, "dataset_mixture.test_split_size", number(share))
        file.draft.remark("dataset_mixture: id is data.path; config is data.subset; split is data.split; its seed, and "
                          "columns, which trainkit finds by themselves, are left out.")  # fmt: skip
    else:
        parts = "path, data_dir and data_files are data.path; name is data.subset; split is data.split"
        file.draft.remark(f"datasets: {parts}; columns are those that trainkit knows.")
    rows = [_rows(file, key, each, columns) for each in given or [] if isinstance(each, Mapping)]
    return [each for each in rows if each], key


def _rows(file: TrainerFile, key: str, entry: Mapping[str, Any], columns: Mapping[str, str]) -> Rows | None:
    """One data set, by TRL's names or a mixture's. None for a part of a split that trainkit does not read."""
    named = str(entry.get("path") or entry.get("id") or "")
    part = sliced(str(entry.get("split") or "train"))
    share = entry.get("fraction") or entry.get("weight")
    if part is None or (share is not None and number(share) != 1):
        what = f"fraction {share}" if part is not None else f"split {entry.get('split')}"
        file.refuse(key, f"{what} takes a part of {named}", "write train[:N], or its rows into a file")
        return None
    files = entry.get("data_files") or entry.get("data_dir")
    if isinstance(files, Mapping):
        files = files.get(part[0])
    paths = tuple(map(str, files)) if isinstance(files, list) else (str(files or named),)
    here = bool(files) or file.context.files.exists(absolute(paths[0], file.context.cwd))
    split = None if part[0] == "train" else part[0]
    subset = entry.get("name") or entry.get("config")
    return Rows(paths, "", columns, not here, None if subset == "default" else subset, split, first=part[1])


def _first_row(file: TrainerFile, rows: Rows | None) -> Mapping[str, Any] | None:
    """The first row of a file in JSON lines, or of such a file in a folder; None where it cannot be seen here."""
    path, split = (rows.paths[0], rows.split or "train") if rows else ("", "")
    for each in (path, posixpath.join(path, f"{split}.jsonl")):
        place = absolute(each, file.context.cwd)
        if each.endswith(".jsonl") and file.context.files.exists(place):
            try:
                row = json.loads(file.context.files.read(place).partition(b"\n")[0])
            except ValueError:
                return None
            return row if isinstance(row, Mapping) else None
    return None


def _read_learned(file: TrainerFile, rows: Rows | None) -> None:
    """What is learned of a row: in TRL its columns decide, which can be seen of files that are here."""
    row, remark = _first_row(file, rows), file.draft.remark
    answers, completions = file.get("assistant_only_loss"), file.get("completion_only_loss")
    pair = row is not None and "prompt" in row
    chat = row is not None and any(isinstance(row.get(name), list) for name in ("messages", "conversations", "prompt"))
    whole = not answers and (completions is False or (not pair and completions is None))
    for name in ("assistant_only_loss", "completion_only_loss"):
        if file.get(name) is not None:
            file.put(name, {"data.train_on_prompts": whole})
    if whole:
        file.draft.set("data.train_on_prompts", True, file.source.at(""), "TRL learns whole chats and texts by default")
    if row is None and answers is None and completions is None:
        remark(
            "The rows are not here. Of prompts with completions TRL learns the completions alone: set "
            "data.train_on_prompts=false for them."
        )
    if row is None and not answers:
        remark("Prompts and completions that are texts, no chats, TRL joins as they are: data.chat_template=none.")
    elif pair and chat and not answers:
        remark("TRL also learns what the template writes behind an answer's end, as a line break.")
    elif pair and not chat:
        file.draft.set("data.chat_template", "none", file.source.at(""), "TRL joins texts as they are")
    if not chat and not answers and (row is None or "text" in row):
        remark("A text that is longer than data.sequence_length becomes several samples; TRL cuts the rest off.")
