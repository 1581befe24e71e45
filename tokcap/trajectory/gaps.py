"""Where a lost call may lie between a call and what it continues (rule 15)."""

from __future__ import annotations

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
    gaps: set[int] = set()
    undecided = set(links.answered)
    for record in missing:
        found = {n for n in undecided if may_be_within(recorded, links, record, links.parent[n], n)}
        gaps |= found
        undecided -= found
    return gaps


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
