"""The parent's account of one rollout: what every child began and ended, and what may therefore be found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokcap.entry import TokenEntry

from .kills_calls import STATEMENTS, CallState, digest_of, possible_states, trained_digest
from .kills_children import Job

__all__ = ("Account", "Pair", "Seen", "Try")

Pair = tuple[str, int]
"""Identity and version of a snapshot."""


@dataclass
class Try:
    """One attempt at an operation. Times are nanoseconds of CLOCK_MONOTONIC; without an end it goes on."""

    start: int
    end: int | None = None
    reply: Any = None
    """`ack`, a result, or the name of the error that refused it; None if its process died before it said."""


@dataclass(frozen=True)
class Seen:
    """What was found in a rollout."""

    entries: dict[str, dict[int, str]]
    calls: dict[str, str]
    twice: list[str]
    finished: bool
    damage: list[str]
    frozen: tuple[int, int] | None = None
    torn: int = 0
    trained: str = ""
    balanced: bool = True
    source: str = ""

    @classmethod
    def of(cls, plain: dict[str, Any], source: str = "") -> Seen:
        """From what a child wrote; JSON has made its numbers words."""
        frozen = plain.get("frozen")
        return cls(
            {call: {int(c): digest for c, digest in seen.items()} for call, seen in plain["entries"].items()},
            plain["calls"],
            plain["twice"],
            plain["finished"],
            plain["damage"],
            (frozen[0], frozen[1]) if frozen else None,
            plain["torn"],
            plain.get("trained", ""),
            plain.get("balanced", True),
            source,
        )

    def same_as(self, other: Seen) -> bool:
        return (self.entries, self.calls, self.trained) == (other.entries, other.calls, other.trained)


@dataclass
class Account:
    """Everything that is known of one rollout."""

    rollout_id: str
    jobs: list[Job]
    is_reset: bool = False
    """It is reset while it is written and consumed: what was acknowledged may be gone then, and only then."""
    is_expired: bool = False
    """Nobody finishes or consumes it: it is reset, too, but by its age."""
    is_away: bool = False
    """It was reset, or had expired, when its writers had ended."""
    takes_after: int = 0
    """So many steps more, and somebody freezes it; 0: not while it is written."""
    made: float = 0.0
    """Unix seconds."""
    written: float = 0.0
    """When the last writer had come to its end; CLOCK_MONOTONIC."""
    tries: dict[tuple[int, int], list[Try]] = field(default_factory=dict)
    """By writer and number of the step."""
    freezes: list[Try] = field(default_factory=list)
    retires: dict[Pair, list[Try]] = field(default_factory=dict)
    resets: list[Try] = field(default_factory=list)
    handed: dict[Pair, list[Seen]] = field(default_factory=dict)
    final: set[Pair] = field(default_factory=set)
    """What a consumer was told to be gone: it counts as trained."""
    done: set[int] = field(default_factory=set)
    """Writers that have come to their end."""

    @property
    def is_written(self) -> bool:
        return len(self.done) == len(self.jobs)

    def todo(self, job: Job) -> Job:
        """What is left of a job: steps that nobody heard the end of."""
        ended = {
            number
            for (writer, number), tries in self.tries.items()
            if writer == job.writer and tries[-1].reply is not None
        }
        left = tuple(number for number in job.todo if number not in ended)
        return Job(job.rollout_id, job.writer, job.owner, job.always_begun, left)

    @property
    def is_gone(self) -> bool:
        """Somebody was told that it is retired, or reset after its writers had ended."""
        if self.is_reset:
            return self.is_away
        retired = any(attempt.reply is True for tries in self.retires.values() for attempt in tries)
        return retired or any(attempt.reply == "RetiredError" for attempt in self.freezes)

    @cached_property
    def _entries(self) -> dict[str, TokenEntry]:
        return {digest_of(e): e for job in self.jobs for entries in job.plan.entries.values() for e in entries}

    # ---- what must be seen

    def problems_of(self, pair: Pair | None, seen: Seen) -> Iterator[str]:
        """What is wrong with what was found: handed over as `pair`, or lying in the store."""
        if seen.damage:
            yield f"damage: {seen.damage}"
        if seen.twice:
            yield f"twice in one snapshot: {seen.twice}"
        if not seen.balanced:
            yield "the account of the trajectories is not balanced"
        unknown = (seen.calls.keys() | seen.entries.keys()) - {call for job in self.jobs for _, call in job.plan.steps}
        if unknown:
            yield f"calls that nobody made: {sorted(unknown)}"
        must_before, not_after = self._window(pair, seen)
        for job in self.jobs:
            for numbers in job.plan.numbers_by_call(range(len(job.plan.steps))):
                call = job.plan.steps[numbers[0]][1]
                if not call:
                    continue
                found = seen.calls.get(call), seen.entries.get(call, {})
                states = self._states(job, numbers, must_before, not_after, self._reset_before(seen))
                if not any(state.is_seen_as(*found) for state in states):
                    said = {f"{n} {job.plan.steps[n][0]}": self.tries.get((job.writer, n), []) for n in numbers}
                    yield f"call {call} was found as {found}, which can't be after {said}"
        if not self.is_reset and not seen.finished and self._was_finished():
            yield "the acknowledged word that it is finished is missing"
        if seen.trained and seen.trained != self._trained(seen):
            yield f"trained is {seen.trained}, expected {self._trained(seen)}"

    def _window(self, pair: Pair | None, seen: Seen) -> tuple[int | None, int | None]:
        """Statements that ended before the first time are in it, those that started after the second are not."""
        if pair is None:
            return None, None
        frozen = [one.frozen for one in self.handed.get(pair, [seen]) if one.frozen is not None]
        not_after = min((end for _, end in frozen), default=None)
        must_before = max((start for start, _ in frozen), default=0)
        tries = self.retires.get(pair, [])
        if any(attempt.reply is True for attempt in tries):  # it was the newest version until then
            must_before = max(must_before, min(attempt.start for attempt in tries if attempt.reply is not False))
        return must_before, not_after

    def _states(
        self, job: Job, numbers: list[int], must_before: int | None, not_after: int | None, reset: int
    ) -> Iterator[CallState]:
        steps = []
        for number in numbers:
            what, _ = step = job.plan.steps[number]
            tries = [t for t in self.tries.get((job.writer, number), []) if t.end is None or t.end > reset]
            kind, certain = self._standing(what, tries, must_before, not_after)
            if kind:
                steps.append((kind, job.plan.entries.get(step, ()), certain and not self.is_reset))
        return possible_states(steps)

    def _reset_before(self, seen: Seen) -> int:
        """What ended before this time can't come back."""
        if seen.frozen is None:
            return 0
        done = [one for one in self.resets if one.reply == "ack" and (one.end or 0) < seen.frozen[0]]
        return max((one.start for one in done), default=0)

    @staticmethod
    def _standing(what: str, tries: list[Try], must_before: int | None, not_after: int | None) -> tuple[str, bool]:
        """As what a step counts, empty for not at all, and whether it does so certainly."""
        done = [attempt for attempt in tries if attempt.reply == "ack"]
        doubtful = [attempt for attempt in tries if attempt.reply is None]
        frozen = [attempt for attempt in tries if attempt.reply == "FrozenError"]
        late = what in STATEMENTS
        if what == "conflict" and frozen and not done:  # of a frozen rollout it is a statement, too
            what, done, late = "late conflict", frozen, True
        if done:
            if not late:
                return what, True
            if must_before is None or (done[0].end or 0) < must_before:
                return what, True
            if not_after is not None and min(attempt.start for attempt in tries) > not_after:
                return "", False
            return what, False
        # A put that was there would not have been refused: it would have been a repetition.
        refused = what in ("put", "put_many") and bool(frozen)
        return (what, False) if doubtful and not refused else ("", False)

    def _was_finished(self) -> bool:
        return any(
            job.plan.steps[number][0] == "finish" and any(attempt.reply == "ack" for attempt in tries)
            for job in self.jobs
            for (writer, number), tries in self.tries.items()
            if writer == job.writer
        )

    def _trained(self, seen: Seen) -> str:
        entries = [
            self._entries[digest]
            for call, choices in seen.entries.items()
            if seen.calls.get(call) == "recorded"
            for digest in choices.values()
            if digest in self._entries
        ]
        return trained_digest((entry.generation_token_ids, entry.generation_log_probs) for entry in entries)

    # ---- the whole

    def problems(self, left: tuple[Pair, Seen] | None = None) -> Iterator[str]:
        """At the end of a rollout. `left`: what was still in the store, frozen by the parent and not handed over."""
        for pair, copies in self.handed.items():
            for copy in copies:
                yield from (f"{pair} handed over in {copy.source}: {one}" for one in self.problems_of(pair, copy))
                if not copy.same_as(copies[0]):
                    yield f"{pair} was handed over with two contents, in {copies[0].source} and {copy.source}"
        if left is not None:
            yield from (f"left in the store as {left[0]}: {one}" for one in self.problems_of(*left))
        last = self._last_versions(left)
        for pair, tries in self.retires.items():
            if any(attempt.reply is True for attempt in tries) and pair not in self.handed:
                yield f"{pair} was retired, and nobody had handed it over"
        for pair in self.final:
            if last.get(pair[0]) != pair[1]:
                yield f"{pair} counts as trained, and so does version {last.get(pair[0])}"
        if not self.is_reset and len(last) > 1:
            yield f"two lives of a rollout that nobody reset: {last}"
        yield from self._lost_or_twice(last, left)

    def _last_versions(self, left: tuple[Pair, Seen] | None) -> dict[str, int]:
        last: dict[str, int] = {}
        for identity, version in [*self.handed, *([left[0]] if left else [])]:
            last[identity] = max(version, last.get(identity, 0))
        return last

    def _lost_or_twice(self, last: dict[str, int], left: tuple[Pair, Seen] | None) -> Iterator[str]:
        """Each acknowledged put is in exactly one of the snapshots that count, unless it was reset."""
        counted = {pair: copies[0] for pair, copies in self.handed.items() if last[pair[0]] == pair[1]}
        if left is not None:
            counted[left[0]] = left[1]
        for job in self.jobs:
            for number, step in enumerate(job.plan.steps):
                if step[0] not in ("put", "put_many"):
                    continue
                done = [t for t in self.tries.get((job.writer, number), []) if t.reply == "ack"]
                if not done:
                    continue
                found = [pair for pair, seen in counted.items() if step[1] in seen.entries]
                may_be_gone = any(reset.end is None or reset.end > done[-1].start for reset in self.resets)
                if not found and not may_be_gone:
                    yield f"lost: {step} of writer {job.writer}, acknowledged in {done}, is in none of {list(counted)}"
                if len(found) > 1 and not self.resets:
                    yield f"twice: {step} of writer {job.writer} is in {found}"
