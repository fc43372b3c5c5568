"""What can be imported: one module for each kind of source, listed in FORMATS, satisfying the Format protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainkit.frameworks.accelerate import importer as accelerate
from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.frameworks.base.foreign_file import ForeignFile
from trainkit.frameworks.deepspeed import importer as deepspeed


class Format(Protocol):
    """What a module for files of one kind offers; both functions are pure."""

    def recognises(self, tree: Mapping[str, Any]) -> bool:
        """Whether a file that holds this mapping is of the kind."""

    def read(self, draft: Draft, context: ImportContext, source: ForeignFile) -> None:
        """Settings, remarks and problems out of the file."""


FORMATS: dict[str, Format] = {"accelerate": accelerate, "deepspeed": deepspeed}
