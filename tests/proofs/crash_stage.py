"""What store objects do while they are recorded, and what must hold of every rollout at each moment of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec

from tests.faulty_files import Fault
from tests.state_model import UNKNOWN, Operation, Raised, Seen, State, linearize
from tests.store_worker import attempt, perform, seen
from tokcap import FileStore
from tokcap.entry import content_digest
from tokcap.store import base as store_module
from tokcap.store.snapshot import Snapshot

from .crash_recording import Recording, RecordingFiles

__all__ = ("ROOT", "Expected", "Stage", "brief", "explained_across_boots")

_RECORDS = ("put", "begin", "settle", "deliver", "finish")
_LEAVES_SEALED = ("read", "tidy", "sweep", "close")

ROOT = "a/s"
"""The store's directory below the base of the recording: its parent has to become durable, too."""


@dataclass(frozen=True)
class Expected:
    """What a crash at this moment may leave of each rollout."""

    states: dict[str, tuple[State, ...]]
    sealed: frozenset[str] = frozenset()
    """Rollouts all writers of which were closed: nothing is torn, nothing left open."""
    under_way: tuple[Operation, ...] = ()
    moment: str = ""
    """For people: what was under way."""


@dataclass
class _Done:
    who: str
    operation: Operation
    number: int
    result: object = UNKNOWN


@dataclass
class _Step:
    """Operations that ran at the same time; the steps came one after another."""

    done: list[_Done]
    before: dict[str, tuple[State, ...]]
    sealed: frozenset[str]


@dataclass
class _Actor:
    files: RecordingFiles
    store: FileStore
    wrote: set[str] = field(default_factory=set)


class Stage:
    """Store objects on one recorded directory, driven step by step, with the state table as a model beside them."""

    def __init__(self, base: str, rollouts: Sequence[str], states: dict[str, tuple[State, ...]] | None = None) -> None:
        self.recording = Recording(base)
        self.rollouts = tuple(rollouts)
        self._later_boot = states is not None
        self.states = states or {rollout: (State(),) for rollout in self.rollouts}
        self._at_first = dict(self.states)
        self._used: set[str] = set(self.states) if self._later_boot else set()
        self.seen: dict[str, Seen] = {}
        """The last snapshot of each rollout that anybody saw."""
        self.problems: list[str] = []
        self._actors: dict[str, _Actor] = {}
        self._steps: list[_Step] = []
        self._step_of: list[int] = []
        """Operation -> its step."""
        dead = {"somebody who died"} if self._later_boot else set()
        self._writers: dict[str, set[str]] = {rollout: set(dead) for rollout in self.rollouts}
        self._sealed: frozenset[str] = frozenset()
        self._strict: set[str] = set()
        self._cut_short: list[tuple[int, str, Operation]] = []
        """Records of dead processes, with their step: nobody believes them, until the next boot finds them whole."""
        self._threads = ThreadPoolExecutor(8)
        self._expected: dict[tuple[int, int], Expected] = {}

    # ---- who acts

    def open(
        self, who: str, *, kernel: bool = False, space: bool = False, dying: int | None = None, **options: Any
    ) -> bool:
        """A store object, as a process of its own would have it; False if it died meanwhile.

        `kernel`: the kernel does its syncs, `space`: space is written ahead; as on ext4, whatever this is.
        """
        files = RecordingFiles(self.recording, in_kernel=kernel)
        with contextlib.ExitStack() as stack:
            if kernel:
                stack.enter_context(patch.object(store_module, "kernel_syncs_for", lambda kind: 64))
                stack.enter_context(patch.object(store_module, "sync_threads_for", lambda kind: 8))
                stack.enter_context(patch.object(store_module, "is_memory", lambda kind: False))
            stack.enter_context(patch.object(store_module, "is_faster_with_space", lambda kind: space))
            if dying is not None:
                stack.enter_context(files.dying(dying))
            try:
                store = FileStore(f"{self.recording.base}/{ROOT}", sweep_every_s=0, files=files, **options)
            except OSError:
                assert files.dead
                return False
        self._actors[who] = _Actor(files, store)
        if options.get("require_intent"):
            self._strict.add(who)
        return True

    def store(self, who: str) -> FileStore:
        """One of the store objects."""
        return self._actors[who].store

    def files(self, who: str) -> RecordingFiles:
        """Those of one store object, for what somebody does by hand."""
        return self._actors[who].files

    def failing(self, who: str, fault: Fault) -> AbstractContextManager[object]:
        """Inside, calls of one store object fail."""
        return self._actors[who].files.failing(fault)

    def close(self, who: str) -> None:
        """It seals what it wrote."""
        actor = self._actors.pop(who)
        step = self._begin([(who, Operation("close", ""))])
        actor.store.close_now()
        for writers in self._writers.values():
            writers.discard(who)
        self._sealed |= {rollout for rollout in actor.wrote if not self._writers[rollout]}
        self._finish(step)
        self._forget(who)

    def _forget(self, who: str) -> None:
        self.states = {r: tuple(dict.fromkeys(s.forget(who) for s in states)) for r, states in self.states.items()}

    def end(self) -> None:
        """Whatever is still open is closed, and recorded no more."""
        events, marks = list(self.recording.events), list(self.recording.marks)
        for actor in self._actors.values():
            with contextlib.suppress(OSError):
                actor.store.close_now()
        self._actors.clear()
        self._threads.shutdown()
        self.recording.events, self.recording.marks = events, marks

    # ---- what is done

    def do(self, who: str, *operations: Operation, asynchronous: bool = False) -> list[object]:
        """Do operations through one store object: at the same time, if there are several."""
        return self.together([(who, operation) for operation in operations], asynchronous=asynchronous)

    def together(self, work: Sequence[tuple[str, Operation]], *, asynchronous: bool = False) -> list[object]:
        """Do operations at the same time."""
        step = self._begin(work)
        if asynchronous:
            asyncio.run(self._gather(step))
        else:
            for future in [self._threads.submit(self._act, done) for done in step.done]:
                future.result()
        self._finish(step)
        return [done.result for done in step.done]

    async def _gather(self, step: _Step) -> None:
        async def act(done: _Done) -> None:
            try:
                result = await perform(self.store(done.who), done.operation, suffix="")
                done.result = seen(result) if isinstance(result, Snapshot) else result
            except Exception as error:
                done.result = Raised(type(error).__name__, str(error))
            self._returned(done)

        await asyncio.gather(*map(act, step.done))

    def _act(self, done: _Done) -> None:
        done.result = attempt(lambda: perform(self.store(done.who), done.operation))
        self._returned(done)

    def _returned(self, done: _Done) -> None:
        if self._actors[done.who].files.dead:
            done.result = UNKNOWN
            if done.operation.name in _RECORDS:
                self._cut_short.append((self._step_of[done.number], done.who, done.operation))
        else:
            self.recording.mark(done.number, returned=True)

    def freeze_many(self, who: str, rollouts: Sequence[str]) -> None:
        """`freeze_many`: each of them counts once all have returned."""
        step = self._begin([(who, Operation("freeze", rollout)) for rollout in rollouts])
        future: Future[object] = self._threads.submit(
            lambda: [seen(snapshot) for snapshot in self.store(who).freeze_many_now(rollouts)]
        )
        found = future.result()
        assert isinstance(found, list)
        for done, result in zip(step.done, found, strict=True):
            done.result = result
            self._returned(done)
        self._finish(step)

    def sweep(self, who: str, *, older_than_s: float = 0) -> None:
        """`sweep`: of every rollout."""
        name = "sweep" if older_than_s == 0 else "tidy"
        step = self._begin([(who, Operation(name, rollout)) for rollout in self.rollouts])
        count = self._threads.submit(self.store(who).sweep_now, older_than_s).result()
        for done in step.done:
            gone = {state.life is not None and state.life.retired for state in self.states[done.operation.rollout_id]}
            done.result = int(True in gone) if len(gone) == 1 else UNKNOWN
            self._returned(done)
        results = [done.result for done in step.done]
        if name == "sweep" and UNKNOWN not in results and count != results.count(1):
            self.problems.append(f"sweep gave {count}, {results.count(1)} rollouts were retired")
        self._finish(step)

    def die(self, who: str, operation: Operation, after: int) -> bool:
        """Do an operation and die after so many changes and syncs; False if it was done before that."""
        actor = self._actors[who]
        with actor.files.dying(after):
            self.do(who, operation)
        died = actor.files.dead
        if not died:
            return False
        del self._actors[who]
        with contextlib.suppress(OSError):
            actor.store.close_now()
        self._forget(who)
        return True

    def retire(self, who: str, rollout: str) -> Operation:
        """The retirement of what was seen last."""
        snapshot = self.seen[rollout]
        return Operation("retire", rollout, word=snapshot.snapshot_id, number=snapshot.version)

    # ---- what is expected

    def _begin(self, work: Sequence[tuple[str, Operation]]) -> _Step:
        done: list[_Done] = []
        step = _Step(done, dict(self.states), self._sealed)
        self._steps.append(step)
        for who, operation in work:
            number = len(self._step_of)
            self._step_of.append(len(self._steps) - 1)
            self.recording.mark(number, returned=False)
            done.append(_Done(who, operation, number))
            if operation.name not in _LEAVES_SEALED:
                self._used.add(operation.rollout_id)
                self._sealed -= {operation.rollout_id}
                if who in self._actors:
                    self._actors[who].wrote.add(operation.rollout_id)
                    self._writers[operation.rollout_id].add(who)
        return step

    def _finish(self, step: _Step) -> None:
        for done in step.done:
            if isinstance(done.result, Seen) and done.result.version:
                self.seen[done.operation.rollout_id] = done.result
        if step.done and step.done[0].operation.name == "close":
            self.recording.mark(step.done[0].number, returned=True)
        self.states = self._after(step, [(done.who, done.operation, done.result) for done in step.done])
        for rollout, states in self.states.items():
            if not states:
                self.problems.append(f"no state of {rollout} explains " + "; ".join(map(_short, step.done)))
                self.states[rollout] = step.before[rollout]

    def _with_tails(self, states: dict[str, tuple[State, ...]], step: int) -> dict[str, tuple[State, ...]]:
        """With what a later boot may believe although nobody did before: whole records of processes that died."""
        after = dict(states)
        strict = frozenset(self._strict)
        for rollout in states:
            tails = [
                (who, operation, UNKNOWN)
                for number, who, operation in self._cut_short
                if number < step and operation.rollout_id == rollout
            ]
            if tails:
                after[rollout] = tuple(linearize(states[rollout], tails, strict))
        return after

    def _of_used(self, states: dict[str, tuple[State, ...]]) -> dict[str, tuple[State, ...]]:
        return {rollout: states[rollout] for rollout in self.rollouts if rollout in self._used}

    def _after(self, step: _Step, done: Sequence[tuple[str, Operation, object]]) -> dict[str, tuple[State, ...]]:
        strict = frozenset(self._strict)
        after = dict(step.before)
        for rollout in {operation.rollout_id for _, operation, _ in done if operation.rollout_id}:
            own = [
                one for one in done if one[1].rollout_id == rollout and one[1].name != "tidy" and not _failed(one[2])
            ]
            explain = explained_across_boots if self._later_boot else linearize
            after[rollout] = tuple(explain(step.before[rollout], own, strict))
        return after

    def expected(self, position: int) -> Expected:
        """What may be found after a crash in front of the event at `position`."""
        marks = self.recording.marks
        # An operation that returned in front of the event is acknowledged.
        count = sum(mark.position <= position for mark in marks)
        return self.expected_after(count)

    def expected_after(self, count: int) -> Expected:
        """What may be found after a crash behind so many marks, of the rollouts that were used at all."""
        key = (count, len(self._steps))
        known = self._expected.get(key)
        if known is not None:
            return known
        marks = self.recording.marks[:count]
        if not marks:
            found = Expected(self._of_used(self._at_first), moment="before the first operation")
        else:
            step = self._steps[self._step_of[marks[-1].operation]]
            started = {mark.operation for mark in marks}
            returned = {mark.operation for mark in marks if mark.returned}
            known_of = [done for done in step.done if done.number in started]
            work = [
                (done.who, done.operation, done.result if done.number in returned else UNKNOWN) for done in known_of
            ]
            sealed = step.sealed - {
                done.operation.rollout_id for done in step.done if done.operation.name not in _LEAVES_SEALED
            }
            if step.done[0].operation.name == "close" and step.done[0].number in returned:
                following = self._step_of[marks[-1].operation] + 1
                sealed = self._steps[following].sealed if following < len(self._steps) else self._sealed
            found = Expected(
                self._of_used(self._with_tails(self._after(step, work), self._step_of[marks[-1].operation])),
                sealed,
                tuple(done.operation for done in known_of if done.number not in returned),
                "; ".join(f"{_short(done)}{'' if done.number in returned else ' (under way)'}" for done in known_of),
            )
        self._expected[key] = found
        return found


def across_boots(result: object, states: Sequence[State]) -> object:
    """What was seen, as the model has it: times of an earlier boot can't be compared, so a call that goes on in a later
    one doesn't show any more when it began."""
    if not isinstance(result, Seen):
        return result
    begun = {name for state in states if state.life for name, call in state.life.calls.items() if call.begun}
    calls = {name: (*shown[:5], shown[5] or name in begun, *shown[6:]) for name, shown in result.calls.items()}
    return msgspec.structs.replace(result, calls=calls)


def explained_across_boots(
    states: Sequence[State], done: Sequence[tuple[str, Operation, object]], strict: frozenset[str] = frozenset()
) -> list[State]:
    """`linearize`, of what was seen as it is and as the model has it."""
    forgiving = [(who, operation, across_boots(result, states)) for who, operation, result in done]
    return list(dict.fromkeys([*linearize(states, done, strict), *linearize(states, forgiving, strict)]))


def brief(found: object) -> str:
    """A result or a state, for people."""
    if isinstance(found, Seen):
        calls = " ".join(f"{name}={shown[0]}/{shown[1]}" for name, shown in found.calls.items())
        entries = " ".join(f"{e.model_call_id}/{e.choice_index}={content_digest(e).hex()[:6]}" for e in found.entries)
        damaged = " incomplete" if found.incomplete else ""
        return f"<version {found.version} of {found.snapshot_id[:6]}{damaged}: {calls}; {entries}; {found.meta}>"
    if isinstance(found, State):
        life = found.life
        if life is None:
            return "<absent>"
        calls = " ".join(f"{name}={call.outcome}/{call.delivered}" for name, call in life.calls.items())
        version = f"{'retired ' if life.retired else ''}version {life.version} of {life.snapshot_id[:6]}"
        return f"<{version}: {calls}; {life.notes}; {life.finish}>"
    if isinstance(found, Raised):
        return "unknown" if found is UNKNOWN else f"{found.error}: {found.message}"
    return str(found)


def _failed(result: object) -> bool:
    """Whether the device failed: then nothing of it is ever shown to anybody."""
    return isinstance(result, Raised) and result.error == "DurabilityError"


def _short(done: _Done) -> str:
    return f"{done.who}: {done.operation} -> {brief(done.result)}"
