"""The arrays of stored entries, viewed where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..store.prefix import Node
from ..store.records import ID_DTYPES, LOG_PROB_DTYPES, StoredEntry
from ..store.snapshot import Entries

__all__ = ("Pieces",)

Views = tuple[npt.NDArray[Any], ...]


class Pieces:
    """Views of the arrays of nodes. They keep the files of the snapshot open: copy them, and let go.

    A slice of a view of the whole segment costs a third of a view made from bytes, and every call has three of them.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._views: dict[int, tuple[Views, Views]] = {}

    def of(self, node: Node, stored: StoredEntry) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Log-probs, the ids of the prompt's suffix, sampled ids; each of the type it is stored in."""
        head = stored.head
        start = node.body_start + node.body_length - len(stored._arrays)
        if start & 7:  # the format says that this can't be
            return stored.log_probs, stored.suffix, stored.generated
        floats, ids = self._views.get(node.segment) or self._open(node.segment)
        # The place of a type tells its size (`ID_DTYPES`); each array begins at a multiple of 8.
        kind, count = head.log_prob_dtype, head.generated
        first = start >> kind + 1
        log_probs = floats[kind][first : first + count]
        start += (count << kind + 1) + 7 & -8
        kind, count = head.suffix_dtype, head.suffix
        first = start >> kind
        suffix = ids[kind][first : first + count]
        start += (count << kind) + 7 & -8
        kind, count = head.generated_dtype, head.generated
        first = start >> kind
        return log_probs, suffix, ids[kind][first : first + count]

    def _open(self, segment: int) -> tuple[Views, Views]:
        buffers = self._entries._buffers
        assert buffers is not None  # or nothing could have been loaded
        data = buffers[segment]
        found = self._views[segment] = _typed(data, LOG_PROB_DTYPES), _typed(data, ID_DTYPES)
        return found


def _typed(data: Any, dtypes: tuple[np.dtype[Any], ...]) -> Views:
    return tuple(np.frombuffer(data, dtype, len(data) // dtype.itemsize) for dtype in dtypes)
