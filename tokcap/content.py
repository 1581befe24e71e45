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

import hashlib
import math
import reprlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

__all__ = (
    "MAX_NESTING",
    "MAX_REPEATED",
    "UNSTORABLE_KEY",
    "apart_from_the_stack",
    "count_unstorable",
    "decode_content",
    "encode_content",
    "name_of",
    "storable",
)

_T = TypeVar("_T")

UNSTORABLE_KEY = "__tokcap_unstorable__"
MAX_NESTING = 200
"""Deeper values are replaced; msgpack decoders recurse, and nothing a model or a harness says nests deeper."""

MAX_REPEATED = 2**18
"""How many values may be copied because a container is met again; `x = [x, x]`, forty times over, has 2^40 of them."""

_REPR_LIMIT = 2000
_BIG_INT, _SURROGATE_STR, _SURROGATE_MAP = 1, 2, 3


def storable(value: object) -> Any:
    """A deep copy of `value` made of dict, list, str, int, float, bool and None only.

    Tuples become lists and numpy scalars Python ones. Anything else (bytes, sets, dates, objects, mappings with keys
    that are not strings), cycles, whatever lies below `MAX_NESTING` levels and repetitions beyond `MAX_REPEATED`
    become `{UNSTORABLE_KEY: repr}`.
    """
    try:
        return _Copier().copy(value, 0, False)
    except Exception:  # the stack was nearly full already, or another thread changes the value meanwhile
        return _unstorable(value)


class _Copier:
    def __init__(self) -> None:
        self._open: set[int] = set()
        self._met: dict[int, object] = {}  # keeps what it has met alive, so that no id comes up twice
        self._repeated = 0

    def copy(self, value: Any, depth: int, repeated: bool) -> Any:
        if repeated:
            self._repeated += 1
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return value
        if kind is float:
            return value if value == value else math.nan
        plain = value if kind is dict or kind is list or kind is tuple else _plain(value)
        if not isinstance(plain, (dict, list, tuple)):
            return _unstorable(value) if plain is None else plain
        identity = id(value)
        if depth >= MAX_NESTING or identity in self._open:
            # What was replaced before stays as it is: an entry that is copied again is still the same entry.
            return dict(value) if _is_replacement(value) else _unstorable(value)
        if identity in self._met:
            repeated = True
            if self._repeated >= MAX_REPEATED:
                return _unstorable(value)
        elif plain:  # there is only one empty tuple, which may be met any number of times
            self._met[identity] = value
        self._open.add(identity)
        try:
            if isinstance(plain, dict):
                return self._copy_mapping(plain, depth, repeated)
            items = []
            for item in plain:
                items.append(self.copy(item, depth + 1, repeated))  # noqa: PERF401  (a frame less per level)
            return items
        finally:
            self._open.discard(identity)

    def _copy_mapping(self, mapping: dict[Any, Any], depth: int, repeated: bool) -> dict[str, Any]:
        copied = {}
        for key, item in mapping.items():
            if not isinstance(key, str):
                return _unstorable(mapping)
            copied[str.__str__(key)] = self.copy(item, depth + 1, repeated)
        return copied


def _is_replacement(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and type(value.get(UNSTORABLE_KEY)) is str


def _plain(value: object) -> Any:
    """A subclass of a JSON type, or a numpy scalar, as that type; None if it is neither."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.timedelta64):  # numpy counts it among the integers
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)) and not isinstance(value, np.longdouble):
        return float(value) if value == value else math.nan
    try:
        if isinstance(value, dict):
            return dict(value)
        if isinstance(value, (list, tuple)):
            return list(value)
    except Exception:  # a subclass may iterate in its own way, and fail
        return None
    return None


def _unstorable(value: object) -> dict[str, str]:
    try:
        text = repr(value) if _is_small(value) else _abbreviating.repr(value)
    except Exception:  # a repr may raise anything, RecursionError included
        text = f"<{type(value).__name__} object whose repr failed>"
    if len(text) > _REPR_LIMIT:
        text = f"{text[:_REPR_LIMIT]}... ({len(text)} characters)"
    return {UNSTORABLE_KEY: text}


class _Abbreviating(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, dict):  # a subclass, whose own repr would show all of it
            return self.repr_dict(x, level)
        if isinstance(x, (list, tuple)):
            return self.repr_list(list(x), level)
        return super().repr_instance(x, level)


_abbreviating = _Abbreviating()
_abbreviating.maxlevel = 4
_abbreviating.maxstring = _abbreviating.maxother = _abbreviating.maxlong = _REPR_LIMIT


def _is_small(value: object) -> bool:
    """Whether a repr of `value` can't be much longer than the limit because of how its containers nest."""
    waiting = [value]
    count = 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, (dict, list, tuple, set, frozenset)):
            count += len(item)
            if count > _REPR_LIMIT:
                return False
            waiting.extend(item)
            if isinstance(item, dict):
                waiting.extend(item.values())
    return True


_REPLACED = b"\x81" + msgspec.msgpack.encode(UNSTORABLE_KEY)  # a mapping of one pair, and its key


def count_unstorable(encoded: bytes | memoryview) -> int:
    """How many replaced values an encoded content holds."""
    return bytes(encoded).count(_REPLACED)


_encoder = msgspec.msgpack.Encoder()
_sorting_encoder = msgspec.msgpack.Encoder(order="deterministic")


def name_of(value: Any) -> str:
    """`str(value)`; the type and a digest of a value in which an integer has more digits than Python writes out."""
    try:
        return str(value)
    except ValueError:
        digest = hashlib.blake2b(encode_content(storable(value), canonical=True), digest_size=16)
        return f"{type(value).__name__}-{digest.hexdigest()}"


def encode_content(value: Any, *, canonical: bool = False) -> bytes:
    """msgpack of a value made by `storable`; `canonical` sorts mapping keys, for comparing and digesting."""
    encoder = _sorting_encoder if canonical else _encoder
    try:
        return encoder.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        pass
    try:
        return encoder.encode(_with_extensions(value, encoder))
    except RecursionError:
        return apart_from_the_stack(lambda: encoder.encode(_with_extensions(value, encoder)))


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
    try:
        if code == _BIG_INT:
            return int.from_bytes(data, "big", signed=True)
        if code == _SURROGATE_STR:
            return bytes(data).decode("utf-8", "surrogatepass")
        if code == _SURROGATE_MAP:
            flat = _decoder.decode(data)
            return dict(zip(flat[::2], flat[1::2], strict=True))
    except (ValueError, TypeError) as error:
        raise msgspec.ValidationError(f"damaged content extension {code}: {error}") from error
    raise msgspec.ValidationError(f"unknown content extension {code}")


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)


def decode_content(data: bytes | memoryview) -> Any:
    """The value that `encode_content` was given. Raises `msgspec.DecodeError` on bytes that it did not write."""
    try:
        try:
            return _decoder.decode(data)
        except RecursionError:
            return apart_from_the_stack(lambda: _decoder.decode(data))
    except UnicodeDecodeError as error:  # an older msgspec lets it through
        raise msgspec.DecodeError(f"damaged content: {error}") from error


def apart_from_the_stack(function: Callable[[], _T]) -> _T:
    """What `function` gives on a stack of its own, after a `RecursionError` on one that may have been nearly full.

    Raises `msgspec.DecodeError` for what is nested too deeply all the same: nothing that is written here is.
    """
    results: list[_T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="tokcap-content")
    thread.start()
    thread.join()
    for failure in failures:
        if isinstance(failure, RecursionError):
            raise msgspec.ValidationError("it is nested too deeply") from failure
        raise failure
    return results[0]
