"""The flags that choose a strategy, by HF's words or by a file of HF's or DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import Diagnostic, RecipeError, UsageError
from trainkit.launch_plan.rules import way
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.paths import absolute
from trainkit.recipe.short_flags import Outcome, ParsedFlag
from trainkit.recipe.yaml_reader import read_scalar
from trainkit.tools.accelerate.importer import READ_BY
from trainkit.tools.base.fields import by_name
from trainkit.tools.base.fsdp_settings import FIELDS, FIRST_SHARDING, SHARDING, read_settings
from trainkit.tools.base.imported_recipe import ForeignFile, ImportContext, read_mapping
from trainkit.tools.deepspeed.fields import KINDS, STAGE, faults, sharding
from trainkit.tools.deepspeed.importer import STAGES, stage_of
from trainkit.tools.hf.fsdp_config import read_fsdp_config
from trainkit.tools.registry import PROGRAMS

_HOW = (*SHARDING, *FIRST_SHARDING)
_FSDP_WORDS = (*_HOW, "auto_wrap", "offload")
NO_SHARD = "no_shard"


def fsdp(use: ParsedFlag) -> Outcome:
    """`--fsdp` with HF's words, or none."""
    assignments = [use.assign("strategy.kind", "fsdp")]
    if use.value is None or use.value.lower() == "true":
        return assignments, []
    words, key = use.value.replace(",", " ").split(), "strategy.sharding"
    named = [word for word in _HOW if word in words]
    if named == [NO_SHARD] and "offload" not in words:  # plain data parallelism
        what = f"--fsdp {NO_SHARD} shards nothing: the strategy is ddp"
        return [use.assign("strategy.kind", "ddp")], [Diagnostic("note", what, origin=use.origin)]
    for word in words:
        if word not in _FSDP_WORDS:
            joined = next((each for each in _FSDP_WORDS if each in "_".join(words)), None)
            hint = f"did you mean {joined}?" if joined else f"words are: {', '.join(_FSDP_WORDS)}"
            return [], [use.error(f"--fsdp does not know {word!r}", hint, key="strategy")]
    if len(named) > 1:
        return [], [use.error(f"--fsdp names both {' and '.join(named)}", "keep one", key=key)]
    assignments += [
        *(use.assign("strategy.version", 1) for word in named if word in FIRST_SHARDING),
        use.assign(key, (named or ["full_shard"])[0]),
        use.assign("strategy.auto_wrap", "transformer" if "auto_wrap" in words else "none"),
        use.assign("strategy.offload", "offload" in words),
    ]
    return assignments, []


def fsdp_config(use: ParsedFlag) -> Outcome:
    """`--fsdp_config FILE`."""
    if NO_SHARD in str(use.current("--fsdp") or "").replace(",", " ").split():
        what = f"--fsdp_config says nothing of plain data parallelism, which --fsdp {NO_SHARD} is"
        return [], [Diagnostic("warning", what, origin=use.origin, hint="leave --fsdp_config out")]
    file = _read_file(use)
    if isinstance(file, list):
        return [], file
    assignments, found = read_fsdp_config(file.tree, file.at)
    return [use.assign("strategy.kind", "fsdp"), *assignments], found


def deepspeed(use: ParsedFlag) -> Outcome:
    """`--deepspeed FILE`: its stage is the strategy, and what it offloads, where to, and how it sums are set."""
    file = _read_file(use)
    if isinstance(file, list):
        return [], file
    stage = stage_of(file.tree)
    if type(stage) is not int or stage not in KINDS:
        what = f"{use.value}: {STAGE} is {stage!r}, expected 0, 1, 2 or 3"
        return [], [use.error(what, STAGES, origin=file.at(STAGE))]
    found = [use.error(f"{use.value}: {what}", hint, origin=file.at(key)) for key, what, hint in faults(file.tree)]
    said, kind = list[Assignment](), use.current("program.kind") or "builtin"
    lost = list[Diagnostic]()
    for name, key, value in sharding(file.tree, stage):
        reach = way(PROGRAMS[kind].SUPPORT, name)
        if reach is None or reach.by or value in reach.accepted:
            said.append(Assignment(name, value, file.at(key)))
        else:  # as an import leaves it out
            what = f"{use.value}: {name} {value} is left out, for it cannot reach a program of kind {kind}"
            lost.append(Diagnostic("warning", what, name, file.at(key), reach.why, reach.instead))
    path = absolute(file.path, use.cwd)
    chosen = [use.assign("strategy.kind", KINDS[stage]), use.assign("strategy.config", path)]
    return ([], found) if found else ([*chosen, *said], lost)


def of_accelerate(use: ParsedFlag) -> Outcome:
    """A flag of `accelerate launch --use_fsdp`."""
    read_by, policy = READ_BY.get(use.name), str(use.current("--fsdp_auto_wrap_policy") or "")
    if read_by and policy and policy.upper() != read_by:
        what = f"--{use.name} is read beside --fsdp_auto_wrap_policy {read_by} alone: left out"
        return [], [Diagnostic("warning", what, origin=use.origin)]
    words: Mapping[str, Any] = {"true": True, "false": False}  # which accelerate reads in any case
    text = use.value or ""
    value = words.get(text.lower(), read_scalar(text))
    return read_settings({use.name: value}, by_name(FIELDS), lambda _: use.origin, "accelerate launch:")


def _read_file(use: ParsedFlag) -> ForeignFile | list[Diagnostic]:
    """The JSON or YAML file that a flag names, or the errors for which it cannot be read."""
    try:
        return read_mapping(
            ImportContext(use.files, use.cwd), use.value or "", f"flag --{use.name}", use.origin.strength
        )
    except UsageError as error:
        return [use.error(f"--{use.name}: {each.what}", each.hint) for each in error.diagnostics]
    except RecipeError as error:
        return list(error.diagnostics)
