"""JSON lines: one record a line, written as it comes."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import math
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from .schema import COLUMNS, SCHEMA_VERSION, Kind, Level, Record, json_text

__all__ = ("JsonLines",)


class JsonLines:
    """A `Writer`. compressed: gzip, without a time in it, so that the same records give the same bytes."""

    def __init__(self, file: BinaryIO, by: Level, *, compressed: bool = False) -> None:
        self._columns = COLUMNS[by]
        self._head = f'{{"schema":"tokcap/{by}/{SCHEMA_VERSION}"'.encode()
        self._gzip = gzip.GzipFile("", "wb", 6, file, mtime=0) if compressed else None
        self._file: BinaryIO = file if self._gzip is None else cast(BinaryIO, self._gzip)

    def write(self, record: Record) -> None:
        line = io.BytesIO()
        line.write(self._head)
        for name, kind in self._columns.items():
            line.write(b',"%s":' % name.encode())
            line.write(_encoded(record[name], kind))
        line.write(b"}\n")
        self._file.write(line.getbuffer())

    def close(self) -> None:
        if self._gzip is not None:
            self._gzip.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.close()


def _encoded(value: Any, kind: Kind) -> bytes:
    if kind == "float64[]":
        values: list[Any] = value.tolist()  # NaN is encoded as null
        for position in np.flatnonzero(np.isinf(value)):
            values[position] = str(values[position])
        return msgspec.json.encode(values)
    if kind.endswith("[]"):
        return msgspec.json.encode(value.tolist())
    if kind == "bytes":
        return b'"%s"' % base64.b64encode(value)
    if kind == "float64":
        return b'"%s"' % str(float(value)).encode() if math.isinf(value) else msgspec.json.encode(float(value))
    return json_text(value).encode()
