"""The micro batches that were found on this machine: in the user's cache folder, and beside each run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit.machine.probes import memory as main_memory
from trainkit.planner.fingerprint import memory_digest
from trainkit.trainer.folders import cache_folders
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.whole_file import write_json

log = logging.getLogger("trainkit.trainer")
BESIDE = "micro-batch.json"  # in the run directory


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered for one kind of work on one machine.

    key: of the settings that decide what fits, the host, its device and memory, and torch. sizes: what may be chosen.
    path: the file; None where there is no home. runs: run directories that may know better, for what is resumed there.
    """

    key: str
    sizes: tuple[int, ...]
    path: Path | None
    runs: tuple[Path, ...]

    @classmethod
    def of(cls, settings: Settings, device: torch.device) -> Memory:
        """Of this run on this machine."""
        work = memory_digest(settings.recipe, settings.batch, settings.dtype)
        key = hashlib.sha256(json.dumps([work, *_machine(device)]).encode()).hexdigest()
        folder = next(iter(cache_folders(os.environ, "micro-batches")), None)
        # a checkpoint stands at <run directory>/checkpoints/<step>
        resumed = (settings.resume.absolute().parent.parent,) if settings.resume else ()
        path = folder / f"{key[:32]}.json" if folder else None
        return cls(key, settings.batch.search, path, (settings.run_dir, *resumed))

    def recall(self) -> int | None:
        """The micro batch, as the run itself has it, the run that it goes on from, or the cache."""
        files = [*(folder / BESIDE for folder in self.runs), *((self.path,) if self.path else ())]
        return next((micro for file in files if (micro := self._read(file)) is not None), None)

    def _read(self, file: Path) -> int | None:
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError):  # nothing there, or a torn file: it is searched for again
            return None
        known = isinstance(content, dict) and content.get("key") == self.key and content.get("micro") in self.sizes
        return int(content["micro"]) if known else None

    def keep(self, micro: int, record: Mapping[str, Any], world: World) -> None:
        """Write it down, once on each machine and once beside the run. A full disk costs a warning, not the run."""
        files = [self.path] if self.path and world.local_rank == 0 else []
        files += [self.runs[0] / BESIDE] if world.rank == 0 else []
        for file in [file for file in files if self._read(file) != micro]:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"key": self.key, "micro": micro, "found": record})
            except OSError as error:
                log.warning("%s cannot be written, the micro batch is searched for again: %s", file, error.strerror)


def _machine(device: torch.device) -> tuple[str, str, int, str]:
    """Host, device, its memory in bytes, and torch's version."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return platform.node(), card.name, card.total_memory, torch.__version__
    return platform.node(), device.type, main_memory.probe()["memory_total"] or 0, torch.__version__
