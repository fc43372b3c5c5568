"""The roll call before the start: the nodes of a run prove that they belong to it, and that they plan the same.

Node 0 writes a random token, readable for its user alone, into a folder that all nodes share: the run directory, or
output.root where there is none yet. It is removed when all nodes have met. The token itself is never sent: each side
shows an HMAC (RFC 2104) over two random numbers, one of each side. Then each node reports the digest of its plan.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import os
import re
import secrets
import selectors
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from trainkit.errors import MachineError
from trainkit.files import open_regular, publish
from trainkit.runner.nodes.connection import MOST, SEND_SECONDS, Connection, flush_all
from trainkit.runner.nodes.control import Neighbour
from trainkit.text import join_names, pluralize

SAY_SECONDS = 5.0  # until the first line about who is missing
MOST_DIFFERENCES = 3  # that a message names

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one node. start: as in `Place`, or the plan's name; version: of trainkit.

    digest: of the plan's leaves. The leaves are sent only on request: they are kilobytes, and nodes may be thousands.
    process: random for each process; tells a node that reconnects from two nodes with the same number.
    unfit: why this machine cannot run the plan; empty if it can. hint: what to do about that.
    """

    node: int
    host: str
    start: str
    version: str
    digest: str
    process: str = ""
    unfit: str = ""
    hint: str = ""

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Report | None:
        """The report in a message, even from another version of trainkit; None for any other message."""
        node, texts = message.get("node"), [message.get(name, "") for name in cls.__slots__[1:]]
        if not isinstance(node, int) or not message.keys() >= {"host", "start", "version"}:
            return None
        return cls(node, *texts) if all(isinstance(text, str) for text in texts) else None


def digest_of(leaves: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()


def say_after(seconds: float) -> float:
    """When to name the missing nodes again: after 5, 10, 20, 40, 80 seconds, then every minute."""
    return min(2 * seconds, seconds + 60)


class RefusedRunError(MachineError):
    """The run was refused before its start. blamed: the hosts at fault, separated by commas; empty if all are."""

    def __init__(self, why: str, *, hint: str = "", blamed: str = "") -> None:
        super().__init__(why, hint=hint)
        self.blamed = blamed


class ReportedElsewhereError(RefusedRunError):
    """Node 0 refuses the run, and reports it on its own console; this is another node."""


def refusal(first: Report, other: Report, nodes: int) -> str:
    """Why a node may not join node 0's run, whatever its plan; empty if it may."""
    if not 0 < other.node < nodes:
        return f"{other.name} is not in the plan, whose {nodes} nodes are 0 to {nodes - 1}"
    if other.version != first.version:
        return f"{other.name} has trainkit {other.version}, and {first.name} {first.version}"
    if other.unfit:
        return f"{other.name} cannot run the plan: {other.unfit}"
    return ""


def plan_differences(first: Report, planned: Mapping[str, Any], other: Report, found: Mapping[str, Any]) -> str:
    """How two plans differ that should be the same."""
    keys = [key for key in dict.fromkeys((*planned, *found)) if planned.get(key) != found.get(key)]
    # Arguments of a command, and digests, follow from the other differences and say less.
    keys.sort(key=lambda key: 2 if key.endswith("digest") else int(".argv." in key))
    shown = [f"{key} is {found.get(key, 'absent')}, and {planned.get(key, 'absent')} there" for key in keys]
    more = f", and {len(shown) - MOST_DIFFERENCES} more" if len(shown) > MOST_DIFFERENCES else ""
    return f"{other.name} has another plan than {first.name}: {'; '.join(shown[:MOST_DIFFERENCES])}{more}"


@dataclass(frozen=True, slots=True)
class Start:
    """What node 0 decides for all nodes: the run directory, and address and port at which the ranks meet."""

    run_dir: str
    attempt: int
    master: str
    port: int

    @classmethod
    def read(cls, message: object) -> Start | None:
        """The start in a message; None for any other message."""
        if not isinstance(message, dict) or message.keys() != {*cls.__slots__}:
            return None
        texts, numbers = (message["run_dir"], message["master"]), (message["attempt"], message["port"])
        fits = all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in numbers)
        return cls(**message) if fits else None

    def at(self, run_dir: str) -> Start:
        return replace(self, run_dir=run_dir)


BYTES = 32
HEX = re.compile(
    f"[0-9a-f]{{{2 * BYTES}}}"
)  # the form of nonces and proofs on the connection, and of the token in its file
FIRST_BYTES = 512  # of a message before the sender has proved that it has the token
NODE_0, OTHER = (
    "node 0",
    "other node",
)  # the side is part of the proof, so that node 0's proof, sent back to it, proves nothing


def token_path(folder: str, start: str, place: tuple[str, int]) -> str:
    """The path of a start's token. place: node 0's address and port, as the nodes know them."""
    digest = hashlib.sha256(f"{start}\n{place[0]}\n{place[1]}".encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(os.path.abspath(folder), f".token-{digest[:16]}")


@contextlib.contextmanager
def shared_token(path: str, say: Say) -> Iterator[bytes]:
    """A new token at the path, which exists while the nodes meet. Raises MachineError if it cannot be written.

    A refused or ended start leaves behind no folder that was created for it.
    """

    def remove() -> None:
        with contextlib.suppress(OSError):  # the folder has been removed
            os.unlink(path)

    folder = os.path.dirname(path)
    token = secrets.token_bytes(BYTES)
    above = [folder, *map(str, Path(folder).parents)]
    made = list(itertools.takewhile(lambda each: not os.path.lexists(each), above))
    try:
        os.makedirs(folder, exist_ok=True)
        publish(path, token.hex(), mode=0o600)
        seen = os.lstat(path).st_mode
    except OSError as error:
        what = f"the run's token, which lets other nodes in, cannot be written to {folder}: {error.strerror}"
        hint = "set output.root to a folder that you may write to, and that all nodes share"
        raise MachineError(what, hint=hint) from error
    if stat.S_IMODE(seen) & 0o077:
        say(f"warning: files in {folder} cannot be made private: whoever reads the run's token there can join")
    try:
        yield token
    except BaseException:
        remove()
        with contextlib.suppress(OSError):  # another run uses it
            for each in made:
                os.rmdir(each)
        raise
    remove()


def read_token(path: str) -> bytes:
    """The token at a path. Raises OSError, even if another user may have put the file there."""
    with os.fdopen(open_regular(path), "rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        # A file server may map all users to another number (squashing): then the folder has the same owner.
        if owner not in (os.geteuid(), os.stat(os.path.dirname(path)).st_uid):
            raise PermissionError(1, f"it belongs to another user ({owner})", path)
        text = file.read(2 * BYTES + 1).decode("ascii", "replace")
    if not HEX.fullmatch(text):
        raise OSError(22, "it is not a token", path)
    return bytes.fromhex(text)


def new_nonce() -> str:
    return secrets.token_hex(BYTES)


def is_hex(value: object) -> bool:
    """Whether a value has the form of a nonce or a proof."""
    return isinstance(value, str) and HEX.fullmatch(value) is not None


def proof(token: bytes, side: str, nonces: tuple[str, str]) -> str:
    """Shows that a side has the token. nonces: node 0's, and the other node's."""
    return hmac.new(token, "\n".join((side, *nonces)).encode(), hashlib.sha256).hexdigest()


def is_proof(value: object, token: bytes, side: str, nonces: tuple[str, str]) -> bool:
    return isinstance(value, str) and is_hex(value) and hmac.compare_digest(value, proof(token, side, nonces))


TURN_SECONDS = 0.2
LATE_SECONDS = 10.0  # for late nodes to be told that the run was refused
SEE_SECONDS = 30.0  # for all nodes to see the run directory: NFS shows new files late
SILENT_SECONDS = 10.0  # for the proof and the report on a new connection
MOST_STRANGERS = 256  # connections beyond those of the nodes; the oldest without a report are dropped first
MOST_OF_REPORT = 1 << 16  # bytes
BACKLOG = 4096
MOST_NAMED = 8
SAME_WORDS = "start each node once, all with the same command"


class Caller:
    """A connection to node 0. address: of the other side; nonces: node 0's and the caller's.

    proven: whether the caller has the run's token. report: of its node, None before it has come.
    """

    __slots__ = ("address", "line", "nonces", "proven", "report", "since")

    def __init__(self, end: socket.socket, address: str) -> None:
        self.line = Connection(end, FIRST_BYTES)
        self.address, self.nonces, self.proven = address, ("", ""), False
        self.report: Report | None = None
        self.since = time.monotonic()


class RollCall:
    """Node 0's side. leaves: of the plan, as from `assembly.comparable_leaves`. hosts: by node, if they are known."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: bytes,
        mine: Report,
        leaves: Mapping[str, Any],
        nodes: int,
        say: Say,
        hosts: Sequence[str] = (),
    ) -> None:
        self._mine, self._leaves, self._nodes, self._say, self._hosts = mine, leaves, nodes, say, hosts
        self._listeners, self._token = listeners, token
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._refused = ""  # the address of the last caller without the token
        self._strangers: dict[Caller, None] = {}  # the oldest first
        self._here: dict[int, Caller] = {}

    def wait(self, seconds: float) -> None:
        """Until all nodes have reported. Raises MachineError when one is refused, or does not come."""
        began = looked = time.monotonic()
        say_at = SAY_SECONDS
        while len(self._here) < self._nodes - 1:
            for key, _ in self._selector.select(TURN_SECONDS):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data.line.fileno() >= 0:  # it may have been dropped just before
                    self._read(key.data)
            now = time.monotonic()
            if now - looked < TURN_SECONDS:
                continue
            looked, passed = now, now - began
            for caller in [each for each in self._strangers if now - each.since > SILENT_SECONDS]:
                self._forget(caller)
            for caller in self._here.values():
                caller.line.flush()
            if passed >= say_at:
                say_at = say_after(say_at)
                self._say(f"{self._present()}, {passed:.0f} s")
            if passed > seconds:
                missing = [host for node, host in enumerate(self._hosts) if node and node not in self._here]
                hint = "see why it did not start, then start again"
                self.refuse(f"after {seconds:.0f} s {self._present()}", hint, blamed=",".join(missing))
        for listener in self._listeners:
            self._selector.unregister(listener)
        for caller in [*self._strangers]:
            self._forget(caller)

    def _present(self) -> str:
        missing = [self._name(node) for node in range(1, self._nodes) if node not in self._here]
        refused = f"; {self._refused} connected without the run's token" if self._refused else ""
        return (
            f"{len(self._here) + 1} of {self._nodes} nodes are here; waiting for {join_names(missing, most=8)}{refused}"
        )

    def _name(self, node: int) -> str:
        return f"node {node} ({self._hosts[node]})" if node < len(self._hosts) else f"node {node}"

    def _accept(self, listener: socket.socket) -> None:
        try:
            end, address = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # it has disconnected again
            if not self._strangers:
                self.refuse(f"node 0 cannot open more files: {error.strerror}", "raise the limit with ulimit -n")
            self._forget_oldest_stranger()
            return
        caller = Caller(end, str(address[0]))
        self._selector.register(caller.line, selectors.EVENT_READ, caller)
        self._strangers[caller] = None
        if len(self._strangers) + len(self._here) > self._nodes + MOST_STRANGERS:
            self._forget_oldest_stranger()

    def _forget_oldest_stranger(self) -> None:
        """The oldest one without a proof, else the oldest."""
        self._forget(next((each for each in self._strangers if not each.proven), next(iter(self._strangers))))

    def _heard(self, caller: Caller) -> list[dict[str, Any]] | None:
        """Messages of a caller that has proved that it has the token; None if it is gone, or its proof is wrong."""
        messages = caller.line.waiting_messages()
        while messages and not caller.proven:
            message = messages.pop(0)
            if not caller.nonces[0] and is_hex(nonce := message.get("nonce")):
                caller.nonces = (new_nonce(), str(nonce))
                caller.line.send({"nonce": caller.nonces[0], "proof": proof(self._token, NODE_0, caller.nonces)})
                continue
            caller.proven = bool(caller.nonces[0]) and is_proof(message.get("proof"), self._token, OTHER, caller.nonces)
            if not caller.proven:
                return None
            caller.line.most = MOST_OF_REPORT
            caller.line.send({"proven": True})
        return messages

    def _read(self, caller: Caller) -> None:
        messages = self._heard(caller)
        if messages is None:
            self._forget(caller)
        for message in messages or ():
            if caller.line.fileno() < 0:  # it was dropped for the message before
                return
            if caller.report is None:
                self._meet(caller, message)
            elif caller in self._strangers and isinstance(message.get("leaves"), dict):
                self.refuse(
                    plan_differences(self._mine, self._leaves, caller.report, message["leaves"]), SAME_WORDS, caller
                )

    def _forget(self, caller: Caller) -> None:
        if caller.nonces[0] and not caller.proven:  # before the close, after which the caller may reconnect
            self._refused = caller.address
        self._strangers.pop(caller, None)
        self._selector.unregister(caller.line)
        caller.line.close()
        if caller.report is not None and self._here.get(caller.report.node) is caller:
            self._say(f"{caller.report.name} has left")
            del self._here[caller.report.node]

    def _meet(self, caller: Caller, message: Mapping[str, Any]) -> None:
        report = Report.read(message)
        if report is None:  # an unrelated connection to this port
            self._forget(caller)
            return
        if report.start != self._mine.start:
            caller.line.send({"other": self._mine.start})
            self._forget(caller)
            return
        caller.report = report
        known = self._here.get(report.node)
        same = known is not None and known.report is not None and known.report.process == report.process != ""
        if known is not None and (same or known.line.waiting_messages() is None):
            del self._here[report.node]  # it reconnected before its disconnection was seen
            self._forget(known)
        elif known is not None or report.node == self._mine.node:
            host = self._mine.host if known is None or known.report is None else known.report.host
            self.refuse(f"{report.name} was started twice: {host} has the same number", SAME_WORDS, caller)
        if why := refusal(self._mine, report, self._nodes):
            self.refuse(why, report.hint if report.unfit else SAME_WORDS, caller, report.host if report.unfit else "")
        if report.digest != self._mine.digest:
            caller.line.most = MOST
            caller.line.send({"leaves": True})
            return
        caller.line.send({"here": True})
        del self._strangers[caller]
        self._here[report.node] = caller

    def refuse(self, why: str, hint: str, caller: Caller | None = None, blamed: str = "") -> NoReturn:
        """Tell all nodes that are here, and the caller, and raise the RefusedRunError."""
        if self._mine.unfit:  # node 0's own reason counts more: the others may be unfit for the same one
            why, hint = f"{self._mine.name} cannot run the plan: {self._mine.unfit}", self._mine.hint
            blamed = self._mine.host if len(self._here) == self._nodes - 1 else ""
        self.dismiss(why, hint, caller)
        if caller is not None and caller.report is not None:
            self._dismiss_late({"refused": why, "hint": hint}, len({*self._here, caller.report.node}))
        for each in {*self._here.values(), *self._strangers, *([caller] if caller else [])}:
            each.line.close()
        self._here, self._strangers = {}, {}
        raise RefusedRunError(why, hint=hint, blamed=blamed)

    def dismiss(self, why: str, hint: str = "", caller: Caller | None = None) -> None:
        """Tell all nodes that are here, and the caller, that there will be no run."""
        lines = [each.line for each in (*self._here.values(), *([caller] if caller else []))]
        for line in lines:
            line.send({"refused": why, "hint": hint})
        flush_all(lines, SEND_SECONDS)

    def _dismiss_late(self, refusal: Mapping[str, str], told: int) -> None:
        """Tell late nodes too: they would wait for node 0 for minutes. told: how many know already."""
        until, left = time.monotonic() + LATE_SECONDS, self._nodes - 1 - told
        while left > 0 and time.monotonic() < until:
            for key, _ in self._selector.select(TURN_SECONDS):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data.line.fileno() < 0:
                    continue
                elif key.data in self._strangers:
                    messages = self._heard(key.data)
                    if messages and (report := Report.read(messages[0])) and report.start == self._mine.start:
                        left -= 1
                        key.data.line.send(refusal)
                    if messages != []:
                        self._forget(key.data)
                else:  # they end by themselves
                    self._selector.unregister(key.fileobj)

    def neighbours(self) -> Iterator[Neighbour]:
        """The other nodes with the descriptors of their connections, which the caller owns from then on."""
        self._selector.close()
        for node, caller in sorted(self._here.items()):
            assert caller.report is not None
            yield Neighbour(node, caller.report.host, caller.line.detach())

    def start(self, what: Start) -> None:
        """Tell all nodes the start, and wait until each sees the run directory; or refuse the run."""
        for caller in self._here.values():
            caller.line.send({"start": asdict(what)})
        if unready := self._unready(time.monotonic() + SEE_SECONDS):
            more = f"; and {pluralize(len(unready) - MOST_NAMED, 'other node')}" if len(unready) > MOST_NAMED else ""
            named = "; ".join(f"{self._name(node)} {why}" for node, why in sorted(unready.items())[:MOST_NAMED])
            self.refuse(f"{named}{more}", "set output.root to a folder that all nodes share")
        for caller in self._here.values():
            caller.line.send({"go": True})
        flush_all((caller.line for caller in self._here.values()), SEND_SECONDS)

    def _unready(self, until: float) -> dict[int, str]:
        """Why nodes cannot start, by their numbers."""
        waiting, found = dict.fromkeys(self._here, "does not answer"), dict[int, str]()
        while waiting and time.monotonic() < until:
            for key, _ in self._selector.select(TURN_SECONDS):
                node, messages = key.data.report.node, key.data.line.waiting_messages()
                for message in messages or ():
                    waiting.pop(node, None)
                    if message != {"ready": True}:
                        found[node] = str(message.get("why", "does not answer"))
                if messages is None:
                    self._selector.unregister(key.data.line)
                    waiting.pop(node, None)
                    found[node] = "has left"
            for caller in self._here.values():
                caller.line.flush()
        return {**found, **waiting}
