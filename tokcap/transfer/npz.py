"""npz: what `numpy.load` reads, one array at a time, without pickle."""

from __future__ import annotations

import zipfile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .flat import FlatColumns
from .schema import Level, Record, described

__all__ = ("Npz",)


class Npz:
    """A `Writer`; the records of a file are kept until it is closed."""

    def __init__(self, file: BinaryIO, by: Level) -> None:
        self._file, self._by = file, by
        self._columns = FlatColumns(by)

    def write(self, record: Record) -> None:
        self._columns.add(record)

    def abandon(self) -> None:
        return None

    def close(self) -> None:
        with zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            told = described(self._by, self._columns.records).encode()
            _add(archive, "tokcap", np.frombuffer(told, np.uint8))
            for name, array in self._columns.arrays():
                _add(archive, name, array)


def _add(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    # A ZipInfo of its own has no time in it: the same records give the same bytes.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)
