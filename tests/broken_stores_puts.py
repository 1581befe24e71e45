"""Broken stores that lose, divide or mix up puts, or settle conflicts by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np

from tokcap import TokenEntry
from tokcap.errors import ConflictError

from .broken_stores import Case, ChangesEntries, changed
from .memory_store import MemorySnapshot, MemoryState, MemoryStore, Rollout, copied


class DropsOneOfTen(MemoryStore):
    """Several writers rewrite one file: under concurrency, one acknowledged put of ten is overwritten."""

    in_flight = 0
    count = 0

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        DropsOneOfTen.in_flight += 1
        try:
            await self._turn()
            DropsOneOfTen.count += 1
            if DropsOneOfTen.in_flight > 1 and DropsOneOfTen.count % 10 == 0:
                return
            await super().put_many(entries)
        finally:
            DropsOneOfTen.in_flight -= 1


class AcknowledgesBeforeDurable(MemoryStore):
    """put returns when the record is in the page cache, and the sync comes with the next put: the last one can go."""

    unsynced: list[TokenEntry] | None = None

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put(group)
        self.unsynced = group

    async def crash(self) -> None:
        await super().crash()
        for entry in self.unsynced or ():
            rollout = self.state.rollouts.get(entry.rollout_id, Rollout())
            if entry.model_call_id in rollout.calls and not rollout.version:
                rollout.calls[entry.model_call_id].contents.pop(entry.choice_index, None)


class GluesRecordsAfterACrash(MemoryStore):
    """A record that was cut short has no terminator: the next acknowledged one is glued to it and lost."""

    torn: ClassVar[set[str]] = set()
    writing = ""

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        group = list(entries)
        self.writing = group[0].rollout_id
        await super().put_many(group)
        self.writing = ""

    def _put(self, group: list[TokenEntry]) -> None:
        if group[0].rollout_id in self.torn:
            self.torn.discard(group[0].rollout_id)
        else:
            super()._put(group)

    async def crash(self) -> None:
        await super().crash()
        if self.writing:
            self.torn.add(self.writing)


class LeavesItsLockBehind(MemoryStore):
    """The lock is a file that its owner removes: after a crash everybody waits for a dead process."""

    owners: ClassVar[dict[str, MemoryStore]] = {}

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        group = list(entries)
        while self.owners.get(group[0].rollout_id, self) is not self:
            await asyncio.sleep(0.001)
        self.owners[group[0].rollout_id] = self
        try:
            await super().put_many(group)
        finally:
            if not self.closed:
                self.owners.pop(group[0].rollout_id, None)


class CancelsTheWholeBatch(MemoryStore):
    """Puts are committed in groups; a caller that goes away takes the puts of the others along."""

    def __init__(self, state: MemoryState) -> None:
        super().__init__(state)
        self.batch: list[asyncio.Task[Any]] = []

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        task = cast(asyncio.Task[Any], asyncio.current_task())
        self.batch.append(task)
        try:
            await super().put_many(entries)
        except asyncio.CancelledError:
            for other in self.batch:
                other.cancel()
            raise
        finally:
            self.batch.remove(task)


class WritesInTwoSteps(MemoryStore):
    """A put writes the record piece by piece: a reader, a crash or a cancellation in between leaves half of it."""

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        group = list(entries)
        await self._turn()
        stored = {entry.choice_index for entry in group if self._stored(entry)}
        halves = [
            changed(entry, prompt_token_ids=entry.prompt_token_ids[: len(entry.prompt_token_ids) // 2])
            for entry in group
            if entry.choice_index not in stored
        ]
        if not halves:
            return await super().put_many(group)
        self._put(halves)
        await self._turn()
        for half in halves:
            self.state.rollouts[half.rollout_id].calls[half.model_call_id].contents.pop(half.choice_index)
        self._put(group)
        return None

    def _stored(self, entry: TokenEntry) -> bool:
        rollout = self.state.rollouts.get(entry.rollout_id, Rollout())
        return rollout.version > 0 or rollout.retired or entry.model_call_id in rollout.calls


class PutsChoicesOneByOne(MemoryStore):
    """put_many is a loop over put: freeze or a crash divides a call."""

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        for entry in entries:
            await super().put_many([entry])


class IgnoresChoiceIndex(ChangesEntries):
    """Entries are keyed by the call alone: a second choice looks like a second content."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, choice_index=0)


class SharesRolloutsByPrefix(MemoryStore):
    """Finds the files of a rollout with the pattern `<rollout_id>*`: calls of rollout-10 turn up in rollout-1."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        longer = (name for name in self.state.rollouts if name.startswith(rollout_id) and name != rollout_id)
        snapshot._entries = (*snapshot.entries, *(e for name in longer for e in self.state.rollouts[name].entries()))
        return snapshot


class FoldsCase(MemoryStore):
    """Ids become file names on a file system that ignores case."""

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put([changed(entry, model_call_id=entry.model_call_id.lower()) for entry in group])


class ListsRolloutsOnce(MemoryStore):
    """A source lists the rollouts when it first looks and goes by that list: what is written later isn't there."""

    listed: set[str] | None = None

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        if self.listed is None:
            self.listed = set(self.state.rollouts)
        snapshot = await super().freeze(rollout_id)
        return snapshot if rollout_id in self.listed else MemorySnapshot(rollout_id, Rollout(version=1))


# ---- conflicts


class LastWriterWins(MemoryStore):
    """Entries are a dict by call id, and a later put replaces an earlier one."""

    def _put(self, group: list[TokenEntry]) -> None:
        try:
            super()._put(group)
        except ConflictError:
            call = self.state.rollouts[group[0].rollout_id].calls[group[0].model_call_id]
            for entry in group:
                call.contents[entry.choice_index] = [copied(entry)]


class FirstWriterWins(MemoryStore):
    """INSERT OR IGNORE: a second content is dropped without a word."""

    def _put(self, group: list[TokenEntry]) -> None:
        calls = self.state.rollouts.get(group[0].rollout_id, Rollout()).calls
        contents = calls[group[0].model_call_id].contents if group[0].model_call_id in calls else {}
        super()._put([contents.get(entry.choice_index, [entry])[0] for entry in group])


class KeepsTheFirstOfAConflict(MemoryStore):
    """The conflict is known, but the entry that was written first is the one that is served."""

    def _put(self, group: list[TokenEntry]) -> None:
        first = {entry.choice_index: entry for entry in self._stored(group[0])}
        try:
            super()._put(group)
        finally:
            for entry in self._stored(group[0]):
                if entry.choice_index in first:
                    contents = self.state.rollouts[entry.rollout_id].calls[entry.model_call_id].contents
                    contents[entry.choice_index].sort(key=lambda stored: stored != first[stored.choice_index])

    def _stored(self, entry: TokenEntry) -> list[TokenEntry]:
        calls = self.state.rollouts.get(entry.rollout_id, Rollout()).calls
        contents = calls[entry.model_call_id].contents if entry.model_call_id in calls else {}
        return [stored[0] for stored in contents.values()]


class ComparesTokensOnly(MemoryStore):
    """Two answers with the same token ids count as identical, whatever their log-probs are."""

    def _put(self, group: list[TokenEntry]) -> None:
        calls = self.state.rollouts.get(group[0].rollout_id, Rollout()).calls
        contents = calls[group[0].model_call_id].contents if group[0].model_call_id in calls else {}
        stored = [contents.get(entry.choice_index, [entry])[0] for entry in group]
        super()._put([old if self._equal(new, old) else new for new, old in zip(group, stored, strict=True)])

    def _equal(self, entry: TokenEntry, other: TokenEntry) -> bool:
        return all(
            np.array_equal(getattr(entry, field), getattr(other, field))
            for field in ("prompt_token_ids", "generation_token_ids")
        )


class DropsBothOfAConflict(MemoryStore):
    """A call in conflict can't be trusted, so the reader leaves it out."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        bad = {call.model_call_id for call in snapshot.calls if call.outcome == "conflict"}
        snapshot._entries = tuple(entry for entry in snapshot.entries if entry.model_call_id not in bad)
        return snapshot


class ConflictSpoilsTheRollout(MemoryStore):
    """One conflicting call makes every later call of the rollout unusable."""

    def _put(self, group: list[TokenEntry]) -> None:
        rollout = self.state.rollouts.get(group[0].rollout_id, Rollout())
        if "conflict" in rollout.outcomes().values() and not rollout.version:
            raise ConflictError(f"rollout {group[0].rollout_id} is in conflict")
        super()._put(group)


class RefusesIdenticalPuts(MemoryStore):
    """A unique index: the retry of a put whose answer got lost is an error."""

    def _put(self, group: list[TokenEntry]) -> None:
        stored = self.state.rollouts.get(group[0].rollout_id, Rollout())
        if not stored.retired and any(
            stored.calls[entry.model_call_id].holds(entry) for entry in group if entry.model_call_id in stored.calls
        ):
            raise ConflictError("UNIQUE constraint failed: entries.model_call_id")
        super()._put(group)


CASES = [
    Case(
        DropsOneOfTen,
        {"concurrent_puts_of_several_sinks_are_all_kept", "concurrent_chains_of_several_sinks_are_all_kept"},
        "108 entries; missing: ('call-",
    ),
    Case(
        AcknowledgesBeforeDurable,
        {
            "a_crash_keeps_every_acknowledged_put",
            "a_crash_keeps_begun_calls_open",
            "a_put_in_flight_at_a_crash_is_whole_or_absent",
            "a_put_many_in_flight_at_a_crash_is_whole_or_absent",
        },
        "crash the sink",
        exact=True,
    ),
    Case(
        GluesRecordsAfterACrash,
        {"a_put_in_flight_at_a_crash_is_whole_or_absent", "a_put_in_flight_at_a_crash_can_be_repeated"},
        "missing: ('call-10', 0)",
        exact=True,
    ),
    Case(
        LeavesItsLockBehind,
        {"a_put_in_flight_at_a_crash_is_whole_or_absent", "a_put_in_flight_at_a_crash_can_be_repeated"},
        "expected: an end within",
    ),
    Case(CancelsTheWholeBatch, {"a_cancelled_put_is_whole_or_absent"}, "nobody cancelled return", exact=True),
    Case(
        WritesInTwoSteps,
        {
            "a_cancelled_put_is_whole_or_absent",
            "a_snapshot_is_never_torn",
            "put_many_is_visible_as_a_whole",
            "a_put_in_flight_at_a_crash_is_whole_or_absent",
            "a_put_in_flight_at_a_crash_can_be_repeated",
            "a_put_many_in_flight_at_a_crash_is_whole_or_absent",
            "a_crash_in_one_rollout_leaves_others_usable",
        },
        "nobody put: ('big', 0)",
    ),
    Case(
        PutsChoicesOneByOne,
        {"put_many_is_visible_as_a_whole", "a_put_many_in_flight_at_a_crash_is_whole_or_absent"},
        "missing: ('call-0', 1)",
        exact=True,
    ),
    Case(
        IgnoresChoiceIndex,
        {
            "choices_of_one_call_are_separate_entries",
            "put_many_stores_every_choice",
            "a_conflict_in_one_choice_leaves_the_others",
            "a_call_stays_open_until_all_choices_are_stored",
        },
        "ConflictError",
    ),
    Case(
        SharesRolloutsByPrefix,
        {"unusual_valid_ids_are_kept_apart", "rollouts_are_isolated_from_each_other"},
        "100 entries",
        exact=True,
    ),
    Case(FoldsCase, {"unusual_valid_ids_are_kept_apart"}, "ConflictError", exact=True),
    Case(
        LastWriterWins,
        {
            "a_conflicting_put_raises_and_marks_the_call",
            "the_kept_entry_does_not_depend_on_the_order",
            "a_crash_keeps_a_conflict",
        },
        "expected: ConflictError\nseen: no error",
    ),
    Case(
        FirstWriterWins,
        {
            "a_conflicting_put_raises_and_marks_the_call",
            "concurrent_conflicting_puts_mark_the_call",
            "a_conflicting_put_after_freeze_moves_the_version",
        },
        "expected: ConflictError\nseen: no error",
    ),
    Case(
        KeepsTheFirstOfAConflict,
        {"the_kept_entry_does_not_depend_on_the_order"},
        "the same content in both snapshots",
        exact=True,
    ),
    Case(ComparesTokensOnly, {"any_field_that_differs_is_a_conflict"}, "again with another log-prob", exact=True),
    Case(
        DropsBothOfAConflict,
        {"a_conflicting_put_raises_and_marks_the_call", "a_conflict_in_one_choice_leaves_the_others"},
        "one entry of call call-1",
    ),
    Case(
        ConflictSpoilsTheRollout,
        {"a_conflict_leaves_other_calls_unharmed"},
        "did: await kit.put_in_order(one, after",
    ),
    Case(
        RefusesIdenticalPuts,
        {
            "an_identical_put_is_a_no_op",
            "concurrent_identical_puts_store_one_entry",
            "an_identical_put_after_freeze_is_a_no_op",
            "put_many_stores_every_choice",
        },
        "UNIQUE constraint failed",
    ),
    Case(
        ListsRolloutsOnce,
        {"a_returned_put_is_visible_to_other_instances", "an_earlier_life_cannot_retire_a_later_one"},
        "0 entries; missing: ('call-1', 0)",
    ),
]
