"""Which call continues which: by ids, compared one by one (rules 1 to 4).

Calls with the same prompt, the same answer and the same model are one call with several ids, unless they are samples:
choices of one call, or calls that ran at the same time and both reached the client.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np

from ..entry import content_digest
from ..protocol import CallRecord
from .recorded import Call, Recorded

__all__ = ("NO_CALL", "Links", "chain_of", "ended_before", "link", "overlapped", "received")

NO_CALL = -1

LARGEST_DIFFERENCE = 0.5
"""Between the log-probs of two identical calls; engines in bf16 differ by 0.04 on average between runs."""

PARENT_HINT = "parent_call_id"
"""Key in `TokenEntry.extra` under which a harness may say which call it continued."""


class Links(msgspec.Struct, eq=False):
    """The calls of a rollout and how they continue each other. Numbers are those of `Recorded.calls`."""

    representative: list[int]
    """Of each call: the call that stands for it and for all that are identical to it."""
    members: dict[int, list[int]]
    """Of each representative: all calls that it stands for, itself included."""
    parent: dict[int, int]
    """Of each representative: the representative that it continues, or NO_CALL."""
    children: dict[int, list[int]]
    answered: list[int]
    """Representatives that have sampled ids."""
    unclear: set[int]
    """Representatives whose identical calls disagree on what the log-probs mean."""
    largest_difference: float
    """Between log-probs of identical calls, natural log."""
    hints_refuted: int


def link(recorded: Recorded) -> Links:
    """Merge identical calls and find the parent of each."""
    representative, members = _merge(recorded)
    answered = [number for number in members if recorded.calls[number].sampled]
    parent, refuted = _parents(recorded, members, answered)
    children: dict[int, list[int]] = defaultdict(list)
    for number in answered:
        if parent[number] != NO_CALL:
            children[parent[number]].append(number)
    unclear = set()
    largest = 0.0
    for number, same in members.items():
        if len(same) > 1 and recorded.calls[number].sampled:
            difference = _difference([recorded.calls[i] for i in same])
            largest = max(largest, difference)
            if difference > LARGEST_DIFFERENCE or _meanings(recorded, same) > 1:
                unclear.add(number)
    return Links(representative, members, parent, children, answered, unclear, largest, refuted)


def chain_of(links: Links, number: int) -> list[int]:
    """The representatives that `number` continues, the first call first and `number` last; empty for NO_CALL."""
    chain = []
    while number != NO_CALL:
        chain.append(number)
        number = links.parent[number]
    return chain[::-1]


def overlapped(one: CallRecord, other: CallRecord) -> bool | None:
    """Whether two calls ran at the same time; None if their times don't compare."""
    if not one.boot_id or one.boot_id != other.boot_id:
        return None
    if None in (one.begun_at, one.ended_at, other.begun_at, other.ended_at):
        return None
    assert one.begun_at is not None and one.ended_at is not None
    assert other.begun_at is not None and other.ended_at is not None
    return one.begun_at < other.ended_at and other.begun_at < one.ended_at


def _are_samples(one: Call, other: Call) -> bool:
    if one.model_call_id == other.model_call_id:
        return True
    both_received = one.record.delivered == other.record.delivered == "full"
    return both_received and overlapped(one.record, other.record) is True


def _merge(recorded: Recorded) -> tuple[list[int], dict[int, list[int]]]:
    places: dict[tuple[int, int, str], list[int]] = {}
    representative = list(range(len(recorded.calls)))
    members: dict[int, list[int]] = {}
    for call in recorded.calls:
        same = places.setdefault((call.prompt_vertex, call.end_vertex, call.model), [])
        for candidate in same:
            if not any(_are_samples(call, recorded.calls[other]) for other in members[candidate]):
                representative[call.number] = candidate
                members[candidate].append(call.number)
                break
        else:
            same.append(call.number)
            members[call.number] = [call.number]
    return representative, members


def _parents(recorded: Recorded, members: dict[int, list[int]], answered: list[int]) -> tuple[dict[int, int], int]:
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
        deepest = max((calls[i].prompt for i in candidates), default=0)
        candidates = [i for i in candidates if calls[i].prompt == deepest]
        hint = call.answer.extra.get(PARENT_HINT)
        if hint is not None:
            hinted = [i for i in candidates if any(calls[m].model_call_id == hint for m in members[i])]
            refuted += not hinted and hint in by_id
            candidates = hinted or candidates
        # Twins have the same ids; which of them goes on makes no difference to what is trained.
        parent[number] = min(candidates, key=lambda i: _twin_order(calls[i]), default=NO_CALL)
    return parent, refuted


def _twin_order(call: Call) -> tuple[bytes, tuple[str, int]]:
    return call.generation_log_probs.tobytes(), call.key


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


def _difference(same: list[Call]) -> float:
    log_probs = np.stack([call.generation_log_probs for call in same])
    with np.errstate(invalid="ignore"):
        spread = np.nanmax(log_probs, axis=0, initial=-np.inf) - np.nanmin(log_probs, axis=0, initial=np.inf)
    known = spread[np.isfinite(spread)]
    return float(known.max(initial=0.0))


def _meanings(recorded: Recorded, same: list[int]) -> int:
    """How many different policy versions and log-prob modes identical calls claim."""
    answers = [recorded.calls[i].answer for i in same]
    return len({repr((answer.policy_versions, answer.sampling.get("logprobs_mode"))) for answer in answers})


def received(recorded: Recorded, links: Links, number: int) -> Call:
    """Of identical calls the one whose log-probs count.

    The one that the client received; else the later one that ended before its continuation began; else the one with
    the smaller content digest.
    """
    same = [recorded.calls[i] for i in links.members[number]]
    if len(same) == 1:
        return same[0]
    full = [call for call in same if call.record.delivered == "full"]
    if len(full) == 1:
        return full[0]
    same = full or same
    following = [recorded.calls[i].record for i in links.children.get(number, ())]
    for call in same:
        others = [other for other in same if other is not call]
        if all(recorded.is_before(other.record, call.record) for other in others) and any(
            ended_before(call.record, record) for record in following
        ):
            return call
    return min(same, key=lambda call: (content_digest(call.answer), call.key))


def ended_before(one: CallRecord, other: CallRecord) -> bool:
    """Whether `one` is known to have ended before `other` began."""
    if not one.boot_id or one.boot_id != other.boot_id or one.ended_at is None or other.begun_at is None:
        return False
    return one.ended_at <= other.begun_at
