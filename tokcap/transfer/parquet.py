"""Parquet through pyarrow: a row group is written as soon as it is full."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np

from .schema import ARRAYS, COLUMNS, Kind, Level, Record, described, json_text, plain_text, weight

__all__ = ("Parquet",)

# It has no types.
pa: Any = import_module("pyarrow")
pq: Any = import_module("pyarrow.parquet")

_ROW_GROUP_BYTES = 64 << 20
_TYPES: dict[Kind, Any] = {
    "str": pa.string(),
    "json": pa.string(),
    "bytes": pa.binary(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "int32[]": pa.list_(pa.int32()),
    "int64[]": pa.list_(pa.int64()),
    "float64[]": pa.list_(pa.float64()),
    "bool[]": pa.list_(pa.bool_()),
}


class Parquet:
    """A `Writer`; what is in memory is one row group."""

    def __init__(self, file: BinaryIO, by: Level, *, row_group_bytes: int = _ROW_GROUP_BYTES) -> None:
        self._by, self._most = by, row_group_bytes
        kinds = COLUMNS[by]
        self._schema = pa.schema(
            [pa.field(name, _TYPES[kind], nullable=False) for name, kind in kinds.items()],
            metadata={"tokcap": described(by)},
        )
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Record] = []
        self._bytes = 0

    def write(self, record: Record) -> None:
        self._rows.append(record)
        self._bytes += weight(record, self._by)
        if self._bytes >= self._most:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        self._rows = []
        with contextlib.suppress(Exception):  # whatever the disk says: it would say so again when this is collected
            self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [_column([row[name] for row in self._rows], kind) for name, kind in COLUMNS[self._by].items()]
            table = pa.Table.from_arrays(columns, schema=self._schema)
            self._writer.write_table(table, row_group_size=len(self._rows))
        self._rows, self._bytes = [], 0


def _column(values: list[Any], kind: Kind) -> Any:
    if kind in ARRAYS:
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), from_pandas=False))
    if kind == "json":
        values = [json_text(value) for value in values]
    elif kind == "str":
        values = [plain_text(value) for value in values]
    elif kind == "float64":
        return pa.array(np.array(values, np.float64), from_pandas=False)
    return pa.array(values, _TYPES[kind])
