"""Did you mean: the known name that is nearest to an unknown one."""

from __future__ import annotations

from collections.abc import Iterable

from trainkit.recipe.schema.fields import schema

# Names that people bring from other tools, and the recipe's key for each; those of flags are in the schema.
_FAMILIAR = {
    "batch_size": "batch.micro",
    "micro_batch": "batch.micro",
    "micro_batch_size": "batch.micro",
    "global_batch_size": "batch.global",
    "gradient_accumulation": "batch.accumulation",
    "grad_accum": "batch.accumulation",
    "num_epochs": "train.epochs",
    "dtype": "precision.dtype",
    "mixed_precision": "precision.dtype",
    "devices.count": "devices.select",
    "devices.ids": "devices.select",
    "gpus": "devices.select",
    "num_gpus": "devices.select",
    "num_nodes": "nodes.count",
    "nproc_per_node": "nodes.processes_per_node",
    "num_processes": "nodes.processes_per_node",
    "processes": "nodes.processes_per_node",
    "num_workers": "data.workers",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "base": "extends",
    "defaults": "extends",
    "include": "extends",
    "inherits": "extends",
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel", "tensor_parallel_size"), "strategy.tensor"),
    **dict.fromkeys(
        ("cp", "cp_size", "context_parallel", "context_parallel_size", "sequence_parallel", "sp_size"),
        "strategy.context",
    ),
    **dict.fromkeys(("dp_replicate", "dp_replicate_size", "data_parallel_replicate_dim"), "strategy.replicate"),
    **dict.fromkeys(("ep", "ep_size", "expert_parallel", "expert_parallel_size"), "model.moe.parallel"),
}
# What people know from other tools and no recipe has, by their name there: why, and what to do instead.
NO_PIPELINE = (
    "there is no pipeline parallelism: stages wait for one another, in a schedule that must know the model's layers",
    "write strategy.kind: fsdp, which spreads all layers over the ranks, with strategy.tensor inside a node",
)
PIPELINES = ("pipeline", "pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_stages", "gpipe")


# Keys of earlier releases, and what says the same now.
REPLACED = {
    "data.field": "data.columns: {text: NAME}",
    "data.prompt_field": "data.columns: {prompt: NAME, completion: NAME}, or source and target",
    "data.messages_field": "data.columns: {messages: NAME}",
    "data.tokens_field": "data.columns: {input_ids: NAME}",
    "data.targets_field": "data.columns: {labels: NAME}",
    "data.label_field": "data.columns: {label: NAME}",
}
REPLACED_KINDS = {("data", "jsonl"): "dataset"}


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known word most like the given one, if any is alike enough (difflib's ratio, 0 to 1)."""
    import difflib  # 3 ms, for messages alone

    found = difflib.get_close_matches(word.lower()[:100], list(known), n=1, cutoff=alike)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """The hint for an unknown word: the nearest known one behind the prefix, or else what there is."""
    close = nearest(word, known)
    return f"did you mean {prefix}{close}?" if close else otherwise


def nearest_key(key: str) -> str | None:
    """The recipe key that an unknown dotted key most likely means: in the same section first, then anywhere."""
    # Stricter than difflib by default: a wrong suggestion costs more than none.
    section, _, name = key.rpartition(".")
    if key.lower() in _FAMILIAR:
        return _FAMILIAR[key.lower()]
    table = schema()
    known = (*table.keys, *([] if section else ["extends", "variants"]))
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == section}
    if close := nearest(name, siblings, 0.7):
        return siblings[close]
    familiar = {**{each.flag: each.key for each in table.all_settings()}, **_FAMILIAR}
    if name.lower() in familiar:
        return familiar[name.lower()]
    # Of settings with one name the first section's counts.
    elsewhere = {each.rpartition(".")[2]: each for each in reversed(table.keys)}
    if name in elsewhere:
        return elsewhere[name]
    if whole := nearest(key, table.keys, 0.75):
        return whole
    close = nearest(name, elsewhere, 0.75)
    return elsewhere[close] if close else None
