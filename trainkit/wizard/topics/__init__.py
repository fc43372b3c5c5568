"""Everything that the wizard can ask about, in its order."""

from __future__ import annotations

from trainkit.wizard.question import Topic
from trainkit.wizard.topics import program_and_place as place
from trainkit.wizard.topics import strategy_and_training as training

TOPICS: tuple[Topic, ...] = (
    place.PROGRAM, place.COMMAND, place.WHERE, place.MACHINES, training.STRATEGY, training.SHARDING, training.WRAPPING,
    training.OFFLOAD, training.NVME_PATH, training.LAUNCHER, place.DATA, training.PRECISION, training.BATCH,
    training.CHECKPOINTING, training.LENGTH, training.SAVING,
)  # fmt: skip
