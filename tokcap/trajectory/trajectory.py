"""`Trajectory`: one contiguous sequence with its loss mask and behaviour log-probs, made when looked at (rule 20)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray, IdArray
from .links import Links, chain_of
from .paths import Path
from .recorded import Recorded
from .verdicts import Category, Judged

__all__ = ("Span", "Trajectory", "TrajectoryFacts")


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


class TrajectoryFacts(msgspec.Struct, frozen=True):
    """What a trajectory says of its rollout."""

    rollout_id: str
    group: str
    count: int
    trained: int


class Trajectory:
    """One contiguous token sequence. All arrays have its length L and are read-only; they are made on first access.

    rollout_id, group: of the rollout.
    index, count: `index` is the position in `Build.trajectories`; `count` how many of them have trained ids. Those
        come first, so `index >= count` means that nothing here is trained.
    trained: ids that are trained here. rollout_trained: in all trajectories of the rollout, so that a rollout that
        splits into many neither weighs more nor moves a baseline.
    flags: what is worth knowing, sorted; see `tokcap.trajectory.FLAGS`.
    prefix_of, shared: the first `shared` ids are also the first ids of trajectory `prefix_of`, an earlier one; None, 0
        if it has no such prefix. Equal prefixes are stored once.
    """

    def __init__(
        self,
        recorded: Recorded,
        links: Links,
        judged: dict[int, Judged],
        path: Path,
        index: int,
        flags: tuple[str, ...],
        facts: TrajectoryFacts,
    ) -> None:
        self._recorded, self._links, self._judged, self._path = recorded, links, judged, path
        self._end = recorded.calls[path.end]
        self.rollout_id, self.group = facts.rollout_id, facts.group
        self.index, self.count = index, facts.count
        self.rollout_trained = facts.trained
        self.trained = path.trained
        self.flags = flags
        self.shared = path.shared
        self.prefix_of = path.prefix_of if path.shared else None

    def __len__(self) -> int:
        return self._end.total

    @cached_property
    def token_ids(self) -> IdArray:
        """int32 [L]: exactly what the engine saw and the policy sampled."""
        ids = np.empty(len(self), np.int32)
        self._recorded.tree.ids_to(self._end.end_vertex, ids)
        return _read_only(ids)

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """bool [L]: True where an id was sampled by the policy and is trained here."""
        mask = np.zeros(len(self), np.bool_)
        for found in self._owned():
            if found.trained:
                mask[found.call.prompt : found.call.total] = True if found.mask is None else found.mask
        return _read_only(mask)

    @cached_property
    def log_probs(self) -> FloatArray:
        """float64 [L]: natural log under the policy that sampled; NaN wherever the mask is False."""
        log_probs = np.full(len(self), np.nan)
        for found in self._owned():
            if found.trained:
                span = log_probs[found.call.prompt : found.call.total]
                span[:] = found.source.generation_log_probs
                if found.mask is not None:
                    span[~found.mask] = np.nan
        return _read_only(log_probs)

    @property
    def policy_versions(self) -> tuple[tuple[Any, int, int], ...]:
        """(version, start, end) over the sampled positions that belong to this trajectory; None: unknown."""
        spans: list[tuple[Any, int, int]] = []
        for found in self._owned():
            for version, start, end in _versions(found.source.policy_versions, found.call.sampled):
                start, end = start + found.call.prompt, end + found.call.prompt
                if spans and spans[-1][0] == version and spans[-1][2] == start:
                    start = spans.pop()[1]
                spans.append((version, start, end))
        return tuple(spans)

    @property
    def calls(self) -> tuple[Span, ...]:
        """Every call on the way, the first first, whether its span is owned here or not."""
        owned = set(self._path.owned)
        return tuple(self._span(number, number in owned) for number in chain_of(self._links, self._path.end))

    def as_dict(self) -> dict[str, Any]:
        """Arrays and facts in one plain dict, for a queue or a file; independent of the build."""
        return {
            "rollout_id": self.rollout_id,
            "group": self.group,
            "index": self.index,
            "count": self.count,
            "trained": self.trained,
            "rollout_trained": self.rollout_trained,
            "flags": self.flags,
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "log_probs": self.log_probs,
            "policy_versions": self.policy_versions,
        }

    def __repr__(self) -> str:
        flags = f", {', '.join(self.flags)}" if self.flags else ""
        return f"<Trajectory {self.rollout_id} {self.index}: {len(self)} ids, {self.trained} trained{flags}>"

    def _owned(self) -> Iterator[Judged]:
        return (self._judged[number] for number in self._path.owned)

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


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
