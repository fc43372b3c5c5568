"""The machine that the doctor's tests spoil."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared_machine import Machine

from trainkit.doctor.check import Commands


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine in good order."""
    commands = Commands({})
    yield Machine(tmp_path / "machine", commands)
    commands.close()
