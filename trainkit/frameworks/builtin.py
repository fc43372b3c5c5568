"""`builtin`: trainkit's own trainer, which reads its settings from one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainkit.frameworks.base.fsdp_settings import FIRST_VERSION
from trainkit.frameworks.base.interface import Detection, all_own, nothing
from trainkit.frameworks.deepspeed.config import config_file
from trainkit.frameworks.deepspeed.fields import FILE
from trainkit.plan.context import Context
from trainkit.plan.model import Variable
from trainkit.plan.provenance import Source, SourcedFile, Token, module, token
from trainkit.plan.support import Reach, Table, no_way

SETTINGS = "trainer.json"

_OLD = "the built-in trainer uses fully_shard, which is version 2"
_SAME = "every rank builds the same weights from the seed"
_OWN = "set program.kind to torch to run a program of your own, or leave it out"
_LEAVE = "leave it out"
REQUIRES: Mapping[str, str] = {"torch": "2.6", "numpy": "1.26"}
DETECTION = Detection()
read = all_own
problems = wrapper = environment = notices = nothing
REACH: Table = {
    "": Reach(SETTINGS),
    **dict.fromkeys(
        ("program.script", "program.module", "program.args", "program.local_rank"),
        no_way("trainkit's own trainer is what runs", _OWN, None, [], {}, False),
    ),
    "strategy.version": no_way(_OLD, "write 2", 2),
    **{f"strategy.{name}": no_way(_OLD, _LEAVE, always, None) for name, always in FIRST_VERSION.items()},
    "strategy.sync_module_states": no_way(_SAME, _LEAVE, True, None),
    "strategy.cpu_ram_efficient_loading": no_way(_SAME, _LEAVE, False, None),
    "strategy.gather_16bit": no_way(
        "the trainer writes its checkpoints in parts, and `trainkit export` gathers the weights", _LEAVE, False
    ),
    "strategy.state_dict_type": no_way("checkpoints of sharded models are written sharded", _LEAVE, "sharded", None),
}


def reason(context: Context) -> str:
    """For people."""
    return "trainkit's own trainer"


def argv(context: Context) -> tuple[Token, ...]:
    """The trainer and its settings file."""
    rule = "the trainer reads the plan's decisions from one file"
    settings = (token("--settings", rule=rule), token(Variable.RUN_DIR, f"/{SETTINGS}", rule=rule))
    return (*module(context, "trainkit.trainer", keys=("program.kind",)), *settings)


def files(context: Context) -> tuple[SourcedFile, ...]:
    """The trainer's settings, and DeepSpeed's for the zero strategies."""
    settings = SourcedFile(SETTINGS, json.dumps(_settings(context), indent=2, ensure_ascii=False) + "\n", _sources())
    return (settings, config_file(context, "builtin")) if context.zero else (settings,)


def _settings(context: Context) -> dict[str, Any]:
    batch = context.batch
    return {
        "recipe": context.recipe.model_dump(mode="json", by_alias=True),
        "batch": {
            "global_": batch.global_,
            "micro": batch.micro,
            "accumulation": batch.accumulation,
            "ranks": batch.ranks,
            "eval_micro": batch.eval_micro,
            "search": list(batch.search),
        },
        "device": context.topology.device,
        "dtype": context.dtype,
        "training_digest": context.training_digest,
        "resume": {"path": context.resume.path, "step": context.resume.step},
        "deepspeed": FILE if context.zero else None,
    }


def _sources() -> dict[str, Source]:
    ranks = ("nodes.count", "nodes.processes_per_node")
    sides = ("batch.global", "batch.micro", "batch.accumulation", *ranks)
    return {
        "recipe": Source(rule="the resolved recipe, whole"),
        "batch.global_": Source(sides),
        "batch.micro": Source(sides),
        "batch.accumulation": Source(sides),
        "batch.ranks": Source(ranks),
        "batch.eval_micro": Source(("batch.eval_micro", "batch.micro")),
        "batch.search": Source(("batch.micro", "batch.global", *ranks)),
        "device": Source(("devices.type", "devices.select")),
        "dtype": Source(("precision.dtype",)),
        "training_digest": Source(rule="digest of everything that decides the course of training"),
        "resume": Source(("checkpoint.resume",)),
        "deepspeed": Source(("strategy.kind",)),
    }
