"""Where a lost call may lie between a call and what it continues (rule 15)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..protocol import CallRecord
from .links import Links, records_of
from .recorded import Recorded
from .times import Times, began_before, ended_first

__all__ = ("find_gaps", "gaps_between", "missing_calls")

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
    later = Times([records_of(recorded, links, after) for _, after in steps])
    earlier = Times([records_of(recorded, links, before) for before, _ in steps])
    undecided = np.ones(len(steps), np.bool_)
    for record in missing:
        # Most steps are settled by one comparison of all at once; what is left is looked at closely.
        possible = undecided & ~later.begun_before(record) & ~earlier.begun_after(record) & ~earlier.ended_after(record)
        for place in np.flatnonzero(possible).tolist():
            if may_be_within(recorded, links, record, *steps[place]):
                undecided[place] = False
    return [steps[place] for place in np.flatnonzero(~undecided).tolist()]


def may_be_within(recorded: Recorded, links: Links, missing: CallRecord, earlier: int, later: int) -> bool:
    """Whether `missing` can have run after call `earlier` (NO_CALL: the beginning) and before call `later`."""
    after, before = records_of(recorded, links, earlier), records_of(recorded, links, later)
    if missing.model_call_id and any(record.model_call_id == missing.model_call_id for record in (*after, *before)):
        return False  # one of whose choices some are recorded: it lies beside them
    # Identical calls have one prompt and one answer: the first of them shows that they were there by then.
    if any(began_before(record, missing) for record in before):
        return False
    # An answer is released when its record is stored, so what had ended by then was not asked because of it.
    return not after or not all(began_before(missing, r) or ended_first(missing, r) for r in after)
