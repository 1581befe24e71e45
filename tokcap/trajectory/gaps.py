"""Where a lost call may lie between a call and what it continues (rule 15)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..protocol import CallRecord
from .links import NO_CALL, Links
from .recorded import Recorded
from .samples import began_before, ended_first

__all__ = ("find_gaps", "gaps_between", "missing_calls")

Booleans = npt.NDArray[np.bool_]
Step = tuple[int, int]


def missing_calls(recorded: Recorded) -> list[CallRecord]:
    """The calls that may have sampled something of which no record is left."""
    return [record for record in recorded.records if record.outcome in ("lost", "open")]


def find_gaps(recorded: Recorded, links: Links) -> set[int]:
    """The representatives that a lost or open call may directly precede: after their parent, or before their root.

    By begin order where it is known; a call whose order is unknown may lie anywhere.
    """
    steps = [(links.parent[number], number) for number in links.answered]
    return {later for _, later in gaps_between(recorded, links, steps)}


def gaps_between(recorded: Recorded, links: Links, steps: Sequence[Step]) -> list[Step]:
    """Those of `steps` (an earlier call or NO_CALL, and a later one) between which a lost or open call may lie."""
    missing = missing_calls(recorded)
    if not missing or not steps:
        return []
    later = _Times(recorded, [links.members[after] for _, after in steps])
    earlier = _Times(recorded, [links.members[before] if before != NO_CALL else () for before, _ in steps])
    undecided = np.ones(len(steps), np.bool_)
    for record in missing:
        # Most steps are settled by one comparison of all at once; what is left is looked at closely.
        possible = undecided & ~later.begun_before(record) & ~earlier.begun_after(record) & ~earlier.ended_after(record)
        for place in np.flatnonzero(possible).tolist():
            if may_be_within(recorded, links, record, *steps[place]):
                undecided[place] = False
    return [steps[place] for place in np.flatnonzero(~undecided).tolist()]


class _Times:
    """The earliest times of groups of identical calls; unknown where their times don't compare."""

    def __init__(self, recorded: Recorded, groups: list[tuple[int, ...]]) -> None:
        self._boots: dict[str, int] = {}
        self._boot = np.full(len(groups), -1, np.int64)
        self._begun = np.full(len(groups), np.nan)
        self._ended = np.full(len(groups), np.nan)
        for place, group in enumerate(groups):
            records = [recorded.calls[i].record for i in group]
            boots = {record.boot_id for record in records}
            if len(boots) != 1 or "" in boots:
                continue
            self._boot[place] = self._boots.setdefault(boots.pop(), len(self._boots))
            begun = [record.begun_at for record in records if record.begun_at is not None]
            ended = [record.ended_at for record in records if record.ended_at is not None]
            self._begun[place] = min(begun) if len(begun) == len(records) else np.nan
            self._ended[place] = min(ended) if len(ended) == len(records) else np.nan

    def begun_before(self, record: CallRecord) -> Booleans:
        """Which are known to have begun before `record`."""
        return self._comparable(record) & (self._begun < _time(record.begun_at))

    def begun_after(self, record: CallRecord) -> Booleans:
        return self._comparable(record) & (self._begun > _time(record.begun_at))

    def ended_after(self, record: CallRecord) -> Booleans:
        return self._comparable(record) & (self._ended > _time(record.ended_at))

    def _comparable(self, record: CallRecord) -> Booleans:
        boot = self._boots.get(record.boot_id, -2) if record.boot_id else -2
        comparable: Booleans = self._boot == boot
        return comparable


def _time(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds


def may_be_within(recorded: Recorded, links: Links, missing: CallRecord, earlier: int, later: int) -> bool:
    """Whether `missing` can have run after call `earlier` (NO_CALL: the beginning) and before call `later`."""
    after = [] if earlier == NO_CALL else [recorded.calls[i].record for i in links.members[earlier]]
    before = [recorded.calls[i].record for i in links.members[later]]
    if missing.model_call_id and any(record.model_call_id == missing.model_call_id for record in (*after, *before)):
        return False  # one of whose choices some are recorded: it lies beside them
    # Identical calls have one prompt and one answer: the first of them shows that they were there by then.
    if any(began_before(record, missing) for record in before):
        return False
    # An answer is released when its record is stored, so what had ended by then was not asked because of it.
    return not after or not all(began_before(missing, r) or ended_first(missing, r) for r in after)
