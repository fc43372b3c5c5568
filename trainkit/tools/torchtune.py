"""torchtune's files (`tune run RECIPE --config FILE`): a recipe for the built-in trainer, or why it cannot train that.

Names and defaults: torchtune 0.7, recipes/configs/**, recipes/{full,lora}_finetune_*.py, torchtune/datasets/*.py and
torchtune/models/*/_model_builders.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.recipe.merge import value_at
from trainkit.recipe.paths import absolute
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, ImportedRecipe
from trainkit.tools.base.trainer_data import ONE_HELD_OUT, Rows, put_rows, sliced
from trainkit.tools.base.trainer_files import Decoded, Key, LeftOut, TrainerFile, accepted, left_out, maps, table
from trainkit.tools.hf.training_arguments import KEPT, ORDER, SHOWN, SPEED, number

TOOL, COMPONENT = "torchtune", "_component_"
COMMAND = "tune run RECIPE --config"  # that starts it itself, in front of a file
_SAID_THERE = "it is that of the folder in checkpointer.checkpoint_dir"
_TRAINS_NOTHING = "the file trains nothing: trainkit generate and trainkit export do the like"
_PREFERENCES = "preferences and rewards are learned by TRL's trainers, or torchtune's"
# What only files for other recipes than full and lora finetuning have: why they are not for the built-in trainer.
OTHER_RECIPES: Mapping[str, str] = {
    **dict.fromkeys(
        ("teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio"),
        "the built-in trainer learns from rows, and from no other model (distillation)",
    ),
    **dict.fromkeys(
        (
            *("policy_model", "reward_and_value_model", "reward_checkpointer", "value_checkpointer", "ppo_epochs"),
            *("ref_policy_checkpointer", "ref_checkpointer", "ppo_batch_size", "grpo_samples", "reward_functions"),
            *("orchestration", "inference", "postprocessing", "forward_batch_size", "whiten_rewards", "kl_coeff"),
        ),
        _PREFERENCES,
    ),
    **dict.fromkeys(("tasks", "max_new_tokens", "prompt", "enable_kv_cache", "instruct_template"), _TRAINS_NOTHING),
    "early_exit_loss": "every layer would learn to answer (early exit)",
    "layer_dropout": "layers would be left out at random",
}
_PICTURES = re.compile(r"vision|llama4|clip|flux|multimodal")
_OTHER_MODELS = re.compile(r"reward|classifier|t5_encoder")
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss", "ChunkedCrossEntropyLoss")
_OPTIMIZERS = {"torch.optim.AdamW": "adamw_torch", "torch.optim.SGD": "sgd"}
_SCHEDULE = "get_cosine_schedule_with_warmup"
_LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
# Phi's layers are fused in transformers, and apart in torchtune.
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Builder:
    """A builder of data sets. source: its data set; columns: as data.columns; learns_prompts: its default.

    worded: what it writes around a prompt, which is no part of the rows.
    """

    source: str = ""
    form: str = "pair"
    columns: Mapping[str, str] = field(default_factory=dict)
    learns_prompts: bool = False
    worded: str = ""


_STANFORD = "the sentences of Stanford Alpaca (Below is an instruction …)"
_BUILDERS: Mapping[str, Builder] = {
    "alpaca_dataset": Builder("tatsu-lab/alpaca", "alpaca", {}, True, _STANFORD),
    "alpaca_cleaned_dataset": Builder("yahma/alpaca-cleaned", "alpaca", {}, True, _STANFORD),
    "instruct_dataset": Builder("", "instruct"),
    "chat_dataset": Builder("", "chat"),
    "slimorca_dataset": Builder("Open-Orca/SlimOrca-Dedup", "conversations"),
    "samsum_dataset": Builder(
        "Samsung/samsum", "pair", {"prompt": "dialogue", "completion": "summary"}, False, "Summarize this dialogue"
    ),
    "grammar_dataset": Builder(
        "liweili/c4_200m",
        "pair",
        {"prompt": "input", "completion": "output"},
        False,
        "Correct this to standard English",
    ),
    "text_completion_dataset": Builder("", "text"),
    "wikitext_dataset": Builder("EleutherAI/wikitext_document_level", "text", {"text": "page"}),
    "cnn_dailymail_articles_dataset": Builder("ccdv/cnn_dailymail", "text", {"text": "article"}),
}


def _compiles(value: Any) -> Decoded:
    on = any(value.values()) if isinstance(value, Mapping) else bool(value)
    return {"efficiency.compile.enabled": True} if on else {}


def _reporter(value: Any) -> Decoded:
    name = str(value).rpartition(".")[2]
    known = {"WandBLogger": ["wandb"], "TensorBoardLogger": ["tensorboard"], "DiskLogger": [], "StdoutLogger": []}
    if name in known:
        return {"logging.report_to": known[name]}
    return LeftOut("trainkit reports to tensorboard and wandb, and writes metrics.jsonl in any case")


def _device(value: Any) -> Decoded:
    return {"devices.type": "cpu"} if value == "cpu" else LeftOut("the plan finds the devices: devices.type is another")


KEYS: Mapping[str, Key] = table(
    maps("batch_size", "batch.micro"),
    maps("batch_size_val", "batch.eval_micro"),
    maps("gradient_accumulation_steps", "batch.accumulation"),
    maps("checkpointer.checkpoint_dir", "model.path"),
    maps("checkpointer.keep_last_n_checkpoints", "checkpoint.keep"),
    maps("seed", "train.seed"),
    maps("enable_activation_checkpointing", "efficiency.gradient_checkpointing.every"),
    Key("compile", _compiles),
    maps("log_every_n_steps", "logging.every_steps"),
    maps("save_every_n_steps", "checkpoint.every_steps"),
    maps("run_val_every_n_steps", "eval.every_steps"),
    Key(f"metric_logger.{COMPONENT}", _reporter),
    Key("device", _device),
    maps("fsdp_cpu_offload", "strategy.offload"),
    maps("fsdp.cpu_offload", "strategy.offload"),
    accepted("resume_from_checkpoint", "trainkit goes on from its own checkpoints", False),
    accepted("checkpointer.adapter_checkpoint", "adapters to go on with are named in peft.path"),
    accepted("checkpointer.recipe_checkpoint", "trainkit goes on from its own checkpoints"),
    accepted("tokenizer.prompt_template", "the wording of prompts is a template in data.chat_template"),
    accepted("model.apply_lora_to_output", "adapters are for the layers of the blocks", False),
    left_out(_SAID_THERE, "checkpointer.checkpoint_files", "checkpointer.model_type", "checkpointer.safe_serialization",
             f"tokenizer.{COMPONENT}", "tokenizer.path", "tokenizer.merges_file", "tokenizer.merges_path",
             "tokenizer.vocab_path", "tokenizer.truncation_type", "tokenizer.special_tokens_path",
             *(f"model.{name}" for name in (
                 "attn_dropout", "embed_dim", "max_seq_len", "norm_eps", "num_heads", "num_kv_heads", "num_layers",
                 "vocab_size", "intermediate_dim", "rope_base", "tie_word_embeddings"))),
    left_out("every run has a folder of its own", "output_dir", "checkpointer.output_dir", "name"),
    left_out(KEPT, "save_adapter_weights_only", "save_every_n_epochs", "enable_async_checkpointing"),
    left_out(
        SPEED, "enable_activation_offloading", "activation_offloading_use_streams", "ac_mode", "ac_option",
        "low_cpu_ram", "custom_sharded_layers", "fsdp_reshard_after_forward", "use_distributed_state_dict",
        "memory_efficient_fsdp_wrap", "use_flex", "optimizer_in_bwd", "enable_fp8_training", "fp8_recipe_name",
        "optimizer.fused", "optimizer.foreach",
        "loss.num_output_chunks", "loss.tiled_projection", "dataloader.num_workers", "dataloader.pin_memory",
        "dataloader.prefetch_factor", "dataloader.parallel_method", "collate_fn", "model.use_grouped_mm",
    ),
    left_out(
        "how a model is spread changes no result; strategy.tensor and strategy.replicate do the like",
        "tensor_parallel_dim", "tensor_parallel_plan", "data_parallel_replicate_dim", "data_parallel_shard_dim",
        "context_parallel_dim",
    ),
    left_out(ORDER, "shuffle"),
    left_out(SHOWN, "log_level", "log_peak_memory_stats", "debug_logging_enabled", "debug_num_samples_per_step",
             "metric_logger.log_dir", "metric_logger.project", "metric_logger.entity", "metric_logger.group",
             "metric_logger.filename", "metric_logger.name", "profiler"),
    left_out("it says nothing without a quantizer", "quantizer.groupsize", "fake_quant_after_n_steps"),
)  # fmt: skip


def components(tree: Any) -> Iterator[str]:
    """The names of torchtune's parts in a file."""
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if key == COMPONENT:
            yield str(value)
        for each in value if isinstance(value, list) else [value]:
            yield from components(each)


def likeness(tree: Mapping[str, Any]) -> float:
    """1 for a file that names a part of torchtune's."""
    return float(any(name.startswith("torchtune.") for name in components(tree)))


def _resolved(tree: Any, top: Mapping[str, Any]) -> Any:
    """The tree with what `${a.b}` in it stands for."""
    if isinstance(tree, Mapping):
        return {key: _resolved(value, top) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_resolved(each, top) for each in tree]
    if isinstance(tree, str) and (whole := re.fullmatch(r"\$\{([\w.]+)\}", tree)):
        return value_at(top, whole[1])
    return (
        re.sub(r"\$\{([\w.]+)\}", lambda found: str(value_at(top, found[1])), tree) if isinstance(tree, str) else tree
    )


def read(draft: ImportedRecipe, context: ImportContext, source: ForeignFile) -> None:
    """Each key as a setting, or named with the reason."""
    source = replace(source, tree=_resolved(source.tree, source.tree))
    file = TrainerFile(TOOL, COMMAND, KEYS, draft, context, source)
    model = str(file.get(f"model.{COMPONENT}", ""))
    if _is_other(file, model):
        return
    draft.set("model.kind", "hf", source.at("model"))
    _read_model(file, model)
    _read_optimizer(file)
    _read_length(file)
    for each in ("dataset", "dataset_val"):
        if file.get(each) is not None and not isinstance(file.get(each), Mapping | list):
            file.refuse(each, "a builder of data sets is expected")
            return
    _read_data(file)
    _spread(file)
    file.finish()
    steps = {} if draft.get("schedule.name") == "constant" else {"schedule.warmup_steps": 0}
    file.assume({
        "batch.accumulation": 1, "train.max_grad_norm": 0.0, "optimizer.weight_decay": 0.01, "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8, **steps,
    })  # fmt: skip


def _is_other(file: TrainerFile, model: str) -> bool:
    """Whether the file is for something else than finetuning a model of text, which is an error."""
    if name := next((each for each in OTHER_RECIPES if file.get(each) is not None), None):
        why = OTHER_RECIPES[name]
        file.refuse(name, why, "start from `trainkit cp dpo` or `trainkit cp grpo`" if why == _PREFERENCES else "")
        return True
    loss, data = str(file.get(f"loss.{COMPONENT}", "")), str(file.get("dataset"))
    found = (
        ("loss", loss and not loss.endswith(_LOSSES), _PREFERENCES if "rl" in loss else "the loss is cross entropy"),
        ("quantizer", file.get("quantizer") and file.get("dataset"), "weights are rounded while they train (QAT)"),
        ("model", _PICTURES.search(f"{model} {data}"), "the built-in trainer has models of text alone"),
        ("model", _OTHER_MODELS.search(model), "the built-in trainer has no such model"),
        ("checkpointer", not file.get("dataset"), _TRAINS_NOTHING),
        (
            f"checkpointer.{COMPONENT}",
            not str(file.get(f"checkpointer.{COMPONENT}", "FullModelHFCheckpointer")).endswith(
                "FullModelHFCheckpointer"
            ),
            "weights are read as save_pretrained of transformers writes them",
        ),
    )
    for name, wrong, why in found:
        if wrong:
            at = f"{name}.{COMPONENT}" if file.get(f"{name}.{COMPONENT}") else name
            file.refuse(at, why, "start from `trainkit cp dpo`" if why == _PREFERENCES else "")
            return True
    file.take(f"checkpointer.{COMPONENT}")
    file.take(f"loss.{COMPONENT}")
    return False


def _read_model(file: TrainerFile, model: str) -> None:
    """The method and its adapters by the builder's name, and the format of weights."""
    name, draft = model.rpartition(".")[2], file.draft
    file.put(f"model.{COMPONENT}", {"peft.kind": "lora" if "lora_" in name else "none"}, f"by the builder {name}")
    draft.remark(f"model: {name} is the model in the folder {file.get('checkpointer.checkpoint_dir')}.")
    if "lora_" in name:
        for key, ours, default in (
            ("lora_rank", "peft.rank", 8), ("lora_alpha", "peft.alpha", 16.0), ("lora_dropout", "peft.dropout", 0.0),
            ("use_dora", "peft.dora", False),
        ):  # fmt: skip
            if file.get(f"model.{key}") is not None:
                file.put(f"model.{key}", {ours: number(file.get(f"model.{key}"))})
            elif default:
                file.assume({ours: default})
        asked = [str(each) for each in file.take("model.lora_attn_modules") or []]
        layers = [_LAYERS.get(each, each) for each in asked]
        layers += _MLP if file.take("model.apply_lora_to_mlp") else ()
        if "phi" in name:
            draft.remark("Phi has one adapter for layers that torchtune keeps apart (q, k and v; gate and up).")
            layers = [_FUSED.get(each, each) for each in layers]
        file.put("model.lora_attn_modules", {"peft.target_modules": list(dict.fromkeys(layers))})
        if file.get("model.apply_lora_to_mlp") is not None:
            file.put("model.apply_lora_to_mlp", {"peft.target_modules": draft.get("peft.target_modules")})
    quantized = name.startswith(("qlora_", "qdora_")) or file.get("model.quantize_base")
    if quantized:
        at = "model.quantize_base" if file.get("model.quantize_base") else f"model.{COMPONENT}"
        file.put(at, {"model.quantize.bits": 4}, "NF4 by bitsandbytes, as by torchao but for rounding")
    dtype = file.get("dtype", "fp32")
    if dtype in ("bf16", "fp32"):
        weights = {} if quantized else {"precision.weights": dtype}
        why = "dtype of the computation" if quantized else "dtype of the computation, and in torchtune of the weights"
        file.put("dtype", {"precision.dtype": dtype, **weights}, why)
    else:
        file.refuse("dtype", "torchtune trains in bf16 or fp32")


def _read_optimizer(file: TrainerFile) -> None:
    """Optimizer, schedule, and how long."""
    name = str(file.get(f"optimizer.{COMPONENT}", "torch.optim.AdamW"))
    ours = _OPTIMIZERS.get(name, ":".join(name.rsplit(".", 1)))
    file.put(f"optimizer.{COMPONENT}", {"optimizer.name": ours})
    for each, value in (file.get("optimizer") or {}).items():
        if each in (COMPONENT, "fused", "foreach") or value is None:
            continue
        if each in ("lr", "weight_decay", "eps"):
            file.put(f"optimizer.{each}", {f"optimizer.{each}": number(value)})
        elif each == "betas" and isinstance(value, list) and ours == "adamw_torch":
            file.put("optimizer.betas", {"optimizer.beta1": value[0], "optimizer.beta2": value[1]})
        else:
            file.put(f"optimizer.{each}", {f"optimizer.args.{each}": value})
    schedule = file.get(f"lr_scheduler.{COMPONENT}")
    if schedule is None:
        file.assume({"schedule.name": "constant"})
    elif not str(schedule).endswith(_SCHEDULE) or file.get("lr_scheduler.num_cycles", 0.5) != 0.5:
        file.refuse(
            f"lr_scheduler.{COMPONENT}",
            "the built-in trainer has only the cosine of torchtune's schedules",
        )
    else:
        file.put(
            f"lr_scheduler.{COMPONENT}",
            {"schedule.name": "cosine", "schedule.min_lr_ratio": 0.0, "schedule.from_zero": True},
        )
        file.put(
            "lr_scheduler.num_warmup_steps", {"schedule.warmup_steps": file.get("lr_scheduler.num_warmup_steps", 0)}
        )
    if ours == "adamw_torch" and number(file.get("optimizer.weight_decay", 0.01)):
        file.draft.remark("Norms and biases are not decayed; in torchtune they are.")
    epochs, steps = file.get("epochs", 1), file.get("max_steps_per_epoch")
    file.take("epochs")
    if isinstance(steps, int):
        file.put("max_steps_per_epoch", {"train.steps": steps * epochs}, f"{steps} steps in each of epochs {epochs}")
        if epochs != 1:
            file.draft.remark("max_steps_per_epoch: an epoch goes on with the rows that torchtune would leave out.")
    else:
        file.put("epochs", {"train.epochs": epochs})
    clip = file.take("clip_grad_norm")
    if clip is not None and str(clip) != "inf":
        file.put("clip_grad_norm", {"train.max_grad_norm": number(clip)})
    elif clip is not None:
        file.put("clip_grad_norm", {"train.max_grad_norm": 0.0})


def _read_length(file: TrainerFile) -> None:
    length = file.take("tokenizer.max_seq_len")
    if isinstance(length, int):
        file.put("tokenizer.max_seq_len", {"data.sequence_length": length})
    else:
        file.draft.remark(
            "tokenizer.max_seq_len: torchtune cuts nothing off; data.sequence_length auto is what 99 of 100 rows fit "
            "into: trainkit data counts what is cut."
        )
        why = "tokenizer.max_seq_len is null"
        file.draft.set("data.sequence_length", "auto", file.source.at("tokenizer.max_seq_len"), why)


def _read_data(file: TrainerFile) -> None:
    given = file.take("dataset")
    given = given if isinstance(given, list) else [given]
    found = [each for each in (_rows(file, one) for one in given) if each]
    first = put_rows(file, "dataset", [rows for rows, _, _ in found])
    if first is None:
        return
    _, builder, one = found[0]
    draft, where = file.draft, file.source.at("dataset")
    draft.remark(f"dataset: {', '.join(map(str, one))} are read as data.")
    if builder.worded:
        draft.remark(f"dataset: torchtune writes {builder.worded} around a prompt; here the prompt is the row's alone.")
    learned = one.get("train_on_input", builder.learns_prompts)
    strategy = one.get("masking_strategy")
    if strategy == "train_on_last":
        file.refuse(
            "dataset", "masking_strategy: train_on_last learns the last answer alone", "write train_on_assistant"
        )
    learned = strategy == "train_on_all" if strategy else learned
    if builder.form != "text" and learned:
        draft.set("data.train_on_prompts", True, where, "train_on_input, or the builder's default")
    packs = "packed" in one and one["packed"]
    draft.set("data.packing", "isolated" if packs else "none", where, "dataset.packed")
    if builder.form == "text" and not one.get("add_eos", True):
        file.refuse("dataset", "add_eos: false leaves the end of a text open", "leave add_eos out")
    _read_evaluation(file, str(one.get("split") or "train"), given)


def _rows(file: TrainerFile, one: Any) -> tuple[Rows, Builder, Mapping[str, Any]] | None:
    """A data set of a builder; None and an error where the built-in trainer has no such rows."""
    name = str(one.get(COMPONENT, "")).rpartition(".")[2] if isinstance(one, Mapping) else ""
    builder = _BUILDERS.get(name)
    if builder is None:
        why = (
            _PREFERENCES
            if re.search("preference|hh_rlhf|paired", name)
            else "trainkit reads rows of files, and no code"
        )
        file.refuse(
            "dataset", f"{name or 'it'} is no builder that trainkit knows: {why}", "name a file of rows in data.path"
        )
        return None
    for each, why in (
        ("filter_fn", "rows are not filtered"), ("new_system_prompt", "no system message is added to rows"),
        ("image_dir", "the built-in trainer has models of text alone"),
    ):  # fmt: skip
        if one.get(each):
            file.refuse("dataset", f"{each}: {why}", "write the rows as they are to be into a file")
            return None
    columns, form = dict(builder.columns), builder.form
    named = one.get("column_map") or {}
    if form == "chat":
        form = "conversations" if one.get("conversation_style") == "sharegpt" else "messages"
        column = str(one.get("conversation_column", form))
        columns = {} if column == form else {form: column}
    elif form == "instruct":
        file.draft.remark("dataset: input and output of column_map are prompt and completion in data.columns.")
        columns = {"prompt": str(named.get("input", "input")), "completion": str(named.get("output", "output"))}
    elif named:
        columns |= {str(part): str(column) for part, column in named.items() if part != column}
    elif form == "text" and one.get("column", "text") != columns.get("text", "text"):
        columns = {"text": str(one.get("column"))}
    files, source = one.get("data_files"), str(one.get("source") or builder.source)
    paths = tuple(map(str, files)) if isinstance(files, list) else (str(files or source),)
    here = bool(files) or file.context.files.exists(absolute(paths[0], file.context.cwd))
    split = str(one.get("split") or "train")
    part = sliced(split)
    if part is None:
        file.refuse("dataset", f"split: {split} is a part of the rows", "write these into a file")
        return None
    subset = one.get("name") or one.get("subset")
    return Rows(paths, form, columns, not here, subset, None if part[0] == "train" else part[0]), builder, one


def _read_evaluation(file: TrainerFile, split: str, given: Sequence[Any]) -> None:
    """What is held out: the rest of a split of which a part is trained on."""
    draft, where = file.draft, file.source.at("dataset")
    whole, first = sliced(split) or (split, None)
    evaluation = file.take("dataset_val")
    other = evaluation if isinstance(evaluation, Mapping) else {}
    rest = str(other.get("split", ""))
    if isinstance(first, float) and rest.startswith(f"{whole}["):
        share = round(1 - first, 6)
        draft.set("data.validation_fraction", share, where, f"{split}: the rest is held out, drawn by data.split_seed")
        file.leave("dataset_val", "the rows that are held out are evaluated on, drawn and not the last ones")
        return
    if first is not None:
        draft.set("data.max_rows", first, where, split)
    if rest and "[" not in rest and other.get("source") == (given[0] or {}).get("source"):
        draft.set("data.validation_split", rest, file.source.at("dataset_val"), "dataset_val")
        return
    if evaluation:
        file.leave("dataset_val", "name its rows in data.validation_path or data.validation_split")
    why = "nothing is evaluated, and trainkit holds out one row at least"
    draft.set("data.validation_fraction", ONE_HELD_OUT, where, why)


def _spread(file: TrainerFile) -> None:
    """A file does not say over how many GPUs: its name, or what only the distributed recipes read."""
    many = ("fsdp_cpu_offload", "fsdp", "custom_sharded_layers", "tensor_parallel_dim", "data_parallel_shard_dim")
    origin = file.source.at("")
    if any(file.get(name) is not None for name in many):
        file.draft.set(
            "strategy.kind", "fsdp", origin, "torchtune's distributed recipes shard, as keys of the file say"
        )
    else:
        file.draft.set("strategy.kind", "single", origin, "the file does not say over how many GPUs: fsdp for several")
