"""A second opinion on the trajectory rules: slow, plain, over Python lists.

It shares nothing with `tokcap.trajectory`. Every question is answered by looking at all calls again, so that each
function reads like the rule that it stands for. Where a rule leaves something open, the comment says what was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from tokcap import CallRecord, TokenEntry
from tokcap.entry import content_digest

__all__ = ("CATEGORIES", "Key", "Trajectory", "Verdict", "judge")

Key: TypeAlias = tuple[str, int]
"""(model_call_id, choice_index)"""

Trajectory: TypeAlias = tuple[Key, frozenset[Key]]
"""Its last call, and the calls whose sampled span it owns."""

CATEGORIES = (
    "trained",
    "abandoned",
    "ambiguous",
    "aborted",
    "unknown",
    "conflict",
    "other_model",
    "after_final",
)
"""What can become of a sampled token; exactly one of them does."""

_LOWEST_LOG_PROB = -9999.0
_ROUNDING = 1e-5
_MAX_DIFFERENCE = 0.5
"""Between the log-probs of two calls with the same tokens; beyond it they are not the same call."""

_BOUNDARY = 1
"""How many ids at the end of a prompt may be re-tokenised together with the answer: a prompt that ends in a newline and
an answer that begins with one are three ids when sampled, and may be two in the next prompt. Seen in the recordings."""

_T = TypeVar("_T")


class Verdict(msgspec.Struct, frozen=True):
    """What the rules say of one rollout. Calls with the same tokens are one, named by its smallest key."""

    parent: dict[Key, Key | None]
    """Also of calls without generated tokens: their prompts are evidence like any other."""
    merged: dict[Key, Key]
    """Every key -> the key that stands for it."""
    status: dict[Key, dict[str, int]]
    """Per call, how many of its sampled tokens are in each category; all categories are there."""
    trajectories: set[Trajectory]
    drifts: dict[Key, tuple[Key, int]]
    """Call -> the nearest call that it continues in part, and the first index that differs."""
    after_gap: set[Key]
    """Calls with generated tokens before which, and after whose parent, a missing call can lie."""
    sampled: dict[str, int]
    """Totals over all entries, the merged ones included: the categories, and `sampled`, their sum."""


def judge(
    entries: Iterable[TokenEntry],
    calls: Iterable[CallRecord],
    *,
    models: Collection[str] | None = None,
    scored: Key | None = None,
) -> Verdict:
    """Apply the rules. A scored key that names no entry says nothing."""
    records = list(calls)
    by_id = {record.model_call_id: record for record in records}
    spans = [_Span(entry, by_id.get(entry.model_call_id)) for entry in entries]
    nodes = _merge_identical(sorted(spans, key=lambda span: span.key))
    merged = {span.key: node.key for node in nodes for span in node.spans}
    final = next((node for node in nodes if node.key == merged.get(scored)), None) if scored is not None else None

    parents = {node.key: _parent(node, nodes, final) for node in nodes}
    extended = {
        parent.key
        for node in nodes
        for parent in [parents[node.key]]
        if parent is not None and not _all_before(node, parent)
    }
    fates = _fates(nodes, extended, final)
    after_final = _after_final(nodes, parents, final)
    selected = _selected_models(nodes, models, final)

    status: dict[Key, dict[str, int]] = {}
    totals = dict.fromkeys(("sampled", *CATEGORIES), 0)
    for node in nodes:
        kept = _kept_span(node, [child for child in nodes if parents[child.key] is node])
        count = dict.fromkeys(CATEGORIES, 0)
        for category in _categories(node, kept, nodes, fates, after_final, selected):
            count[category] += 1
            totals[category] += 1
        status[node.key] = count
        for span in node.spans:
            totals["sampled"] += len(span.ids)
            if span is not kept:
                totals[_category_of_duplicate(node, span, after_final, selected)] += len(span.ids)

    after_gap = _after_gap(nodes, parents, [record for record in records if record.outcome in ("lost", "open")])
    trained = {key: count["trained"] for key, count in status.items()}
    return Verdict(
        parent={key: None if parent is None else parent.key for key, parent in parents.items()},
        merged=merged,
        status=status,
        trajectories=_trajectories(nodes, parents, after_gap, after_final, trained, final),
        drifts=_drifts(nodes, parents, fates),
        after_gap=after_gap,
        sampled=totals,
    )


# ---- calls


class _Span:
    """One entry and what is known of its call."""

    def __init__(self, entry: TokenEntry, record: CallRecord | None) -> None:
        self.entry = entry
        self.record = record or CallRecord(entry.model_call_id, "recorded")
        self.key: Key = (entry.model_call_id, entry.choice_index)
        self.model = entry.model
        self.prompt: list[int] = entry.prompt_token_ids.tolist()
        self.ids: list[int] = entry.generation_token_ids.tolist()
        self.log_probs: list[float] = entry.generation_log_probs.tolist()

    @property
    def conflict(self) -> bool:
        return self.record.outcome == "conflict"


class _Node:
    """One call as the rules see it: one entry, or several with the same model, prompt and generation."""

    def __init__(self, spans: list[_Span]) -> None:
        self.spans = spans
        self.key = min(span.key for span in spans)
        self.model, self.prompt, self.ids = spans[0].model, spans[0].prompt, spans[0].ids
        self.sequence = self.prompt + self.ids

    @property
    def sound(self) -> list[_Span]:
        """The entries whose call is in no conflict: each is an exact record, whatever its double went through."""
        return [span for span in self.spans if not span.conflict]

    @property
    def aborted(self) -> bool:
        # If one of the calls ended well, the answer did.
        return bool(self.sound) and all(
            "aborted" in (span.record.outcome, span.entry.finish_reason) for span in self.sound
        )

    @property
    def delivered(self) -> str:
        """full, not (known to have been cut or dropped), or unknown. Received once is received."""
        known = [span.record.delivered for span in self.spans]
        if "full" in known:
            return "full"
        return "unknown" if "unknown" in known else "not"


def _merge_identical(spans: list[_Span]) -> list[_Node]:
    """Rule 3. The spans are sorted by key, and so are the nodes."""
    nodes: list[_Node] = []
    for group in _grouped(spans, lambda span: (span.model, tuple(span.prompt), tuple(span.ids))):
        # Samples that came out equal stay apart. A retry of n samples pairs its i-th with the i-th of the others, in
        # the order of their contents, so that nothing depends on names.
        units = [sorted(unit, key=_by_content) for unit in _components(group, _sampled_at_once)]
        nodes += [_Node([unit[i] for unit in units if i < len(unit)]) for i in range(max(map(len, units)))]
    return sorted(nodes, key=lambda node: node.key)


def _sampled_at_once(one: _Span, other: _Span) -> bool:
    """Choices of one call, or two calls that provably ran at the same time and were both delivered."""
    if one.record.model_call_id == other.record.model_call_id:
        return True
    a, b = one.record, other.record
    if not (_one_clock(a, b) and a.delivered == b.delivered == "full"):
        return False
    if a.begun_at is None or a.ended_at is None or b.begun_at is None or b.ended_at is None:
        return False
    return a.begun_at <= b.ended_at and b.begun_at <= a.ended_at


def _kept_span(node: _Node, children: list[_Node]) -> _Span:
    """Whose log-probs stand for the call (rule 3)."""
    spans = node.sound or node.spans
    spans = [span for span in spans if span.record.delivered == "full"] or spans
    if len(spans) > 1:
        # "Before this call began": the first known call that continues it.
        begun = [child.record for node in children for child in node.spans if child.record.begun_at is not None]
        ended = [
            (span.record.ended_at, span)
            for span in spans
            if span.record.ended_at is not None
            and begun
            and all(_one_clock(span.record, record) for record in begun)
            and span.record.ended_at < min(record.begun_at for record in begun if record.begun_at is not None)
        ]
        if ended:
            last = max(when for when, _ in ended)
            spans = [span for when, span in ended if when == last]
    return min(spans, key=_by_content)


def _by_content(span: _Span) -> tuple[bytes, Key]:
    return content_digest(span.entry), span.key


def _disagree(node: _Node) -> bool:
    """Whether the calls that were merged can't have drawn from the same distribution (rule 3)."""
    for one in node.sound:
        for other in node.sound:
            if one.entry.policy_versions != other.entry.policy_versions:
                return True
            if one.entry.sampling.get("logprobs_mode") != other.entry.sampling.get("logprobs_mode"):
                return True
            for a, b in zip(one.log_probs, other.log_probs, strict=True):
                if not _unknown(a) and not _unknown(b) and abs(a - b) > _MAX_DIFFERENCE:
                    return True
    return False


# ---- links


def _parent(node: _Node, nodes: list[_Node], final: _Node | None) -> _Node | None:
    """Rules 1 to 4: the longest sequence that the prompt begins with, at the same length the later cut."""
    candidates = [
        other
        for other in nodes
        if other.model == node.model and other.ids and _begins_with(node.prompt, other.sequence)
    ]

    def rank(other: _Node) -> tuple[int, int, bool, tuple[bytes, Key]]:
        # Equal samples tie even then: the scored one, else the smaller content. A name decides nothing that differs.
        return -len(other.sequence), -len(other.prompt), other is not final, min(map(_by_content, other.spans))

    return min(candidates, key=rank, default=None)


def _line(node: _Node | None, parents: dict[Key, _Node | None]) -> list[_Node]:
    """The call and all its ancestors."""
    line = []
    while node is not None:
        line.append(node)
        node = parents[node.key]
    return line


def _after_gap(nodes: list[_Node], parents: dict[Key, _Node | None], missing: list[CallRecord]) -> set[Key]:
    """Rule 15."""
    return {
        node.key for node in nodes if node.ids and any(_can_precede(gap, node, parents[node.key]) for gap in missing)
    }


def _can_precede(gap: CallRecord, node: _Node, parent: _Node | None) -> bool:
    """Whether the missing call can lie between the two, or before a root."""
    ours = [span.record for span in node.spans]
    theirs = [] if parent is None else [span.record for span in parent.spans]
    # A call that lost one of its choices has the same prompt as the others: it can't lie between them and a parent or
    # a child of theirs.
    if gap.model_call_id and any(gap.model_call_id == record.model_call_id for record in ours + theirs):
        return False
    # The prompt stood when the first of the merged calls began; the answer may have been taken from the first, too.
    if any(_began_first(record, gap) for record in ours):
        return False
    # An answer is released when its record is stored; what had ended by then was not asked because of it.
    return parent is None or not all(
        _began_first(gap, record)
        or (
            _one_clock(gap, record)
            and gap.ended_at is not None
            and record.ended_at is not None
            and gap.ended_at < record.ended_at
        )
        for record in theirs
    )


# ---- siblings


def _fates(nodes: list[_Node], extended: set[Key], final: _Node | None) -> dict[Key, str]:
    """Rules 7 to 10 and 19: kept, abandoned, ambiguous or aborted, of every call with generated tokens."""
    fates: dict[Key, str] = {}
    for group in _grouped([node for node in nodes if node.ids], lambda node: (node.model, tuple(node.prompt))):
        proven = [node for node in group if node.key in extended or node is final]
        stopped = [node for node in group if node.aborted and node not in proven]
        units = _components([node for node in group if node not in stopped], _samples)
        for node in stopped:
            fates[node.key] = "aborted"
        for unit, fate in zip(units, _fates_of_units(units, proven, stopped, nodes), strict=True):
            for node in unit:
                fates[node.key] = fate
    return fates


def _fates_of_units(
    units: list[list[_Node]], proven: list[_Node], stopped: list[_Node], nodes: list[_Node]
) -> list[str]:
    rivals = [unit for unit in _components(stopped, _samples) if any(_run(n, other) for n in unit for other in nodes)]
    if len(units) + len(rivals) < 2:
        return ["kept"] * len(units)
    winners = [unit for unit in units if any(node in proven for node in unit)]
    if not winners:
        runs = [max(_run(node, other) for node in unit for other in nodes) for unit in units + rivals]
        if runs.count(max(runs)) == 1:  # then it is 1 at least: there are two or more
            winners = [(units + rivals)[runs.index(max(runs))]]
    if not winners:
        received = [unit for unit in units if any(node.delivered == "full" for node in unit)]
        dropped = [unit for unit in units if all(node.delivered == "not" for node in unit)]
        if len(received) == 1 and len(received) + len(dropped) == len(units):
            winners = received
    if not winners:
        return ["ambiguous"] * len(units)
    return ["kept" if unit in winners else "abandoned" for unit in units]


def _samples(one: _Node, other: _Node) -> bool:
    """Rule 7; of merged calls it is enough that two of them are samples of each other."""
    return any(_samples_or_unknown(a.record, b.record) for a in one.spans for b in other.spans)


def _samples_or_unknown(one: CallRecord, other: CallRecord) -> bool:
    # Two answers that were both delivered are samples, unless the clock proves that one call had ended before the
    # other began. Without comparable times nothing proves it, and delivery decides alone.
    if one.model_call_id == other.model_call_id:
        return True
    return one.delivered == other.delivered == "full" and not _ended_first(one, other) and not _ended_first(other, one)


def _run(node: _Node, other: _Node) -> int:
    """How many of the first sampled ids stand in the other call's prompt, at their own place."""
    if (
        other is node
        or other.model != node.model
        or _all_before(other, node)
        or not _begins_with(other.prompt, node.prompt)
    ):
        return 0
    return _common(node.ids, other.prompt[len(node.prompt) :])


def _continued(node: _Node, nodes: list[_Node], fates: dict[Key, str]) -> int:
    """Rule 16: how many of an aborted call's ids a prompt went on with, and not with those of a kept sibling."""
    kept = [
        n
        for n in nodes
        if n.model == node.model and n.prompt == node.prompt and fates.get(n.key) in ("kept", "ambiguous")
    ]
    # Of identical calls each was a request of its own: one that was sent before the sibling began is proof by itself.
    requests = [_Node([span]) for other in nodes for span in other.spans]
    return max(
        run if all(_run(sibling, other) < run for sibling in kept) else 0
        for other in requests
        for run in [_run(node, other)]
    )


# ---- what becomes of the tokens


def _selected_models(nodes: list[_Node], models: Collection[str] | None, final: _Node | None) -> set[str]:
    """Rule 17. Only calls that sampled something count as a model's."""
    there = {node.model for node in nodes if node.ids}
    if models is not None:
        return there & set(models)
    if final is not None:
        return {final.model}
    return there if len(there) == 1 else set()


def _after_final(nodes: list[_Node], parents: dict[Key, _Node | None], final: _Node | None) -> set[Key]:
    """Rule 19: what continues the scored call, and what provably began after it had ended."""
    if final is None:
        return set()
    on_the_way = _line(final, parents)
    return {
        node.key
        for node in nodes
        if node not in on_the_way
        and (
            final in _line(node, parents)
            # Of merged calls all must have come later: the answer may be that of the first.
            or all(_ended_first(scored.record, span.record) for scored in final.spans for span in node.spans)
        )
    }


def _categories(
    node: _Node,
    kept: _Span,
    nodes: list[_Node],
    fates: dict[Key, str],
    after_final: set[Key],
    selected: set[str],
) -> list[str]:
    """One category per sampled token."""
    size = len(node.ids)
    if node.model not in selected:
        return ["other_model"] * size
    if not node.sound:
        return ["conflict"] * size
    if node.key in after_final:
        return ["after_final"] * size
    fate = fates.get(node.key, "kept")
    if fate in ("abandoned", "ambiguous"):
        return [fate] * size
    held = _continued(node, nodes, fates) if fate == "aborted" else size
    doubtful = _disagree(node)
    known = ["unknown" if doubtful or _unknown(value) else "trained" for value in kept.log_probs]
    return known[:held] + ["aborted"] * (size - held)


def _category_of_duplicate(node: _Node, span: _Span, after_final: set[Key], selected: set[str]) -> str:
    """Of the tokens of an entry that was merged away: abandoned, unless something outranks that."""
    if node.model not in selected:
        return "other_model"
    if span.conflict:
        return "conflict"
    return "after_final" if node.key in after_final else "abandoned"


def _unknown(log_prob: float) -> bool:
    """Rule 21."""
    return not math.isfinite(log_prob) or log_prob <= _LOWEST_LOG_PROB or log_prob > _ROUNDING


# ---- trajectories


def _trajectories(
    nodes: list[_Node],
    parents: dict[Key, _Node | None],
    after_gap: set[Key],
    after_final: set[Key],
    trained: dict[Key, int],
    final: _Node | None,
) -> set[Trajectory]:
    """Rules 11, 12 and 19: every call with generated tokens is owned by exactly one path."""
    below = dict.fromkeys(parents, 0)
    for node in nodes:
        # Across gaps, too: where the trunk goes must not depend on whether some other call was lost.
        for above in _line(node, parents):
            below[above.key] += trained[node.key]
    on_the_way = _line(final, parents)

    def linked(child: _Node, parent: _Node) -> bool:
        """Whether the child goes on where its parent's trajectory stands."""
        if not child.ids or parents[child.key] is not parent or child.key in after_gap:
            return False
        # What comes after the scored answer is a trajectory of its own.
        return child.key not in after_final or parent.key in after_final

    def rank(child: _Node, parent: _Node) -> tuple[bool, int, list[int], int, tuple[bytes, Key]]:
        # At equal ids the later cut, as for parents; equal samples by their contents.
        own = child.sequence[len(parent.sequence) :]
        content = min(map(_by_content, child.spans))
        return child not in on_the_way, -below[child.key], own, -len(child.prompt), content

    follower: dict[Key, _Node] = {}
    for parent in nodes:
        ranked = [(rank(child, parent), child) for child in nodes if linked(child, parent)]
        if ranked:
            follower[parent.key] = min(ranked, key=lambda pair: pair[0])[1]
    followers = list(follower.values())
    found: set[Trajectory] = set()
    for node in nodes:
        if node.ids and node not in followers:
            path = [node]
            while path[-1].key in follower:
                path.append(follower[path[-1].key])
            found.add((path[-1].key, frozenset(step.key for step in path)))
    return found


def _drifts(nodes: list[_Node], parents: dict[Key, _Node | None], fates: dict[Key, str]) -> dict[Key, tuple[Key, int]]:
    """Rule 13: the call that this one continues, though not with all of its ids."""
    drifts: dict[Key, tuple[Key, int]] = {}
    for node in nodes:
        candidates = [
            other
            for other in nodes
            if other.model == node.model
            and other.ids
            and not _all_before(node, other)
            and len(other.prompt) < len(node.prompt)
            and _begins_with(node.prompt, other.prompt[: max(len(other.prompt) - _BOUNDARY, 0)])
            and not _begins_with(node.prompt, other.sequence)
            and not _begins_with(other.sequence, node.prompt)
        ]
        parent = parents[node.key]
        least = 0 if parent is None else len(parent.sequence)

        def rank(other: _Node, prompt: list[int] = node.prompt) -> tuple[int, bool, list[int], int, tuple[bytes, Key]]:
            # At equal ids the later cut, as for parents; equal samples by their contents.
            shared = _common(other.sequence, prompt)
            content = min(map(_by_content, other.spans))
            return -shared, fates.get(other.key) != "kept", other.sequence, -len(other.prompt), content

        found = None
        if candidates:
            nearest = min(candidates, key=rank)
            # Without a parent one id must be shared at least: else the call continues nothing.
            if _common(nearest.sequence, node.prompt) > least:
                found = nearest.key, _common(nearest.sequence, node.prompt)
        if found is None and len(node.prompt) > least:
            # An answer that was cut off, of which the prompt holds the beginning and nothing behind it.
            stopped = [
                other
                for other in nodes
                if other.model == node.model
                and fates.get(other.key) == "aborted"
                and _begins_with(other.sequence, node.prompt)
                and len(other.prompt) < len(node.prompt) <= len(other.prompt) + _continued(other, nodes, fates)
            ]
            if stopped:
                found = min(stopped, key=rank).key, len(node.prompt)
        if found is not None and not any(_parts_before_its_answer(other, node, found[1]) for other in nodes):
            drifts[node.key] = found
    return drifts


def _parts_before_its_answer(other: _Node, node: _Node, shared: int) -> bool:
    """Whether an earlier call's prompt has more in common with this one's: then that is the nearest call."""
    if other is node or other.model != node.model or not other.ids:
        return False
    first = min((span.record for span in node.spans), key=lambda r: (r.begun_at is None, r.begun_at or 0.0))
    return any(_began_first(span.record, first) for span in other.spans) and shared < _common(
        other.prompt, node.prompt
    ) < min(len(other.prompt), len(node.prompt))


# ---- order in time


def _one_clock(one: CallRecord, other: CallRecord) -> bool:
    return one.boot_id != "" and one.boot_id == other.boot_id


def _before(one: CallRecord, other: CallRecord) -> bool:
    """Whether one is known to come first."""
    if not _one_clock(one, other):
        return False
    if one.begun_at is not None and other.begun_at is not None:
        return one.begun_at < other.begun_at
    return one.ended_at is not None and other.ended_at is not None and one.ended_at < other.ended_at


def _all_before(one: _Node, other: _Node) -> bool:
    """Whether all of one's calls are known to come before all of the other's."""
    return all(_before(a.record, b.record) for a in one.spans for b in other.spans)


def _began_first(one: CallRecord, other: CallRecord) -> bool:
    """Whether one is known to have begun before the other. When a loss was noted says nothing of when it began."""
    if not _one_clock(one, other) or one.begun_at is None or other.begun_at is None:
        return False
    return one.begun_at < other.begun_at


def _ended_first(one: CallRecord, other: CallRecord) -> bool:
    """Whether one is known to have ended before the other began."""
    if not _one_clock(one, other) or one.ended_at is None or other.begun_at is None:
        return False
    return one.ended_at < other.begun_at


# ---- lists


def _begins_with(ids: list[int], start: list[int]) -> bool:
    return ids[: len(start)] == start


def _common(one: list[int], other: list[int]) -> int:
    """The length of the common beginning."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _grouped(items: Sequence[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    groups: dict[object, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _components(items: Sequence[_T], related: Callable[[_T, _T], bool]) -> list[list[_T]]:
    """Connected components, each in the order of the items."""
    components: list[list[_T]] = []
    for item in items:
        near = [component for component in components if any(related(item, other) for other in component)]
        components = [component for component in components if component not in near]
        components.append([*(other for component in near for other in component), item])
    return [[item for item in items if item in component] for component in components]
