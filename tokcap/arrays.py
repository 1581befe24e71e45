"""Token ids and log-probs as canonical arrays: one dtype, one dimension, read-only, owned.

Strict where a mistake would train wrong data (a float or a bool among ids), lenient where engines differ
(Python lists, numpy or torch arrays, None for an unknown log-prob).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidEntryError

__all__ = ("MAX_TOKEN_ID", "FloatArray", "IdArray", "StoredArray", "log_prob_array", "owned_array", "token_id_array")

IdArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]

MAX_TOKEN_ID = 2**31 - 1

_INT32 = np.dtype(np.int32)
_FLOAT64 = np.dtype(np.float64)
_encode = msgspec.msgpack.Encoder().encode
# The methods of arrays call these through two more functions.
_least, _largest = np.minimum.reduce, np.maximum.reduce


class StoredArray(np.ndarray[Any, Any]):
    """Marks an array that comes out of the store: already canonical, so that no check or copy is due again."""


def token_id_array(value: object, *, field: str, where: str) -> IdArray:
    """`value` as a read-only int32 array [N] that nobody else can write.

    Accepts integer arrays and sequences of objects with `__index__`, except bool. `where` names the rollout and call
    in errors. Raises `InvalidEntryError`, naming the field, the position and the value.
    """
    if isinstance(value, (list, tuple)):
        return _ids_from_sequence(value, field, where)
    if type(value) is np.ndarray and value.dtype is _INT32 and value.ndim == 1:
        ids = owned_array(value, _INT32)  # owned first: what is checked is what is kept
        if len(ids) and _least(ids) < 0:
            _refuse_range(ids, ids < 0, field, where)
        return ids
    source = _as_array(value, field, where)
    if source is None:
        if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
            raise InvalidEntryError(f"{where}: {field} is {shown(value)}, not an array or a sequence of token ids")
        return _ids_from_sequence(list(value), field, where)
    if source.dtype.kind == "O":
        return _ids_from_sequence(source.tolist(), field, where)
    if source.dtype.kind not in "iu" and source.size:  # numpy makes an empty list a float64 array
        raise InvalidEntryError(f"{where}: {field} has dtype {source.dtype}, token ids are integers")
    given = source
    if source.dtype == np.int64:
        source = source.view(np.uint64)  # a negative number is a large one: one look at each id tells both
    if source.size and source.dtype.kind == "i" and _least(source) < 0:
        _refuse_range(source, source < 0, field, where)
    if source.size and source.dtype.itemsize + (source.dtype.kind == "u") > 4 and _largest(source) > MAX_TOKEN_ID:
        _refuse_range(given, source > MAX_TOKEN_ID, field, where)
    return owned_array(source, _INT32)


def log_prob_array(value: object, *, field: str, where: str) -> FloatArray:
    """`value` as a read-only float64 array [N] of natural logs; None becomes NaN, and every NaN the same NaN."""
    if isinstance(value, (list, tuple)):
        return _floats_from_sequence(value, field, where)
    source = _as_array(value, field, where)
    if source is None:
        if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
            raise InvalidEntryError(f"{where}: {field} is {shown(value)}, not an array or a sequence of floats")
        return _floats_from_sequence(list(value), field, where)
    if source.dtype.kind == "O":
        return _floats_from_sequence(source.tolist(), field, where)
    if source.dtype is not _FLOAT64 and (source.dtype.kind not in "fiu" or source.dtype.itemsize > 8):
        raise InvalidEntryError(f"{where}: {field} has dtype {source.dtype}, log-probs are floats of at most 64 bits")
    return _one_nan(source.astype(_FLOAT64))


def owned_array(source: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`source` as a C-ordered, read-only array of `dtype`; copied if anybody could still write to it."""
    if (
        type(source) is np.ndarray
        and source.dtype == dtype
        and not (flags := source.flags).writeable
        and flags.c_contiguous
        and _lies_in_bytes(source)
    ):
        return source
    data = np.asarray(source).astype(dtype, copy=False).tobytes()
    return np.ndarray(source.shape, dtype, buffer=data)


def _lies_in_bytes(source: npt.NDArray[Any]) -> bool:
    # Nothing else is safe to share: a read-only array may have a writable view that was taken earlier.
    base: object = source
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return False
        base = base.base
    return type(base) is bytes


def is_masked(value: object) -> bool:
    """Whether `value` is a masked array of numpy, found out without importing `numpy.ma` (9 ms)."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def _as_array(value: object, field: str, where: str) -> npt.NDArray[Any] | None:
    """`value` as a 1-D array if it has an array interface, else None."""
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__array__") and not isinstance(value, (array, memoryview)):
            return None
        if isinstance(value, memoryview) and value.format in ("B", "b", "c"):
            raise InvalidEntryError(
                f"{where}: {field} is a memoryview of bytes, not of numbers; cast it to their format"
            )
        try:
            value = np.asarray(value)
        except Exception as error:  # whatever an engine's array type raises, e.g. of a tensor on a GPU
            raise InvalidEntryError(f"{where}: {field} is {shown(value)}, not readable as an array: {error}") from error
    if is_masked(value):
        raise InvalidEntryError(f"{where}: {field} is a masked array; its masked values would count as real ones")
    if value.ndim != 1:
        raise InvalidEntryError(f"{where}: {field} has shape {value.shape}, expected one dimension")
    return value


def _ids_from_sequence(value: Sequence[Any], field: str, where: str) -> IdArray:
    try:
        # Asks each object for __index__: floats, strings and negative numbers are refused in C. Unsigned, because
        # CPython converts those four times as fast (4.6 ns against 18, measured with 3.11).
        ids = np.frombuffer(array("I", value).tobytes(), dtype=np.int32)
        if len(ids) and _least(ids) < 0:
            raise OverflowError("an id is too large")
    except Exception as error:  # an item's __index__ may raise anything
        for position, item in enumerate(value):
            _check_id(item, position, field, where)
        raise InvalidEntryError(f"{where}: {field} is {shown(value)}, not token ids: {error}") from error
    suspects = np.flatnonzero(ids <= 1)  # a bool can only hide behind a 0 or a 1
    if suspects.size and (suspects.size < 256 or set(map(type, value)) != {int}):
        for position in suspects.tolist():
            _check_id(value[position], position, field, where)
    return ids


def _check_id(item: Any, position: int, field: str, where: str) -> None:
    if _is_bool(item) or not hasattr(item, "__index__"):
        raise InvalidEntryError(
            f"{where}: {field}[{position}] is {shown(item)}, a token id is an integer (not a bool, a string or a float)"
        )
    try:
        number = item.__index__()
    except Exception as error:
        raise InvalidEntryError(f"{where}: {field}[{position}] is {shown(item)}, not an integer: {error}") from error
    if isinstance(number, bool):
        raise InvalidEntryError(f"{where}: {field}[{position}] is {shown(item)}, not an integer but a bool")
    if not 0 <= number <= MAX_TOKEN_ID:
        raise InvalidEntryError(f"{where}: {field}[{position}] is {shown(number)}, outside 0..{MAX_TOKEN_ID}")


def _is_bool(item: object) -> bool:
    # By the name of its dtype too: a torch scalar answers to __index__ and __float__ even if it is a bool.
    return isinstance(item, bool) or str(getattr(item, "dtype", "")).endswith("bool")


def _refuse_range(source: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], field: str, where: str) -> None:
    position = int(np.argmax(wrong))
    raise InvalidEntryError(f"{where}: {field}[{position}] is {source[position]}, outside 0..{MAX_TOKEN_ID}")


def _floats_from_sequence(value: Sequence[Any], field: str, where: str) -> FloatArray:
    floats = _plain_floats(value)
    if floats is not None:
        return _one_nan(floats)
    try:
        floats = np.array(array("d", value), dtype=np.float64)
    except Exception:  # None among them, or an item whose __float__ raises
        floats = np.empty(len(value), dtype=np.float64)
        for position, item in enumerate(value):
            floats[position] = np.nan if item is None else _check_float(item, position, field, where)
    for position in np.flatnonzero((floats == 0.0) | (floats == 1.0)).tolist():
        _check_float(value[position], position, field, where)
    return _one_nan(floats)


def _plain_floats(value: Sequence[Any]) -> FloatArray | None:
    """`value` as an array if each of its items is a float and nothing else, at a tenth of the price.

    msgpack writes a float in 9 bytes, the first of them 0xcb. The first item starts behind the header of the array; if
    it is a float the second starts 9 bytes later, and so on: the bytes prove the types.
    """
    count = len(value)
    try:
        encoded = _encode(value)
    except Exception:  # something that msgpack has no word for: numpy's floats, say
        return None
    start = 1 if count < 16 else 3 if count < 2**16 else 5
    if len(encoded) != start + 9 * count:
        return None
    items = np.frombuffer(encoded, np.uint8, 9 * count, start).reshape(count, 9)
    if not (items[:, 0] == 0xCB).all():
        return None
    return items[:, 1:].copy().view(">f8").reshape(count).astype(_FLOAT64)


def _check_float(item: Any, position: int, field: str, where: str) -> float:
    if type(item) is float:
        return item
    if _is_bool(item) or isinstance(item, (str, bytes, bytearray)):
        raise InvalidEntryError(f"{where}: {field}[{position}] is {shown(item)}, a log-prob is a float or None")
    try:
        return float(item)
    except Exception as error:
        raise InvalidEntryError(
            f"{where}: {field}[{position}] is {shown(item)}, a log-prob is a float or None: {error}"
        ) from error


def _one_nan(floats: FloatArray) -> FloatArray:
    if len(floats) and (least := _least(floats)) != least:  # a NaN anywhere is the least of all
        floats[np.isnan(floats)] = np.nan
    floats.flags.writeable = False
    return floats


def shown(value: object) -> str:
    """`value` as an error message shows it: its repr, if it has one, and not too long."""
    try:
        text = repr(value)
    except Exception:  # a repr may raise anything, that of a huge integer included; the error message must not
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"
