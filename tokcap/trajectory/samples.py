"""Which calls are samples of each other (rule 7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf

from ..protocol import CallRecord

__all__ = ("sample_units",)


def sample_units(records: Mapping[int, Sequence[CallRecord]], *, by_delivery_alone: bool) -> list[list[int]]:
    """Group calls, given with their records, into samples of each other.

    Samples are choices of one call, and calls that ran at the same time and reached the client in full.
    by_delivery_alone: without times that compare, having reached the client in full is enough.
    """
    units = _Units(records)
    by_call: dict[str, int] = {}
    timed: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    untimed = []
    for number, same in records.items():
        for record in same:
            units.join(by_call.setdefault(record.model_call_id, number), number)
            if record.delivered != "full":
                continue
            begun, ended = record.begun_at, record.ended_at
            if not record.boot_id or (begun is None and ended is None):
                untimed.append(number)
            elif by_delivery_alone or (begun is not None and ended is not None):
                # What is not known may have been long ago, or not yet.
                interval = (-inf if begun is None else begun, inf if ended is None else ended)
                timed[record.boot_id].append((*interval, number))
    for intervals in timed.values():
        intervals.sort()
        latest, number_of_latest = intervals[0][1:]
        for begun, ended, number in intervals:
            if begun <= latest:
                units.join(number_of_latest, number)
            if ended >= latest:
                latest, number_of_latest = ended, number
    if by_delivery_alone and (untimed or len(timed) > 1):
        # Each of two groups whose times don't compare is joined with the other, so all are one.
        everyone = [*untimed, *(number for intervals in timed.values() for *_, number in intervals)]
        for number in everyone:
            units.join(everyone[0], number)
    return units.groups()


class _Units:
    """Disjoint sets of numbers."""

    def __init__(self, numbers: Mapping[int, object]) -> None:
        self._above = {number: number for number in numbers}

    def _top(self, number: int) -> int:
        while self._above[number] != number:
            self._above[number] = number = self._above[self._above[number]]
        return number

    def join(self, one: int, other: int) -> None:
        self._above[self._top(other)] = self._top(one)

    def groups(self) -> list[list[int]]:
        units: dict[int, list[int]] = defaultdict(list)
        for number in self._above:
            units[self._top(number)].append(number)
        return list(units.values())
