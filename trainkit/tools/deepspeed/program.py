"""`deepspeed`: scripts that call deepspeed.initialize; what the recipe sets reaches them in the file they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainkit.errors import Diagnostic, note
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import SourcedFile, SourcedVariable, Token, token, variable
from trainkit.launch_plan.rules import LAUNCHED, InputRule, PlanRule, Support, Table, incompatible, unsupported
from trainkit.tools.base import own_scripts
from trainkit.tools.base.fields import is_set, keys_set_below
from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe
from trainkit.tools.base.interface import Detection, nothing
from trainkit.tools.base.launcher_flags import script_flags
from trainkit.tools.deepspeed.config import config_file
from trainkit.tools.deepspeed.fields import CARRIED, FILE, SCHEDULE_KEYS, SCHEDULERS, TYPES
from trainkit.tools.deepspeed.importer import use_as_base

FLAG = "--deepspeed_config"
GIVEN = "deepspeed.add_config_arguments names the flag, and deepspeed.initialize reads the file"
SHORTEST_WARMUP = 2  # steps; DeepSpeed makes two of one, and refuses none (deepspeed/runtime/lr_schedules.py)

reason, wrapper = own_scripts.reason, nothing
TIMEOUT, COLLECTIVES = "DEEPSPEED_TIMEOUT", "hang.collective_seconds"  # minutes (deepspeed/constants.py)
REQUIRES: Mapping[str, str] = {}
STRATEGY_BY = "done by DeepSpeed, which is told in its file: "
DETECTION = Detection(
    "DeepSpeed's engine",
    frozenset({"deepspeed.initialize"}),
    frozenset({"add_config_arguments", FLAG}),  # else it makes its configuration by itself
    frozenset({FLAG.removeprefix("--")}),
)
_OWN = "the script does this itself"
SUPPORT: Table = {
    **LAUNCHED,
    **dict.fromkeys((*CARRIED, "strategy"), Support(FILE)),
    "train.steps": Support(f"{FILE}, as the length of the schedule"),
    COLLECTIVES: Support(TIMEOUT),
    "efficiency.gradient_checkpointing": unsupported(
        "DeepSpeed recomputes what the script hands to deepspeed.checkpointing",
        "put activation_checkpointing in the file that strategy.config names, and leave it out here",
        False,
    ),
    "data.pin_memory": unsupported(_OWN, "leave it out", False),  # which the preset for CPUs says
    **dict.fromkeys(
        ("model", "data", "peft", "sample", "eval", "checkpoint"),
        unsupported(_OWN, "pass what the script takes in program.args", "never"),
    ),
}


INCOMPATIBLE: tuple[PlanRule, ...] = (
    incompatible(
        "strategy.kind",
        lambda c: c.strategy == "fsdp",
        "a program on DeepSpeed's engine trains with ZeRO, or with what its own code configures",
        "strategy.kind: zero3, which shards too; ddp or single for a script that configures the engine in its code",
    ),
    incompatible(
        "devices.type",
        lambda c: c.device == "xla",
        "DeepSpeed does not run through torch_xla",
        "program.kind: hf with strategy.kind: fsdp, which shards over the chips",
    ),
)
INPUT_RULES: tuple[InputRule, ...] = ()


def problems(context: Context) -> Iterator[Diagnostic]:
    """What DeepSpeed cannot make from its file, and a second file in the program's own words."""
    recipe, given = context.recipe, context.resolved.given
    for word, key in own_scripts.arguments(recipe.program.args):
        if word.partition("=")[0] == FLAG:
            hint = "name the file in strategy.config: it is the base that the recipe fills"
            yield context.resolved.error(key, f"{FLAG} is the plan's to pass", hint)
    if given(COLLECTIVES) and recipe.hang.collective_seconds % 60:
        what = f"{COLLECTIVES} {recipe.hang.collective_seconds} cannot reach a program of kind deepspeed"
        yield context.resolved.error(COLLECTIVES, what, "write a multiple of 60", why="DeepSpeed takes whole minutes")
    if not context.zero:
        yield from _unread(context)
        return
    if given("optimizer.name") and recipe.optimizer.name not in TYPES.values():
        names = " or ".join(dict.fromkeys(TYPES.values()))
        hint = f"choose {names}, or leave it out and describe it in the file of strategy.config"
        yield context.resolved.error(
            "optimizer.name", f"optimizer {recipe.optimizer.name} cannot be made by DeepSpeed", hint
        )
    schedule = recipe.schedule
    if not is_set(context, *SCHEDULE_KEYS):
        if given("train.steps"):
            hint = "pass what the script takes in program.args, or give a schedule, whose length it is"
            yield context.resolved.error("train.steps", "train.steps cannot reach a program of kind deepspeed", hint)
        return
    if schedule.name not in SCHEDULERS:
        hint = f"choose {', '.join(SCHEDULERS)}, or make the schedule in your script"
        yield context.resolved.error("schedule.name", f"schedule {schedule.name} cannot be made by DeepSpeed", hint)
        return
    warms = schedule.name != "constant"
    if warms and schedule.warmup_steps < SHORTEST_WARMUP:
        hint = f"set schedule.warmup_steps to {SHORTEST_WARMUP} or more, or schedule.name to constant"
        yield context.resolved.error("schedule.warmup_steps", "DeepSpeed's schedules warm up", hint)
    if schedule.name in ("linear", "cosine") and recipe.train.steps is None:
        hint = "set train.steps to the number of updates that the script makes"
        yield context.resolved.error("schedule.name", f"the schedule {schedule.name} needs its length", hint)
    if schedule.name == "linear" and schedule.min_lr_ratio:
        hint = "set schedule.min_lr_ratio to 0, or schedule.name to cosine"
        yield context.resolved.error("schedule.min_lr_ratio", "DeepSpeed's linear schedule ends at 0", hint)


def _unread(context: Context) -> Iterator[Diagnostic]:
    """Settings for a file that a script does not read, because it configures the engine in its own code."""
    for key in (each for section in CARRIED for each in keys_set_below(context, section)):
        why = f"strategy.kind is {context.recipe.strategy.kind}: the script configures DeepSpeed's engine in its code"
        hint = f"leave {key} out; or set strategy.kind to zero0 … zero3 for a script that reads {FLAG}"
        yield context.resolved.error(key, f"{key} cannot reach the program", hint, why=why)


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script, the user's words, and the file where the plan configures the engine."""
    if not context.zero:
        return own_scripts.argv(context)
    return own_scripts.argv(context, (token(FLAG, rule=GIVEN), token(Variable.RUN_DIR, f"/{FILE}", rule=GIVEN)))


def files(context: Context) -> tuple[SourcedFile, ...]:
    """DeepSpeed's file, from the recipe or with the user's as base."""
    return (config_file(context, "deepspeed"),) if context.zero else ()


def environment(context: Context) -> Iterator[SourcedVariable]:
    """What deepspeed.init_distributed reads, where a layer says it."""
    if context.resolved.given(COLLECTIVES):
        yield variable(TIMEOUT, str(context.recipe.hang.collective_seconds // 60), keys=(COLLECTIVES,))


def notices(context: Context) -> tuple[Diagnostic, ...]:
    """What the file says can be overruled in the script."""
    sections = {"optimizer": "optimizer", "schedule": "lr_scheduler"}
    return tuple(
        note(f"a script that passes {sections[section]} to deepspeed.initialize overrules {section} here")
        for section in sections
        if is_set(context, section)
    )


def read(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> list[str]:
    found = list(script_flags(argv))
    given = next((each for each in found if f"--{each.name}" == FLAG), None)
    if given is None:
        return list(argv)
    use_as_base(draft, context, next(iter(given.values), ""), given.origin)
    more = given.values[1:]  # words behind the file are the script's own
    return [word for each in found for word in (more if each is given else each.words)]


RULES: tuple[PlanRule, ...] = (problems, notices)
