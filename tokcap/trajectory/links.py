"""Which call continues which: by ids, compared one by one (rules 1 to 4).

Calls with the same prompt, the same answer and the same model are one call with several ids, unless they are samples:
choices of one call, or calls that ran at the same time and both reached the client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from ..content import name_of
from ..protocol import CallRecord
from .behaviour import unknown_log_probs
from .recorded import Call, Recorded
from .samples import sample_units
from .times import ended_before, is_before

__all__ = ("NO_CALL", "Links", "chain_of", "first_content", "grouped", "link", "received", "records_of", "sound")

NO_CALL = -1

LARGEST_DIFFERENCE = 0.5
"""Between the log-probs of two identical calls; engines in bf16 differ by 0.04 on average between runs."""


class Links(msgspec.Struct, eq=False):
    """The calls of a rollout and how they continue each other. Numbers are those of `Recorded.calls`."""

    representative: list[int]
    """Of each call: the call that stands for it and for all that are identical to it."""
    members: dict[int, tuple[int, ...]]
    """Of each representative: all calls that it stands for, itself included."""
    parent: dict[int, int]
    """Of each representative: the representative that it continues, or NO_CALL."""
    children: dict[int, tuple[int, ...]]
    """Of a representative: those that continue it and have sampled ids."""
    extended: set[int]
    """Representatives that a later prompt holds whole, whether or not anything was sampled after it."""
    answered: list[int]
    """Representatives that have sampled ids."""
    unclear: set[int]
    """Representatives whose identical calls disagree on what the log-probs mean."""
    largest_difference: float
    """Between log-probs of identical calls, natural log."""
    hints_refuted: int


def link(recorded: Recorded, preferred: int = NO_CALL) -> Links:
    """Merge identical calls and find the parent of each.

    preferred: of equal samples the one that is continued, if it is known.
    """
    representative, members = _merge(recorded)
    answered = [number for number in members if recorded.calls[number].sampled]
    parent, refuted = _parents(recorded, members, answered, preferred)
    children: dict[int, tuple[int, ...]] = {}
    for above, below in grouped(answered, lambda number: parent[number]).items():
        if above != NO_CALL:
            children[above] = tuple(below)
    extended = {
        above
        for number, above in parent.items()
        if above != NO_CALL and _may_follow(recorded, members[number], members[above])
    }
    links = Links(representative, members, parent, children, extended, answered, set(), 0.0, refuted)
    for number in answered:
        same = sound(recorded, links, number) if len(members[number]) > 1 else []
        if len(same) > 1:
            difference = _difference(same)
            links.largest_difference = max(links.largest_difference, difference)
            if difference > LARGEST_DIFFERENCE or _meanings(same) > 1:
                links.unclear.add(number)
    return links


_Key = TypeVar("_Key", bound=Hashable)


def grouped(numbers: Iterable[int], key: Callable[[int], _Key]) -> dict[_Key, Sequence[int]]:
    """Numbers by their key, in order. Most keys have one number, which costs no list."""
    groups: dict[_Key, Sequence[int]] = {}
    for number in numbers:
        found = groups.setdefault(key(number), (number,))
        if isinstance(found, list):
            found.append(number)
        elif found[0] != number:
            groups[key(number)] = [*found, number]
    return groups


def records_of(recorded: Recorded, links: Links, number: int) -> list[CallRecord]:
    """The records of all calls that `number` stands for; none for NO_CALL."""
    return [recorded.calls[i].record for i in links.members[number]] if number != NO_CALL else []


def chain_of(links: Links, number: int) -> list[int]:
    """The representatives that `number` continues, the first call first and `number` last; empty for NO_CALL."""
    chain = []
    while number != NO_CALL:
        chain.append(number)
        number = links.parent[number]
    return chain[::-1]


def content_order(recorded: Recorded, number: int) -> tuple[bytes, tuple[str, int]]:
    """Orders calls with equal ids by what else was recorded; names decide between complete equals only."""
    call = recorded.calls[number]
    return call.digest, call.key


def first_content(recorded: Recorded, numbers: Iterable[int]) -> tuple[bytes, tuple[str, int]]:
    """The smallest `content_order` of identical calls."""
    return min(content_order(recorded, number) for number in numbers)


def _merge(recorded: Recorded) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    calls = recorded.calls
    places = grouped(range(len(calls)), lambda n: (calls[n].prompt_vertex, calls[n].end_vertex, calls[n].model))
    groups = []
    for same in places.values():
        if len(same) == 1:
            groups.append(same)
            continue
        units = sample_units({number: (recorded.calls[number].record,) for number in same}, by_delivery_alone=False)
        # Samples that came out equal stay apart. A retry of several is paired with them in the order of contents, so
        # that nothing depends on names.
        for unit in units:
            if len(unit) > 1:
                unit.sort(key=lambda number: content_order(recorded, number))
        groups += [[unit[i] for unit in units if i < len(unit)] for i in range(max(map(len, units)))]
    representative = list(range(len(recorded.calls)))
    members: dict[int, tuple[int, ...]] = {}
    for group in sorted(map(sorted, groups)):
        members[group[0]] = tuple(group)
        for number in group:
            representative[number] = group[0]
    return representative, members


def _parents(
    recorded: Recorded, members: dict[int, tuple[int, ...]], answered: list[int], preferred: int
) -> tuple[dict[int, int], int]:
    """Of each representative its parent; and how many hints are refuted."""
    calls = recorded.calls
    ends: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number in answered:
        ends[calls[number].model][calls[number].end_vertex].append(number)
    nearest: dict[str, dict[int, int]] = defaultdict(lambda: {0: 0})
    by_id = {call.model_call_id: call.number for call in calls}
    parent, refuted = {}, 0
    for number in members:
        call = calls[number]
        vertex = _nearest_end(recorded, call.prompt_vertex, ends[call.model], nearest[call.model])
        candidates = ends[call.model].get(vertex, [])
        if len(candidates) > 1:
            deepest = max(calls[i].prompt for i in candidates)
            candidates = [i for i in candidates if calls[i].prompt == deepest]
        hint = call.parent_hint
        if hint:
            hinted = [i for i in candidates if any(calls[m].model_call_id == hint for m in members[i])]
            refuted += not hinted and hint in by_id
            candidates = hinted or candidates
        if len(candidates) > 1:  # equal samples
            candidates = [min(candidates, key=lambda i: (i != preferred, first_content(recorded, members[i])))]
        parent[number] = candidates[0] if candidates else NO_CALL
    return parent, refuted


def _nearest_end(recorded: Recorded, vertex: int, ends: dict[int, list[int]], known: dict[int, int]) -> int:
    """The nearest vertex at or above `vertex` where an answer ends; the root if there is none."""
    way = []
    while vertex not in known:
        if vertex in ends:
            known[vertex] = vertex
            break
        way.append(vertex)
        vertex = recorded.tree.parent[vertex]
    found = known[vertex]
    for passed in way:
        known[passed] = found
    return found


def _may_follow(recorded: Recorded, numbers: Iterable[int], earlier: Iterable[int]) -> bool:
    """Whether calls are not known to have come before all of some others."""
    calls = recorded.calls
    # Loops, because this is asked of every step and nearly always about two calls.
    for number in numbers:
        for before in earlier:
            if not is_before(calls[number].record, calls[before].record):
                return True
    return False


def sound(recorded: Recorded, links: Links, number: int) -> list[Call]:
    """Of identical calls those that are in no conflict; all if every one is."""
    same = [recorded.calls[i] for i in links.members[number]]
    if len(same) == 1:
        return same
    return [call for call in same if call.record.outcome != "conflict"] or same


def received(recorded: Recorded, links: Links, number: int) -> Call:
    """Of identical calls the one whose log-probs count.

    One that the client received; else the last that ended before its continuation began; else the one with the
    smallest content digest.
    """
    same = sound(recorded, links, number)
    same = [call for call in same if call.record.delivered == "full"] or same
    if len(same) > 1:
        following = [r for child in links.children.get(number, ()) for r in records_of(recorded, links, child)]
        following = [record for record in following if record.begun_at is not None]
        earlier = [
            call for call in same if following and all(ended_before(call.record, record) for record in following)
        ]
        if earlier:
            last = max(call.record.ended_at or 0.0 for call in earlier)
            same = [call for call in earlier if call.record.ended_at == last]
    return same[0] if len(same) == 1 else min(same, key=lambda call: content_order(recorded, call.number))


def _difference(same: list[Call]) -> float:
    """The largest difference between known log-probs of identical calls."""
    log_probs = np.stack([call.generation_log_probs for call in same])
    log_probs[unknown_log_probs(log_probs)] = np.nan
    spread = np.fmax.reduce(log_probs, axis=0) - np.fmin.reduce(log_probs, axis=0)
    return float(spread[~np.isnan(spread)].max(initial=0.0))


def _meanings(same: list[Call]) -> int:
    """How many different policy versions and log-prob modes identical calls claim."""
    return len({name_of((call.policy_versions, call.sampling.get("logprobs_mode"))) for call in same})
