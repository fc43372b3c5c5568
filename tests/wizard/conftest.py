"""Machines that do not exist, and sessions of the wizard on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.file_system import FileSystem
from trainkit.cli.pipeline import look_at_data
from trainkit.machine.facts import Facts, Gpu
from trainkit.wizard.question import Base, View
from trainkit.wizard.session import Session, read_base

GIGABYTE = 1024**3
PACKAGES = {
    "torch": "2.13.0",
    "numpy": "2.4.0",
    "safetensors": "0.8.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "transformers": "5.23.0",
}
KINDS = {
    "A100": ("NVIDIA A100", 80, (8, 0)),
    "4090": ("NVIDIA RTX 4090", 24, (8, 9)),
    "V100": ("Tesla V100", 16, (7, 0)),
    "T4": ("Tesla T4", 15, (7, 5)),
    "1660": ("NVIDIA GeForce GTX 1660", 6, (7, 5)),
    "P100": ("Tesla P100", 16, (6, 0)),
}
Machine = Callable[..., Facts]
Start = Callable[..., Session]


def machine_of(count: int = 0, kind: str = "A100", **more: Any) -> Facts:
    """A machine with so many cards of one kind."""
    name, memory, capability = KINDS[kind]
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index:x}{index:07x}-1111-2222-3333-444444444444",
            name=name,
            memory_total=memory * GIGABYTE,
            memory_free=memory * GIGABYTE,
            compute_capability=capability,
        )
        for index in range(count)
    )
    return Facts(
        platform="linux",
        machine="x86_64",
        hostname="box",
        python="3.11.7",
        executable=sys.executable,
        cpu_cores=16,
        memory_total=64 * GIGABYTE,
        gpus=gpus,
        packages=more.pop("packages", PACKAGES),
        **more,
    )


@pytest.fixture
def machine() -> Machine:
    return machine_of


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A session on a machine, with settings given, from a recipe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where no data lie prepared

    def begin(facts: Facts, given: Mapping[str, Any] | None = None, base: str = "") -> Session:
        (tmp_path / "train.py").touch()
        disk = FileSystem()
        from_recipe = read_base(base, base, disk, str(tmp_path), {}) if base else Base()
        return Session(View(lambda: facts, disk, str(tmp_path), from_recipe, given or {}, look=look_at_data))

    return begin


def taken(session: Session, typed: str) -> Session:
    """The session after an answer."""
    outcome = session.answer(typed)
    assert isinstance(outcome, Session), (session.question, outcome)
    return outcome


def usual(session: Session, topic: str) -> str:
    """What is typed where a test says nothing: pretraining, which is asked the most, and else the default."""
    return "pretrain" if topic == "program" and not session.view.base.path else ""


def answered(session: Session, **typed: str) -> tuple[Session, list[str]]:
    """Answer every question, with what is typed for its topic or by `usual`; also the topics in order."""
    topics = []
    while (question := session.question) is not None:
        topics.append(question.topic)
        session = taken(session, typed.get(question.topic, usual(session, question.topic)))
    assert typed.keys() <= set(topics)
    return session, topics
