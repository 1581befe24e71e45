"""What a setting may be, and how a refused one is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import msgspec

from ..errors import ConfigError
from .references import ResolvedText

__all__ = ("Rule", "accepted", "below", "nearest", "refusal", "shown")

_LONGEST = 200
"""Characters of a value in a message."""


class Rule(msgspec.Struct, frozen=True):
    """What a setting accepts; `expected` is what a message says of it."""

    expected: str
    accepts: Callable[[object], bool]
    secret: bool = False
    """Its value never appears in a message."""


def _is_text_or_path(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


BOOL = Rule("true or false", lambda value: isinstance(value, bool))
PATH = Rule("the path of a directory, or null", lambda value: value is None or _is_text_or_path(value))
TEXT = Rule("text, or null", lambda value: value is None or isinstance(value, str))
ARGUMENTS = Rule(
    "a mapping of argument names to values",
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
    secret=True,
)
FRACTION = Rule(
    "a number from 0 to 1, or null",
    lambda value: value is None or (_is_number(value) and 0 <= value <= 1),  # type: ignore[operator]
)
COUNT = Rule(
    "a whole number from 1",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
)
FLOOR = Rule(
    "a whole number from 0, or null",
    lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0),
)


def accepted(path: str, value: object, rule: Rule, raw: str | None = None) -> object:
    """The value, paths as text; raises `ConfigError` if the rule refuses it.

    path: where it stands, for the message. raw: the interpolation that gave the value, shown in its place.
    """
    if not rule.accepts(value):
        kind = f"a {type(value).__name__}" if rule.secret else raw or shown(value)
        raise refusal(path, kind, rule.expected)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return ResolvedText(value, raw) if raw is not None and isinstance(value, str) else value


def refusal(path: str, value: str, expected: str) -> ConfigError:
    """The error for a value that was shown already."""
    return ConfigError(f"{path} is {value}, expected {expected}")


def shown(value: object) -> str:
    """A value as a message may show it: short, of containers only the type, of an interpolation its text."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return f"a {type(value).__name__}"
    try:
        text = repr(value)
    except Exception:  # for instance an integer of more digits than Python prints
        return f"a {type(value).__name__} that can't be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def below(path: str, key: object) -> str:
    """The path of what stands at a key."""
    return f"{path}.{key if isinstance(key, str) else shown(key)}"


def nearest(name: object, valid: list[str]) -> str:
    """The end of a sentence about a name: a hint at the valid one that was probably meant, if there is one."""
    from difflib import get_close_matches

    close = get_close_matches(str(name).lower(), valid, 1, 0.5) if isinstance(name, str) else []
    return f", did you mean {close[0]}?" if close else "."
