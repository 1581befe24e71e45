"""Reads what `tokcap export` writes, as a trainer would: with the usual libraries and nothing else."""

from __future__ import annotations

import base64
import gzip
import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tokcap.transfer.schema import COLUMNS, Kind, Level

__all__ = ("SUFFIXES", "read")

SUFFIXES = (".jsonl", ".jsonl.gz", ".npz", ".parquet", ".safetensors")

_DTYPES: dict[str, Any] = {
    "int32[]": np.int32,
    "int64[]": np.int64,
    "float64[]": np.float64,
    "bool[]": np.bool_,
}


def read(path: Path, by: Level) -> list[dict[str, Any]]:
    """The records of a file: arrays with their dtypes, json decoded, bytes as bytes."""
    kinds = COLUMNS[by]
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        data = path.read_bytes()
        text = gzip.decompress(data) if path.name.endswith(".gz") else data
        lines = [json.loads(line) for line in text.splitlines()]
        assert all(line.pop("schema") == f"tokcap/{by}/1" for line in lines)
        assert all(list(line) == list(kinds) for line in lines)
        return [{name: _from_json(line[name], kind) for name, kind in kinds.items()} for line in lines]
    if path.name.endswith(".parquet"):
        return _parquet(path, by)
    if path.name.endswith(".npz"):
        with np.load(path) as file:
            arrays = dict(file)
        told = json.loads(arrays.pop("tokcap").tobytes())
    else:
        with import_module("safetensors").safe_open(path, "np") as file:
            told = json.loads(file.metadata()["tokcap"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    assert (told["schema"], told["by"], told["columns"]) == (1, by, kinds)
    return _flat(arrays, kinds, told["records"])


def _from_json(value: Any, kind: Kind) -> Any:
    if kind in _DTYPES:
        assert kind == "float64[]" or not any(part is None for part in value)
        return np.array(value, _DTYPES[kind])
    if kind == "bytes":
        return base64.b64decode(value)
    return float("nan") if kind == "float64" and value is None else value


def _flat(arrays: dict[str, Any], kinds: dict[str, Kind], count: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, kind in kinds.items():
        flat = arrays.pop(name)
        if kind in ("int64", "float64", "bool"):
            assert flat.dtype == kind
            values = flat.tolist()
        else:
            offsets = arrays.pop(f"{name}_offsets")
            assert offsets.dtype == np.int64
            assert len(offsets) == count + 1
            assert (offsets[0], offsets[-1]) == (0, len(flat))
            parts = [flat[start:end] for start, end in pairwise(offsets)]
            values = [part if kind in _DTYPES else _decoded(part.tobytes(), kind) for part in parts]
        assert len(values) == count
        for record, value in zip(records, values, strict=True):
            record[name] = value
    assert not arrays
    return records


def _decoded(data: bytes, kind: Kind) -> Any:
    return data if kind == "bytes" else data.decode() if kind == "str" else json.loads(data)


def _parquet(path: Path, by: Level) -> list[dict[str, Any]]:
    kinds = COLUMNS[by]
    table: Any = import_module("pyarrow.parquet").read_table(path)
    told = json.loads(table.schema.metadata[b"tokcap"])
    assert (told["schema"], told["by"], told["columns"]) == (1, by, kinds)
    assert table.column_names == list(kinds)
    records: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for name, kind in kinds.items():
        column = table.column(name)
        if kind in _DTYPES:
            assert str(column.type).startswith(f"list<element: {kind[:-2]}".replace("float64", "double"))
            values = [scalar.values.to_numpy(zero_copy_only=False) for scalar in column]
        else:
            values = [json.loads(value) if kind == "json" else value for value in column.to_pylist()]
        for record, value in zip(records, values, strict=True):
            record[name] = value
    return records
