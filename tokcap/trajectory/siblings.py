"""Calls with the same prompt: samples, retries, and answers that were cut off (rules 7 to 10, 16, 19)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

import msgspec

from ..digests import answer_digest
from ..protocol import CallRecord
from .links import NO_CALL, Links, overlapped
from .recorded import Call, Recorded

__all__ = ("Fate", "settle_siblings")

Verdict = Literal["kept", "abandoned", "ambiguous", "aborted"]


class Fate(msgspec.Struct):
    """What became of an answer."""

    verdict: Verdict = "kept"
    continued: int | None = None
    """Of an answer that was cut off: how many of its ids a later prompt holds; None if all count."""


def settle_siblings(recorded: Recorded, links: Links, scored: int = NO_CALL) -> dict[int, Fate]:
    """The fate of every representative with sampled ids. `scored` (a representative) is always kept."""
    prompts = _Prompts(recorded)
    fates = {number: Fate() for number in links.answered}
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number in links.answered:
        call = recorded.calls[number]
        groups[call.prompt_vertex, call.model].append(number)
    for group in groups.values():
        _settle_group(recorded, links, prompts, group, scored, fates)
    return fates


def _settle_group(
    recorded: Recorded, links: Links, prompts: _Prompts, group: list[int], scored: int, fates: dict[int, Fate]
) -> None:
    competing = []
    for number in group:
        if _is_aborted(recorded, links, number) and not links.children.get(number) and number != scored:
            continued = prompts.run(number, links, [other for other in group if other != number])
            fates[number] = Fate("kept" if continued else "aborted", continued)
            if not continued:
                continue
        competing.append(number)
    units = _units(recorded, links, competing)
    if len(units) < 2:
        return
    kept = [unit for unit in units if scored in unit or any(links.children.get(number) for number in unit)]
    verdict: Verdict = "abandoned"
    if not kept:
        decided = _decide(recorded, links, prompts, units)
        if decided is None:
            verdict = "ambiguous"
        else:
            kept = [decided]
    for unit in units:
        for number in unit:
            # An answer that was cut off and went on counts as far as it went on, whatever its siblings did.
            if unit not in kept and fates[number].continued is None:
                fates[number] = Fate(verdict)


def _is_aborted(recorded: Recorded, links: Links, number: int) -> bool:
    return all(recorded.calls[i].record.outcome == "aborted" for i in links.members[number])


def _units(recorded: Recorded, links: Links, numbers: list[int]) -> list[list[int]]:
    """Siblings that are samples of each other, together; each unit competes with the others."""
    by_call: dict[str, list[int]] = defaultdict(list)
    for number in numbers:
        by_call[recorded.calls[number].model_call_id].append(number)
    if len(by_call) == 1:
        return list(by_call.values())
    records = {call_id: recorded.calls[same[0]].record for call_id, same in by_call.items()}
    full = {
        call_id: record
        for call_id, record in records.items()
        if any(_full(recorded, links, number) for number in by_call[call_id])
    }
    units = [by_call[call_id] for call_id in by_call if call_id not in full]
    unit: list[int] = []
    end: CallRecord | None = None
    # In order of their begin, a call is a sample beside those before it if it began before the last of them ended.
    # Where times don't compare, both having reached the client is enough.
    comparable = all(overlapped(one, one) is not None for one in full.values())
    comparable = comparable and len({record.boot_id for record in full.values()}) == 1
    for call_id in sorted(full, key=lambda i: (full[i].begun_at or 0.0, i)):
        record = full[call_id]
        if comparable and end is not None and not overlapped(end, record):
            units.append(unit)
            unit, end = [], None
        unit = unit + by_call[call_id]
        if end is None or (record.ended_at or 0.0) > (end.ended_at or 0.0):
            end = record
    if unit:
        units.append(unit)
    return units


def _full(recorded: Recorded, links: Links, number: int) -> bool:
    return any(recorded.calls[i].record.delivered == "full" for i in links.members[number])


def _decide(recorded: Recorded, links: Links, prompts: _Prompts, units: list[list[int]]) -> list[int] | None:
    """The unit that the client went on with, although no later prompt holds its ids whole; None on doubt."""
    runs = [max(prompts.run(number, links) for number in unit) for unit in units]
    longest = max(runs)
    by_ids = [unit for unit, run in zip(units, runs, strict=True) if run == longest] if longest else []
    by_text = [unit for unit in units if any(prompts.stands_later(number, links) for number in unit)]
    if len(by_ids) == 1:
        return by_ids[0] if not by_text or by_ids[0] in by_text else None
    if by_text:
        both = [unit for unit in by_text if unit in by_ids] if by_ids else by_text
        return both[0] if len(both) == 1 else None
    received = [unit for unit in units if any(_full(recorded, links, number) for number in unit)]
    if len(received) == 1 and all(
        recorded.calls[i].record.delivered in ("no", "partly")
        for unit in units
        if unit is not received[0]
        for number in unit
        for i in links.members[number]
    ):
        return received[0] if not by_ids or received[0] in by_ids else None
    return None


class _Prompts:
    """The prompts of a rollout, to ask which of them run through a vertex, and which hold a text."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._ranks: dict[str, list[int]] = defaultdict(list)
        self._numbers: dict[str, list[int]] = defaultdict(list)
        for call in sorted(recorded.calls, key=lambda call: recorded.first[call.prompt_vertex]):
            self._ranks[call.model].append(recorded.first[call.prompt_vertex])
            self._numbers[call.model].append(call.number)
        self._holding: dict[bytes, list[Call]] | None = None

    def run(self, number: int, links: Links, rivals: Iterable[int] = ()) -> int:
        """How many of the call's sampled ids the later prompt that holds most of them holds, at their own position.

        0 if a rival's answer shares as many with it.
        """
        recorded = self._recorded
        call = recorded.calls[number]
        ranks, numbers = self._ranks[call.model], self._numbers[call.model]
        vertex = call.end_vertex
        while vertex != call.prompt_vertex:
            start = bisect_left(ranks, recorded.first[vertex])
            stop = bisect_right(ranks, recorded.last[vertex])
            if any(self._is_later(links, number, other) for other in numbers[start:stop]):
                if any(recorded.below(recorded.calls[rival].end_vertex, vertex) for rival in rivals):
                    return 0
                return recorded.tree.depth[vertex] - call.prompt
            vertex = recorded.tree.parent[vertex]
        return 0

    def stands_later(self, number: int, links: Links) -> bool:
        """Whether a later request holds the call's answer, by its text and tool calls, once more than its own did."""
        if self._holding is None:
            self._holding = defaultdict(list)
            for holder in self._recorded.calls:
                for held in set(holder.record.request_digests):
                    self._holding[held].append(holder)
        if not self._holding:
            return False
        call = self._recorded.calls[number]
        digest = answer_digest(call.answer.output_items)
        if digest is None:
            return False
        before = Counter(call.record.request_digests)[digest]
        return any(
            Counter(other.record.request_digests)[digest] > before and self._is_later(links, number, other.number)
            for other in self._holding.get(digest, ())
        )

    def _is_later(self, links: Links, number: int, other: int) -> bool:
        """Whether `other` may have been asked after the call was; unknown order counts as later."""
        recorded = self._recorded
        return not all(
            recorded.is_before(recorded.calls[other].record, recorded.calls[same].record)
            for same in links.members[number]
        )
