"""The flags that choose a strategy, by HF's words or by a file of HF's or DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.errors import Origin
from trainkit.flags.flag import Outcome, Use
from trainkit.frameworks.base.fsdp import REFUSED, SHARDING
from trainkit.frameworks.deepspeed.strategy import KINDS, ZERO, faults, sharding
from trainkit.frameworks.hf_trainer.fsdp_config import read_fsdp_config
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.layer import Page, page
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import absolute
from trainkit.recipe.yaml.reader import Document, compose_bytes
from trainkit.recipe.yaml.syntax import Mark

_FSDP_WORDS = (*SHARDING, "auto_wrap", "offload")


def fsdp(use: Use) -> Outcome:
    """`--fsdp` with HF's words, or none."""
    assignments = [use.assign("strategy.kind", "fsdp")]
    if use.value is None or use.value.lower() == "true":
        return assignments, []
    words = use.value.replace(",", " ").split()
    for word in words:
        if word in REFUSED:
            refused, key = REFUSED[word], "strategy.sharding"
            return [], [use.error(f"--fsdp {word} cannot be run", refused.instead, why=refused.why, key=key)]
        if word not in _FSDP_WORDS:
            hint = f"words are: {', '.join(_FSDP_WORDS)}"
            return [], [use.error(f"--fsdp does not know {word!r}", hint, key="strategy")]
    if set(SHARDING) <= set(words):
        return [], [use.error("--fsdp names both full_shard and shard_grad_op", "keep one", key="strategy.sharding")]
    assignments += [
        use.assign("strategy.sharding", "shard_grad_op" if "shard_grad_op" in words else "full_shard"),
        use.assign("strategy.auto_wrap", "transformer" if "auto_wrap" in words else "none"),
        use.assign("strategy.offload", "offload" in words),
    ]
    return assignments, []


def fsdp_config(use: Use) -> Outcome:
    """`--fsdp_config FILE`."""
    document, outcome = _read_file(use)
    if document is None:
        return outcome
    assignments, found = read_fsdp_config(document.tree, lambda key: _place(use, document, key))
    return [use.assign("strategy.kind", "fsdp"), *assignments], found


def deepspeed(use: Use) -> Outcome:
    """`--deepspeed FILE`: its stage is the strategy, and what it offloads, where to, and how it sums are set."""
    document, outcome = _read_file(use)
    if document is None:
        return outcome
    stage = value_at(document.tree, f"{ZERO}.stage")
    if type(stage) is not int or stage not in KINDS:
        what = f"zero_optimization.stage {'is missing' if stage is None else f'is {stage!r}'}"
        why = "stage 0 is plain data parallelism" if stage == 0 else ""
        hint = "write zero_optimization.stage: 1, 2 or 3; for plain data parallelism use strategy.kind=ddp"
        origin = _place(use, document, ZERO if stage is None else f"{ZERO}.stage")
        return [], [use.error(f"{use.value}: {what}, expected 1, 2 or 3", hint, why=why, origin=origin)]
    found = [
        use.error(f"{use.value}: {what}", hint, origin=_place(use, document, key))
        for key, what, hint in faults(document.tree)
    ]
    if found:
        return [], found
    assignments = [use.assign("strategy.kind", KINDS[stage]), use.assign("strategy.config", _path(use))]
    assignments += [
        Assignment(each.setting, each.value, _place(use, document, each.key)) for each in sharding(document.tree, stage)
    ]
    return assignments, []


def _read_file(use: Use) -> tuple[Document | None, Outcome]:
    """The JSON or YAML file that a flag names, or the error that it cannot be read."""
    try:
        document = compose_bytes(use.files.read(_path(use)))
    except OSError as error:
        reason = "there is no file" if isinstance(error, FileNotFoundError) else "cannot read"
        hint = "check the path; it starts from the current folder"
        return None, ([], [use.error(f"--{use.name}: {reason} {use.value}", hint)])
    found = [_page(use, document).diagnose("error", each) for each in document.errors]
    if not found and not isinstance(document.tree, Mapping):
        found = [use.error(f"--{use.name}: {use.value} holds no mapping", "write a JSON object or YAML mapping")]
    return (None if found else document), ([], found)


def _path(use: Use) -> str:
    return absolute(use.value or "", use.cwd)


def _place(use: Use, document: Document, key: str) -> Origin:
    """The origin of a value in the file that a flag names."""
    return _page(use, document).at(document.values.get(key, Mark(1, 1)))


def _page(use: Use, document: Document) -> Page:
    return page(f"flag --{use.name}", use.origin.strength, use.value or "", document)
