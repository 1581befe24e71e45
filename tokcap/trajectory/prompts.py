"""The prompts of a rollout in the order of their ids: which of them run through a vertex, and which came when."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray
from ..protocol import CallRecord
from .recorded import Call, Recorded
from .times import began_before, is_before

__all__ = ("FEW", "Prompts", "prompts_by_model")

Booleans = npt.NDArray[np.bool_]

FEW = 16
"""Up to so many calls are compared one after another in less time than arrays of them take to be made."""


def prompts_by_model(recorded: Recorded, calls: Iterable[Call]) -> Callable[[str], Prompts]:
    """The prompts of `calls`, for each model apart."""
    of_model: dict[str, list[Call]] = {}
    for call in sorted(calls, key=lambda call: recorded.first[call.prompt_vertex]):
        of_model.setdefault(call.model, []).append(call)
    made: dict[str, Prompts] = {}

    def prompts(model: str) -> Prompts:
        if model not in made:
            made[model] = Prompts(recorded, of_model.get(model, ()))
        return made[model]

    return prompts


class Prompts:
    """The prompts of one model, with the times of their calls as arrays: many are compared at once."""

    def __init__(self, recorded: Recorded, calls: Sequence[Call]) -> None:
        self._recorded = recorded
        self.calls = calls
        self._ranks = [recorded.first[call.prompt_vertex] for call in calls]

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.array([self._recorded.first[call.end_vertex] for call in self.calls], np.int64)

    @cached_property
    def _boots(self) -> dict[str, int]:
        boots = dict.fromkeys(call.record.boot_id for call in self.calls if call.record.boot_id)
        return {boot: number for number, boot in enumerate(boots)}

    @cached_property
    def _boot(self) -> npt.NDArray[np.int64]:
        return np.array([self._boots.get(call.record.boot_id, -1) for call in self.calls], np.int64)

    @cached_property
    def _begun(self) -> FloatArray:
        begun = (call.record.begun_at for call in self.calls)
        return np.array([np.nan if time is None else time for time in begun], np.float64)

    @cached_property
    def _ended(self) -> FloatArray:
        ended = (call.record.ended_at for call in self.calls)
        return np.array([np.nan if time is None else time for time in ended], np.float64)

    @cached_property
    def _one_clock(self) -> str:
        """The boot in which all of them began, at known times; else empty."""
        known = len(self._boots) == 1 and bool((self._boot == 0).all() and not np.isnan(self._begun).any())
        return next(iter(self._boots)) if known else ""

    def through(self, vertex: int) -> slice:
        """The places in `calls` of those whose prompt runs through `vertex` or ends there."""
        start = bisect_left(self._ranks, self._recorded.first[vertex])
        return slice(start, bisect_right(self._ranks, self._recorded.last[vertex], lo=start))

    def any_later(
        self, through: slice, records: Sequence[CallRecord], rivals: Sequence[Sequence[CallRecord]] = ()
    ) -> bool:
        """Whether one of them may have come after the calls of `records`, and came before those of every rival."""
        if through.start == through.stop:
            return False
        if through.stop - through.start <= FEW:
            return any(
                not all(is_before(call.record, record) for record in records)
                and all(is_before(call.record, record) for rival in rivals for record in rival)
                for call in self.calls[through]
            )
        if self._one_clock and not rivals and len(records) == 1 and records[0].begun_at is not None:
            if records[0].boot_id != self._one_clock:
                return True
            return bool(self._begun[through].max() >= records[0].begun_at)
        found = ~self._before_all(through, records)
        for rival in rivals:
            found &= self._before_all(through, rival)
        return bool(found.any())

    def latest_before(self, through: slice, record: CallRecord, not_below: int) -> Call | None:
        """The last of them that is known to have begun before `record`, and whose answer isn't below `not_below`."""
        if record.begun_at is None or through.start == through.stop:
            return None
        if through.stop - through.start <= FEW:
            return self._latest_of_few(through, record, not_below)
        earlier = self._same_boot(through, record) & (self._begun[through] < record.begun_at)
        ends = self._ends[through]
        first, last = self._recorded.first[not_below], self._recorded.last[not_below]
        earlier &= (ends < first) | (ends > last)
        if not earlier.any():
            return None
        latest: Call = self.calls[through.start + int(np.where(earlier, self._begun[through], -np.inf).argmax())]
        return latest

    def _latest_of_few(self, through: slice, record: CallRecord, not_below: int) -> Call | None:
        """The same, one after another."""
        latest, latest_begun = None, -math.inf
        for call in self.calls[through]:
            begun = call.record.begun_at
            if begun is None or not began_before(call.record, record):
                continue
            if (latest is None or begun > latest_begun) and not self._recorded.below(call.end_vertex, not_below):
                latest, latest_begun = call, begun
        return latest

    def _before_all(self, through: slice, records: Sequence[CallRecord]) -> Booleans:
        before = np.ones(through.stop - through.start, np.bool_)
        for record in records:
            before &= self._before(through, record)
        return before

    def _before(self, through: slice, record: CallRecord) -> Booleans:
        """As `times.is_before` says it of each of them and `record`."""
        begun, ended = self._begun[through], self._ended[through]
        earlier = np.zeros(len(begun), np.bool_)
        unbegun = np.isnan(begun)
        if record.begun_at is not None:
            earlier = begun < record.begun_at
        else:
            unbegun = np.ones(len(begun), np.bool_)
        if record.ended_at is not None:
            earlier |= unbegun & (ended < record.ended_at)
        return self._same_boot(through, record) & earlier

    def _same_boot(self, through: slice, record: CallRecord) -> Booleans:
        boot = self._boots.get(record.boot_id, -2) if record.boot_id else -2
        same: Booleans = self._boot[through] == boot
        return same
