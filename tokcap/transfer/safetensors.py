"""safetensors, for readers that map the file. It has no ragged arrays, so the layout is flat."""

from __future__ import annotations

from typing import BinaryIO

from safetensors.numpy import save

from .flat import FlatColumns
from .schema import Level, Record, described

__all__ = ("Safetensors",)


class Safetensors:
    """A `Writer`; the records of a file are kept until it is closed, and then once more as the file's bytes."""

    def __init__(self, file: BinaryIO, by: Level) -> None:
        self._file, self._by = file, by
        self._columns = FlatColumns(by)

    def write(self, record: Record) -> None:
        self._columns.add(record)

    def abandon(self) -> None:
        return None

    def close(self) -> None:
        told = described(self._by, self._columns.records)
        self._file.write(save(dict(self._columns.arrays()), metadata={"tokcap": told}))
