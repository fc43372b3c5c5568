"""What kind of program a script is, as its source tells, or else the flags behind its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainkit.frameworks.base.argv_reader import script_flags
from trainkit.frameworks.base.draft import ImportContext
from trainkit.recipe.layers.paths import absolute

FLAG = "deepspeed_config"
# Flags that only scripts on Trainer have: one of them tells the kind of the program.
MARKS = frozenset({
    "do_train", "do_eval", "do_predict", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "eval_strategy",
    "evaluation_strategy", "save_strategy", "logging_strategy", "save_total_limit", "overwrite_output_dir",
    "per_device_train_batch_size", "predict_with_generate", "lr_scheduler_kwargs", "load_best_model_at_end",
    "torch_compile_backend", "ddp_find_unused_parameters", "group_by_length", "logging_first_step",
})  # fmt: skip
# Trainer's too, and common in scripts of other kinds: they tell nothing.
SHARED_MARKS = frozenset({
    "fsdp", "torch_compile", "gradient_checkpointing", "activation_checkpointing", "optim", "use_cpu", "no_cuda",
    "warmup_ratio",
})  # fmt: skip
PARSERS = frozenset({"HfArgumentParser", "TrlParser"})  # which make TrainingArguments of a command line
BUILT_ON = {  # name in a library -> the kind of program that uses it
    **{f"transformers.{name}": "hf" for name in ("Trainer", "Seq2SeqTrainer")},
    **{f"transformers.{name}": "hf" for name in ("TrainingArguments", "Seq2SeqTrainingArguments")},
    "accelerate.Accelerator": "accelerate",
    "deepspeed.initialize": "deepspeed",
}
ORDER = ("hf", "accelerate", "deepspeed")  # the outermost first: Trainer uses the others by itself


@dataclass(frozen=True, slots=True)
class DetectedKind:
    """kind: of the program, empty where nothing tells. by: what tells. remark: why it is not another."""

    kind: str = ""
    by: str = ""
    remark: str = ""


def program_kind(
    context: ImportContext, argv: Sequence[str], otherwise: str = "torch", *, module: bool = False
) -> DetectedKind:
    """What kind of program a script or module with these arguments is; `otherwise` where nothing tells."""
    source = DetectedKind() if module else kind_by_source(context, argv[0])
    if source.kind:
        return source
    kind, flag = _kind_by_flags(argv)
    if kind:
        return DetectedKind(kind, f"--{flag}", "" if kind == "hf" else source.remark)
    return DetectedKind(otherwise, "", source.remark or _doubt(argv[1:]))


def kind_by_source(context: ImportContext, script: str) -> DetectedKind:
    """What the script uses; nothing where it cannot be read, or is no Python."""
    try:
        tree = ast.parse(context.files.read(absolute(script, context.cwd)))
    except (OSError, SyntaxError, ValueError):
        return DetectedKind()
    used = set(_used(tree))
    kinds = {BUILT_ON[name]: name for name in sorted(used & BUILT_ON.keys(), reverse=True)}
    if "hf" in kinds and not {name.rpartition(".")[2] for name in used} & PARSERS:
        name = kinds["hf"]
        return DetectedKind(remark=f"{script} uses {name} without HfArgumentParser: Trainer's flags do not reach it.")
    kind = next((each for each in ORDER if each in kinds), "")
    return DetectedKind(kind, kinds.get(kind, ""))


def _used(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported, or reached through an imported module."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module.partition('.')[0]}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"


def _kind_by_flags(argv: Sequence[str]) -> tuple[str, str]:
    """The kind and the flag that tells; empty where none does."""
    flags = {each.name: each for each in script_flags(argv[1:]) if each.name}
    marks = sorted(MARKS & flags.keys())
    if marks and "no_trainer" not in argv[0]:
        return "hf", marks[0]
    if "deepspeed" in flags and flags["deepspeed"].values:  # Trainer's takes a file, DeepSpeed's own is a switch
        return "hf", "deepspeed"
    return ("deepspeed", FLAG) if FLAG in flags else ("", "")


def _doubt(argv: Sequence[str]) -> str:
    """A remark on a flag that Trainer has too; empty without one."""
    name = next((each.name for each in script_flags(argv) if each.name in SHARED_MARKS), "")
    return (
        name and f"--{name} is also a flag of transformers' Trainer: import with --kind hf where the script is on it."
    )
