"""Everything that the wizard can ask about, in its order; one module for each group."""

from __future__ import annotations

from trainkit.wizard.question import Topic
from trainkit.wizard.topics.program_and_place import COMMAND, DATA, MACHINES, PROGRAM, WHERE
from trainkit.wizard.topics.strategy import LAUNCHER, NVME_PATH, OFFLOAD, SHARDING, STRATEGY, WRAPPING
from trainkit.wizard.topics.training import BATCH, CHECKPOINTING, LENGTH, PRECISION, SAVING

TOPICS: tuple[Topic, ...] = (
    PROGRAM, COMMAND, WHERE, MACHINES, STRATEGY, SHARDING, WRAPPING, OFFLOAD, NVME_PATH, LAUNCHER, DATA, PRECISION,
    BATCH, CHECKPOINTING, LENGTH, SAVING,
)  # fmt: skip

__all__ = ["TOPICS"]
