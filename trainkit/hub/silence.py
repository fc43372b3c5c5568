"""A bound on waiting for a Hub that says nothing."""

from __future__ import annotations

from typing import Any

_LIMITED = ("connect", "read", "write", "pool")  # what httpx waits for


def end_silence(seconds: float) -> None:
    """Have the library give up on a Hub that is reached and says nothing (huggingface_hub's client waits for ever)."""
    try:
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils._http import default_client_factory
    except ImportError:  # before 1.0, which sends by another HTTP library
        return

    def bound(request: Any) -> None:  # listings ask for no limit of their own, which would win over the client's
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: limits.get(name) or seconds for name in _LIMITED}

    def client() -> Any:
        made = default_client_factory()
        hooks = made.event_hooks
        made.event_hooks = {**hooks, "request": [*hooks["request"], bound]}
        return made

    set_client_factory(client)
