"""What a trainer does with a store: freeze, build, and compute every log-prob once more with transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokcap import Build, FileStore, TokenEntry, build
from tokcap.arrays import FloatArray, IdArray
from tokcap.protocol import CallRecord
from tokcap.trajectory.verdicts import UNTRAINED

from .again import Again, said_in
from .drive import Expected
from .rescore import TOLERANCE, Teacher
from .rescore import Sequence as Recomputed
from .wire import Exchange

__all__ = ("Scored", "score")

Key = tuple[str, int]


class Scored(msgspec.Struct):
    """What became of one phase."""

    calls: int = 0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    sampled: int = 0
    trained: int = 0
    untrained: Counter[str] = msgspec.field(default_factory=Counter)
    trajectories: int = 0
    drifted: int = 0
    prompts: int = 0
    """Prompts that equal what the server renders of the client's own request."""
    ids: int = 0
    """Ids that equal what the engine says when it is asked again."""
    forced: int = 0
    """Trained ids of answers for which a grammar was set."""
    differences: list[float] = []
    """Of trained ids, one each."""
    evidence: list[float] = []
    """Of ids that are recorded and not trained."""
    problems: list[str] = []


def score(
    directory: Path,
    expected: Mapping[str, Expected],
    exchanges: Iterable[Exchange],
    repeated: Sequence[Again],
    teacher: Teacher,
    scored: Scored,
    *,
    late_grammars: bool,
) -> None:
    """Take every rollout of a store, whose server has stopped, and note in `scored` what is found.

    late_grammars: whether a grammar holds only from the end of the reasoning on.
    """
    grammars = {again.exchange.call_id: again.grammar for again in repeated if again.grammar}
    lesson = _Lesson(teacher, grammars, late_grammars)
    store = FileStore(directory)
    found: dict[Key, TokenEntry] = {}
    records: dict[str, CallRecord] = {}
    traces = {rollout for rollout, _ in store.rollouts()}
    for rollout, wanted in expected.items():
        if (rollout in traces) != bool(wanted.outcomes):
            scored.problems.append(f"{rollout}: {'a' if rollout in traces else 'no'} trace in the store")
    scored.problems += [f"{rollout}: nobody asked for it" for rollout in sorted(traces - expected.keys())]
    for rollout in sorted(traces & expected.keys()):
        with store.freeze_now(rollout) as snapshot:
            entries = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
            records |= {record.model_call_id: record for record in snapshot.calls}
            built = build(snapshot)
        found |= entries
        _account(built, entries, expected[rollout], scored)
        _teach(built, entries, lesson, scored)
    store.close_now()
    for again in repeated:
        if again.prompts:
            scored.problems += _compared(again, found, scored)
    scored.problems += _undelivered(exchanges, records)
    scored.problems += _cut_off(exchanges, found, teacher)


class _Lesson:
    """Computes the log-probs of answers, each under the grammar that forced it."""

    def __init__(self, teacher: Teacher, grammars: Mapping[str, Mapping[str, Any]], late: bool) -> None:
        self.teacher, self._grammars, self._late = teacher, grammars, late

    def is_forced(self, call_id: str) -> bool:
        """Whether a grammar forced this answer."""
        return call_id in self._grammars

    def differences(self, sequence: Recomputed, call_id: str, start: int, told: FloatArray) -> FloatArray:
        """float64 [N]: of one answer within a sequence."""
        return sequence.differences(start, told, self._grammars.get(call_id), self._late)


def _account(built: Build, entries: Mapping[Key, TokenEntry], wanted: Expected, scored: Scored) -> None:
    """Every call has the outcome that it had to have, and every sampled id is accounted for."""
    metrics, name = built.metrics, built.rollout_id
    outcomes = Counter(record.outcome for record in built.recorded.records)
    scored.calls += metrics["calls"]
    scored.outcomes += outcomes
    scored.sampled += metrics["sampled"]
    scored.trained += metrics["trained"]
    scored.untrained += Counter({category: metrics[category] for category in UNTRAINED})
    scored.trajectories += metrics["trained_trajectories"]
    scored.drifted += metrics["drifted_calls"]
    if outcomes != wanted.outcomes:
        details = sorted({record.detail for record in built.recorded.records if record.detail})
        scored.problems.append(f"{name}: {dict(outcomes)}, expected {wanted.outcomes}; {details}")
    for metric, value in wanted.metrics.items():
        if metrics[metric] != value:
            scored.problems.append(f"{name}: {metric} is {metrics[metric]}, expected {value}; {dict(metrics)}")
    sampled = sum(len(entry.generation_token_ids) for entry in entries.values())
    accounted = metrics["trained"] + sum(metrics[category] for category in (*UNTRAINED, "masked"))
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in built.trajectories)
    if not sampled == metrics["sampled"] == accounted or trained != metrics["trained"]:
        scored.problems.append(f"{name}: {sampled} sampled ids, {accounted} accounted for, {trained} in masks")


def _teach(built: Build, entries: Mapping[Key, TokenEntry], lesson: _Lesson, scored: Scored) -> None:
    """Trajectories hold exactly what entries hold, and each log-prob is the model's."""
    trained: set[Key] = set()
    for trajectory in built.trained:
        sequence = lesson.teacher.sequence(trajectory.token_ids)
        for span in trajectory.calls:
            if not span.owned or not span.trained:
                continue
            keys = [key for key in ((i, span.choice_index) for i in span.model_call_ids) if key in entries]
            if trained & set(keys):
                scored.problems.append(f"{built.rollout_id}: {keys} is trained twice")
            trained |= set(keys)
            # Several if answers were equal: then the log-probs of one of them count.
            members = [entries[key] for key in keys]
            if not np.array_equal(trajectory.token_ids[: span.end], _ids(members[0])):
                scored.problems.append(f"{built.rollout_id}: {keys} is trained with other ids")
            known = trajectory.loss_mask[span.start : span.end]
            told = trajectory.log_probs[span.start : span.end]
            if not any(np.array_equal(told[known], each.generation_log_probs[known]) for each in members):
                scored.problems.append(f"{built.rollout_id}: {keys} is trained with other log-probs")
            scored.differences += lesson.differences(sequence, keys[0][0], span.start, told)[known].tolist()
            scored.forced += span.trained * lesson.is_forced(keys[0][0])
    for key in entries.keys() - trained:
        entry = entries[key]
        sequence, start = lesson.teacher.sequence(_ids(entry)), len(entry.prompt_token_ids)
        scored.evidence += lesson.differences(sequence, key[0], start, entry.generation_log_probs).tolist()


def _ids(entry: TokenEntry) -> IdArray:
    return np.concatenate([entry.prompt_token_ids, entry.generation_token_ids])


def _undelivered(exchanges: Iterable[Exchange], records: Mapping[str, CallRecord]) -> Iterator[str]:
    """What a client has read to its end is known to be delivered, and nothing else is."""
    for exchange in exchanges:
        record = records.get(exchange.call_id)
        if record is None or exchange.answer.status != 200:
            continue
        if (record.delivered == "full") != exchange.whole or record.retry_count != exchange.retry:
            yield f"{exchange}: delivered is {record.delivered}, retry_count {record.retry_count}"


def _cut_off(exchanges: Iterable[Exchange], found: Mapping[Key, TokenEntry], teacher: Teacher) -> Iterator[str]:
    """Of a stream that its client left, at least what the client has read is stored."""
    for exchange in exchanges:
        if exchange.call_id and exchange.answer.is_stream and not exchange.whole:
            entry = found.get((exchange.call_id, 0))
            said = "".join(said_in(exchange))
            if entry is None or not said or not teacher.text(entry.generation_token_ids).startswith(said):
                yield f"{exchange}: the client has read {said!r}, and stored is {entry}"


def _compared(again: Again, found: Mapping[Key, TokenEntry], scored: Scored) -> Iterator[str]:
    """The prompt is the one that the server makes of the client's request, the ids are those of the engine."""
    exchange = again.exchange
    own = {index: entry for (call_id, index), entry in found.items() if call_id == exchange.call_id}
    if not own:
        yield f"{exchange}: nothing is stored of it"
        return
    each = len(own) // len(again.prompts)
    for index, entry in own.items():
        if entry.prompt_token_ids.tolist() != again.prompts[index // each]:
            yield f"{exchange}: the prompt is not the one that the server renders"
        else:
            scored.prompts += 1
    if again.flagged is None:
        return
    sampled = again.sampled
    if sampled.keys() != own.keys():
        yield f"{exchange}: choices {sorted(own)}, and the engine says {sorted(sampled)}"
        return
    for index, (ids, log_probs) in sampled.items():
        entry = own[index]
        if entry.generation_token_ids.tolist() != ids:
            yield f"{exchange}: other ids than the engine's"
        elif len(ids) != len(log_probs) or np.abs(entry.generation_log_probs - log_probs).max(initial=0) > TOLERANCE:
            yield f"{exchange}: other log-probs than the engine's"
        else:
            scored.ids += len(ids)
