"""Weights of transformers from a local folder: what the model wants and the folder lacks, or the reverse, is said."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from trainkit.errors import TrainingError
from trainkit.trainer.models.model import Remarks

_SHOWN = 3  # names in a message


def read_weights(maker: Any, folder: str, config: Any, attention: str | None) -> tuple[Any, Remarks]:
    """The model with a folder's weights, and what is to be said of them.

    A new head for another task is news; anything else that the folder does not give, or the model does not take, is a
    warning. TrainingError where a weight has another size than the model's.
    """
    inner, found = maker.from_pretrained(
        folder,
        config=config,
        attn_implementation=attention,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # which only lets us name them
    )
    # Until 4.57 the names alone, then with both sizes.
    odd = sorted(each if isinstance(each, str) else each[0] for each in found["mismatched_keys"])
    if odd:
        size = tuple(inner.state_dict()[odd[0]].shape)
        others = f", and so have {len(odd) - 1} more" if odd[1:] else ""
        raise TrainingError(
            f"model.path: {odd[0]} has another size in {folder} than {size}, which the model needs{others}",
            hint="the folder's own sizes hold: leave them out of model.config",
        )
    missing, unused = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    return inner, tuple(
        (_level(inner, names), f"model.path: {_count(names)} {fate}: {_listed(names)}")
        for names, fate in (
            (missing, f"not in {folder} and drawn at random"),
            (unused, f"in {folder} and not in the model"),
        )
        if names
    )


def _level(inner: Any, names: Iterable[str]) -> int:
    """News where only the head of another task is concerned, else a warning."""
    same_task = type(inner).__name__ in (inner.config.architectures or ())
    in_the_body = any(name.startswith(f"{inner.base_model_prefix}.") for name in names)
    return logging.WARNING if same_task or in_the_body else logging.INFO


def _count(names: list[str]) -> str:
    return "1 weight is" if len(names) == 1 else f"{len(names)} weights are"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if names[_SHOWN:] else "")
