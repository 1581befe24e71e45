"""Requests read strictly: every field is taken, dropped for a reason, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UntranslatableError

__all__ = ("ONLY_TEXT", "Fields", "kind_of", "objects", "refusal", "texts")

ONLY_TEXT = "only text can be carried over"


def refusal(field: str, why: str) -> UntranslatableError:
    """The error for `field`, named as the client wrote it."""
    return UntranslatableError(f"{field}: {why}", field=field)


def kind_of(value: object) -> str:
    """What a JSON value is, in words: messages name no content."""
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null" if value is None else type(value).__name__)


class Fields:
    """One object of a request. A field that is null counts as one that is not there.

    value: what should be the object. at: where it stands, `messages[2].content[0]`; empty for the request itself.
    Raises `UntranslatableError`, as all its methods do.
    """

    def __init__(self, value: object, at: str = "") -> None:
        if not isinstance(value, Mapping):
            raise refusal(at or "the request", f"expected an object, not {kind_of(value)}")
        self.at = at
        self._left = {key: item for key, item in value.items() if item is not None}

    def path(self, key: str) -> str:
        """Where the field stands in the request."""
        return f"{self.at}.{key}" if self.at else key

    def refuse(self, key: str, why: str) -> UntranslatableError:
        """The error for one of its fields."""
        return refusal(self.path(key), why)

    def take(self, key: str, *, needed: bool = False) -> Any:
        """The value, None if there is none. needed: then that is refused."""
        value = self._left.pop(key, None)
        if needed and value is None:
            raise self.refuse(key, "is missing")
        return value

    def text(self, key: str, *, needed: bool = False) -> str:
        """A string; empty if there is none."""
        value = self.take(key, needed=needed)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"expected a string, not {kind_of(value)}")
        return value or ""

    def flag(self, key: str) -> bool:
        """A boolean; False if there is none."""
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, f"expected a boolean, not {kind_of(value)}")
        return bool(value)

    def done(self, dropped: Mapping[str, str], refused: Mapping[str, str] | None = None) -> None:
        """Account for what nobody took.

        dropped: fields that change nothing, and why. refused: fields that would, and why they can't be carried; empty
        ones ask for nothing. Any other field is refused, because nobody can say what it would change.
        """
        for key, value in self._left.items():
            if key in dropped:
                continue
            why = (refused or {}).get(key)
            if why is None:
                raise self.refuse(key, "is not known, so that nothing can be said about what it would change")
            if value not in (False, "", [], {}):
                raise self.refuse(key, why)


def objects(value: object, at: str) -> list[Fields]:
    """The objects of an array, each at its place."""
    if not isinstance(value, (list, tuple)):
        raise refusal(at, f"expected an array, not {kind_of(value)}")
    return [Fields(item, f"{at}[{index}]") for index, item in enumerate(value)]


def texts(value: object, at: str, kinds: tuple[str, ...], dropped: Mapping[str, str]) -> list[str]:
    """The texts of an array of parts of these kinds; any other is refused."""
    found = []
    for part in objects(value, at):
        kind = part.text("type", needed=True)
        if kind not in kinds:
            raise part.refuse("type", f"{kind}: {ONLY_TEXT}")
        found.append(part.text("text", needed=True))
        part.done(dropped, dict.fromkeys(("citations", "annotations"), "citations have no place in chat"))
    return found
