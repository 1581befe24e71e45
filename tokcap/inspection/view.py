"""One rollout, call by call: what each continues, what became of it, and why, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from ..arrays import FloatArray, IdArray
from ..protocol import CallRecord, Delivered, Outcome, TokenCaptureSnapshot
from ..trajectory import Build, Drift, TokenBytes, build
from ..trajectory.content import BoolArray
from ..trajectory.links import NO_CALL, records_of
from ..trajectory.recorded import Call, Recorded
from ..trajectory.samples import sample_units
from ..trajectory.verdicts import Category, Judged, verdict_of_repetition
from .beginnings import Beginnings, Relation

__all__ = ("CallKey", "CallView", "DriftView", "Relation", "RolloutView", "view_of")

CallKey = tuple[str, int]
"""(model_call_id, choice_index)."""


class DriftView(msgspec.Struct, frozen=True):
    """Where a prompt parts from an earlier call."""

    nearest: CallKey
    index: int
    """The first position at which the two differ."""
    kept: int
    """How many of the earlier call's sampled ids the prompt still holds."""
    lost: int
    """How many it doesn't."""
    before_answer: bool
    kind: str
    """`tokcap.trajectory.DriftKind`."""


class CallView(msgspec.Struct, frozen=True):
    """One choice of one model call."""

    model_call_id: str
    """Empty for a lost call that nobody could name, such as damage."""
    choice_index: int
    outcome: Outcome
    relation: Relation
    parent: CallKey | None
    """The call that it hangs on, as `relation` says."""
    shared: int
    """How many ids its prompt has in common with that call, or with the nearest earlier one, from the beginning."""
    prompt: int
    """Ids of the prompt."""
    sampled: int
    """Ids of the answer."""
    trained: int
    verdict: Category | Literal[""]
    """Why its ids are trained or not; empty if it has none."""
    continued: bool
    """Whether a later prompt holds it whole."""
    after_gap: bool
    """A lost or open call may lie directly before it."""
    drift: DriftView | None
    """Of its prompt; a call that `continues` one call may part from another that continued it, too."""
    began_s: float | None
    """Seconds since the first call of the rollout began; None if unknown, or of another boot of the machine."""
    took_s: float | None
    delivered: Delivered
    retry_count: int
    model: str = ""
    finish_reason: str = ""
    response_id: str = ""
    policy_versions: tuple[Any, ...] = ()
    """(version, start, end) over the answer."""
    sampling: dict[str, Any] = {}
    unknown_log_probs: int = 0
    """Sampled ids whose log-prob is NaN."""
    mean_log_prob: float | None = None
    """Over the known ones, natural log."""
    detail: str = ""
    """Why, in words: the reason of a loss, or the file and offset of damage."""
    number: int = 0
    """Its place in `RolloutView.calls`, from 1: a short name for it."""
    counts: dict[Category, int] = {}
    """Its sampled ids by what they count as in the metrics of the build; over all calls they add up to those."""
    samples: int = 1
    """How many answers to its prompt are samples of each other, this one included."""
    attempts: int = 1
    """How many times that prompt was asked for one after another; more than 1: retries."""
    instead: CallKey | None = None
    """Of an abandoned answer the one that the client went on with; of a repetition the one that counts."""

    @property
    def key(self) -> CallKey:
        """What identifies it in its rollout."""
        return self.model_call_id, self.choice_index

    @property
    def name(self) -> str:
        """`model_call_id`, with `#N` for choice N if that isn't the first."""
        return f"{self.model_call_id}#{self.choice_index}" if self.choice_index else self.model_call_id


class RolloutView:
    """A rollout that was read and built. It stays valid when its snapshot is closed.

    snapshot_id, version, incomplete, meta: of the snapshot. version 0: still open. finished, damage, torn: those of a
    file store; other sources tell none.
    build: the trajectories. calls: in the order in which they began. Where that is not known, by when they ended; those
    of which neither is known, or which lie in another boot of the machine, follow.
    """

    def __init__(self, snapshot: TokenCaptureSnapshot, built: Build) -> None:
        self.rollout_id, self.snapshot_id, self.version = built.rollout_id, built.snapshot_id, built.version
        self.incomplete, self.meta = snapshot.incomplete, built.meta
        self.finished = bool(getattr(snapshot, "finished", False))
        self.damage = tuple(str(damage) for damage in getattr(snapshot, "damage", ()))
        self.torn = tuple(str(damage) for damage in getattr(snapshot, "torn", ()))
        self.build = built
        self._numbers = {call.key: call.number for call in built.recorded.calls}
        self.calls = tuple(_Views(built).made())
        self._by_key = {view.key: view for view in self.calls if view.model_call_id}
        self._children: dict[CallKey | None, list[CallView]] = defaultdict(list)
        for view in self.calls:
            self._children[view.parent].append(view)

    @property
    def masked(self) -> bool:
        """Whether nothing of it is trained. Of an open one that has nothing yet, nothing is left out."""
        return self.build.masked and (self.version > 0 or self.build.metrics["sampled"] > 0)

    def call(self, key: CallKey) -> CallView | None:
        """The view of a call, if there is one."""
        return self._by_key.get(key)

    def children(self, key: CallKey | None) -> Iterator[CallView]:
        """The calls that hang on `key`, in order; None: those that hang on none."""
        return iter(self._children.get(key, ()))

    def named(self, name: str) -> list[CallView]:
        """The calls that `name` may mean.

        A call id, `ID#N` for its choice N, a response id, the beginning of either, or the number of a call (`7`, `#7`).
        What fits exactly hides what only begins like it.
        """
        if name.startswith("#") and name[1:].isdecimal():
            return [view for view in self.calls if view.number == int(name[1:])]
        found = self._named(name)
        head, mark, choice = name.rpartition("#")
        if not found and mark and choice.isdecimal():
            found = [view for view in self._named(head) if view.choice_index == int(choice)]
        if not found and name.isdecimal():
            found = [view for view in self.calls if view.number == int(name)]
        return found

    def _named(self, name: str) -> list[CallView]:
        if not name:
            return []
        calls = self.calls
        found = [view for view in calls if view.model_call_id == name]
        found = found or [view for view in calls if view.response_id == name]
        if found or name.isdecimal():
            return found
        found = [view for view in calls if view.model_call_id.startswith(name)]
        return found or [view for view in calls if view.response_id.startswith(name)]

    def recorded(self, key: CallKey) -> Call | None:
        """What the trajectory layer knows of a call; None if no ids of it are stored."""
        number = self._numbers.get(key)
        return None if number is None else self.build.recorded.calls[number]

    def same_answer(self, one: CallKey, other: CallKey) -> bool:
        """Whether two calls are one by their ids: the same prompt, the same answer, and no samples of each other."""
        mine, its = self.recorded(one), self.recorded(other)
        same = self.build.links.representative
        return mine is not None and its is not None and same[mine.number] == same[its.number]

    def prompt_token_ids(self, key: CallKey) -> IdArray:
        """int32 [P]: what the engine saw; empty for a call without a record."""
        call = self.recorded(key)
        return np.empty(0, np.int32) if call is None else self.build.recorded.prompt_token_ids(call)

    def generation_token_ids(self, key: CallKey) -> IdArray:
        """int32 [G]: what the policy sampled; empty for a call without a record."""
        call = self.recorded(key)
        return np.empty(0, np.int32) if call is None else call.generation_token_ids

    def log_probs(self, key: CallKey) -> FloatArray:
        """float64 [G], natural log; NaN where unknown."""
        call = self.recorded(key)
        return np.empty(0, np.float64) if call is None else call.generation_log_probs

    def loss_mask(self, key: CallKey) -> BoolArray:
        """bool [G]: which sampled ids of the call are trained, in whichever trajectory owns them."""
        call = self.recorded(key)
        if call is None:
            return np.zeros(0, np.bool_)
        judged = self.build.judged.get(self.build.links.representative[call.number])
        if judged is None or judged.source.number != call.number or not judged.trained:
            return np.zeros(call.sampled, np.bool_)
        return np.ones(call.sampled, np.bool_) if judged.mask is None else judged.mask


def view_of(snapshot: TokenCaptureSnapshot, *, token_bytes: TokenBytes | None = None, **options: Any) -> RolloutView:
    """Build and look. token_bytes, options: those of `tokcap.build`."""
    return RolloutView(snapshot, build(snapshot, token_bytes=token_bytes, **options))


class _Clock:
    """Places calls in time. Times compare within one boot of the machine only."""

    def __init__(self, recorded: Recorded) -> None:
        timed = [record for record in recorded.records if record.boot_id]
        boots = dict.fromkeys(record.boot_id for record in timed)
        if len(boots) > 1:  # the wall clock is good enough to tell which came first
            first: dict[str, float] = {}
            for call in recorded.calls:
                if (created := call.contents.created_at) > 0:
                    boot = call.record.boot_id
                    first[boot] = min(first.get(boot, created), created)
            boots = dict.fromkeys(sorted(boots, key=lambda boot: first.get(boot, float("inf"))))
        self._boots = {boot: place for place, boot in enumerate(boots)}
        self._home = next(iter(boots), "")
        begun = (record.begun_at for record in timed if record.boot_id == self._home)
        self._origin = min((at for at in begun if at is not None), default=0.0)

    def place(self, record: CallRecord) -> tuple[int, bool, float]:
        """Sorts by boot, then by when it began. When a loss was noted says nothing of when the call began."""
        at = record.begun_at
        if at is None and record.outcome not in ("lost", "open"):
            at = record.ended_at
        return self._boots.get(record.boot_id, len(self._boots)), at is None, at or 0.0

    def times(self, record: CallRecord) -> tuple[float | None, float | None]:
        """When it began, in seconds since the first call did; how long it took."""
        if record.begun_at is None:
            return None, None
        began = record.begun_at - self._origin if record.boot_id == self._home else None
        return began, None if record.ended_at is None else record.ended_at - record.begun_at


class _Views:
    """Makes the views of a rollout's calls."""

    def __init__(self, built: Build) -> None:
        self._built, self._recorded, self._links = built, built.recorded, built.links
        self._clock = _Clock(self._recorded)
        self._siblings = _siblings(built)
        self._beginnings = Beginnings(self._recorded, self._links, built.drift_of)

    def made(self) -> Iterator[CallView]:
        answers: dict[str, list[Call]] = defaultdict(list)
        for call in self._recorded.calls:
            answers[call.model_call_id].append(call)
        number = 0
        for record in sorted(self._recorded.records, key=self._clock.place):
            for call in answers[record.model_call_id] if record.model_call_id else ():
                number += 1
                yield self._recorded_view(call, record, number)
            if not answers.get(record.model_call_id):
                number += 1
                yield self._unrecorded_view(record, number)

    def _recorded_view(self, call: Call, record: CallRecord, number: int) -> CallView:
        representative = self._links.representative[call.number]
        judged = self._built.judged.get(representative)
        drift = self._built.drift_of.get(representative)
        relation, parent, shared = self._tie(call, representative, drift)
        began, took = self._clock.times(record)
        known = call.generation_log_probs[~np.isnan(call.generation_log_probs)]
        verdict, counts = _verdict(judged, call)
        samples, attempts, kept = self._siblings.get(representative, (1, 1, NO_CALL))
        if judged is not None and judged.source.number != call.number:
            kept = judged.source.number
        elif verdict != "abandoned":
            kept = NO_CALL
        return CallView(
            call.model_call_id,
            call.choice_index,
            record.outcome,
            relation,
            parent,
            shared,
            call.prompt,
            call.sampled,
            counts.get("trained", 0),
            verdict,
            representative in self._links.extended,
            representative in self._built.gaps,
            None if drift is None else _drift_view(drift),
            began,
            took,
            record.delivered,
            record.retry_count,
            model=call.model,
            finish_reason=call.finish_reason,
            response_id=call.response_id,
            policy_versions=tuple(call.policy_versions),
            sampling=call.sampling,
            unknown_log_probs=call.sampled - len(known),
            mean_log_prob=mean_of(known),
            detail=record.detail,
            number=number,
            counts=counts,
            samples=samples,
            attempts=attempts,
            instead=None if kept == NO_CALL else self._recorded.calls[kept].key,
        )

    def _tie(self, call: Call, representative: int, drift: Drift | None) -> tuple[Relation, CallKey | None, int]:
        calls, parent = self._recorded.calls, self._links.parent[representative]
        if representative != call.number:
            return "repeats", calls[representative].key, call.prompt
        if drift is not None and not drift.before_answer:
            return "drifted", drift.nearest, drift.index
        if parent != NO_CALL:  # also if it parts from the prompt of another call that continues it
            return "continues", calls[parent].key, calls[parent].total
        if drift is not None:
            relation = self._beginnings.relation(call, drift)
            return relation, drift.nearest if relation == "restarted" else None, drift.index
        return "root", None, 0

    def _unrecorded_view(self, record: CallRecord, number: int) -> CallView:
        began, took = self._clock.times(record)
        return CallView(
            record.model_call_id,
            0,
            record.outcome,
            "unrecorded",
            None,
            0,
            0,
            0,
            0,
            "",
            False,
            False,
            None,
            began,
            took,
            record.delivered,
            record.retry_count,
            detail=record.detail,
            number=number,
        )


def _verdict(judged: Judged | None, call: Call) -> tuple[Category | Literal[""], dict[Category, int]]:
    """What holds for the span of a call, and its ids by category; of identical calls only one is counted as it is."""
    if judged is None:
        return "", {}
    if judged.source.number == call.number:
        return judged.verdict, dict(judged.counts)
    verdict = verdict_of_repetition(judged, call)
    return verdict, {verdict: call.sampled}


def mean_of(log_probs: FloatArray) -> float | None:
    """Their mean; None if there are none, NaN where infinities of both signs are among them."""
    with np.errstate(invalid="ignore"):
        return float(log_probs.mean()) if len(log_probs) else None


def _drift_view(drift: Drift) -> DriftView:
    return DriftView(drift.nearest, drift.index, drift.kept, drift.lost, drift.before_answer, drift.kind)


def _siblings(built: Build) -> dict[int, tuple[int, int, int]]:
    """Of each answer to a prompt that has several: samples in its unit, units, and an answer of the only unit that the
    client went on with, or NO_CALL."""
    recorded, links = built.recorded, built.links
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number in links.answered:
        call = recorded.calls[number]
        groups[call.prompt_vertex, call.model].append(number)
    found = {}
    for group in groups.values():
        if len(group) > 1:
            records = {number: records_of(recorded, links, number) for number in group}
            units = sample_units(records, by_delivery_alone=True)
            kept = [unit for unit in units if any(built.fates[number].verdict == "kept" for number in unit)]
            went_on = built.judged[kept[0][0]].source.number if len(kept) == 1 else NO_CALL
            found.update({number: (len(unit), len(units), went_on) for unit in units for number in unit})
    return found
