"""The places of an answer where ids may stand, and that all of them must agree.

Ids are taken from where the engine writes them and from nowhere else: never from text, never from bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ...arrays import IdArray, shown, token_id_array
from ...errors import InvalidEntryError, UnusableAnswerError

__all__ = ("NAMED_TOKEN", "Found", "IdReader", "as_dict", "as_list", "column", "count", "named_ids", "text")

Found: TypeAlias = list[tuple[str, Any]]
"""Places and what stands there, as yet unchecked; None = nothing."""

NAMED_TOKEN = "token_id:"
"""How a token is named in log-probs if `return_tokens_as_token_ids` was asked for."""

_NUMBER = re.compile(r"(?<!\])\[[0-9]+\]")  # not the column of a triple


def as_dict(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """`value` if it is a JSON array, else an empty one."""
    return value if isinstance(value, list) else []


def text(value: object) -> str:
    """`value` if it is a string, else an empty one."""
    return value if isinstance(value, str) else ""


def count(value: object) -> int | None:
    """`value` if it can be a number of tokens, else None: what an engine doesn't tell abstains."""
    return value if type(value) is int and value >= 0 else None


def column(rows: Sequence[Any], index: int, place: str) -> list[Any]:
    """One column of the triples `[log-prob, id, text]` that SGLang gives. Raises `UnusableAnswerError`."""
    try:
        # Only lists: the characters of a string would do as a row, too.
        if set(map(type, rows)) <= {list, tuple}:
            return [row[index] for row in rows]
    except IndexError:
        pass
    position = next(i for i, row in enumerate(rows) if not isinstance(row, (list, tuple)) or len(row) <= index)
    raise UnusableAnswerError(f"{place}[{position}] is {shown(rows[position])}, expected [log-prob, token id, text]")


def named_ids(tokens: Sequence[object], place: str, member: str = "") -> list[int | None] | None:
    """The ids in strings like `token_id:15`; None for a token that is named otherwise, or for all if none is so named.

    Raises `UnusableAnswerError` for a name that isn't one of an id.
    """
    found: list[int | None] = []
    any_named = False
    for position, token in enumerate(tokens):
        if isinstance(token, str) and token.startswith(NAMED_TOKEN):
            digits = token[len(NAMED_TOKEN) :]
            # Bounded, because converting a huge number of digits is refused by Python itself.
            if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
                raise UnusableAnswerError(f"{place}[{position}]{member} is {shown(token)}, which names no token id")
            found.append(int(digits))
            any_named = True
        else:
            found.append(None)
    return found if any_named else None


class IdReader:
    """Turns what stands at a place into ids, once each, and holds the places against each other."""

    def __init__(self, where: str) -> None:
        self.where = where
        """Begins every message: the path of the request, if known."""
        self.sources: dict[str, None] = {}
        """The places of the ids that were used, in order of appearance."""
        self._arrays: dict[int, tuple[object, IdArray]] = {}

    def refuse(self, message: str) -> UnusableAnswerError:
        """The error to raise: says where, and what is wrong."""
        return UnusableAnswerError(f"{self.where}{message}")

    def ids(self, value: object, place: str) -> IdArray:
        """int32 [N]. The ids of a prompt that several choices share are read once."""
        known = self._arrays.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        try:
            ids = token_id_array(value, field=place, where=self.where.removesuffix(": ") or "answer")
        except InvalidEntryError as error:
            raise UnusableAnswerError(str(error)) from error
        self._arrays[id(value)] = value, ids
        return ids

    def agreed(self, found: Iterable[tuple[str, object]], what: str) -> IdArray | None:
        """The ids at all the places that have any; None if none has. Raises `UnusableAnswerError` if two differ."""
        first: tuple[str, IdArray] | None = None
        for place, value in found:
            if value is None:
                continue
            ids = self.ids(value, place)
            self.sources[_general(place)] = None
            if first is None:
                first = place, ids
            elif first[1] is not ids and not np.array_equal(first[1], ids):
                raise self.refuse(_disagreement(what, first, (place, ids)))
        return None if first is None else first[1]

    def check_named(self, ids: IdArray, named: Sequence[int | None], place: str, member: str) -> None:
        """The ids that the log-probs name, where they name any, are `ids`. Lengths are equal."""
        if named and None not in named:
            self.sources[f"{_general(place)}[]{member}"] = None
        known = ids.tolist()
        if known == named:
            return
        for position, (one, other) in enumerate(zip(known, named, strict=True)):
            if other is not None and one != other:
                raise self.refuse(
                    f"{place}[{position}]{member} names the id {other}, "
                    f"but at position {position} the ids say {one}: they disagree"
                )


def _general(place: str) -> str:
    """The place without the number of its choice: `choices[3].token_ids` is `choices[].token_ids`."""
    return _NUMBER.sub("[]", place)


def _disagreement(what: str, one: tuple[str, IdArray], other: tuple[str, IdArray]) -> str:
    common = min(len(one[1]), len(other[1]))
    differing = np.flatnonzero(one[1][:common] != other[1][:common])
    if differing.size:
        at = int(differing[0])
        return (
            f"{one[0]} and {other[0]} disagree about the {what} ids: "
            f"at position {at} they say {int(one[1][at])} and {int(other[1][at])}"
        )
    return f"{one[0]} and {other[0]} disagree about the {what} ids: {len(one[1])} ids and {len(other[1])}"
