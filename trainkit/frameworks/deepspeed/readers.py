"""Who reads DeepSpeed's file, and what each program needs in it: a rule for each field and program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

from trainkit.frameworks.base.fields import Field, said, same
from trainkit.plan.context import Context

OPTIMIZER_KEYS = tuple(f"optimizer.{name}" for name in ("name", "lr", "weight_decay", "beta1", "beta2", "eps"))
SCHEDULE_KEYS = tuple(f"schedule.{name}" for name in ("name", "warmup_steps", "min_lr_ratio"))

Reader = Literal["builtin", "hf", "deepspeed", "accelerate"]  # kinds of programs


class Rule(Enum):
    """What becomes of a field in the file of one program. Where nothing else is said, an "auto" is filled."""

    ALWAYS = "written; a user's file that says otherwise is an error"
    KEPT = "written where the user's file is silent; what it says counts unless a layer of the recipe says otherwise"
    TUNED = "written where the user's file is silent; what it says always counts, for it decides speed alone"
    OURS = "as SAID beside a user's file; without one as ALWAYS"
    COMPARED = "never written; a user's file that says otherwise is an error"
    SAID = "left to the user's file, or to DeepSpeed's default, unless a layer of the recipe says it"
    FILLED = "as SAID, and the program replaces an auto by itself where no layer says it"
    ASKED = "as FILLED beside a user's file; without one as SAID, and written as auto where no layer says it"
    TOLD = "as AGREED beside a user's file; without one as ASKED"
    STAYING = "as SAID, and an auto stays: the program replaces it by what it is told by itself"
    AGREED = "never written, and an auto stays: the program is told by itself; a file that says otherwise is an error"
    MADE = "as ALWAYS or KEPT where layers describe the schedule or optimizer for DeepSpeed to make, else as OWN"
    OWN = "the user's file alone says it"
    LEFT = "as OWN, and the program replaces an auto by itself"


AUTO_STAYS = (Rule.FILLED, Rule.ASKED, Rule.TOLD, Rule.STAYING, Rule.AGREED, Rule.LEFT)
# With which a setting of the recipe reaches the program.
REACHES = (Rule.ALWAYS, Rule.KEPT, Rule.OURS, Rule.SAID, Rule.MADE)


class Rules(NamedTuple):
    """The rule for each kind of program that reads the file."""

    builtin: Rule
    hf: Rule  # transformers, integrations/deepspeed.py: HfTrainerDeepSpeedConfig
    deepspeed: Rule  # a script that calls deepspeed.initialize
    accelerate: Rule  # accelerate, accelerator.py: _prepare_deepspeed


EVERYWHERE: Final = Rules(*(Rule.ALWAYS,) * 4)
# A rule may differ by program, for each fills and compares other keys of the same file by itself.
# With Accelerator() the batch is that of the script's DataLoader.
BATCH: Final = Rules(Rule.ALWAYS, Rule.ASKED, Rule.SAID, Rule.ASKED)
CLIPPING: Final = Rules(Rule.ALWAYS, Rule.TOLD, Rule.SAID, Rule.ASKED)
FORMAT: Final = Rules(Rule.ALWAYS, Rule.TOLD, Rule.SAID, Rule.FILLED)
# accelerate's own where there is no file (utils/dataclasses.py: set_mixed_precision)
CASTING: Final = Rules(Rule.OWN, Rule.TUNED, Rule.OWN, Rule.TUNED)
BUCKET: Final = Rules(Rule.OURS, Rule.FILLED, Rule.SAID, Rule.FILLED)
OVERLAP: Final = Rules(Rule.OURS, Rule.SAID, Rule.SAID, Rule.SAID)
OFFLOAD: Final = Rules(Rule.ALWAYS, Rule.SAID, Rule.SAID, Rule.SAID)
GATHERING: Final = Rules(Rule.KEPT, Rule.FILLED, Rule.SAID, Rule.FILLED)
WIDTH: Final = Rules(Rule.TUNED, Rule.LEFT, Rule.OWN, Rule.LEFT)
# What is set to suit the built-in trainer; another program has DeepSpeed's default.
BUILTIN: Final = Rules(Rule.TUNED, Rule.OWN, Rule.OWN, Rule.OWN)
REQUIRED: Final = Rules(Rule.ALWAYS, Rule.OWN, Rule.OWN, Rule.OWN)
UNTESTED: Final = Rules(Rule.TUNED, Rule.OWN, Rule.SAID, Rule.OWN)
ENGINE: Final = Rules(Rule.OWN, Rule.OWN, Rule.SAID, Rule.OWN)
# The built-in trainer and a script on Accelerator() make optimizer and schedule themselves; Trainer takes what the file
# describes in place of its own.
TYPE: Final = Rules(Rule.COMPARED, Rule.OWN, Rule.MADE, Rule.OWN)
ARGUMENT: Final = Rules(Rule.COMPARED, Rule.AGREED, Rule.SAID, Rule.LEFT)
MOMENTS: Final = Rules(Rule.COMPARED, Rule.AGREED, Rule.SAID, Rule.OWN)
MOMENTUM: Final = Rules(Rule.COMPARED, Rule.OWN, Rule.SAID, Rule.OWN)
SWITCH: Final = Rules(Rule.COMPARED, Rule.OWN, Rule.SAID, Rule.OWN)
UNUSED: Final = Rules(Rule.COMPARED, Rule.OWN, Rule.OWN, Rule.OWN)
LENGTH: Final = Rules(Rule.COMPARED, Rule.AGREED, Rule.MADE, Rule.LEFT)
START: Final = Rules(Rule.COMPARED, Rule.LEFT, Rule.MADE, Rule.LEFT)
SHAPE: Final = Rules(Rule.COMPARED, Rule.OWN, Rule.MADE, Rule.OWN)


@dataclass(frozen=True, slots=True)
class Row(Field):
    """A field of DeepSpeed's file.

    rules: when it is written, for each program. stages: of ZeRO, at which DeepSpeed has it.
    written: where it says no, the value is only compared with that of the user's file, or put in place of an "auto".
    """

    rules: Rules = EVERYWHERE
    stages: tuple[int, ...] = (1, 2, 3)
    written: Callable[[Context], bool] = lambda context: True


def same_row(name: str, key: str, rules: Rules, **more: Any) -> Row:
    """A field whose value is that of a setting."""
    encode, decode = same(key)
    return Row(name, (key,), encode, decode, rules=rules, **more)


def rule_of(row: Row, reader: Reader, context: Context, *, whole: bool = False) -> Rule:
    """The rule for a program. whole: for a file that says what the recipe's defaults mean too, as an export does."""
    rule: Rule = getattr(row.rules, reader)
    if whole and rule is Rule.SAID and row.rules.builtin in (Rule.ALWAYS, Rule.KEPT, Rule.OURS):
        return Rule.KEPT if row.rules.builtin is Rule.OURS else row.rules.builtin
    if rule is not Rule.MADE:
        return rule
    section = row.name.partition(".")[0]
    if not is_made(context, section) or not row.written(context):
        return Rule.OWN
    return Rule.ALWAYS if section == "scheduler" else Rule.KEPT


def is_made(context: Context, section: str) -> bool:
    """Whether layers describe the section's object, for DeepSpeed to make; a constant rate needs no schedule."""
    if section == "optimizer":
        return said(context, *OPTIMIZER_KEYS)
    return said(context, *SCHEDULE_KEYS) and context.recipe.schedule.name != "constant"
