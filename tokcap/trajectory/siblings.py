"""Calls with the same prompt: samples, retries, and answers that were cut off (rules 7 to 10, 16, 19)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from ..digests import answer_digest
from ..protocol import CallRecord
from ..store.ledger import DigestChain
from .links import NO_CALL, Links, grouped, records_of, sound
from .prompts import Prompts, prompts_by_model
from .recorded import Call, Recorded
from .samples import sample_units
from .times import is_before

__all__ = ("Fate", "doubtful_siblings", "settle_siblings")

Verdict = Literal["kept", "abandoned", "ambiguous", "aborted"]


class Fate(msgspec.Struct, frozen=True, gc=False):
    """What became of an answer."""

    verdict: Verdict = "kept"
    continued: int | None = None
    """Of an answer that was cut off: how many of its ids a later prompt holds; None if all count."""


_KEPT = Fate()


def doubtful_siblings(recorded: Recorded, links: Links) -> list[Sequence[int]]:
    """The representatives with one prompt where not all are kept for certain: several, or one that was cut off."""
    calls = recorded.calls
    groups = grouped(links.answered, lambda number: (calls[number].prompt_vertex, calls[number].model)).values()
    # Only what an engine or the ledger says has no end can be without one.
    cut_off = bool(recorded.partly_aborted) or any(record.outcome == "aborted" for record in recorded.records)
    return [group for group in groups if len(group) > 1 or (cut_off and _is_cut_off(recorded, links, group[0]))]


def settle_siblings(
    recorded: Recorded, links: Links, doubtful: Sequence[Sequence[int]], scored: int = NO_CALL
) -> dict[int, Fate]:
    """The fate of every representative with sampled ids. `scored` (a representative) is always kept."""
    fates = dict.fromkeys(links.answered, _KEPT)
    if doubtful:
        evidence = _Evidence(recorded, links, [number for group in doubtful if len(group) > 1 for number in group])
        for group in doubtful:
            _settle_group(recorded, links, evidence, group, scored, fates)
    return fates


def _settle_group(
    recorded: Recorded, links: Links, evidence: _Evidence, group: Sequence[int], scored: int, fates: dict[int, Fate]
) -> None:
    proven = {number for number in group if number == scored or number in links.extended}
    cut_off = [number for number in group if number not in proven and _is_cut_off(recorded, links, number)]
    units = _units(recorded, links, [number for number in group if number not in cut_off])
    rivals = [unit for unit in _units(recorded, links, cut_off) if any(evidence.run(number) for number in unit)]
    if units and len(units) + len(rivals) > 1:
        kept = [unit for unit in units if not proven.isdisjoint(unit)]
        verdict: Verdict = "abandoned"
        if not kept:
            decided = _decide(recorded, links, evidence, units, rivals)
            verdict = "abandoned" if decided is not None else "ambiguous"
            kept = [decided or []]
        for unit in units:
            if unit not in kept:
                fates.update((number, Fate(verdict)) for number in unit)
    # A prompt that may have gone on with a sibling's answer is no proof that it went on with this one.
    others = [number for number in group if number not in cut_off and fates[number].verdict != "abandoned"]
    for number in cut_off:
        continued = evidence.run(number, others)
        fates[number] = Fate("kept" if continued else "aborted", continued)


def _units(recorded: Recorded, links: Links, numbers: list[int]) -> list[list[int]]:
    """Siblings that are samples of each other, together; each unit competes with the others."""
    if len(numbers) < 2:
        return [numbers] if numbers else []
    records = {number: records_of(recorded, links, number) for number in numbers}
    return sample_units(records, by_delivery_alone=True)


def _is_cut_off(recorded: Recorded, links: Links, number: int) -> bool:
    """Whether the answer has no end: of a choice the engine says so, of a call its outcome."""
    return all(_has_no_end(recorded, call) for call in sound(recorded, links, number))


def _has_no_end(recorded: Recorded, call: Call) -> bool:
    if call.finish_reason == "aborted":
        return True
    # Of several choices only those that say so were cut off.
    return call.record.outcome == "aborted" and call.model_call_id not in recorded.partly_aborted


def _full(recorded: Recorded, links: Links, number: int) -> bool:
    return any(record.delivered == "full" for record in records_of(recorded, links, number))


def _decide(
    recorded: Recorded, links: Links, evidence: _Evidence, complete: list[list[int]], cut_off: list[list[int]]
) -> list[int] | None:
    """The unit that the client went on with, although no later prompt holds its ids whole; None on doubt."""
    units = complete + cut_off
    runs = [max(evidence.run(number) for number in unit) for unit in units]
    longest = max(runs)
    by_ids = [unit for unit, run in zip(units, runs, strict=True) if run == longest] if longest else []
    by_text = [unit for unit in units if any(evidence.stands_later(number) for number in unit)]
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


class _Evidence:
    """What later prompts and requests say of an answer."""

    def __init__(self, recorded: Recorded, links: Links, contested: Sequence[int]) -> None:
        self._recorded, self._links = recorded, links
        self._contested = contested
        """Representatives that have siblings."""

    @cached_property
    def _prompts(self) -> Callable[[str], Prompts]:
        return prompts_by_model(self._recorded, self._recorded.calls)

    def run(self, number: int, rivals: Sequence[int] = ()) -> int:
        """How many of the call's sampled ids the later prompt that holds most of them holds, at their own position.

        A prompt that may have gone on with a rival's answer, because it holds as much of it, doesn't count.
        """
        recorded = self._recorded
        call = recorded.calls[number]
        prompts = self._prompts(call.model)
        records = self._records(number)
        vertex = call.end_vertex
        while vertex != call.prompt_vertex:
            sharing = [self._records(n) for n in rivals if recorded.below(recorded.calls[n].end_vertex, vertex)]
            if prompts.any_later(prompts.through(vertex), records, sharing):
                return recorded.tree.depth[vertex] - call.prompt
            vertex = recorded.tree.parent[vertex]
        return 0

    def _records(self, number: int) -> list[CallRecord]:
        return records_of(self._recorded, self._links, number)

    def stands_later(self, number: int) -> bool:
        """Whether a later request holds the call's answer, by its text and tool calls, once more than its own did."""
        records = self._records(number)
        for i in self._links.members[number]:
            holders = self._holders.get(self._texts.get(i, b""), ())
            before = next((count for record, count in holders if record is self._recorded.calls[i].record), 0)
            for holder, count in holders:
                if count > before and not all(is_before(holder, record) for record in records):
                    return True
        return False

    @cached_property
    def _texts(self) -> dict[int, bytes]:
        """Of each contested call the digest that its answer has in a later request."""
        calls, members = self._recorded.calls, self._links.members
        if not any(record.request_digests for record in self._recorded.records):
            return {}
        digests = {i: answer_digest(calls[i].contents.output_items) for n in self._contested for i in members[n]}
        return {number: digest for number, digest in digests.items() if digest is not None}

    @cached_property
    def _holders(self) -> dict[bytes, list[tuple[CallRecord, int]]]:
        """Of each of these digests the requests that hold it, and how often."""
        wanted = set(self._texts.values())
        holders: dict[bytes, list[tuple[CallRecord, int]]] = defaultdict(list)
        known: dict[int, Held] = {}
        for record in self._recorded.records:
            held = _held(record.request_digests, wanted, known)
            for digest, count in Counter(digest for _, digest in held).items():
                holders[digest].append((record, count))
        return holders


Held = list[tuple[int, bytes]]
"""Where in a request which of the wanted digests stand."""


def _held(digests: Sequence[bytes], wanted: Container[bytes], known: dict[int, Held]) -> Held:
    """The wanted ones of `digests`. A history that a store keeps once is looked through once."""
    if not isinstance(digests, DigestChain):
        return [(place, digest) for place, digest in enumerate(digests) if digest in wanted]
    way: list[DigestChain] = []
    chain: DigestChain | None = digests
    while chain is not None and id(chain) not in known:
        way.append(chain)
        chain = chain.parent
    for chain in reversed(way):
        shared = known[id(chain.parent)] if chain.parent is not None else []
        held = [(place, digest) for place, digest in shared if place < chain.shared]
        held += [(chain.shared + n, digest) for n, digest in enumerate(chain.own_digests()) if digest in wanted]
        known[id(chain)] = held
    return known[id(digests)]
