"""The C library's heap: which tensors stay out of it, so that their memory goes back to the system once they are free.

glibc soon takes blocks of up to 32 MiB from its heap, where small blocks behind them keep it from shrinking: a process
holds hundreds of megabytes more than its tensors need (mallopt(3): the threshold no longer moves once it is set).
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)


def keep_out_of_heap(at_least: int) -> None:
    """Have the system itself give and take back each block of so many bytes or more, where glibc manages memory."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, at_least)
        # Without it the heap's free end, which no longer grows with the threshold, would come and go with each tensor.
        mallopt(_TRIM_THRESHOLD, 16 * at_least)


def trim_heap() -> None:
    """Return the heap's free pages to the system."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # which other C libraries lack
        trim(0)
