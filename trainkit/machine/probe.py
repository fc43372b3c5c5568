"""Probe this machine once and give its Facts; a probe that fails becomes a note.

Probes run in a child process: a driver may hang in a call that no signal ends, and a library may crash the process
that it is loaded into. Such a child is killed, or left behind where even that is impossible, and a new one goes on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from trainkit.machine import gpus, host
from trainkit.machine.facts import Facts, TorchBuild
from trainkit.machine.gpu_locks import with_holders
from trainkit.machine.gpu_queue import first_for, line

Probe = Callable[[], Mapping[str, Any]]

# Name in Facts.notes -> what finds out a part of the facts: fields of Facts by name.
PROBES: Mapping[str, Probe] = {
    "host": host.probe_host,
    "cpu": host.probe_cpu,
    "memory": host.probe_memory,
    "numa": host.probe_numa,
    "torch": host.probe_torch,
    "packages": host.probe_packages,
    "mps": host.probe_mps,
    "scheduler": host.probe_allocations,
    # Last, because they ask drivers: when one hangs, no other probe has to be started again.
    "amd": gpus.probe_amd,
    "gpus": gpus.probe_nvidia,
}
CARD_PROBES = {name: PROBES[name] for name in ("host", "torch", "mps", "amd", "gpus")}
SECONDS = 5.0  # for one probe
# A driver without persistence mode wakes each GPU first, which takes seconds for every one of them.
LIMITS: Mapping[str, float] = {"gpus": 30.0}


def probe(
    probes: Mapping[str, Probe] = PROBES, limits: Mapping[str, float] = LIMITS, *, ticket: int | None = None
) -> Facts:
    """The facts of this machine. What a probe cannot find out is a note; neither torch nor a launcher is imported.

    limits: seconds that a probe may take, SECONDS where it is not named. ticket: the number of the asking run, which
    waits for GPUs itself: those that came later than it do not count.
    """
    found: dict[str, Any] = {"hostname": "", "cpu_cores": 1, "memory_total": 0}
    notes: dict[str, str] = {}
    for name, answer in answers(probes, lambda name: limits.get(name, SECONDS)):
        if isinstance(answer, str):
            notes[name] = answer
            continue
        notes |= answer.get("notes", {})
        found |= {key: value for key, value in answer.items() if key != "notes"}
    # One torch is built for one make of GPUs; AMD's count where it is ROCm's.
    if amd_cards := found.pop("amd", ()):
        if isinstance(build := found.get("torch"), TorchBuild) and build.hip:
            found["gpus"] = amd_cards
        else:
            notes["amd"] = f"{len(amd_cards)} AMD GPU(s) are here, and the installed torch is no ROCm build"
    facts = Facts(
        platform=sys.platform,
        machine=platform.machine(),
        python=platform.python_version(),
        executable=sys.executable,
        notes=notes,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        device_order=os.environ.get("CUDA_DEVICE_ORDER"),
        hip_devices=os.environ.get("HIP_VISIBLE_DEVICES"),
        rocr_devices=os.environ.get("ROCR_VISIBLE_DEVICES"),
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF")),
        **found,
    )
    if not facts.gpus:
        return facts
    wanted = first_for(each for each in line(os.environ) if ticket is None or each.number < ticket)
    return replace(facts, gpus=with_holders(facts.gpus, os.environ, wanted))


def answers(probes: Mapping[str, Probe], seconds: Callable[[str], float]) -> Iterator[tuple[str, Any]]:
    """Each probe's name with its answer (a mapping), or with the reason why there is none (a text), in order.

    seconds: how long a probe may take, by its name.
    """
    left = dict(probes)
    while left:
        child = _Child(left)
        try:
            for name in tuple(left):
                del left[name]
                yield name, child.answer(seconds(name))
                if not child.is_of_use:
                    break
        finally:
            child.end()


class _Child:
    """A child process that runs the probes in order."""

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        self.is_of_use = True  # False once a probe hangs or has ended the process
        self._received = b""
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the child only probes and ends
            # Forked, not spawned: a new interpreter would take longer to start than all probes take.
            self._pid = os.fork()
        if self._pid == 0:
            _run_probes(probes, writer)
        os.close(writer)

    def answer(self, seconds: float) -> Any:
        """The next probe's answer; a text where there is none."""
        deadline = time.monotonic() + seconds
        while True:
            # Eight bytes with the length of the answer, then the answer.
            size = 8 + int.from_bytes(self._received[:8], "big")
            if len(self._received) >= max(size, 8):
                body, self._received = self._received[8:size], self._received[size:]
                return pickle.loads(body)  # noqa: S301 - our own child wrote it
            if not select.select([self._reader], [], [], max(deadline - time.monotonic(), 0))[0]:
                self.is_of_use = False
                return f"no answer within {seconds:g} s"
            if not (data := os.read(self._reader, 1 << 16)):
                code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                self._pid, self.is_of_use = 0, False
                how = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
                return f"the probe {how}"
            self._received += data

    def end(self) -> None:
        """Kill and reap; a child that is inside a driver's call cannot be killed, and is not waited for."""
        os.close(self._reader)
        if not self._pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + 1.0
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)


def _run_probes(probes: Mapping[str, Probe], fd: int) -> NoReturn:
    try:
        stream = os.fdopen(fd, "wb")
        for run in probes.values():
            try:
                answer: Mapping[str, Any] | str = run()
            except Exception as error:  # noqa: BLE001 - a driver's library may raise anything; the reason becomes a fact
                answer = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            body = pickle.dumps(answer)
            stream.write(len(body).to_bytes(8, "big") + body)
            stream.flush()
    finally:
        os._exit(0)
