"""Prompts that no longer hold what was sampled: where they part from it, and how (rule 13)."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..protocol import CallRecord
from .links import NO_CALL, Links, first_content, records_of
from .prompts import FEW, Prompts, prompts_by_model
from .recorded import Call, Recorded
from .siblings import Fate
from .times import Times, is_before
from .tree import ROOT

__all__ = ("Drift", "DriftKind", "TokenBytes", "find_drifts")

DriftKind = Literal[
    "retokenised",
    "stripped_reasoning",
    "whitespace_or_stop",
    "edited",
    "truncated_or_compacted",
    "other",
    "unknown",
]
"""How the later prompt differs, judged by bytes; `unknown` where the bytes are not known."""

TokenBytes = Mapping[int, bytes] | Callable[[int], bytes | None]
"""The bytes of a token id: a mapping, or a function that answers None for an id that it doesn't know."""

Bytes = Callable[[int], bytes | None]

BOUNDARY = 1
"""Ids: text that is tokenised again may merge the last id of a prompt with the first of the answer behind it."""

_REASONING = re.compile(rb"<(think|thinking|reasoning)>.*?</\1>\s*", re.DOTALL)


class Drift(msgspec.Struct, frozen=True, dict=True, eq=False):
    """One call whose prompt parts from an earlier call that it would otherwise continue."""

    call: tuple[str, int]
    """(model_call_id, choice_index) of the call whose prompt parts."""
    nearest: tuple[str, int]
    """Of the earlier call that shares the most ids with it."""
    index: int
    """The first position at which the two differ."""
    kept: int
    """How many of the earlier call's sampled ids the prompt still holds."""
    lost: int
    """How many it doesn't."""
    before_answer: bool
    """The prompt parts even before the earlier call's answer: compacted, edited, forked, or another conversation."""
    nearest_number: int
    """Representative of the earlier call (`Links`)."""
    _compare: Callable[[], DriftKind]

    def __repr__(self) -> str:
        place = "before its answer" if self.before_answer else f"{self.kept} ids kept, {self.lost} lost"
        return f"<Drift of {self.call} from {self.nearest} at {self.index}: {place}>"

    @cached_property
    def kind(self) -> DriftKind:
        """What happened to the bytes; looked at when asked."""
        return self._compare()


def find_drifts(recorded: Recorded, links: Links, fates: dict[int, Fate], bytes_of: Bytes) -> dict[int, Drift]:
    """The drift of every representative that has one."""
    calls, depth, above = recorded.calls, recorded.tree.depth, recorded.tree.parent
    stopped = any(fate.continued for fate in fates.values())
    answers, prompts = _Answers(recorded, links, fates), _EarlierPrompts(recorded, links)
    found = {}
    for number in links.members:
        call = calls[number]
        parent = links.parent[number]
        extended = calls[parent].total if parent != NO_CALL else 0
        if not stopped and depth[above[call.prompt_vertex]] <= extended:
            continue  # no vertex lies between what it extends and the end of its prompt: nothing parts from it there
        drift = answers.left_by(call, extended) or answers.stopped_in_by(call, extended)
        other = prompts.left_by(call, extended if drift is None else drift[1])
        before_answer = other is not None
        drift = other or drift
        if drift is None:
            continue
        nearest, index = drift
        kept = max(index - nearest.prompt, 0)
        found[number] = Drift(
            call.key,
            nearest.key,
            index,
            kept,
            nearest.sampled - kept,
            before_answer,
            nearest.number,
            _Comparison(recorded, call, nearest, index, before_answer, bytes_of),
        )
    return found


class _Answers:
    """Finds, on the way to a prompt, the answer of another call that it leaves."""

    def __init__(self, recorded: Recorded, links: Links, fates: dict[int, Fate]) -> None:
        self._recorded, self._links, self._fates = recorded, links, fates
        self._leaving: dict[tuple[str, int], _Leaving] = {}

    @cached_property
    def _passing(self) -> dict[str, dict[int, array[int]]]:
        """Of each model and vertex the answers that run through it."""
        calls, depth, above = self._recorded.calls, self._recorded.tree.depth, self._recorded.tree.parent
        of_model: dict[str, dict[int, array[int]]] = defaultdict(dict)
        for number in self._links.answered:
            call = calls[number]
            passing, vertex, least = of_model[call.model], call.end_vertex, call.prompt - BOUNDARY
            while True:
                found = passing.get(vertex)
                if found is None:
                    passing[vertex] = array("q", (number,))
                else:
                    found.append(number)
                vertex = above[vertex]
                if vertex == ROOT or depth[vertex] < least:
                    break
        return of_model

    def left_by(self, call: Call, extended: int) -> tuple[Call, int] | None:
        recorded = self._recorded
        depth, parent = recorded.tree.depth, recorded.tree.parent
        passing = self._passing.get(call.model, {})
        below, vertex = call.prompt_vertex, parent[call.prompt_vertex]
        while depth[vertex] > extended:
            if vertex in passing:
                for other in self._at(call.model, vertex).candidates(call, self._records(call.number), below):
                    if self._may_precede(other, call):
                        return other, depth[vertex]
            below, vertex = vertex, parent[vertex]
        return None

    def stopped_in_by(self, call: Call, extended: int) -> tuple[Call, int] | None:
        """An answer that was cut off, and of which the prompt holds the beginning and nothing behind it."""
        vertex = call.prompt_vertex
        if call.prompt <= extended or vertex not in self._passing.get(call.model, {}):
            return None
        for other in self._at(call.model, vertex).calls:
            continued = self._fates[other.number].continued
            if continued and other.prompt + continued >= call.prompt > other.prompt:
                return other, call.prompt
        return None

    def _may_precede(self, one: Call, other: Call) -> bool:
        return not all(is_before(b, a) for a in self._records(one.number) for b in self._records(other.number))

    def _records(self, number: int) -> list[CallRecord]:
        return records_of(self._recorded, self._links, number)

    def _at(self, model: str, vertex: int) -> _Leaving:
        found = self._leaving.get((model, vertex))
        if found is None:
            calls = [self._recorded.calls[number] for number in self._passing[model][vertex]]
            if len(calls) > 1:
                calls.sort(key=self._rank)
            records = [self._records(call.number) for call in calls]
            found = self._leaving[model, vertex] = _Leaving(self._recorded, calls, records)
        return found

    def _rank(self, call: Call) -> tuple[bool, int, int, tuple[bytes, tuple[str, int]]]:
        """Whole answers that were kept first, then by ids, the later cut, and content."""
        fate = self._fates[call.number]
        kept = fate.verdict == "kept" and fate.continued is None
        content = first_content(self._recorded, self._links.members[call.number])
        return not kept, self._recorded.first[call.end_vertex], -call.prompt, content


class _Leaving:
    """The calls whose answer runs through a vertex, in order of preference; many are looked at in one comparison."""

    def __init__(self, recorded: Recorded, calls: list[Call], records: list[list[CallRecord]]) -> None:
        self._recorded, self.calls, self._records = recorded, calls, records

    @cached_property
    def _times(self) -> Times:
        return Times(self._records)

    @cached_property
    def _prompts(self) -> npt.NDArray[np.int64]:
        return np.array([call.prompt for call in self.calls], np.int64)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.array([self._recorded.first[call.end_vertex] for call in self.calls], np.int64)

    def candidates(self, call: Call, records: list[CallRecord], below: int) -> Iterator[Call]:
        """Those with a shorter prompt whose answer doesn't go on below vertex `below`, but for those known to be later.

        A conversation grows, whatever became of its beginning.
        """
        if len(self.calls) <= FEW:
            return iter(self._candidates_of_few(call, below))
        first, last = self._recorded.first[below], self._recorded.last[below]
        possible = (self._prompts < call.prompt) & ((self._ends < first) | (self._ends > last))
        later = np.ones(len(possible), np.bool_)
        for record in records:
            later &= self._times.begun_after(record)
        return (self.calls[place] for place in np.flatnonzero(possible & ~later).tolist())

    def _candidates_of_few(self, call: Call, below: int) -> list[Call]:
        """The same, one after another; later ones too, which who asks leaves out anyway."""
        return [
            other
            for other in self.calls
            if other.prompt < call.prompt and not self._recorded.below(other.end_vertex, below)
        ]


class _EarlierPrompts:
    """Finds, on the way to a prompt, the latest earlier call whose own prompt parts from it."""

    def __init__(self, recorded: Recorded, links: Links) -> None:
        self._recorded, self._links = recorded, links

    @cached_property
    def _prompts(self) -> Callable[[str], Prompts]:
        return prompts_by_model(self._recorded, (call for call in self._recorded.calls if call.sampled))

    def left_by(self, call: Call, extended: int) -> tuple[Call, int] | None:
        recorded = self._recorded
        depth, parent = recorded.tree.depth, recorded.tree.parent
        record = self._first_asked(call)
        below, vertex = call.prompt_vertex, parent[call.prompt_vertex]
        while depth[vertex] > extended:
            prompts = self._prompts(call.model)
            earlier = prompts.latest_before(prompts.through(vertex), record, below)
            if earlier is not None:
                return recorded.calls[self._links.representative[earlier.number]], depth[vertex]
            below, vertex = vertex, parent[vertex]
        return None

    def _first_asked(self, call: Call) -> CallRecord:
        """Of identical calls the first: by then the prompt was there."""
        records = records_of(self._recorded, self._links, call.number)
        return min(records, key=lambda record: (record.begun_at is None, record.begun_at or 0.0))


class _Comparison:
    """Compares the bytes of an answer with those that a later prompt has in its place."""

    def __init__(
        self, recorded: Recorded, call: Call, nearest: Call, index: int, before_answer: bool, bytes_of: Bytes
    ) -> None:
        self._recorded, self._call, self._nearest, self._index = recorded, call, nearest, index
        self._before_answer, self._bytes_of = before_answer, bytes_of

    def __call__(self) -> DriftKind:
        start = min(self._index, self._nearest.prompt)
        before, known = self._text(self._nearest.end_vertex, start, self._nearest.total)
        if not known:
            return "unknown"
        # What stands behind the answer in the later prompt is not compared, so its bytes need not be known.
        after, whole = self._text(self._call.prompt_vertex, start, self._call.prompt)
        stop = self._bytes_of(int(self._nearest.generation_token_ids[-1])) or b""
        return compare(before, after, stop, rewritten_history=self._before_answer, whole=whole)

    def _text(self, vertex: int, start: int, end: int) -> tuple[bytes, bool]:
        """The bytes of these positions up to the first that is not known; whether that is all of them."""
        ids = np.empty(self._recorded.tree.depth[vertex], np.int32)
        self._recorded.tree.ids_to(vertex, ids)
        pieces: list[bytes] = []
        for token in ids[start:end].tolist():
            piece = self._bytes_of(token)
            if piece is None:
                return b"".join(pieces), False
            pieces.append(piece)
        return b"".join(pieces), True


def compare(
    before: bytes, after: bytes, stop: bytes = b"", *, rewritten_history: bool = False, whole: bool = True
) -> DriftKind:
    """What became of the bytes `before` in `after`, which starts at the same place and goes on behind them.

    stop: the bytes of the last sampled token, which a template may write differently or leave out.
    whole: False if `after` is only the beginning of what is there; then what the rest decides is `unknown`.
    """
    if after.startswith(before):
        return "retokenised"
    if not whole and before.startswith(after):
        return "unknown"
    if not after:
        return "truncated_or_compacted"
    if rewritten_history:
        shorter = len(after) < len(before)
        return "edited" if not shorter else "truncated_or_compacted" if whole else "unknown"
    visible = before.removesuffix(stop)
    words, expected = _words(after), _words(visible)
    if words.startswith(expected):
        return "whitespace_or_stop"
    undecided = not whole and expected.startswith(words)
    without = _REASONING.sub(b"", visible).rpartition(b"</think>")[2]
    if without != visible:
        rest, expected = after.lstrip(), without.strip()
        if rest.startswith(expected):
            return "stripped_reasoning"
        undecided |= not whole and expected.startswith(rest)
    if undecided:
        return "unknown"
    pairs = zip(visible, after, strict=False)
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(visible), len(after)))
    if same == len(after) or (stop and after.startswith(stop, same)):  # its beginning, and then nothing or its end
        return "truncated_or_compacted"
    return "edited" if same else "other"


def _words(text: bytes) -> bytes:
    return b"".join(text.split())
