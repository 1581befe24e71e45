"""The ragged layout of npz and safetensors: flat arrays and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .schema import ARRAYS, COLUMNS, NUMBERS, Level, Record, as_bytes

__all__ = ("FlatColumns",)

_OFFSETS = "_offsets"


class FlatColumns:
    """Records, kept column by column until the file is written."""

    def __init__(self, by: Level) -> None:
        self._kinds = COLUMNS[by]
        self._values: dict[str, list[Any]] = {name: [] for name in self._kinds}
        self.records = 0

    def add(self, record: Record) -> None:
        """Keep the next record; arrays are not copied."""
        for name, kind in self._kinds.items():
            value = record[name]
            self._values[name].append(value if kind in ARRAYS or kind in NUMBERS else as_bytes(value, kind))
        self.records += 1

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Every array of the file, by name. What it is made of is let go of on the way."""
        for name, kind in self._kinds.items():
            values = self._values.pop(name)
            if kind in NUMBERS:
                yield name, np.array(values, NUMBERS[kind])
                continue
            offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
            if kind in ARRAYS:
                yield name, np.concatenate(values) if values else np.empty(0, ARRAYS[kind])
            else:
                yield name, np.frombuffer(b"".join(values), np.uint8)
            yield name + _OFFSETS, offsets
