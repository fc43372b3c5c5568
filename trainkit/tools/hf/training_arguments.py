"""TrainingArguments in another trainer's file, as settings of the built-in trainer, or why they become none.

For tools that hand the keys of their files on to transformers' Trainer under its own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from trainkit.errors import RecipeError, UsageError
from trainkit.metrics import LOSS, PREFIX, lower_is_better
from trainkit.optimizers import CLASSES, OPTIMIZERS, OTHER_NAMES, optimizer
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.grid import HYBRID
from trainkit.recipe.hub_name import has_owner
from trainkit.recipe.merge import value_at
from trainkit.recipe.schema.launching import Reporter
from trainkit.recipe.short_flags import ONLY_AT_THE_END
from trainkit.recipe.yaml_reader import compose
from trainkit.text import join_names
from trainkit.tools.base.fields import Settings, Unsupported, by_name
from trainkit.tools.base.fsdp_settings import FIRST_VERSION
from trainkit.tools.base.imported_recipe import read_mapping
from trainkit.tools.base.trainer_files import Decoded, Key, LeftOut, TrainerFile, accepted, left_out, refused, table
from trainkit.tools.deepspeed.config import leaves
from trainkit.tools.deepspeed.fields import AUTO, KINDS, STAGE, sharding
from trainkit.tools.deepspeed.importer import STAGES, stage_of
from trainkit.tools.hf.fields import BY_NAME, FLAT, decode_arguments, decode_schedule
from trainkit.tools.hf.fsdp_config import TORCH

SPEED = "it changes speed or memory alone"
SHOWN = "it changes what is logged or shown alone"
ORDER = "the order of rows differs: trainkit shuffles them anew in each epoch, by train.seed"
KEPT = "trainkit's checkpoints hold all that a run needs to go on, weights in safetensors"
_WRITES = (
    "eval.metrics, such as [rouge] or [chrf], compare texts that are written for held-out rows; predict lists them"
)
# What Trainer's evaluations are compared by, under the names that tools have for it, and under ours.
_MEASURES = {"loss": LOSS, "perplexity": "perplexity", "accuracy": "accuracy", "mean_token_accuracy": "accuracy"}
# Read together, by the functions below.
_APART = {
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("eval_strategy", "evaluation_strategy", "eval_steps", "save_strategy", "save_steps", "logging_strategy"),
    *("metric_for_best_model", "greater_is_better", "fsdp", "push_to_hub", "report_to"),
    *("hub_model_id", "hub_strategy", "hub_private_repo"),
}


def number(value: Any) -> Any:
    """A number that YAML reads as a text (`2e-5`); anything else as it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _row(name: str) -> Key:
    row = BY_NAME[name]
    return Key(name, lambda value: row.decode(number(value)))


def _reporters(value: Any) -> Decoded:
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    known = [name for name in names if name in get_args(Reporter)]
    if known or names in (["none"], []):
        return {"logging.report_to": known}
    return LeftOut(f"trainkit reports to {join_names(get_args(Reporter))}, and writes metrics.jsonl in any case")


def _resumes(value: Any) -> Decoded:
    if str(value).lower() in ("true", "auto"):
        return {"checkpoint.resume": "auto"}
    return Unsupported("trainkit goes on from its own checkpoints", "name its weights in model.path or peft.path")


def _logs(value: Any) -> Decoded:
    every = number(value)
    if isinstance(every, int | float) and every >= 1:
        return {"logging.every_steps": int(every)}
    return LeftOut("logging.every_steps counts steps")


def _warmup_share(value: Any) -> Settings:
    """`warmup_ratio` of transformers 4, a share of all steps."""
    return {"schedule.warmup_steps": number(value)} if number(value) else {}


KEYS: Mapping[str, Key] = table(
    [_row(name) for name in BY_NAME if name not in _APART],
    Key("report_to", _reporters),
    Key("resume_from_checkpoint", _resumes),
    Key("logging_steps", _logs),
    Key("warmup_ratio", _warmup_share),
    accepted("label_smoothing_factor", "the built-in trainer's loss is cross entropy without smoothing", 0),
    accepted("neftune_noise_alpha", "the built-in trainer adds no noise to embeddings (NEFTune)", 0),
    refused("the built-in trainer projects no gradients, and trains all weights or adapters", "optim_target_modules"),
    refused("its sizes are strategy.replicate and strategy.tensor here", "parallelism_config"),
    left_out("batch.micro auto finds what fits, with batch.global set", "auto_find_batch_size"),
    left_out(ORDER, "data_seed", "group_by_length", "train_sampling_strategy", "length_column_name"),
    left_out(ORDER, "dataloader_in_order"),
    left_out("an epoch's last steps may hold fewer samples, or others", "dataloader_drop_last"),
    left_out("when the first evaluation comes differs", "eval_on_start", "eval_delay"),
    left_out(
        SPEED, "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "torch_empty_cache_steps",
        "use_cache", "use_liger_kernel", "liger_kernel_config", "eval_accumulation_steps", "eval_do_concat_batches",
        "eval_use_gather_object", "ddp_backend", "ddp_broadcast_buffers", "ddp_static_graph", "accelerator_config",
        "dataloader_multiprocessing_context", "skip_memory_metrics", "average_tokens_across_devices",
    ),
    left_out(
        SHOWN, "logging_first_step", "logging_nan_inf_filter", "logging_dir", "include_num_input_tokens_seen",
        "include_tokens_per_second", "disable_tqdm", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "debug", "include_for_metrics", "batch_eval_metrics", "prediction_loss_only",
        "logging_strategy",
    ),
    left_out(
        KEPT, "save_only_model", "save_on_each_node", "save_safetensors", "enable_jit_checkpoint", "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
    ),
    left_out("every run has a folder of its own", "overwrite_output_dir"),
    left_out("trainkit hands the model what it takes", "remove_unused_columns", "label_names"),
    left_out("the token is that of HF_TOKEN, or of `hf auth login`", "hub_token"),
    left_out("see checkpoint.push_to_hub", "hub_always_push", "hub_revision"),
    left_out(
        _WRITES, "predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config",
        "sortish_sampler", "do_predict",
    ),
    left_out("trainkit run trains, and evaluates as eval says", "do_train", "do_eval"),
    left_out("the plan starts the ranks", "local_rank", "torchelastic"),
)  # fmt: skip


def read_optimizer(file: TrainerFile, name: str, default: str) -> None:
    """The optimizer of one of Trainer's names with its arguments; those of Adam where it takes them."""
    asked = str(file.get(name) or default)
    aliases = {alias: ours for ours, each in OPTIMIZERS.items() for alias in each.hf_aliases}
    ours = aliases.get(asked, "adamw_torch" if asked in ("adamw_hf", "adamw_torch_xla") else asked)
    path = CLASSES[ours].partition(",")[0] if ours in CLASSES else ours
    why = None
    if ours == "adafactor":
        why = "Trainer's Adafactor takes the rate as it is, and torch's, which trainkit has, relative to the weights"
    elif ours not in OPTIMIZERS and ours not in CLASSES:
        why = OTHER_NAMES[ours][0] if ours in OTHER_NAMES else "the built-in trainer has no optimizer of this name"
    if why:
        file.refuse(name, why, "name another optimizer")
        return
    if file.get(name):
        file.put(name, {"optimizer.name": path})
    else:
        file.assume({"optimizer.name": path})
    _moments(file, ours, path)
    if said := file.get("optim_args"):
        text = ",".join(f"{key}={each}" for key, each in said.items()) if isinstance(said, Mapping) else str(said)
        found: Any = decode_arguments(text, ours) if ours in OPTIMIZERS else _arguments(text)
        if isinstance(found, Unsupported):
            file.refuse("optim_args", found.why, found.instead)
        else:
            file.put("optim_args", found)
    if ours == "sgd":
        file.assume({"optimizer.beta1": 0.0}, "Trainer")
    elif "beta2" in optimizer(path).takes:
        file.assume({"optimizer.beta2": 0.999}, "Trainer")


def _moments(file: TrainerFile, name: str, path: str) -> None:
    rows = {each: key for each, key in MOMENT_KEYS.items() if file.get(each) is not None}
    if name in OPTIMIZERS:
        for each, key in rows.items():
            if key in optimizer(name).takes and name != "sgd":
                file.put(each, {f"optimizer.{key}": number(file.get(each))})
            else:
                file.leave(each, f"{name} has no such setting")
        return
    betas = [number(file.get("adam_beta1", 0.9)), number(file.get("adam_beta2", 0.999))]
    adamlike = "adam" in path.lower()
    if any(each.startswith("adam_beta") for each in rows) or "lion" in name:
        file.draft.set("optimizer.args.betas", betas, file.source.at("adam_beta1"), "Trainer's, or the file's")
    for each in rows:
        if each == "adam_epsilon" and adamlike:
            file.put(each, {"optimizer.args.eps": number(file.get(each))})
        elif each == "adam_epsilon" or not (adamlike or "lion" in name):
            file.leave(each, f"{name} has no such setting")
        else:
            file.put(each, {"optimizer.args.betas": betas})


MOMENT_KEYS: Mapping[str, str] = {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_epsilon": "eps"}


def _arguments(text: str) -> Settings:
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return {f"optimizer.args.{key.strip()}": compose(value.strip()).tree for key, _, value in pairs}


def read_schedule(file: TrainerFile, name: str, default: str, floor: float = 0.0) -> None:
    """The schedule of one of Trainer's names; those that fall end at 0 there, and at a tenth by trainkit's default.

    floor: the share of the rate at which the tool's own one ends.
    """
    kwargs = file.take("lr_scheduler_kwargs") or {}
    asked = str(file.get(name) or default)
    found = dict(decode_schedule(asked, kwargs, number(file.get("learning_rate"))))
    if not found and not kwargs and asked in ("linear", "cosine", *FLAT):
        found = {"schedule.name": asked, **({} if asked in FLAT else {"schedule.min_lr_ratio": floor})}
    if not found:
        where = "lr_scheduler_kwargs" if kwargs and asked in ("linear", "cosine", *FLAT) else name
        file.refuse(where, "the built-in trainer has cosine, linear, constant, constant_with_warmup and wsd")
    else:
        counted = {} if found["schedule.name"] == "constant" else {"schedule.from_zero": True}
        file.put(name, {**found, **counted}) if file.get(name) else file.assume({**found, **counted})
        if kwargs:
            settings = {key: value for key, value in found.items() if key != "schedule.name"}
            file.put("lr_scheduler_kwargs", settings, f"by {' and '.join(map(str, kwargs))}")


def set_every(file: TrainerFile, name: str, key: str, value: float) -> None:
    """Steps between two events; a number below 1 is a share of all steps."""
    file.put(name, {key: int(value) if value >= 1 else float(f"{value:.12g}")})


def read_strategy(file: TrainerFile, what: str, default: str) -> None:
    """`eval_strategy` or `save_strategy` with its steps. what: `eval` or `save`."""
    key = "eval.every_steps" if what == "eval" else "checkpoint.every_steps"
    name, steps = f"{what}_strategy", f"{what}_steps"
    name = "evaluation_strategy" if what == "eval" and file.get("evaluation_strategy") else name
    asked, epochs = str(file.get(name, default)), file.draft.get("train.epochs")
    if asked in ("no", "False"):
        file.put(name, {key: 0})
        if file.get(steps) is not None:
            file.leave(steps, f"{name} is {asked}")
    elif asked == "best" and what == "save":
        file.put(name, {"checkpoint.keep_best": True})
        file.leave_unread("save_strategy is best", steps)
    elif asked == "epoch":
        if file.get(steps) is not None:
            file.leave(steps, f"{name} is epoch")
        if epochs and epochs <= 1:
            file.put(name, {key: ONLY_AT_THE_END if what == "eval" else 0}, "one epoch: at the end alone")
        else:
            set_every(file, name, key, min(1 / epochs, 0.999) if epochs else 0.5)
    else:
        every = number(file.get(steps) or (file.get("logging_steps") if what == "eval" else None) or 500)
        set_every(file, steps if file.get(steps) else name, key, every)
        if file.get(steps) and file.get(name):
            file.put(name, {})


def read_push(file: TrainerFile, *, pushes: bool) -> None:
    """Uploads to the Hub, where they are on and the repository is named."""
    name = str(file.get("hub_model_id") or "")
    if pushes and name and not has_owner(name):
        file.leave("hub_model_id", "an upload needs the repository with its owner: checkpoint.push_to_hub: owner/name")
        pushes = False
        file.leave_unread("the repository has no owner", "push_to_hub")
    if pushes and name:
        for name in ("hub_model_id", "hub_strategy", "hub_private_repo"):
            found = BY_NAME[name].decode(file.get(name))
            if file.get(name) is not None and not isinstance(found, Unsupported):
                file.put(name, found)
        file.assume({"checkpoint.push_to_hub.strategy": "every_save"}, "Trainer")
        file.leave_unread("checkpoint.push_to_hub.repo says it", "push_to_hub")
    elif pushes:
        file.leave("push_to_hub", "no repository is named: set checkpoint.push_to_hub to owner/name")
    why = "nothing is uploaded: push_to_hub is off"
    file.leave_unread(why, "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo")


def read_epochs(file: TrainerFile, name: str, default: float) -> None:
    """How long to train: `max_steps`, or passes over the data by the key of this name."""
    steps, epochs = file.get("max_steps"), number(file.get(name))
    if steps and steps > 0:
        file.put("max_steps", {"train.steps": steps})
        file.leave_unread("max_steps counts", name)
    elif epochs:
        file.put(name, {"train.epochs": epochs})
    else:
        file.assume({"train.epochs": default})
    if steps is not None and steps <= 0:
        file.put("max_steps", {})


def remark_frozen_weights(file: TrainerFile) -> None:
    """Say what frozen weights take that are in 16 bits in the tool, and in 32 here, as the same numbers."""
    draft = file.draft
    frozen = draft.get("peft.kind") == "lora" and not draft.get("model.quantize.bits")
    if frozen and draft.get("precision.dtype") != "fp32":
        draft.remark(
            f"Frozen weights are kept in 32 bits, in {file.tool} in 16, with the same results: where they do not fit, "
            "precision.weights=bf16 with optimizer.name=adamw_anyprecision has all in 16."
        )


def evaluate_on_all(file: TrainerFile) -> None:
    """Evaluate on all that is held out, as Trainer does, and not on a part of it."""
    if file.draft.get("eval.every_steps"):
        file.draft.set("eval.batches", 1_000_000, file.source.at(""), "as many as there are")


def read_best(file: TrainerFile) -> None:
    """`load_best_model_at_end` with its metric: the best checkpoint is kept, by what an evaluation measures here."""
    metric = str(file.get("metric_for_best_model") or LOSS).removeprefix(PREFIX)
    ours, greater = _MEASURES.get(metric), file.get("greater_is_better")
    if file.get("load_best_model_at_end") and file.draft.get("eval.every_steps"):
        if ours is None or greater not in (None, not lower_is_better(ours)):
            file.leave(
                "load_best_model_at_end", "trainkit compares evaluations by eval.best_metric: name one of its own"
            )
        else:
            why = "the best checkpoint is kept beside the newest, which the run ends with: trainkit export takes either"
            file.put("load_best_model_at_end", {"checkpoint.keep_best": True}, why)
            if ours == "accuracy":
                read_accuracy(file, "metric_for_best_model")
            file.put("metric_for_best_model", {"eval.best_metric": ours} if ours != LOSS else {})
            file.put("greater_is_better", {}) if greater is not None else None
    why = "nothing is kept by it"
    file.leave_unread(why, "load_best_model_at_end", "metric_for_best_model", "greater_is_better")


def read_accuracy(file: TrainerFile, name: str) -> None:
    """Measure the share of tokens that are right, which the tool does by this key."""
    if file.draft.get("eval.every_steps"):
        others = [each for each in file.draft.get("eval.metrics") or ["perplexity"] if each != "accuracy"]
        file.put(name, {"eval.metrics": [*others, "accuracy"]})


# What the built-in trainer's FSDP does by itself, or does not have; the training is the same.
_FSDP_LEFT = {
    *FIRST_VERSION, "version", "state_dict_type", "final_state_dict_type", "cpu_ram_efficient_loading",
    "cpu_offload_pin_memory", "mixed_precision_policy", "activation_cpu_offload",
}  # fmt: skip
_FSDP = by_name(TORCH)


def read_spread(file: TrainerFile) -> None:
    """How the model is spread over ranks: a DeepSpeed file, FSDP in its words and keys, or replicas."""
    engine, words, config = file.take("deepspeed"), file.get("fsdp"), file.take("fsdp_config")
    words = words.replace(",", " ").split() if isinstance(words, str) else words if isinstance(words, list) else []
    if engine:
        _read_engine(file, engine)
    elif words or config or file.get("fsdp") is True:
        _read_fsdp(file, words, config)
    else:
        file.draft.set("strategy.kind", "ddp", file.source.at(""), "neither DeepSpeed nor FSDP: a replica on each GPU")
    file.take("fsdp")


def _read_engine(file: TrainerFile, engine: Any) -> None:
    """DeepSpeed's stage and what it offloads: the other keys of its file change speed alone."""
    draft, origin = file.draft, file.source.at("deepspeed")
    if isinstance(engine, Mapping):
        source = replace(file.source, tree=engine, values={})
    else:
        try:
            source = read_mapping(file.context, str(engine), f"file {engine}", 1)
        except UsageError:
            _by_name(file, str(engine))
            return
        except RecipeError as error:
            draft.problems += error.diagnostics
            return
    stage, tree = stage_of(source.tree), source.tree
    if type(stage) is not int or stage not in KINDS:
        draft.fail(f"{STAGE} is {stage!r}", source.at(STAGE), STAGES)
        return
    draft.set("strategy.kind", KINDS[stage] if stage else "ddp", origin, f"deepspeed {source.path}: stage {stage}")
    taken = {STAGE}
    for key, name, value in sharding(tree, stage) if stage else ():
        draft.put_checked(Assignment(key, value, source.at(name)))
        taken.add(name)
    for name, value in leaves(tree):
        section = name.partition(".")[0]
        if value != AUTO and section in ("optimizer", "scheduler", "tensor_parallel") and not name.endswith(".type"):
            file.refuse("deepspeed", f"{source.path} sets {name}", "leave that to the file for axolotl or Trainer")
            return
    clipping = value_at(tree, "gradient_clipping")
    if isinstance(clipping, int | float):
        draft.set("train.max_grad_norm", float(clipping), source.at("gradient_clipping"))
        taken.add("gradient_clipping")
    rest = [name for name, _ in leaves(tree) if name not in taken]
    if rest:
        draft.remark(f"Of {source.path} these change speed alone, or are said beside it: {', '.join(rest)}.")


def _by_name(file: TrainerFile, engine: str) -> None:
    """The strategy of a DeepSpeed file that is not here, by its name, as both tools' own files have it."""
    draft, origin = file.draft, file.source.at("deepspeed")
    named = re.search(r"z(?:ero)?_?([0-3])", engine.lower())
    if not named:
        draft.fail(f"there is no file {engine}", origin, "import in the folder from which the training starts")
        return
    kind = KINDS[int(named[1])] if named[1] != "0" else "ddp"
    why = f"deepspeed {engine} is not here: by its name; import again where it is"
    offloads = {"strategy.offload_optimizer": "cpu"} if "offload" in engine.lower() and kind != "ddp" else {}
    offloads |= {"strategy.offload_param": "cpu"} if offloads and kind == "zero3" else {}
    for key, value in {"strategy.kind": kind, **offloads}.items():
        draft.set(key, value, origin, why)


def _read_fsdp(file: TrainerFile, words: list[Any], config: Any) -> None:
    draft = file.draft
    if isinstance(config, str):
        try:
            config = read_mapping(file.context, config, f"file {config}", 1).tree
        except UsageError as error:
            draft.fail(error.diagnostics[0].what, file.source.at("fsdp_config"), error.diagnostics[0].hint)
            return
    config = config or {}
    sharding = str(config.get("fsdp_sharding_strategy", config.get("sharding_strategy", ""))).lower()
    if "no_shard" in (*words, sharding):
        draft.set("strategy.kind", "ddp", file.source.at("fsdp"), "NO_SHARD of FSDP is plain data parallelism")
        return
    draft.set("strategy.kind", "fsdp", file.source.at("fsdp" if words else "fsdp_config"))
    if words:
        sharded = next((each for each in (*HYBRID, "shard_grad_op") if each in words), "full_shard")
        file.put("fsdp", {"strategy.sharding": sharded, "strategy.offload": "offload" in words})
    for name, value in config.items():
        full, plain = f"fsdp_config.{name}", str(name).removeprefix("fsdp_")
        if value is None:
            continue
        if plain in _FSDP_LEFT:
            file.leave(full, "FSDP's second version, which the built-in trainer has, does the like by itself")
            continue
        found: Any = (
            _FSDP[plain].decode(value) if plain in _FSDP else LeftOut(f"no key of {file.tool} that trainkit knows")
        )
        if isinstance(found, Unsupported):
            file.refuse(full, found.why, found.instead)
        elif isinstance(found, LeftOut):
            file.leave(full, found.why)
        else:
            file.put(full, found)
