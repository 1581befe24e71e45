"""A prompt that parts from an earlier prompt: is it the same conversation, or another one that begins like it?

Ids alone can't tell: a chat template writes the same first ids before every conversation, and a compacted history may
share no more with the old one than a sub-agent does. The digests of the two requests (`CallRecord.request_digests`) say
which messages they share; where there are none, only a very short common beginning is called another conversation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from ..digests import request_digests
from ..store.ledger import DigestChain
from ..store.prefix import common_prefix
from ..trajectory import Drift
from ..trajectory.links import NO_CALL, Links
from ..trajectory.recorded import Call, Recorded
from ..trajectory.times import is_before

__all__ = ("Beginnings", "Relation")

Relation = Literal["root", "continues", "drifted", "restarted", "forked", "separate", "repeats", "unrecorded"]
"""How a call is tied to the one that it hangs on.

root: to none. continues: its prompt holds all of it, id by id. drifted: its prompt parts from the other's answer.
restarted: its prompt parts from the other's prompt: the history was compacted, edited or rendered anew. repeats: equal
to it in prompt and answer.

These hang on none. forked: it shares its first messages with an earlier call, and then goes another way. separate: it
begins another conversation, and shares only its first ids with an earlier call. unrecorded: no ids of it are stored.
"""

_DIGEST = 16
_TEMPLATE = 16
"""Ids that a chat template writes before the first message, at most, where nothing else tells."""
_SMALL_PART = 4
"""And they are no more than this part of either prompt."""


class Beginnings:
    """Tells conversations apart."""

    def __init__(self, recorded: Recorded, links: Links, drift_of: Mapping[int, Drift]) -> None:
        self._recorded, self._links, self._drift_of = recorded, links, drift_of
        self._going_on: dict[int, list[int]] = defaultdict(list)
        """Of each call those that continue it, or drifted from it."""
        for number, parent in links.parent.items():
            drift = drift_of.get(number)
            if drift is not None and not drift.before_answer:
                self._going_on[drift.nearest_number].append(number)
            elif parent != NO_CALL:
                self._going_on[parent].append(number)

    def relation(self, call: Call, drift: Drift) -> Literal["root", "restarted", "forked", "separate"]:
        """What a call is whose prompt parts from an earlier prompt and continues no call."""
        if self._asked_before(call):
            return "root"
        nearest = self._recorded.calls[drift.nearest_number]
        here, there = _messages(call), _messages(nearest)
        first = self._continues_nothing(nearest)
        # A request whose prompt is not made of messages has one digest of it; of a first call that is its only message.
        if not here or not there or self._is_raw(call) or (here == there == 1 and not first):
            few = drift.index <= _TEMPLATE and drift.index * _SMALL_PART <= min(call.prompt, nearest.prompt)
            return "separate" if few else "restarted"
        shared = _shared_messages(call, nearest)
        if not shared or (shared == 1 and self._goes_on(nearest, call)):
            return "separate"
        another_way = shared == here - 1 == there - 1 or (first and here >= there > shared)
        return "forked" if another_way or _overlap(nearest, call) else "restarted"

    def _asked_before(self, call: Call) -> bool:
        """Whether the same prompt has been there before, as a root: then this is a retry, or a sample."""
        same = self._same_prompt.get((call.prompt_vertex, call.model), ())
        return any(number not in self._drift_of for number in same)

    @cached_property
    def _same_prompt(self) -> dict[tuple[int, str], list[int]]:
        found: dict[tuple[int, str], list[int]] = defaultdict(list)
        for number in self._links.members:
            call = self._recorded.calls[number]
            found[call.prompt_vertex, call.model].append(number)
        return found

    def _continues_nothing(self, call: Call) -> bool:
        drift = self._drift_of.get(call.number)
        return self._links.parent[call.number] == NO_CALL and (drift is None or drift.before_answer)

    def _is_raw(self, call: Call) -> bool:
        """Whether the request gave ids for a prompt."""
        digests = call.record.request_digests
        if len(digests) != 2:
            return False
        return request_digests({"prompt": self._recorded.prompt_token_ids(call).tolist()})[1] == digests[1]

    def _goes_on(self, nearest: Call, call: Call) -> bool:
        """Whether the conversation of `nearest` is continued by something that began after `call` did."""
        calls = self._recorded.calls
        return any(is_before(call.record, calls[later].record) for later in self._going_on.get(nearest.number, ()))


def _overlap(nearest: Call, call: Call) -> bool:
    """Whether a call is known to have begun before the other's answer was there."""
    one, other = nearest.record, call.record
    if not one.boot_id or one.boot_id != other.boot_id or one.ended_at is None or other.begun_at is None:
        return False
    return other.begun_at < one.ended_at


def _messages(call: Call) -> int:
    """Messages of its request; 0 if not known."""
    return max(len(call.record.request_digests) - 1, 0)  # the first digest is that of tools and template arguments


def _shared_messages(one: Call, other: Call) -> int:
    """How many messages two requests have in common, from the first one on."""
    mine, its = (np.frombuffer(_joined(call.record.request_digests)[_DIGEST:], np.uint8) for call in (one, other))
    return common_prefix(mine, its) // _DIGEST


def _joined(digests: Sequence[bytes]) -> bytes:
    return digests.joined() if isinstance(digests, DigestChain) else b"".join(digests)
