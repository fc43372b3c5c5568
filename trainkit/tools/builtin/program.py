"""`builtin`: trainkit's own trainer, which reads its settings from one JSON file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import Source, SourcedFile, Token, json_file, module, resume_word, token
from trainkit.launch_plan.rules import Support, Table, unsupported
from trainkit.lazy import call
from trainkit.recipe.grid import HYBRID
from trainkit.tools.base.fsdp_settings import FIRST_VERSION, SHARDING
from trainkit.tools.base.interface import Detection, all_own, nothing
from trainkit.tools.builtin.inputs import INPUT_RULES
from trainkit.tools.builtin.rules import INCOMPATIBLE, RULES

__all__ = ["INCOMPATIBLE", "INPUT_RULES", "RULES"]

SETTINGS = "trainer.json"

_OLD = "the built-in trainer uses fully_shard, which is version 2"
_SAME = "every rank builds the same weights from the seed"
_OWN = "set program.kind to torch to run a program of your own, or leave it out"
_LEAVE = "leave it out"
REQUIRES: Mapping[str, str] = {"torch": "2.6", "numpy": "1.26", "safetensors": "0.4.3"}
STRATEGY_BY = ""
DETECTION = Detection()
config_file: Callable[..., SourcedFile] = call("trainkit.tools.deepspeed.config:config_file")  # few plans need it
read = all_own
wrapper = environment = nothing
SUPPORT: Table = {
    "": Support(SETTINGS),
    **dict.fromkeys(
        ("program.folder", "program.script", "program.module", "program.args", "program.local_rank"),
        unsupported("trainkit's own trainer is what runs", _OWN, None, [], {}, False),
    ),
    "program.reads_recipe": unsupported("trainkit's own trainer is told everything anyway", _LEAVE, False),
    "strategy.version": replace(unsupported(_OLD, "write 2", 2), implied_by="strategy.sharding"),
    **{
        f"strategy.{name}": replace(unsupported(_OLD, _LEAVE, always, None), part_of="strategy.version")
        for name, always in FIRST_VERSION.items()
    },
    "strategy.sharding": replace(
        unsupported(_OLD, f"write {' or '.join(SHARDING)}", *SHARDING, *HYBRID, None), part_of="strategy.version"
    ),
    "strategy.sync_module_states": unsupported(_SAME, _LEAVE, True, None),
    "strategy.cpu_ram_efficient_loading": unsupported(_SAME, _LEAVE, False, None),
    "strategy.gather_16bit": unsupported(
        "the trainer writes its checkpoints in parts, and `trainkit export` gathers the weights", _LEAVE, False
    ),
    "strategy.state_dict_type": unsupported(
        "checkpoints of sharded models are written sharded", _LEAVE, "sharded", None
    ),
}


def reason(context: Context) -> str:
    return "trainkit's own trainer"


def argv(context: Context) -> tuple[Token, ...]:
    rule = "the trainer reads the plan's decisions from one file"
    settings = (token("--settings", rule=rule), token(Variable.RUN_DIR, f"/{SETTINGS}", rule=rule))
    return (*module(context, "trainkit.trainer", keys=("program.kind",)), *settings, *resume_word(context, "--resume"))


def files(context: Context) -> tuple[SourcedFile, ...]:
    """The trainer's settings, and DeepSpeed's for the zero strategies."""
    more = (config_file(context, "builtin"),) if context.zero else ()
    return (json_file(SETTINGS, _settings(context, more[0].path if more else None)), *more)


def _settings(context: Context, deepspeed: str | None) -> dict[str, tuple[Any, Source]]:
    """The decisions of the plan, by dotted key, each with what made it. deepspeed: the file of its settings."""
    batch, ranks = context.batch, ("nodes.count", "nodes.processes_per_node")
    sides = Source(("batch.global", "batch.micro", "batch.accumulation", *ranks))
    digest = Source(rule="digest of everything that decides the course of training")
    recipe = context.recipe.model_dump(mode="json", by_alias=True)
    return {
        "recipe": (recipe, Source(rule="the resolved recipe, whole")),
        "batch.global_": (batch.global_, sides),
        "batch.micro": (batch.micro, sides),
        "batch.accumulation": (batch.accumulation, sides),
        "batch.ranks": (batch.ranks, Source(ranks)),
        "batch.eval_micro": (batch.eval_micro, Source(("batch.eval_micro", "batch.micro"))),
        "batch.search": (list(batch.search), Source(("batch.micro", "batch.global", *ranks))),
        "device": (context.topology.device, Source(("devices.type", "devices.select"))),
        "dtype": (context.dtype, Source(("precision.dtype",))),
        "training_digest": (context.training_digest, digest),
        "repositories": (
            [[each.ref.key, each.ref.kind, each.ref.name, each.ref.commit] for each in context.hub],
            Source(tuple(each.ref.key for each in context.hub)),
        ),
        "deepspeed": (deepspeed, Source(("strategy.kind",))),
    }
