"""Node 0 of a run of hundreds of nodes, as the real processes that it is; the others only speak the protocol."""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import RUN_HANDMADE, make_plan, of_nodes

import trainkit
from trainkit.files import read_json
from trainkit.runner.nodes import roll_call
from trainkit.runner.nodes.assembly import comparable_leaves
from trainkit.runner.nodes.connection import Connection
from trainkit.runner.nodes.roll_call import Report, digest_of
from trainkit.runner.rendezvous import free_port
from trainkit.runner.report.exit_status import Verdict

NODES, FILES = 600, 512
SECONDS = 60.0
NONCE = 64 * "0"
PROGRAM = ("sh", "-c", "ulimit -n; exec sleep 60")
FAILED = Verdict(7, "program", "rank 17 exited with code 7", 17)


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process holds the other ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * NODES:
        pytest.skip(f"a process may have {before[1]} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * NODES), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Others:
    """All nodes but the first."""

    def __init__(self, port: int, digest: str, folder: str) -> None:
        self.lines: dict[int, Connection] = {}
        self.heard: dict[int, dict[str, Any]] = {}
        self._selector = selectors.DefaultSelector()
        for node in range(1, NODES):
            line = self.lines[node] = self._let_in(Connection(self._connected(port)), folder, port)
            self._selector.register(line, selectors.EVENT_READ, node)
            line.send(asdict(Report(node, f"tk{node}", "handmade", trainkit.__version__, digest, str(node))))

    def _let_in(self, line: Connection, folder: str, port: int) -> Connection:
        """The line, once it has proved that it has the token."""
        line.send({"nonce": NONCE})
        answer = line.next_message(SECONDS)
        assert answer is not None
        found = roll_call.read_token(roll_call.token_path(folder, "handmade", ("127.0.0.1", port)))
        line.send({"proof": roll_call.proof(found, roll_call.OTHER, (answer["nonce"], NONCE))})
        assert line.next_message(SECONDS) == {"proven": True}
        return line

    def _connected(self, port: int) -> socket.socket:
        until = time.monotonic() + SECONDS
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), SECONDS)
            except ConnectionRefusedError:
                assert time.monotonic() < until, "node 0 did not come"
                time.sleep(0.1)

    def until_all(self, word: str, answer: dict[str, object] | None = None) -> None:
        """Wait until all have heard a word, and answer it."""
        missing, until = set(self.lines), time.monotonic() + SECONDS
        while missing:
            assert time.monotonic() < until, f"{len(missing)} nodes have not heard {word!r}"
            for key, _ in self._selector.select(0.2):
                for message in self.lines[key.data].waiting_messages() or ():
                    self.heard[key.data] = message
                    if word in message:
                        missing.discard(key.data)
                        if answer:
                            self.lines[key.data].send(answer)

    def close(self) -> None:
        """All leave."""
        self._selector.close()
        for line in self.lines.values():
            line.close()


def eventually(what: Callable[[], Any]) -> Any:
    """What it gives once it gives something."""
    until = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


@pytest.mark.usefixtures("many_files")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not show a process's files")
def test_600_nodes_are_one_run_where_512_files_may_be_open(tmp_path: Path) -> None:
    port = free_port()
    wanted = {"program": PROGRAM, "output_root": str(tmp_path / "runs"), "grace": 1.0}
    plan = of_nodes(make_plan(**wanted), NODES, f"127.0.0.1:{port}")  # type: ignore[arg-type]
    words = json.dumps({**wanted, "nodes": NODES, "rendezvous": plan.rendezvous})
    # The soft limit; the hard one stays as it is.
    argv = ["sh", "-c", f'ulimit -S -n {FILES} && exec "$@"', "sh", sys.executable, str(RUN_HANDMADE), words]
    node_zero = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment())
    others = None
    try:
        others = Others(port + 1, digest_of(comparable_leaves(plan)), plan.output_root)
        others.until_all("start", {"ready": True})
        others.until_all("go")
        run = next((tmp_path / "runs" / "handmade").iterdir())
        guardian = eventually(lambda: (read_json(run / "status.json").get("pids") or {}).get("guardian"))
        assert len([*Path(f"/proc/{guardian}/fd").iterdir()]) >= NODES
        log = run / "attempts" / "1" / "logs" / "rank-0.out"
        assert eventually(lambda: log.exists() and log.read_text()) == f"{FILES}\n"
        others.lines[17].send({"ended": FAILED._asdict()})
        del others.heard[17]
        for node in others.lines:
            if node != 17:
                others.lines[node].send({"ended": Verdict(0)._asdict(), "consequence": True})
        others.until_all("verdict")
        assert {each["verdict"]["why"] for each in others.heard.values()} == {"rank 17 (tk17) exited with code 7"}
        assert node_zero.wait(SECONDS) == 7
        assert node_zero.stderr is not None
        assert "rank 17 (tk17) exited with code 7" in node_zero.stderr.read()
    finally:
        if others:
            others.close()
        node_zero.kill()
        node_zero.wait()


def environment() -> dict[str, str]:
    """Of node 0: no scheduler's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TRAINKIT_"))}
    return {**kept, "PYTHONPATH": str(Path(trainkit.__file__).parents[1])}


def test_too_low_a_hard_limit_is_said_before_anybody_waits(tmp_path: Path) -> None:
    words = json.dumps({"program": PROGRAM, "output_root": "runs", "nodes": NODES, "rendezvous": "127.0.0.1:2"})
    argv = ["sh", "-c", f'ulimit -n {FILES} && exec "$@"', "sh", sys.executable, str(RUN_HANDMADE), words]
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=60, check=False
    )
    assert done.returncode == 4
    assert (
        f"node 0 of {NODES} nodes needs 1112 open files, for a connection to each, and may have {FILES}" in done.stderr
    )
    assert not (tmp_path / "runs").exists()
