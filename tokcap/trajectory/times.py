"""When calls ran. Times compare within one boot only; otherwise the order is unknown (rule 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..protocol import CallRecord

__all__ = ("Times", "began_before", "ended_before", "ended_first", "is_before")

Booleans = npt.NDArray[np.bool_]


def is_before(one: CallRecord, other: CallRecord) -> bool:
    """Whether `one` is known to have come before `other`; False if their times don't compare.

    Begin times decide; end times only where a begin is missing (a mark without an intent).
    """
    if not one.boot_id or one.boot_id != other.boot_id:
        return False
    if one.begun_at is not None and other.begun_at is not None:
        return one.begun_at < other.begun_at
    return one.ended_at is not None and other.ended_at is not None and one.ended_at < other.ended_at


def began_before(one: CallRecord, other: CallRecord) -> bool:
    """Whether `one` is known to have begun before `other`. When a loss was noted says nothing of when it began."""
    if not one.boot_id or one.boot_id != other.boot_id or one.begun_at is None or other.begun_at is None:
        return False
    return one.begun_at < other.begun_at


def ended_before(one: CallRecord, other: CallRecord) -> bool:
    """Whether `one` is known to have ended before `other` began."""
    if not one.boot_id or one.boot_id != other.boot_id or one.ended_at is None or other.begun_at is None:
        return False
    return one.ended_at < other.begun_at


def ended_first(one: CallRecord, other: CallRecord) -> bool:
    """Whether `one` is known to have ended before `other` ended."""
    if not one.boot_id or one.boot_id != other.boot_id or one.ended_at is None or other.ended_at is None:
        return False
    return one.ended_at < other.ended_at


class Times:
    """The earliest times of groups of identical calls; unknown where their times don't compare."""

    def __init__(self, groups: Sequence[Sequence[CallRecord]]) -> None:
        self._boots: dict[str, int] = {}
        self._boot = np.full(len(groups), -1, np.int64)
        self._begun = np.full(len(groups), np.nan)
        self._ended = np.full(len(groups), np.nan)
        for place, records in enumerate(groups):
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
        """Which are known to have begun after `record`."""
        return self._comparable(record) & (self._begun > _time(record.begun_at))

    def ended_after(self, record: CallRecord) -> Booleans:
        """Which are known to have ended after `record`."""
        return self._comparable(record) & (self._ended > _time(record.ended_at))

    def _comparable(self, record: CallRecord) -> Booleans:
        boot = self._boots.get(record.boot_id, -2) if record.boot_id else -2
        comparable: Booleans = self._boot == boot
        return comparable


def _time(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds
