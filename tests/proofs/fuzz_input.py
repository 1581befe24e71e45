"""What fuzzing is made of: a target, and the reader that makes choices out of the bytes of an input."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ("HOSTILE", "Choices", "Target", "WrongError", "as_json", "changed", "copied", "made_up", "require")

_T = TypeVar("_T")


class WrongError(AssertionError):
    """What came out of an input is not what may come out of it."""


def require(holds: object, what: str) -> None:
    """An oracle that also counts when Python leaves assertions out."""
    if not holds:
        raise WrongError(what)


@dataclass(frozen=True)
class Target:
    """One reader under attack. Any exception that `run` lets out is a finding."""

    name: str
    shows: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    """Inputs that reach deep."""
    longest: int = 4096
    """Bytes of an input that is made up."""
    weight: int = 1
    """How many inputs take as long as one of the slowest target."""


class Choices:
    """Makes choices out of bytes; when they have run out, always the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self._at

    def byte(self) -> int:
        """0 to 255."""
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def number(self, below: int) -> int:
        """From 0 to below that; in one byte, or two, or four."""
        if below <= 1:
            return 0
        size = 1 if below <= 1 << 8 else 2 if below <= 1 << 16 else 4
        return int.from_bytes(bytes(self.byte() for _ in range(size)), "little") % below

    def one_of(self, values: Sequence[_T]) -> _T:
        """One of them."""
        return values[self.number(len(values))]

    def some(self, most: int) -> bytes:
        """So many of the next bytes, as the byte before them says."""
        length = min(self.byte(), most, self.left)
        self._at += length
        return self._data[self._at - length : self._at]

    def rest(self) -> bytes:
        """All that is left."""
        found = self._data[self._at :]
        self._at = len(self._data)
        return found

    def pieces(self, data: bytes) -> list[bytes]:
        """`data` in pieces, some of them of one byte, one after another."""
        sizes = [self.number(1 << 12) if self.byte() % 4 == 0 else 1 + self.byte() for _ in range(self.byte() % 6)]
        found, start = [], 0
        for size in sizes:
            found.append(data[start : start + size])
            start += size
        return [*found, data[start:]]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65_535, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53),
    *(2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.5, 1e308, -1e308, 5e-324, float("inf"), float("nan")),
    *("", "a", "stop", "assistant", "../../x", "a\0b", "\u202e", "\U0001f600", "x" * 300, "[DONE]", "token_id:5"),
    *([], {}, [[]], [None], [0], [1, 2, 3], {"a": 1}, [{}], "r-1", "recorded", "aborted", "details", "__class__"),
    *(_nested(50), "data: x\n\n", "9" * 40, "-0", "1e999", [1, "a", None], {"role": "user", "content": []}),
)
"""Values that nobody expects, in any format."""


def changed(choices: Choices, document: Any, others: Sequence[Any] = HOSTILE) -> Any:
    """A copy of a document of dicts and lists, with a value in it replaced, taken out, repeated or moved."""
    document = copied(document)
    place = document
    while isinstance(place, (dict, list)) and place:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = choices.one_of(keys)
        if isinstance(place[key], (dict, list)) and place[key] and choices.byte() % 4:
            place = place[key]
            continue
        kind = choices.byte() % 6
        if kind == 0:
            del place[key]
        elif kind == 1 and isinstance(place, list):
            place.insert(key, place[key])
        elif kind == 2 and isinstance(place, dict):
            place[choices.one_of(keys)] = place.pop(key)
        elif kind == 3 and isinstance(place[key], str):
            place[key] = place[key] + choices.some(8).decode("latin-1")
        elif kind == 4 and type(place[key]) is int:
            place[key] = place[key] + choices.byte() - 128
        else:
            place[key] = choices.one_of(others)
        break
    return document


def copied(document: Any) -> Any:
    """The same dicts and lists anew."""
    if isinstance(document, dict):
        return {key: copied(value) for key, value in document.items()}
    return [copied(value) for value in document] if isinstance(document, list) else document


def as_json(value: Any) -> bytes:
    """JSON as a careless server writes it: NaN and all."""
    return json.dumps(value).encode()


def made_up(target: Target, kept: Sequence[bytes], seed: int, count: int) -> Iterator[bytes]:
    """Seeds, inputs that are kept, and then so many that are made of these by chance: the same for the same seed."""
    known = [*target.seeds(), *kept]
    yield from known
    chance = random.Random(f"{target.name} {seed}")
    for _ in range(count):
        data = bytearray(chance.choice(known))
        for _ in range(chance.randrange(1, 7)):
            way, at = chance.randrange(5), chance.randrange(len(data) + 1)
            if way == 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            elif way == 1:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            elif way == 2:
                del data[at : at + chance.randrange(1, 4)]
            elif way == 3:
                data += chance.randbytes(chance.randrange(24))
            else:
                other = chance.choice(known)
                data[at:] = other[chance.randrange(len(other) + 1) :]
        yield bytes(data[: target.longest])
