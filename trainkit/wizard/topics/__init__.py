"""Everything that the wizard can ask about, in its order."""

from __future__ import annotations

from trainkit.wizard.question import Topic
from trainkit.wizard.topics.data import DATA
from trainkit.wizard.topics.devices import MACHINES, WHERE
from trainkit.wizard.topics.program import COMMAND, PROGRAM
from trainkit.wizard.topics.strategy import LAUNCHER, NVME_PATH, OFFLOAD, SHARDING, STRATEGY, WRAPPING
from trainkit.wizard.topics.training import BATCH, CHECKPOINTING, LENGTH, PRECISION, SAVING

TOPICS: tuple[Topic, ...] = (
    PROGRAM, COMMAND, WHERE, MACHINES, STRATEGY, SHARDING, WRAPPING, OFFLOAD, NVME_PATH, LAUNCHER, DATA, PRECISION,
    BATCH, CHECKPOINTING, LENGTH, SAVING,
)  # fmt: skip
