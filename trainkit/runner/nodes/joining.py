"""A node's side of the roll call: report to node 0, wherever it listens and has the run's token, and wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from trainkit.errors import MachineError
from trainkit.runner.nodes.agreement import SAY_SECONDS, Report, Say, Start, ToldError, say_after
from trainkit.runner.nodes.line import MOST, Line
from trainkit.runner.nodes.token import FIRST_BYTES, NODE_0, OTHER, is_hex, is_proof, new_nonce, proof

CONNECT_SECONDS = 3.0
AGAIN_SECONDS, MOST_AGAIN, LONGER = 0.2, 2.0, 1.3  # between attempts: a thousand nodes may be waiting for one
GONE_SECONDS = 30.0  # for a node 0 that was there and has gone, to come again
ANSWER_SECONDS = 10.0  # of node 0; who says nothing at all is something else
UNREAD_SECONDS = 60.0  # without the token of a node 0 that is there: NFS shows new files late

ReadToken = Callable[[tuple[str, int]], bytes]  # that of node 0 at an address; raises OSError


class Failed(NamedTuple):
    """Why node 0 was not met at an address. met: it was there, and has gone; unread: its token cannot be read here."""

    why: str
    met: bool = False
    unread: bool = False


def join(
    mine: Report,
    leaves: Mapping[str, Any],
    where: Iterable[tuple[str, int]],
    read_token: ReadToken,
    seconds: float,
    say: Say,
    ranks: tuple[str, int] | None = None,
) -> tuple[Line, Start]:
    """Report to node 0, and wait until it lets all start. leaves: of the plan, for where node 0 has another one.

    ranks: where they are to meet, should that be known before; who is there already is another run, or this one.
    Raises MachineError when node 0's word does not come in time, or refuses the run.
    """
    places, began = [*where], time.monotonic()
    host, why, met = _address(places[0]), "", False
    pause, say_at, begun, unread = AGAIN_SECONDS, SAY_SECONDS, 0.0, float("inf")
    while (left := began + seconds - time.monotonic()) > 0:
        failed = list[Failed]()
        for place in places:
            found = _reported(mine, leaves, place, read_token, left)
            if not isinstance(found, Failed):
                return found
            failed.append(found)
            why = found.why or why
            if found.met and not met:  # it is not waited for as long as for one that starts
                met, seconds = True, min(seconds, time.monotonic() - began + GONE_SECONDS)
        passed = time.monotonic() - began
        unread = min(unread, passed) if any(each.unread for each in failed) else float("inf")
        if passed - unread > UNREAD_SECONDS:
            why = next(each.why for each in failed if each.unread)
            raise MachineError(f"{mine.name} cannot join node 0 at {host}: {why}", hint=SHARED)
        if passed >= say_at:
            say_at = say_after(say_at)
            begun = (begun or passed) if ranks is not None and _is_there(ranks) else 0.0
            already = f"the ranks of a run meet at {_address(ranks)} already" if ranks is not None and begun else ""
            if begun and passed - begun > GONE_SECONDS:
                hint = "start each node once; or wait for the end of that run"
                raise MachineError(f"{mine.name} comes too late, or is there twice: {already}", hint=hint)
            say(f"waiting for node 0 at {host}, {passed:.0f} s ({'; '.join(filter(None, (why, already)))})")
        time.sleep(pause)
        pause = min(pause * LONGER, MOST_AGAIN)
    hint = "see why it ended, on its own console" if met else "start it first"
    raise MachineError(f"node 0 was not there after {seconds:.0f} s, at {host}: {why}", hint=hint)


SHARED = "set output.root to a folder that all nodes share, and start every node with the same words in the same folder"


def _address(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def _is_there(place: tuple[str, int]) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _reported(
    mine: Report, leaves: Mapping[str, Any], place: tuple[str, int], read_token: ReadToken, seconds: float
) -> tuple[Line, Start] | Failed:
    """What came of one connection. Raises MachineError where node 0 refuses the run."""
    until = time.monotonic() + seconds
    try:
        line = Line(socket.create_connection(place, CONNECT_SECONDS))
    except OSError as error:
        return Failed((error.strerror or str(error)).lower())
    if (failed := _unproven(line, place, read_token, until)) is not None:
        line.close()
        return failed
    line.send(asdict(mine))
    met = False
    message = line.next_message(min(seconds, ANSWER_SECONDS))
    if message is not None and "leaves" in message:
        line.send({"leaves": dict(leaves)})
        message, met = line.next_message(max(0.0, until - time.monotonic())), True
    elif message is not None and "here" in message:
        message, met = line.next_message(max(0.0, until - time.monotonic())), True
    start = Start.read(message.get("start")) if message is not None else None
    if start is not None:
        return line, start
    line.close()
    if message is not None and "refused" in message:
        raise ToldError(str(message["refused"]), hint=str(message.get("hint", "")))
    if message is None:
        return Failed("it has gone" if met else "it does not answer", met)
    return Failed("another run is there" if "other" in message else "something else is there")


def _unproven(line: Line, place: tuple[str, int], read_token: ReadToken, until: float) -> Failed | None:
    """Prove to each other that both sides have the token; why not, None where they do."""
    line.most, nonce = FIRST_BYTES, new_nonce()
    line.send({"nonce": nonce})
    answer = line.next_message(min(until - time.monotonic(), ANSWER_SECONDS))
    if answer is None:
        return Failed("it does not answer")
    if not is_hex(answer.get("nonce")):
        return Failed("something else is there")
    # Only now is the file looked for: a network file system remembers for a while that there was none.
    try:
        token = read_token(place)
    except OSError as error:
        return Failed(f"its token cannot be read here: {error.filename}: {(error.strerror or '').lower()}", unread=True)
    nonces = (str(answer["nonce"]), nonce)
    if not is_proof(answer.get("proof"), token, NODE_0, nonces):
        return Failed("another run is there, or something that does not have the run's token")
    line.send({"proof": proof(token, OTHER, nonces)})
    answer = line.next_message(min(until - time.monotonic(), ANSWER_SECONDS))
    line.most = MOST
    return None if answer == {"proven": True} else Failed("it does not let this node in")
