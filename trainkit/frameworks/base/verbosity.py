"""How much libraries say, which they read from the environment: one level on main ranks, another on the rest."""

from __future__ import annotations

from trainkit.plan.context import Context
from trainkit.plan.provenance import SourcedVariable, Token, token, variable

LIBRARIES = ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY")


def wrapper(context: Context, names: tuple[str, ...] = LIBRARIES) -> tuple[Token, ...]:
    """The level of the libraries' log lines on the ranks that are not a main one."""
    keys = ("logging.replica_level", "logging.each_node")
    if not _given(context):
        return ()
    logging = context.recipe.logging
    main = "each-node" if logging.each_node else "one"
    settings = (word for name in names for word in ("--replica-env", f"{name}={logging.replica_level}"))
    return tuple(token(word, keys=keys) for word in ("--main", main, *settings))


def environment(context: Context, names: tuple[str, ...] = LIBRARIES) -> tuple[SourcedVariable, ...]:
    """The level of the main ranks."""
    level, key = context.recipe.logging.level, "logging.level"
    if not _given(context):
        return ()
    return tuple(variable(name, level, keys=(key,), rule="the level of the main ranks") for name in names)


def _given(context: Context) -> bool:
    names = ("level", "replica_level", "each_node")
    return any(context.resolved.given(f"logging.{name}") for name in names)
