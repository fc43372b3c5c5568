"""The flags that choose a strategy, by HF's words or by a file of HF's or DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.flags.flag import Outcome, Use
from trainkit.frameworks.deepspeed.strategy import KINDS, ZERO, faults, sharding
from trainkit.frameworks.hf_trainer.fsdp_config import FSDP_REFUSED, read_fsdp_config
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.layer import Page, page
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.yaml.reader import Document, compose_bytes
from trainkit.recipe.yaml.syntax import Mark

_FSDP_WORDS = ("full_shard", "shard_grad_op", "auto_wrap", "offload")


def fsdp(use: Use) -> Outcome:
    """`--fsdp` with HF's words, or none."""
    assignments = [use.assign("strategy.kind", "fsdp")]
    if use.value is None or use.value.lower() == "true":
        return assignments, []
    words = use.value.replace(",", " ").split()
    for word in words:
        if word in FSDP_REFUSED:
            why, hint = FSDP_REFUSED[word]
            return [], [use.error(f"--fsdp {word} cannot be run", hint, why=why, key="strategy.sharding")]
        if word not in _FSDP_WORDS:
            return [], [
                use.error(f"--fsdp does not know {word!r}", f"words are: {', '.join(_FSDP_WORDS)}", key="strategy")
            ]
    if {"full_shard", "shard_grad_op"} <= set(words):
        return [], [use.error("--fsdp names both full_shard and shard_grad_op", "keep one", key="strategy.sharding")]
    sharding = "shard_grad_op" if "shard_grad_op" in words else "full_shard"
    assignments += [
        use.assign("strategy.sharding", sharding),
        use.assign("strategy.auto_wrap", "transformer" if "auto_wrap" in words else "none"),
        use.assign("strategy.offload", "offload" in words),
    ]
    return assignments, []


def read_file(use: Use) -> tuple[Document | None, Outcome]:
    """The JSON or YAML file that a flag names, or the error that it cannot be read."""
    try:
        document = compose_bytes(use.files.read(path_of(use)))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else "cannot read"
        return None, (
            [],
            [use.error(f"--{use.name}: {reason} {use.value}", "check the path; it starts from the current folder")],
        )
    source = use.value or ""
    found = [_page(use, document).diagnose("error", each) for each in document.errors]
    if not found and not isinstance(document.tree, Mapping):
        found = [use.error(f"--{use.name}: {source} holds no mapping", "write a JSON object or YAML mapping")]
    return (None if found else document), ([], found)


def path_of(use: Use) -> str:
    """Absolute path of the file that a flag names."""
    return absolute(use.value or "", use.cwd)


def place_in(use: Use, document: Document, key: str) -> Origin:
    """The origin of a value in the file that a flag names."""
    return _page(use, document).at(document.values.get(key, Mark(1, 1)))


def _page(use: Use, document: Document) -> Page:
    return page(f"flag --{use.name}", use.origin.strength, use.value or "", document)


def fsdp_config(use: Use) -> Outcome:
    """`--fsdp_config FILE`."""
    document, outcome = read_file(use)
    return read_fsdp_config(use, document, place_in) if document else outcome


def deepspeed(use: Use) -> Outcome:
    """`--deepspeed FILE`: its stage is the strategy, and what it offloads, where to, and how it sums are set."""
    document, outcome = read_file(use)
    if document is None:
        return outcome
    stage = value_at(document.tree, f"{ZERO}.stage")
    if type(stage) is not int or stage not in KINDS:
        return [], [_no_stage(use, document, stage)]
    found = [
        use.error(f"{use.value}: {what}", hint, origin=place_in(use, document, key))
        for key, what, hint in faults(document.tree)
    ]
    if found:
        return [], found
    kind = use.assign("strategy.kind", KINDS[stage])
    said = (
        Assignment(each.setting, each.value, place_in(use, document, each.key))
        for each in sharding(document.tree, stage)
    )
    return [kind, use.assign("strategy.config", path_of(use)), *said], []


def _no_stage(use: Use, document: Document, stage: Any) -> Diagnostic:
    where = place_in(use, document, f"{ZERO}.stage" if stage is not None else ZERO)
    why = "stage 0 is plain data parallelism" if stage == 0 else ""
    hint = "write zero_optimization.stage: 1, 2 or 3; for plain data parallelism use strategy.kind=ddp"
    shown = "is missing" if stage is None else f"is {stage!r}"
    what = f"{use.value}: zero_optimization.stage {shown}, and 1, 2 or 3 is wanted"
    return use.error(what, hint, why=why, origin=where)
