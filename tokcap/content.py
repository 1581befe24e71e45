"""Content that rides along with the tokens: JSON values in, JSON values out, whatever they hold.

Content must never cost the token record. `storable` copies a value and replaces what JSON has no word for by
`{"__tokcap_unstorable__": repr}`; `encode_content` and `decode_content` carry the copy through msgpack exactly,
including integers of any size, NaN and lone surrogates, for which msgpack has no type of its own:

| ext code | payload |
|---|---|
| 1 | an integer outside -2^63..2^64-1: signed big-endian two's complement |
| 2 | a string with lone surrogates: UTF-8 with the surrogates passed through |
| 3 | a mapping with such a string among its keys: msgpack array of key, value, key, value ... |
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

__all__ = ("MAX_NESTING", "UNSTORABLE_KEY", "count_unstorable", "decode_content", "encode_content", "storable")

UNSTORABLE_KEY = "__tokcap_unstorable__"
MAX_NESTING = 200
"""Deeper values are replaced; msgpack decoders recurse, and nothing a model or a harness says nests deeper."""

_REPR_LIMIT = 2000
_BIG_INT, _SURROGATE_STR, _SURROGATE_MAP = 1, 2, 3


def storable(value: object) -> Any:
    """A deep copy of `value` made of dict, list, str, int, float, bool and None only.

    Tuples become lists and numpy scalars Python ones. Anything else (bytes, sets, dates, objects, mappings with keys
    that are not strings), cycles and whatever lies below `MAX_NESTING` levels becomes `{UNSTORABLE_KEY: repr}`.
    """
    try:
        return _copy(value, 0, set())
    except RecursionError:
        return _unstorable(value)


def _copy(value: Any, depth: int, open_ids: set[int]) -> Any:
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is float:
        return value if value == value else math.nan
    if kind is dict or kind is list or kind is tuple:
        if depth >= MAX_NESTING or id(value) in open_ids:
            return _unstorable(value)
        open_ids.add(id(value))
        try:
            if kind is not dict:
                return [_copy(item, depth + 1, open_ids) for item in value]
            copied = {}
            for key, item in value.items():
                if type(key) is not str:
                    if not isinstance(key, str):
                        return _unstorable(value)
                    key = str.__str__(key)
                copied[key] = _copy(item, depth + 1, open_ids)
            return copied
        finally:
            open_ids.discard(id(value))
    return _copy_subclass(value, depth, open_ids)


def _copy_subclass(value: Any, depth: int, open_ids: set[int]) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)) and not isinstance(value, np.longdouble):
        return float(value) if value == value else math.nan
    if isinstance(value, dict):
        return _copy(dict(value), depth, open_ids)
    if isinstance(value, (list, tuple)):
        return _copy(list(value), depth, open_ids)
    return _unstorable(value)


def _unstorable(value: object) -> dict[str, str]:
    try:
        text = repr(value)
    except Exception:  # a repr may raise anything, RecursionError included
        text = f"<{type(value).__name__} object whose repr failed>"
    if len(text) > _REPR_LIMIT:
        text = f"{text[:_REPR_LIMIT]}... ({len(text)} characters)"
    return {UNSTORABLE_KEY: text}


def count_unstorable(encoded: bytes | memoryview) -> int:
    """How many replaced values an encoded content holds."""
    return bytes(encoded).count(UNSTORABLE_KEY.encode())


_encoder = msgspec.msgpack.Encoder()
_sorting_encoder = msgspec.msgpack.Encoder(order="deterministic")


def encode_content(value: Any, *, canonical: bool = False) -> bytes:
    """msgpack of a value made by `storable`; `canonical` sorts mapping keys, for comparing and digesting."""
    encoder = _sorting_encoder if canonical else _encoder
    try:
        return encoder.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return encoder.encode(_with_extensions(value, encoder))


def _with_extensions(value: Any, encoder: msgspec.msgpack.Encoder) -> Any:
    if isinstance(value, str):
        return value if _is_unicode(value) else msgspec.msgpack.Ext(_SURROGATE_STR, _pass_surrogates(value))
    if type(value) is int and not -(2**63) <= value < 2**64:
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(size, "big", signed=True))
    if isinstance(value, list):
        return [_with_extensions(item, encoder) for item in value]
    if isinstance(value, dict):
        pairs = [(key, _with_extensions(item, encoder)) for key, item in value.items()]
        if all(_is_unicode(key) for key, _ in pairs):
            return dict(pairs)
        if encoder is _sorting_encoder:
            pairs.sort(key=lambda pair: _pass_surrogates(pair[0]))
        flat = [part for key, item in pairs for part in (_with_extensions(key, encoder), item)]
        return msgspec.msgpack.Ext(_SURROGATE_MAP, encoder.encode(flat))
    return value


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pass_surrogates(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _extension(code: int, data: memoryview) -> Any:
    if code == _BIG_INT:
        return int.from_bytes(data, "big", signed=True)
    if code == _SURROGATE_STR:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == _SURROGATE_MAP:
        flat = _decoder.decode(data)
        return dict(zip(flat[::2], flat[1::2], strict=True))
    raise msgspec.ValidationError(f"unknown content extension {code}")


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)


def decode_content(data: bytes | memoryview) -> Any:
    """The value that `encode_content` was given. Raises `msgspec.DecodeError` on bytes that it did not write."""
    return _decoder.decode(data)
