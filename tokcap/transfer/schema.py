"""What a record of an export has: the columns of each level, and their kinds. The package documents them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from ..content import UNSTORABLE_KEY
from ..version import __version__

__all__ = (
    "ARRAYS",
    "COLUMNS",
    "FORMATS",
    "LEVELS",
    "NUMBERS",
    "SCHEMA_VERSION",
    "Kind",
    "Level",
    "Record",
    "as_bytes",
    "described",
    "json_text",
    "plain_text",
    "weight",
)

SCHEMA_VERSION: Final = 1

Level = Literal["rollout", "trajectory", "call"]
LEVELS: tuple[Level, ...] = ("rollout", "trajectory", "call")

FORMATS: Final = {
    "jsonl": ".jsonl",
    "jsonl.gz": ".jsonl.gz",
    "npz": ".npz",
    "parquet": ".parquet",
    "safetensors": ".safetensors",
}
"""Each format, and how the names of its files end."""

Kind = Literal["str", "json", "bytes", "int64", "float64", "bool", "int32[]", "int64[]", "float64[]", "bool[]"]

Record = Mapping[str, Any]
"""Values by column: str; any JSON value; bytes; int, float, bool; 1-D arrays of exactly the dtype of their kind."""

NUMBERS: Final[dict[Kind, np.dtype[Any]]] = {
    "int64": np.dtype(np.int64),
    "float64": np.dtype(np.float64),
    "bool": np.dtype(np.bool_),
}
"""Kinds with one number a record."""

ARRAYS: Final[dict[Kind, np.dtype[Any]]] = {
    "int32[]": np.dtype(np.int32),
    "int64[]": np.dtype(np.int64),
    "float64[]": np.dtype(np.float64),
    "bool[]": np.dtype(np.bool_),
}
"""Kinds with an array a record."""

_IDENTITY: Final[dict[str, Kind]] = {"rollout_id": "str", "snapshot_id": "str", "version": "int64", "group": "str"}

COLUMNS: Final[dict[Level, dict[str, Kind]]] = {
    "trajectory": {
        **_IDENTITY,
        "index": "int64",
        "count": "int64",
        "trained": "int64",
        "rollout_trained": "int64",
        "flags": "json",
        "token_ids": "int32[]",
        "loss_mask": "bool[]",
        "log_probs": "float64[]",
        "policy_versions": "json",
        "meta": "json",
    },
    "call": {
        **_IDENTITY,
        "model_call_id": "str",
        "choice_index": "int64",
        "recorded": "bool",
        "outcome": "str",
        "verdict": "str",
        "prompt_token_ids": "int32[]",
        "generation_token_ids": "int32[]",
        "generation_log_probs": "float64[]",
        "loss_mask": "bool[]",
        "model": "str",
        "response_id": "str",
        "finish_reason": "str",
        "created_at": "float64",
        "output_items": "json",
        "token_item_index": "json",
        "policy_versions": "json",
        "sampling": "json",
        "extra": "json",
        "pieces": "json",
        "routed_experts": "bytes",
        "routed_experts_dtype": "str",
        "routed_experts_shape": "json",
        "entry_schema_version": "int64",
        "boot_id": "str",
        "begun_at": "float64",
        "ended_at": "float64",
        "delivered": "str",
        "retry_count": "int64",
        "idempotency_key": "str",
        "detail": "str",
        "meta": "json",
    },
    "rollout": {
        **_IDENTITY,
        "finished": "bool",
        "incomplete": "bool",
        "masked": "bool",
        "reasons": "json",
        "metrics": "json",
        "token_ids": "int32[]",
        "loss_mask": "bool[]",
        "log_probs": "float64[]",
        "trajectory_offsets": "int64[]",
        "trajectories": "json",
        "meta": "json",
    },
}


def described(by: Level, records: int | None = None) -> str:
    """The schema as JSON, for the metadata of a file."""
    told: dict[str, Any] = {"schema": SCHEMA_VERSION, "by": by, "columns": COLUMNS[by], "tokcap": __version__}
    if records is not None:
        told["records"] = records
    return json.dumps(told)


def json_text(value: Any) -> str:
    """A JSON value as ASCII text, exactly; NaN and infinities, which JSON lacks, as `{UNSTORABLE_KEY: "nan"}`."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_with_words(value), allow_nan=False, separators=(",", ":"))


def _with_words(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {UNSTORABLE_KEY: repr(value)}
    if isinstance(value, dict):
        return {key: _with_words(inner) for key, inner in value.items()}
    return [_with_words(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def plain_text(value: str) -> str:
    """A str that UTF-8 can hold: a lone surrogate becomes its escape."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def as_bytes(value: Any, kind: Kind) -> bytes:
    """A str, json or bytes value as the flat formats store it."""
    if kind == "json":
        return json_text(value).encode()
    return value if isinstance(value, bytes) else plain_text(value).encode()


def weight(record: Record, by: Level) -> int:
    """About how many bytes a record has in memory."""
    total = 0
    for name, kind in COLUMNS[by].items():
        value = record[name]
        if kind in ARRAYS:
            total += value.nbytes
        elif kind in ("str", "bytes"):
            total += len(value)
        else:
            total += len(json_text(value)) if kind == "json" and value else 8
    return total
