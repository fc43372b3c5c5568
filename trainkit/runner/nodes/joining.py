"""A node's side of the roll call: report to node 0, wherever it listens, and wait for its word."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from trainkit.errors import MachineError
from trainkit.runner.nodes.agreement import SAY_SECONDS, Report, Say, Start, ToldError, say_after
from trainkit.runner.nodes.line import Line

CONNECT_SECONDS = 3.0
AGAIN_SECONDS, MOST_AGAIN, LONGER = 0.2, 2.0, 1.3  # between attempts: a thousand nodes may be waiting for one
GONE_SECONDS = 30.0  # for a node 0 that was there and has gone, to come again
ANSWER_SECONDS = 10.0  # of node 0; who says nothing at all is something else


class Failed(NamedTuple):
    """Why node 0 was not met at an address."""

    why: str
    met: bool = False  # it was there, and has gone


def join(
    mine: Report,
    leaves: Mapping[str, Any],
    where: Iterable[tuple[str, int]],
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
    pause, say_at, begun = AGAIN_SECONDS, SAY_SECONDS, 0.0
    while (left := began + seconds - time.monotonic()) > 0:
        for place in places:
            found = _reported(mine, leaves, place, left)
            if not isinstance(found, Failed):
                return found
            why = found.why or why
            if found.met and not met:  # it is not waited for as long as for one that starts
                met, seconds = True, min(seconds, time.monotonic() - began + GONE_SECONDS)
        passed = time.monotonic() - began
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
    mine: Report, leaves: Mapping[str, Any], place: tuple[str, int], seconds: float
) -> tuple[Line, Start] | Failed:
    """What came of one connection. Raises MachineError where node 0 refuses the run."""
    until = time.monotonic() + seconds
    try:
        line = Line(socket.create_connection(place, CONNECT_SECONDS))
    except OSError as error:
        return Failed((error.strerror or str(error)).lower())
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
