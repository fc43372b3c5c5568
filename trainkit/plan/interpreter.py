"""How a plan starts a Python module: with the interpreter that plans, and the working folder not in its way."""

from __future__ import annotations

from trainkit.plan.context import Context
from trainkit.plan.provenance import Token, token

INTERPRETER = "the interpreter that plans is the interpreter that runs"
SAFE_PATH = "a logging.py or json.py in the working folder must not be taken for the standard library's"
OWN_INTERPRETER = "the program brings its own interpreter, so the command works with and without the wrapper"


def module(context: Context, name: str, *, keys: tuple[str, ...] = (), rule: str = "") -> tuple[Token, ...]:
    """The words `python -P -m NAME`; keys and rule say what made the name."""
    return (
        token(context.facts.executable, rule=INTERPRETER),
        token("-P", rule=SAFE_PATH),
        token("-m", rule=INTERPRETER),
        token(name, keys=keys, rule=rule),
    )
