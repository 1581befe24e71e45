"""Where two calls, two rollouts or two stores differ: the first id, else log-probs, else what else was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Literal

import msgspec
import numpy as np

from ..arrays import FloatArray, IdArray
from ..content import encode_content
from ..errors import TokcapError
from ..store import FileStore
from ..store.prefix import common_prefix
from ..store.records import Contents
from ..trajectory.recorded import Call
from .telling import detail_of
from .view import CallKey, CallView, RolloutView, view_of

__all__ = ("CallDifference", "Kind", "RolloutDifference", "call_difference", "rollout_difference", "store_differences")

Kind = Literal["equal", "ids", "cut", "log_probs", "contents", "missing"]
"""ids: prompt and answer, one after the other, are other ids. cut: they are the same ids, and the answer begins
elsewhere. log_probs: only log-probs (and contents) differ. contents: only what else was recorded does. missing: one of
the two has no such call, or no ids of it."""


class CallDifference(msgspec.Struct, frozen=True):
    """What differs between two calls; positions count from the first id of the prompt."""

    one: CallKey | None
    """None: there is no such call on this side."""
    other: CallKey | None
    kind: Kind
    index: int = -1
    """ids: the first position at which they differ, or where the shorter one ends. log_probs: the position of the
    largest difference. Else -1."""
    lengths: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    """Of each: ids of the prompt, ids of the answer."""
    log_probs_differ: int = 0
    """Positions of the answer at which they do, where one is known and the other isn't, too."""
    largest: float = 0.0
    """Difference between two known log-probs, natural log; they are compared if the ids are equal."""
    fields: tuple[str, ...] = ()
    """What else differs, by the names of `TokenEntry` and `CallRecord`."""


class RolloutDifference(msgspec.Struct, frozen=True):
    """What differs between two rollouts."""

    one: str
    other: str
    calls: tuple[CallDifference, ...] = ()
    """Of each pair of calls, equal ones too, in order."""
    by_name: bool = False
    """Calls with equal ids were paired; else those at the same place."""
    fields: tuple[str, ...] = ()
    """What differs of the rollouts themselves: meta, finished, incomplete, state."""
    error: str = ""
    """Why one of the two can't be read."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs but perhaps the identity of the snapshot."""
        return not self.error and not self.fields and all(call.kind == "equal" for call in self.calls)

    @property
    def first(self) -> CallDifference | None:
        """The first call that differs."""
        return next((call for call in self.calls if call.kind != "equal"), None)


def call_difference(one: RolloutView, key: CallKey, other: RolloutView, other_key: CallKey) -> CallDifference:
    """Compare one choice of a call with another one, in the same rollout or not."""
    mine, its = one.recorded(key), other.recorded(other_key)
    if mine is None or its is None:
        fields = _told_of_records(one, key, other, other_key)
        kind: Kind = "missing" if (mine is None) != (its is None) else "contents" if fields else "equal"
        return CallDifference(key, other_key, kind, fields=fields)
    ids, its_ids = (sequence(view, call) for view, call in ((one, mine), (other, its)))
    lengths = (mine.prompt, mine.sampled), (its.prompt, its.sampled)
    fields = (*_told_of_records(one, key, other, other_key), *_told_of_contents(mine, its))
    index = common_prefix(ids, its_ids)
    if index < max(len(ids), len(its_ids)):
        return CallDifference(key, other_key, "ids", index, lengths, fields=fields)
    if mine.prompt != its.prompt:
        return CallDifference(key, other_key, "cut", -1, lengths, fields=fields)
    count, largest, at = _apart(mine.generation_log_probs, its.generation_log_probs)
    if count:
        return CallDifference(key, other_key, "log_probs", mine.prompt + at, lengths, count, largest, fields)
    return CallDifference(key, other_key, "contents" if fields else "equal", -1, lengths, fields=fields)


def rollout_difference(one: RolloutView, other: RolloutView) -> RolloutDifference:
    """Compare two rollouts call by call: by name if they have a call id in common, else in the order of begin."""
    mine, its = ([call.key for call in view.calls if call.model_call_id] for view in (one, other))
    by_name = not set(mine).isdisjoint(its)
    pairs: list[tuple[CallKey | None, CallKey | None]]
    if by_name:
        there = set(its)
        pairs = [(key, key if key in there else None) for key in mine]
        pairs += [(None, key) for key in its if key not in set(mine)]
    else:
        pairs = list(zip_longest(mine, its))
    calls = tuple(
        CallDifference(key, other_key, "missing")
        if key is None or other_key is None
        else call_difference(one, key, other, other_key)
        for key, other_key in pairs
    )
    fields = tuple(
        name
        for name in ("meta", "finished", "incomplete")
        if _plain(getattr(one, name)) != _plain(getattr(other, name))
    )
    return RolloutDifference(one.rollout_id, other.rollout_id, calls, by_name, fields)


def store_differences(one: FileStore, other: FileStore, ids: list[str]) -> Iterator[RolloutDifference]:
    """Compare the rollouts of these ids in two stores, the equal ones included. Raises nothing for what is in them."""
    for rollout_id in ids:
        states, views, errors = [], [], []
        for store in (one, other):
            try:
                states.append(store.stat_now(rollout_id).state)
                if states[-1] in ("open", "frozen"):
                    with store.read_now(rollout_id) as snapshot:
                        views.append(view_of(snapshot))
            except TokcapError as error:
                errors.append(str(error))
        if errors:
            yield RolloutDifference(rollout_id, rollout_id, error="; ".join(errors))
            continue
        fields = () if states[0] == states[1] else (f"state: {states[0]}, {states[1]}",)
        found = rollout_difference(*views) if len(views) == 2 else RolloutDifference(rollout_id, rollout_id)
        yield msgspec.structs.replace(found, fields=(*fields, *found.fields))


def sequence(view: RolloutView, call: Call) -> IdArray:
    """int32 [P + G]: what the engine saw, and what was sampled."""
    ids = np.empty(call.total, np.int32)
    view.build.recorded.tree.ids_to(call.end_vertex, ids)
    return ids


def _apart(one: FloatArray, other: FloatArray) -> tuple[int, float, int]:
    """At how many positions two arrays differ, the largest difference of known values, and where it is."""
    differ = (one.view(np.int64) != other.view(np.int64)) & ~(np.isnan(one) & np.isnan(other))
    count = int(np.count_nonzero(differ))
    if not count:
        return 0, 0.0, -1
    with np.errstate(invalid="ignore"):
        distance = np.where(differ, np.abs(one - other), -1.0)
    if np.isnan(distance).all() or not (distance >= 0).any():
        return count, 0.0, int(differ.argmax())
    at = int(np.nanargmax(distance))
    return count, float(distance[at]), at


def _told_of_records(one: RolloutView, key: CallKey, other: RolloutView, other_key: CallKey) -> tuple[str, ...]:
    """Statements about calls that differ; times never agree, and don't count. Nor does where the store lies."""
    mine, its = _statements(one, one.call(key)), _statements(other, other.call(other_key))
    return tuple(name for name in mine if mine[name] != its[name])


def _statements(view: RolloutView, call: CallView | None) -> dict[str, Any]:
    told = {name: getattr(call, name, None) for name in ("outcome", "delivered", "detail", "retry_count")}
    return told if call is None else told | {"detail": detail_of(view, call)}


def _told_of_contents(one: Call, other: Call) -> tuple[str, ...]:
    mine, its = one.contents, other.contents
    fields = [name for name in Contents._fields if _plain(getattr(mine, name)) != _plain(getattr(its, name))]
    return (*fields, *(("pieces",) if one.pieces != other.pieces else ()))


def _plain(value: Any) -> bytes:
    """Comparable, whatever is in it; a tuple is a list, and NaN equals itself."""
    return encode_content(value, canonical=True)
