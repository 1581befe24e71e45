"""Where a lost call may lie between a call and what it continues (rule 15)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..protocol import CallRecord
from .links import NO_CALL, Links
from .recorded import Recorded
from .samples import began_before, ended_first

__all__ = ("find_gaps", "may_be_within", "missing_calls")


def missing_calls(recorded: Recorded) -> list[CallRecord]:
    """The calls that may have sampled something of which no record is left."""
    return [record for record in recorded.records if record.outcome in ("lost", "open")]


def find_gaps(recorded: Recorded, links: Links) -> set[int]:
    """The representatives that a lost or open call may directly precede: after their parent, or before their root.

    By begin order where it is known; a call whose order is unknown may lie anywhere.
    """
    missing = missing_calls(recorded)
    numbers = np.array(links.answered, np.int64)
    if not missing or not len(numbers):
        return set()
    prompted = _Begins(recorded, [links.members[n] for n in links.answered])
    parents = [links.parent[n] for n in links.answered]
    answered = _Begins(recorded, [links.members[n] if n != NO_CALL else () for n in parents])
    undecided = np.ones(len(numbers), np.bool_)
    for record in missing:
        # Most links are settled by one comparison of all at once; what is left is looked at closely.
        possible = undecided & ~prompted.before(record) & ~answered.after(record)
        for place in np.flatnonzero(possible).tolist():
            number = links.answered[place]
            if may_be_within(recorded, links, record, parents[place], number):
                undecided[place] = False
    return set(numbers[~undecided].tolist())


class _Begins:
    """When calls began, one group of identical calls after another; unknown if their times don't compare."""

    def __init__(self, recorded: Recorded, groups: list[tuple[int, ...]]) -> None:
        self._boots: dict[str, int] = {"": -1}
        self._boot = np.full(len(groups), -1, np.int64)
        self._first = np.full(len(groups), np.nan)
        for place, group in enumerate(groups):
            records = [recorded.calls[i].record for i in group]
            if len(records) == 1 and records[0].begun_at is not None:
                boot = records[0].boot_id
                self._boot[place] = self._boots.setdefault(boot, len(self._boots)) if boot else -1
                self._first[place] = records[0].begun_at

    def before(self, record: CallRecord) -> npt.NDArray[np.bool_]:
        """Which began before `record` did, for certain."""
        return self._comparable(record) & (self._first < self._begun(record))

    def after(self, record: CallRecord) -> npt.NDArray[np.bool_]:
        """Which began after `record` did, for certain."""
        return self._comparable(record) & (self._first > self._begun(record))

    def _comparable(self, record: CallRecord) -> npt.NDArray[np.bool_]:
        boot = self._boots.get(record.boot_id, -2) if record.boot_id else -2
        comparable: npt.NDArray[np.bool_] = self._boot == boot
        return comparable

    def _begun(self, record: CallRecord) -> float:
        return float("nan") if record.begun_at is None else record.begun_at


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
