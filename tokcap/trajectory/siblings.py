"""Calls with the same prompt: samples, retries, and answers that were cut off (rules 7 to 10, 16, 19)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ..digests import answer_digest
from .links import NO_CALL, Links, grouped, sound
from .recorded import Call, Recorded
from .samples import is_before, sample_units

__all__ = ("Fate", "settle_siblings")

Verdict = Literal["kept", "abandoned", "ambiguous", "aborted"]


class Fate(msgspec.Struct, gc=False):
    """What became of an answer."""

    verdict: Verdict = "kept"
    continued: int | None = None
    """Of an answer that was cut off: how many of its ids a later prompt holds; None if all count."""


def settle_siblings(recorded: Recorded, links: Links, scored: int = NO_CALL) -> dict[int, Fate]:
    """The fate of every representative with sampled ids. `scored` (a representative) is always kept."""
    prompts = _Prompts(recorded)
    fates = {number: Fate() for number in links.answered}
    calls = recorded.calls
    for group in grouped(links.answered, lambda number: (calls[number].prompt_vertex, calls[number].model)).values():
        _settle_group(recorded, links, prompts, group, scored, fates)
    return fates


def _settle_group(
    recorded: Recorded, links: Links, prompts: _Prompts, group: Sequence[int], scored: int, fates: dict[int, Fate]
) -> None:
    proven = {number for number in group if number == scored or number in links.extended}
    cut_off = [number for number in group if number not in proven and _is_aborted(recorded, links, number)]
    units = _units(recorded, links, [number for number in group if number not in cut_off])
    if len(units) > 1:
        kept = [unit for unit in units if not proven.isdisjoint(unit)]
        verdict: Verdict = "abandoned"
        if not kept:
            decided = _decide(recorded, links, prompts, units, _units(recorded, links, cut_off))
            verdict = "abandoned" if decided is not None else "ambiguous"
            kept = [decided or []]
        for unit in units:
            if unit not in kept:
                fates.update((number, Fate(verdict)) for number in unit)
    # A prompt that may have gone on with a sibling's answer is no proof that it went on with this one.
    rivals = [number for number in group if number not in cut_off and fates[number].verdict != "abandoned"]
    for number in cut_off:
        continued = prompts.run(number, links, rivals)
        fates[number] = Fate("kept" if continued else "aborted", continued)


def _units(recorded: Recorded, links: Links, numbers: list[int]) -> list[list[int]]:
    """Siblings that are samples of each other, together; each unit competes with the others."""
    if len(numbers) < 2:
        return [numbers] if numbers else []
    records = {number: [recorded.calls[i].record for i in links.members[number]] for number in numbers}
    return sample_units(records, by_delivery_alone=True)


def _is_aborted(recorded: Recorded, links: Links, number: int) -> bool:
    return all(call.record.outcome == "aborted" for call in sound(recorded, links, number))


def _full(recorded: Recorded, links: Links, number: int) -> bool:
    return any(recorded.calls[i].record.delivered == "full" for i in links.members[number])


def _decide(
    recorded: Recorded, links: Links, prompts: _Prompts, complete: list[list[int]], cut_off: list[list[int]]
) -> list[int] | None:
    """The unit that the client went on with, although no later prompt holds its ids whole; None on doubt."""
    units = complete + cut_off
    runs = [max(prompts.run(number, links) for number in unit) for unit in units]
    longest = max(runs)
    by_ids = [unit for unit, run in zip(units, runs, strict=True) if run == longest] if longest else []
    by_text = [unit for unit in units if any(prompts.stands_later(number, links) for number in unit)]
    if len(by_ids) == 1:
        return by_ids[0] if not by_text or by_ids[0] in by_text else None
    if by_text:
        both = [unit for unit in by_text if unit in by_ids] if by_ids else by_text
        return both[0] if len(both) == 1 else None
    received = [unit for unit in complete if any(_full(recorded, links, number) for number in unit)]
    if len(received) == 1 and all(
        recorded.calls[i].record.delivered in ("no", "partly")
        for unit in complete
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
        digest = answer_digest(call.contents.output_items)
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
            is_before(recorded.calls[other].record, recorded.calls[same].record) for same in links.members[number]
        )
