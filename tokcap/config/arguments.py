"""`sink_kwargs`: values that may be secret, so they are copied unresolved, resolved late, and kept out of messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ConfigError
from .environment import resolve_text
from .references import Reference, is_omegaconf, item, keys_of, reference
from .values import below

__all__ = ("copied", "resolved", "without_values")

_DEEPEST = 100
_LONGEST_MESSAGE = 500
_LEAST_RUN = 4
"""Characters in a row that a message must not share with a value."""


def copied(value: Any, path: str, depth: int = 0) -> Any:
    """The same dicts and lists made anew, so that what happens to the given ones later doesn't matter.

    References of OmegaConf stay references. Raises `ConfigError` for what is nested too deeply or in a circle.
    """
    if depth > _DEEPEST:
        raise ConfigError(f"{path[:200]}... is nested deeper than {_DEEPEST} levels, or contains itself")
    if is_omegaconf(value):
        pairs = [(key, _unresolved(value, key, below(path, key), depth + 1)) for key in keys_of(value)]
        return dict(pairs) if isinstance(value, Mapping) else [part for _, part in pairs]
    if isinstance(value, Mapping):
        return {key: copied(part, below(path, key), depth + 1) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(part, below(path, index), depth + 1) for index, part in enumerate(value))
    return value


def _unresolved(node: Any, key: Any, path: str, depth: int) -> Any:
    raw = reference(node, key)
    return Reference(raw, node, key) if raw is not None else copied(item(node, key, path, "text"), path, depth)


def resolved(value: Any, path: str) -> Any:
    """With the references in it resolved, now.

    Raises `ConfigError` naming the path and the environment variable or reference, never a value.
    """
    if isinstance(value, Reference):
        return value.resolve(path)
    if isinstance(value, str):
        return resolve_text(value, path)
    if type(value) is dict:
        return {key: resolved(part, below(path, key)) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resolved(part, below(path, index)) for index, part in enumerate(value))
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
