"""The prompts that were read lately: of one that begins as they do, only the rest is read.

In the conversation of an agent the prompt of a call nearly always begins with that of the call before, as engines write
it too: byte by byte. To compare 800,000 bytes takes a hundredth of the time in which 128,000 ids are read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from ...arrays import IdArray
from .id_texts import array_of, ids_of

__all__ = ("PROMPT_MEMORY_BYTES", "PromptReader", "RecentPrompts")

PromptReader: TypeAlias = Callable[[bytes], IdArray | None]
"""What reads the text between the brackets of a list of prompt ids; None for what isn't exactly one (see `ids_of`)."""

PROMPT_MEMORY_BYTES = 64 << 20
"""45 prompts of 128,000 ids."""

_KEPT = 4
"""Texts of one rollout: sub-agents take turns."""
_LEAST_SHARED = 4096
"""Bytes; less than that is read as fast."""
_LITTLE = 1 << 14
"""Bytes by which a text goes on otherwise than a new one, and is not kept beside it all the same: some templates end a
prompt with what the next one has not."""
_STEP = 1 << 16
_COMMA = ord(",")


class _Known(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One text and its ids."""

    text: bytes
    ids: IdArray

    @property
    def nbytes(self) -> int:
        return len(self.text) + self.ids.nbytes

    def begins(self, text: bytes) -> bool:
        """Whether `text` is this one, or goes on behind it with another id."""
        length = len(self.text)
        return text.startswith(self.text) and (len(text) == length or text[length] == _COMMA)

    def shared_with(self, text: bytes) -> int:
        """How many bytes are equal from the start, up to and with the last comma among them. A number may go on."""
        length = min(len(self.text), len(text))
        one, other = (np.frombuffer(each, np.uint8, length) for each in (self.text, text))
        for start in range(0, length, _STEP):
            differs = one[start : start + _STEP] != other[start : start + _STEP]
            position = int(differs.argmax())
            if differs[position]:
                length = start + position
                break
        return text.rfind(b",", 0, length) + 1


class RecentPrompts:
    """Texts of prompt ids and what was read of them, the last few of each rollout, in no more than `most_bytes`.

    Those of the rollout that was not heard of for the longest time are forgotten first. With 0 nothing is kept. What is
    read is what `ids_of` reads, whatever is known. Threads may share it.
    """

    def __init__(self, most_bytes: int = PROMPT_MEMORY_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        """Of all that is kept."""
        self._known: OrderedDict[str, tuple[_Known, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many rollouts something is known of."""
        return len(self._known)

    def of(self, rollout_id: str) -> PromptReader:
        """What reads the prompts of one rollout."""
        return partial(self._read, rollout_id) if self.most_bytes else ids_of

    def _read(self, rollout_id: str, text: bytes) -> IdArray | None:
        known = self._known.get(rollout_id, ())
        replaced: _Known | None = None
        begun = [each for each in known if each.begins(text)]
        if begun:
            replaced = max(begun, key=lambda each: len(each.text))
            ids = _longer(replaced.ids, text, len(replaced.text) + 1)
        else:
            shared, nearest = max(((each.shared_with(text), each) for each in known), default=(0, None), key=_first)
            if nearest is None or shared < _LEAST_SHARED:
                ids = ids_of(text)
            else:
                replaced = nearest if len(nearest.text) - shared <= _LITTLE else None
                count = np.count_nonzero(np.frombuffer(text, np.uint8, shared) == _COMMA)
                ids = _longer(nearest.ids[:count], text, shared)
        if ids is not None:
            self._keep(rollout_id, _Known(text, ids), replaced)
        return ids

    def _keep(self, rollout_id: str, new: _Known, replaced: _Known | None) -> None:
        with self._lock:
            before = self._known.pop(rollout_id, ())
            kept = (new, *(each for each in before if each is not replaced))[:_KEPT]
            self._known[rollout_id] = kept
            self.nbytes += sum(each.nbytes for each in kept) - sum(each.nbytes for each in before)
            while self.nbytes > self.most_bytes:
                _, forgotten = self._known.popitem(last=False)
                self.nbytes -= sum(each.nbytes for each in forgotten)


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def _longer(ids: IdArray, text: bytes, start: int) -> IdArray | None:
    """The ids of `text`, of which those before `start` are known."""
    if start > len(text):
        return ids
    rest = ids_of(text[start:])
    return None if rest is None else array_of(ids, rest)
