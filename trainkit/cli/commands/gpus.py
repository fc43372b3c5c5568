"""`trainkit gpus`: the cards of this machine, who is on them, and which run holds them."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Annotated

import typer

from trainkit.cli.options import Json, On

EVERY_SECONDS = 1.0
WIDEST = 140


def gpus(
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show them anew every second, until Ctrl-C.")] = False,
    machine: On = None,
) -> None:
    """Show the cards: memory, use, processes and their owners, and which trainkit run holds each.

    Without a card it says why. Index and UUID are what devices.select takes.

    Example: trainkit gpus

    Example: trainkit gpus --watch
    """
    from trainkit.errors import UsageError

    if watch and machine is not None:
        raise UsageError("--watch and --on exclude one another", hint="a file or a profile does not change")
    if not watch:
        sys.stdout.write(_page(machine, as_json=as_json))
        return
    try:
        if sys.stdout.isatty() and not as_json:
            _live()
        while True:
            sys.stdout.write(_page(None, as_json=as_json) + ("" if as_json else "\n"))
            sys.stdout.flush()
            time.sleep(EVERY_SECONDS)
    except KeyboardInterrupt:  # the way to end it
        return


def _page(machine: str | None, *, as_json: bool) -> str:
    from trainkit.cli.card_table import render
    from trainkit.cli.machines import machine_facts
    from trainkit.machine.probe import CARD_PROBES, probe

    facts = probe(CARD_PROBES) if machine is None else machine_facts(machine)
    if not as_json:
        return render(facts, min(shutil.get_terminal_size().columns, WIDEST))
    told = facts.to_json()
    names = ("facts_version", "hostname", "gpus", "mps", "driver", "cuda_driver", "notes", "visible_devices")
    return json.dumps({name: told[name] for name in names}) + "\n"


def _live() -> None:
    """On a terminal the page is drawn over itself."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(Text(_page(None, as_json=False).rstrip("\n")), refresh=True)
            time.sleep(EVERY_SECONDS)
