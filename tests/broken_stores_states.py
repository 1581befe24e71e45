"""Broken stores whose freeze, retire or reset isn't what it promises."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from tokcap import TokenEntry
from tokcap.ids import check_rollout_id

from .broken_stores import Case
from .memory_store import MemorySnapshot, MemoryState, MemoryStore, Rollout


class DoesNotFence(MemoryStore):
    """freeze reads and returns; writers never learn of it."""

    def _put(self, group: list[TokenEntry]) -> None:
        rollout = self._present(group[0].rollout_id)
        version, rollout.version = rollout.version, 0
        try:
            super()._put(group)
        finally:
            rollout.version = version


class FencesTooLate(MemoryStore):
    """freeze reads first and puts up the fence afterwards: a put in between is acknowledged and in no snapshot."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        check_rollout_id(rollout_id)
        await self._turn()
        rollout = self._present(rollout_id)
        if not rollout.version and not rollout.retired:
            rollout.version = 1
            early = MemorySnapshot(rollout_id, rollout)
            rollout.version = 0
            await asyncio.sleep(0)
            rollout.version = 1
            return early
        return await super().freeze(rollout_id)


class FencesItsOwnProcess(MemoryStore):
    """Each process caches that a rollout which it has written to is open, and looks at the state only once."""

    def _put(self, group: list[TokenEntry]) -> None:
        key = group[0].rollout_id, ""
        rollout = self._present(group[0].rollout_id)
        version = rollout.version
        if self.begun.get(key) == rollout.snapshot_id:
            rollout.version = 0
        try:
            super()._put(group)
            self.begun[key] = rollout.snapshot_id
        finally:
            rollout.version = version

    def _refuse_stale(self, rollout_id: str, model_call_id: str) -> None:
        if model_call_id:
            super()._refuse_stale(rollout_id, model_call_id)


class FreezeNeedsARollout(MemoryStore):
    """freeze of a rollout without a directory finds nothing to fence: a late writer creates it."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        absent = rollout_id not in self.state.rollouts
        snapshot = await super().freeze(rollout_id)
        if absent:
            await self.reset(rollout_id)
        return snapshot


class NewIdentityPerFreeze(MemoryStore):
    """Every freeze is a new snapshot with a new id; what a consumer holds can't be retired any more."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        rollout = self.state.rollouts.get(rollout_id)
        if rollout is not None and rollout.version and not rollout.retired:
            rollout.snapshot_id = uuid.uuid4().hex
        return await super().freeze(rollout_id)


class RacesInFreeze(MemoryStore):
    """Looks whether a snapshot exists, then makes one: two consumers at once get two identities."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        check_rollout_id(rollout_id)
        rollout = self._present(rollout_id)
        if rollout.version == 0:
            await self._turn()
            raced = self.state.rollouts[rollout_id].version > 0
            rollout.version = 1
            snapshot = MemorySnapshot(rollout_id, rollout)
            if raced:
                snapshot.snapshot_id = uuid.uuid4().hex
            return snapshot
        return await super().freeze(rollout_id)


class LeavesAHalfMadeSnapshot(MemoryStore):
    """freeze makes its directory, fills it and renames it; after a crash the directory is in everybody's way."""

    making: ClassVar[set[str]] = set()

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        check_rollout_id(rollout_id)
        if rollout_id in self.making:
            raise FileExistsError(f"{rollout_id}/snapshot-1.tmp")
        self.making.add(rollout_id)
        try:
            return await super().freeze(rollout_id)
        finally:
            if self.closed != "crashed":
                self.making.discard(rollout_id)


class BeginsAfterFreeze(MemoryStore):
    """begin_call only appends an intent and looks at nothing: a generation is spent that no snapshot can hold."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        if not self.state.rollouts.get(rollout_id, Rollout()).version:
            await super().begin_call(rollout_id, model_call_id, choices)


class WritesIdsWithDashes(MemoryStore):
    """The snapshot id is a uuid as text, four dashes more than the 32 digits that a consumer has room for."""

    def _present(self, rollout_id: str) -> Rollout:
        return self.state.rollouts.setdefault(rollout_id, Rollout(snapshot_id=str(uuid.uuid4())))


class CountsVersionsFromZero(MemoryStore):
    """The version is an index into a list, and its first one means "not frozen" to everybody else."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        snapshot.version -= 1
        return snapshot

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return await super().retire(rollout_id, snapshot_id=snapshot_id, version=version + 1)


# ---- retire


class IgnoresTheVersion(MemoryStore):
    """retire compares the snapshot id only: evidence of a late loss goes with it."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        current = self.state.rollouts.get(rollout_id, Rollout()).version
        return await super().retire(rollout_id, snapshot_id=snapshot_id, version=current)


class IgnoresTheSnapshotId(MemoryStore):
    """retire compares the version only: a consumer of an earlier life deletes records that nobody consumed."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        current = self.state.rollouts.get(rollout_id, Rollout()).snapshot_id
        return await super().retire(rollout_id, snapshot_id=current, version=version)


class RetiresWhateverIsThere(MemoryStore):
    """retire is rm -rf: it asks neither what was consumed nor whether anything was frozen."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        rollout = self._present(rollout_id)
        rollout.version = rollout.version or 1
        return await super().retire(rollout_id, snapshot_id=rollout.snapshot_id, version=rollout.version)


class RetiresOnce(MemoryStore):
    """A repeated retire finds nothing and answers False: the consumer believes that it failed."""

    answered: ClassVar[set[str]] = set()

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        done = await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)
        if snapshot_id in self.answered:
            return False
        if done:
            self.answered.add(snapshot_id)
        return done


class RetiresInTwoSteps(MemoryStore):
    """retire deletes first and writes its tombstone afterwards: a crash in between leaves a frozen rollout, empty."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        rollout = self.state.rollouts.get(rollout_id, Rollout())
        if rollout.version and (rollout.snapshot_id, rollout.version) == (snapshot_id, version):
            await self._turn()
            rollout.calls.clear()
            await self._turn()
        return await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)


class LeavesNoTombstone(MemoryStore):
    """retire removes everything, so that a late writer starts the rollout again."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        done = await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)
        if done:
            self.state.rollouts.pop(rollout_id, None)
        return done


class SnapshotsDieWithRetire(MemoryStore):
    """A snapshot is a directory that is read when somebody looks; retire removes it under the reader."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        return LazySnapshot(snapshot, self.state.rollouts[rollout_id], self.state)


class LazySnapshot(MemorySnapshot):
    """Reads its entries from the rollout as it is now."""

    def __init__(self, snapshot: MemorySnapshot, rollout: Rollout, state: MemoryState) -> None:
        super().__init__(snapshot.rollout_id, rollout)
        self._rollout, self._state = rollout, state

    @property
    def entries(self) -> Sequence[TokenEntry]:
        if self._rollout.retired or self._state.rollouts.get(self.rollout_id) is not self._rollout:
            raise FileNotFoundError(f"{self.rollout_id}/snapshot-1/segment-0")
        return super().entries


# ---- attempts


class StragglersJoinTheNewAttempt(MemoryStore):
    """A put is keyed by the rollout id alone: one of the attempt before lands in the new one."""

    def _refuse_stale(self, rollout_id: str, model_call_id: str) -> None:
        pass


class DerivesTheSnapshotId(MemoryStore):
    """The snapshot id is a hash of the rollout id, so that every life of a rollout has the same one."""

    def _present(self, rollout_id: str) -> Rollout:
        derived = hashlib.md5(rollout_id.encode()).hexdigest()
        return self.state.rollouts.setdefault(rollout_id, Rollout(snapshot_id=derived))


class ResetNeedsARollout(MemoryStore):
    """reset is rmtree: the first attempt of a rollout, which has no directory yet, fails in its preparations."""

    async def reset(self, *rollout_ids: str) -> None:
        for rollout_id in rollout_ids:
            if rollout_id not in self.state.rollouts:
                raise FileNotFoundError(rollout_id)
        await super().reset(*rollout_ids)


CASES = [
    Case(
        DoesNotFence,
        {
            "freeze_fences_new_puts",
            "freeze_among_concurrent_puts_divides_them_cleanly",
            "freeze_of_an_absent_rollout_fences_late_writers",
            "a_crash_keeps_a_freeze",
        },
        "expected: FrozenError\nseen: no error",
    ),
    Case(
        FencesTooLate,
        {
            "freeze_among_concurrent_puts_divides_them_cleanly",
            "freeze_just_before_the_last_put_is_exact",
            "put_many_is_visible_as_a_whole",
            "a_snapshot_is_never_torn",
        },
        "missing: ('agent-",
        exact=True,
    ),
    Case(
        FencesItsOwnProcess,
        {"freeze_fences_new_puts", "freeze_among_concurrent_puts_divides_them_cleanly", "a_crash_keeps_a_freeze"},
        "put a new call through the writer's sink",
    ),
    Case(
        FreezeNeedsARollout,
        {"freeze_of_an_absent_rollout_fences_late_writers"},
        "expected: FrozenError\nseen: no error",
        exact=True,
    ),
    Case(NewIdentityPerFreeze, {"freeze_twice_gives_the_same_snapshot"}, "freeze again through"),
    Case(RacesInFreeze, {"concurrent_freezes_agree"}, "through four sources at once", exact=True),
    Case(
        LeavesAHalfMadeSnapshot,
        {"a_crash_during_freeze_leaves_the_rollout_open_or_frozen", "concurrent_freezes_agree"},
        "FileExistsError",
        exact=True,
    ),
    Case(
        IgnoresTheVersion,
        {
            "another_version_retires_nothing",
            "a_version_is_stale_as_soon_as_a_late_mark_returned",
            "late_puts_and_stale_retires_after_retire_change_nothing",
        },
        "expected: False\nseen: True",
    ),
    Case(
        IgnoresTheSnapshotId,
        {
            "a_foreign_snapshot_id_retires_nothing",
            "an_earlier_life_cannot_retire_a_later_one",
            "late_puts_and_stale_retires_after_retire_change_nothing",
        },
        "retire the old pair",
        exact=True,
    ),
    Case(
        RetiresWhateverIsThere,
        {"retire_of_an_open_rollout_is_false_and_keeps_the_evidence", "retire_of_an_absent_rollout_is_false"},
        "retire without a freeze",
    ),
    Case(
        RetiresOnce,
        {"an_exact_retire_succeeds_and_repeats", "concurrent_retires_agree"},
        "expected: True\nseen: False",
    ),
    Case(
        RetiresInTwoSteps,
        {"a_crash_during_retire_leaves_the_rollout_frozen_or_retired"},
        "start retire, crash its source",
        exact=True,
    ),
    Case(
        LeavesNoTombstone,
        {"a_retired_rollout_refuses_put_and_freeze", "a_retired_rollout_refuses_begin_call"},
        "expected: RetiredError\nseen: no error",
    ),
    Case(
        SnapshotsDieWithRetire,
        {"a_snapshot_stays_readable_after_retire", "a_snapshot_stays_readable_after_reset"},
        "FileNotFoundError",
    ),
    Case(
        StragglersJoinTheNewAttempt,
        {"a_put_of_an_earlier_attempt_is_refused", "marks_and_settlements_of_an_earlier_attempt_are_refused"},
        "expected: StaleAttemptError\nseen: no error",
        exact=True,
    ),
    Case(
        DerivesTheSnapshotId,
        {"an_earlier_life_cannot_retire_a_later_one", "a_reset_rollout_starts_from_nothing"},
        "retire the old pair",
    ),
    Case(
        BeginsAfterFreeze,
        {"begin_call_after_freeze_is_refused", "a_retired_rollout_refuses_begin_call"},
        "did: put, freeze, begin_call\nexpected: FrozenError\nseen: no error",
        exact=True,
    ),
    Case(
        WritesIdsWithDashes,
        {"a_snapshot_has_the_promised_attributes"},
        "expected: a snapshot_id of 32 hex digits",
        exact=True,
    ),
    Case(
        CountsVersionsFromZero,
        {"a_snapshot_has_the_promised_attributes", "a_reset_rollout_starts_from_nothing"},
        "expected: version 1\nseen: 0",
        exact=True,
    ),
    Case(
        ResetNeedsARollout,
        {"reset_of_an_absent_rollout_is_a_no_op", "a_reset_rollout_starts_from_nothing"},
        "FileNotFoundError",
        exact=True,
    ),
]
