"""What NVML says of the card that is proven."""

from __future__ import annotations

from typing import Any


def cards() -> list[str]:
    """UUIDs in PCI order; none where there is no driver, or no library to ask it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, no driver, a broken one: there is no card to prove anything on
        return []
    return [text(pynvml.nvmlDeviceGetUUID(handle(index))) for index in range(pynvml.nvmlDeviceGetCount())]


def handle(card: int | str) -> Any:
    """NVML's handle of a card, by index or UUID."""
    import pynvml

    pynvml.nvmlInit()
    if isinstance(card, int):
        return pynvml.nvmlDeviceGetHandleByIndex(card)
    return pynvml.nvmlDeviceGetHandleByUUID(card.encode())


def used(card: int | str) -> int:
    """Bytes that are occupied on a card, without what the driver keeps for itself."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle(card), pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError:  # a driver before 510 counts it in
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle(card)).used)


def name(card: int | str) -> str:
    """What the driver calls a card."""
    import pynvml

    return text(pynvml.nvmlDeviceGetName(handle(card)))


def driver() -> str:
    """The driver's version."""
    import pynvml

    pynvml.nvmlInit()
    return text(pynvml.nvmlSystemGetDriverVersion())


def total(card: int | str) -> int:
    """Bytes of a card."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(handle(card)).total)


def text(answer: Any) -> str:
    """Older libraries answer in bytes."""
    return answer.decode() if isinstance(answer, bytes) else str(answer)
