"""`sink_kwargs`: values that may be secret, so they are copied unresolved, resolved late, and kept out of messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError
from .environment import resolve_text
from .references import Reference, is_omegaconf, item, keys_of, reference
from .values import below

__all__ = ("copied", "resolved", "without_values")

_DEEPEST = 100
_MOST_VALUES = 100_000
"""Forty aliases of YAML, each of two that came before, are 2^40 values."""
_LONGEST_MESSAGE = 500
_LEAST_RUN = 4
"""Characters in a row that a message must not share with a value."""


class _Extent:
    """How deep one value nests, and how many values are in it."""

    def __init__(self) -> None:
        self.depth = self.values = 0

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """While a value within is looked at. Raises `ConfigError` for one too deep, or one too many."""
        self.depth += 1
        self.values += 1
        if self.depth > _DEEPEST + 1:
            raise ConfigError(f"{path[:200]}... is nested deeper than {_DEEPEST} levels, or contains itself")
        if self.values > _MOST_VALUES:
            raise ConfigError(f"{path[:200]}... is one of more than {_MOST_VALUES} values; aliases count each time")
        yield
        self.depth -= 1


def copied(value: Any, path: str) -> Any:
    """The same dicts and lists made anew, so that what happens to the given ones later doesn't matter.

    References of OmegaConf stay references. Raises `ConfigError` for what is nested too deeply, in a circle, or of too
    many values.
    """
    return _copied(value, path, _Extent())


def _copied(value: Any, path: str, extent: _Extent) -> Any:
    with extent.inside(path):
        if is_omegaconf(value):
            pairs = [(key, _unresolved(value, key, below(path, key), extent)) for key in keys_of(value)]
            return dict(pairs) if isinstance(value, Mapping) else [part for _, part in pairs]
        if isinstance(value, Mapping):
            return {key: _copied(part, below(path, key), extent) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)([_copied(part, below(path, index), extent) for index, part in enumerate(value)])
        return value


def _unresolved(node: Any, key: Any, path: str, extent: _Extent) -> Any:
    raw = reference(node, key)
    return Reference(raw, node, key) if raw is not None else _copied(item(node, key, path, "text"), path, extent)


def resolved(value: Any, path: str) -> Any:
    """With the references in it resolved, now.

    Raises `ConfigError` naming the path and the environment variable or reference, never a value; also for what is
    nested too deeply, in a circle, or of too many values.
    """
    return _resolved(value, path, _Extent())


def _resolved(value: Any, path: str, extent: _Extent) -> Any:
    if isinstance(value, Reference):
        return value.resolve(path)
    if isinstance(value, str):
        return resolve_text(value, path)
    with extent.inside(path):
        if type(value) is dict:
            return {key: _resolved(part, below(path, key), extent) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)([_resolved(part, below(path, index), extent) for index, part in enumerate(value)])
        return value


def without_values(message: str, *values: Any) -> str:
    """A message of somebody else, with everything replaced that it has in common with these values."""
    texts = {text for value in values for text in _texts(value)}
    message = message[:_LONGEST_MESSAGE]
    parts, at = [], 0
    while at < len(message):
        length = max((_shared(message, at, text) for text in texts), default=0)
        parts.append("***" if length else message[at])
        at += length or 1
    return "".join(parts)


def _shared(message: str, at: int, text: str) -> int:
    """How many characters from there on are a part of the text that gives it away."""
    if len(text) < _LEAST_RUN:
        return len(text) if message.startswith(text, at) else 0
    length = _LEAST_RUN
    if message[at : at + length] not in text or at + length > len(message):
        return 0
    while at + length < len(message) and message[at : at + length + 1] in text:
        length += 1
    return length


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, (str, bytes, bytearray, float, os.PathLike)) or (
        isinstance(value, int) and _printable(value)
    ):
        for text in {str(value), repr(value), repr(str(value))[1:-1]}:
            if text:
                yield text


def _printable(value: Any) -> bool:
    # True and False say nothing; Python refuses to print very large integers, so no message shows them either.
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 10_000
