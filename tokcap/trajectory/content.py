"""What a trajectory holds: arrays and spans, joined from the calls along its path (rule 20)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray, IdArray
from .links import Links, chain_of
from .paths import Path
from .recorded import Recorded
from .verdicts import Category, Judged

__all__ = ("BoolArray", "Content", "MadeIds", "PathContent", "Span", "Told", "joined_versions", "read_only")

BoolArray = npt.NDArray[np.bool_]

Told = tuple[Any, int, int]
"""The policy versions that were recorded with a call, the length of its prompt, and how many ids it sampled."""


class Span(msgspec.Struct, frozen=True):
    """The sampled ids of one call within a trajectory: positions `start` to `end` (exclusive)."""

    model_call_ids: tuple[str, ...]
    """Several if calls were identical in prompt and answer."""
    choice_index: int
    start: int
    end: int
    owned: bool
    """Whether the span belongs to this trajectory; elsewhere it is context, with mask False."""
    verdict: Category
    """What holds for the span where it is owned."""
    trained: int
    """How many of its ids are trained, where it is owned."""


class Content(Protocol):
    """Where a trajectory takes from what it shows. Arrays are read-only, and made when asked for."""

    @property
    def total(self) -> int: ...
    @property
    def trained(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def prefix_of(self) -> int: ...
    @property
    def flags(self) -> tuple[str, ...]: ...
    def token_ids(self) -> IdArray: ...
    def loss_mask(self) -> BoolArray: ...
    def log_probs(self) -> FloatArray: ...
    def policy_versions(self) -> tuple[tuple[Any, int, int], ...]: ...
    def calls(self) -> tuple[Span, ...]: ...


class MadeIds:
    """The ids of those trajectories of a rollout that somebody still has: another one may begin as they do."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, IdArray] = weakref.WeakValueDictionary()

    def get(self, index: int) -> IdArray | None:
        """The ids of the trajectory at that position, if they are there."""
        return self._alive.get(index)

    def remember(self, index: int, ids: IdArray) -> None:
        """For as long as somebody else has them."""
        self._alive[index] = ids

    def __reduce__(self) -> tuple[type[MadeIds], tuple[()]]:
        return MadeIds, ()  # a copy, in this process or another, makes its own


class PathContent:
    """The content of one path through the calls of a rollout."""

    def __init__(
        self,
        recorded: Recorded,
        links: Links,
        judged: dict[int, Judged],
        path: Path,
        flags: tuple[str, ...],
        index: int,
        made: MadeIds,
    ) -> None:
        self._recorded, self._links, self._judged, self._path = recorded, links, judged, path
        self._end = recorded.calls[path.end]
        self.total, self.trained = self._end.total, path.trained
        self.shared, self.prefix_of = path.shared, path.prefix_of
        self.flags = flags
        self._index, self._made = index, made

    def token_ids(self) -> IdArray:
        ids = np.empty(self.total, np.int32)
        rest = ids
        earlier = self._made.get(self.prefix_of) if self.shared else None
        if earlier is not None:
            ids[: self.shared] = earlier[: self.shared]
            rest = ids[self.shared :]
        self._recorded.tree.ids_to(self._end.end_vertex, rest)
        self._made.remember(self._index, read_only(ids))
        return ids

    def loss_mask(self) -> BoolArray:
        mask = np.zeros(self.total, np.bool_)
        for found in self._trained():
            mask[found.call.prompt : found.call.total] = True if found.mask is None else found.mask
        return read_only(mask)

    def log_probs(self) -> FloatArray:
        log_probs = np.empty(self.total)
        log_probs.fill(np.nan)
        for found in self._trained():
            span = log_probs[found.call.prompt : found.call.total]
            span[:] = found.source.generation_log_probs
            if found.mask is not None:
                span[~found.mask] = np.nan
        return read_only(log_probs)

    def policy_versions(self) -> tuple[tuple[Any, int, int], ...]:
        owned = (self._judged[number] for number in self._path.owned)
        return joined_versions((found.source.policy_versions, found.call.prompt, found.call.sampled) for found in owned)

    def calls(self) -> tuple[Span, ...]:
        owned = set(self._path.owned)
        return tuple(self._span(number, number in owned) for number in chain_of(self._links, self._path.end))

    def _trained(self) -> Iterator[Judged]:
        owned = (self._judged[number] for number in self._path.owned)
        return (found for found in owned if found.trained)

    def _span(self, number: int, owned: bool) -> Span:
        found = self._judged[number]
        ids = [self._recorded.calls[i].model_call_id for i in self._links.members[number]]
        return Span(
            tuple(dict.fromkeys(ids)),
            found.call.choice_index,
            found.call.prompt,
            found.call.total,
            owned,
            found.verdict,
            found.trained if owned else 0,
        )


def joined_versions(calls: Iterable[Told]) -> tuple[tuple[Any, int, int], ...]:
    """(version, start, end) over the sampled positions of `calls`; spans that touch and agree are one."""
    spans: list[tuple[Any, int, int]] = []
    for told, prompt, sampled in calls:
        for version, start, end in _versions(told, sampled):
            start, end = start + prompt, end + prompt
            if spans and spans[-1][0] == version and spans[-1][2] == start:
                start = spans.pop()[1]
            spans.append((version, start, end))
    return tuple(spans)


def _versions(told: Any, sampled: int) -> Iterator[tuple[Any, int, int]]:
    """The spans that an engine told, completed with None where it was silent; all None if they overlap."""
    done = 0
    spans = sorted(filter(_is_span, told), key=lambda span: int(span[1]))
    if any(one[2] > other[1] for one, other in pairwise(spans)):
        spans = []
    for version, start, end in spans:
        start, end = max(start, done), min(end, sampled)
        if start >= end:
            continue
        if start > done:
            yield None, done, start
        yield version, start, end
        done = end
    if done < sampled:
        yield None, done, sampled


def _is_span(span: Any) -> bool:
    return isinstance(span, (tuple, list)) and len(span) == 3 and all(type(bound) is int for bound in span[1:])


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, which nobody can write to any more."""
    array.flags.writeable = False
    return array
