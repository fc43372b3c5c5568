"""Token ids that are in a table already: whole columns as arrays, without an object for each number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainkit.data.encode import IGNORE_INDEX


class TokenIds(NamedTuple):
    """The ids of rows, end to end, and which of them are learned. sizes: of each row, 0 where it is skipped."""

    ids: NDArray[np.uint32]
    learned: NDArray[np.bool_]
    sizes: NDArray[np.int64]


def token_ids(batch: Any, columns: Mapping[str, str], *, skip_empty: bool) -> TokenIds | None:
    """The ids of a record batch, by the columns of `ids` and `labels`. None where any row of it may be wrong."""
    found = _lists(batch, columns["input_ids"])
    if found is None:
        return None
    ids, sizes = found
    if (not skip_empty and not sizes.all()) or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**32):
        return None
    learned = np.ones(len(ids), dtype=np.bool_)
    if "labels" in columns:
        targets = _lists(batch, columns["labels"])
        if targets is None or not np.array_equal(targets[1], sizes):
            return None
        learned = targets[0] != IGNORE_INDEX
        if not np.array_equal(targets[0][learned], ids[learned]):
            return None
    elif "labels" in {*batch.schema.names} - {*columns.values()}:  # and not in the first row
        return None
    return TokenIds(ids.astype(np.uint32), learned, sizes)


def _lists(batch: Any, column: str) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """The numbers in the lists of a column, end to end, and how many are in each; None where not all are integers."""
    import pyarrow
    import pyarrow.compute

    if column not in batch.schema.names:  # a part of another one
        return None
    lists = batch.column(column)
    kind = lists.type
    if not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        return None
    if not pyarrow.types.is_integer(kind.value_type):
        return None
    values = lists.flatten()
    if values.null_count:
        return None
    lengths = pyarrow.compute.list_value_length(lists).fill_null(0)
    return values.to_numpy(), lengths.to_numpy().astype(np.int64)
