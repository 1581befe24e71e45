"""Stores with one bug each, of the kind that real stores have had. The conformance kit must find every one."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from tokcap import TokenEntry
from tokcap.errors import ConflictError, FrozenError, RetiredError
from tokcap.ids import check_rollout_id
from tokcap.protocol import Outcome, SettledOutcome

from .memory_store import MemorySnapshot, MemoryState, MemoryStore, Rollout, copied


def changed(entry: TokenEntry, **fields: Any) -> TokenEntry:
    """The entry with other values in some fields."""
    return TokenEntry(**{**{name: getattr(entry, name) for name in TokenEntry.__struct_fields__}, **fields})


class ChangesEntries(MemoryStore):
    """Base of the stores whose codec changes what it stores."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        raise NotImplementedError

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put([self.change(entry) for entry in group])


# ---- puts


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


class KeepsMarksInMemory(MemoryStore):
    """mark_incomplete notes the loss in a set of this process and writes it down when it is closed."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.begun.setdefault((rollout_id, model_call_id), "marked")

    def _refuse_stale(self, rollout_id: str, model_call_id: str) -> None:
        if self.begun.get((rollout_id, model_call_id)) != "marked":
            super()._refuse_stale(rollout_id, model_call_id)

    async def close(self) -> None:
        for (rollout_id, call), incarnation in self.begun.items():
            if incarnation == "marked" and not self.closed:
                self._present(rollout_id).call(call).settled.add("lost")
        await super().close()


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


class CachesChainsAcrossRollouts(MemoryStore):
    """Prompts are stored as suffixes of a chain that another rollout wrote, and go when that one is retired."""

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        payload = {e.prompt_token_ids.tobytes() for e in self.state.rollouts.get(rollout_id, Rollout()).entries()}
        done = await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)
        for rollout in self.state.rollouts.values():
            for call in rollout.calls.values():
                if done and any(c.prompt_token_ids.tobytes() in payload for cs in call.contents.values() for c in cs):
                    call.contents.clear()
        return done


class FoldsCase(MemoryStore):
    """Ids become file names on a file system that ignores case."""

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put([changed(entry, model_call_id=entry.model_call_id.lower()) for entry in group])


# ---- values


class RefusesNan(ChangesEntries):
    """Records are JSON, written with allow_nan=False."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        if not np.isfinite(entry.generation_log_probs).all():
            raise ValueError("Out of range float values are not JSON compliant")
        return entry


class CannotReadNan(MemoryStore):
    """Non-finite log-probs are written as NaN and -Infinity, which the strict reader refuses for the whole rollout."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        if not all(np.isfinite(entry.generation_log_probs).all() for entry in snapshot.entries):
            raise msgspec.DecodeError("JSON is malformed: invalid number")
        return snapshot


class PadsUnknownWithZero(ChangesEntries):
    """A missing log-prob becomes 0.0: a probability of one."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(
            entry,
            generation_log_probs=np.nan_to_num(entry.generation_log_probs, nan=0.0, posinf=math.inf, neginf=-math.inf),
        )


class ClipsPositive(ChangesEntries):
    """Log-probs above zero can't be, so they are clipped."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, generation_log_probs=np.fmin(entry.generation_log_probs, 0.0))


class StoresSingleFloats(ChangesEntries):
    """Log-probs are stored as float32, whether that loses something or not."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        with np.errstate(over="ignore"):
            single = entry.generation_log_probs.astype(np.float32)
        return changed(entry, generation_log_probs=single.astype(np.float64))


class FlattensExperts(ChangesEntries):
    """routed_experts is stored as bytes without its shape."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        experts = entry.routed_experts
        return changed(entry, routed_experts=None if experts is None else experts.reshape(-1))


class RoundsBigIntegers(ChangesEntries):
    """Contents pass through a JSON parser that reads all numbers as doubles."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, extra=self._rounded(entry.extra), sampling=self._rounded(entry.sampling))

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._rounded(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._rounded(item) for item in value]
        return int(float(value)) if type(value) is int else value


class RefusesSurrogates(ChangesEntries):
    """Contents are encoded as strict UTF-8; the error loses the token record."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        "".join(self._strings([entry.extra, entry.output_items, entry.model])).encode()
        return entry

    def _strings(self, value: Any) -> Iterable[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, dict)):
            for item in value:
                yield from self._strings(item)
                if isinstance(value, dict):
                    yield from self._strings(value[item])


class TruncatesLongPrompts(ChangesEntries):
    """A column or a message has a maximum length, and what is longer is cut without a word."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        return changed(entry, prompt_token_ids=entry.prompt_token_ids[:50_000])


class AssumesThatPromptsExtend(MemoryStore):
    """Stores each prompt as a suffix of the call before, by length alone: a drifted prompt comes back as another."""

    def _put(self, group: list[TokenEntry]) -> None:
        entry = group[0]
        calls = self.state.rollouts.get(entry.rollout_id, Rollout()).calls
        if entry.model_call_id not in calls and calls:
            for last, *_ in list(calls.values())[-1].contents.values():
                before = np.concatenate([last.prompt_token_ids, last.generation_token_ids])
                if len(entry.prompt_token_ids) >= len(before):
                    prompt = np.concatenate([before, entry.prompt_token_ids[len(before) :]])
                    group = [changed(entry, prompt_token_ids=prompt), *group[1:]]
        super()._put(group)


class KeepsReferences(MemoryStore):
    """Keeps the caller's object instead of a copy: what the caller does with it later is trained."""

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put(group)
        for entry in group:
            contents = self.state.rollouts[entry.rollout_id].calls[entry.model_call_id].contents[entry.choice_index]
            if len(contents) == 1:
                contents[0] = entry


class SharesItsCache(MemoryStore):
    """Every snapshot hands out the same cached entries: one reader changes what the next one sees."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        calls = self.state.rollouts[rollout_id].calls.values()
        snapshot._entries = tuple(contents[0] for call in calls for contents in call.contents.values())
        return snapshot


class HandsOutWritableArrays(MemoryStore):
    """Entries are read into fresh arrays, and nobody thought of the flag."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        for entry in snapshot.entries:
            msgspec.structs.force_setattr(entry, "prompt_token_ids", entry.prompt_token_ids.copy())
        return snapshot


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


# ---- freeze


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


# ---- marks and versions


class RevivedByLateMarks(MemoryStore):
    """A mark after retirement opens the rollout again: it is delivered twice."""

    def _note_late(self, rollout: Rollout, model_call_id: str, outcome: Outcome) -> None:
        rollout.retired = False
        rollout.version = 0
        rollout.call(model_call_id).settled.add(outcome)


class RefusesLateMarks(MemoryStore):
    """A mark after retirement raises, in the error path of a server that has an error already."""

    def _note_late(self, rollout: Rollout, model_call_id: str, outcome: Outcome) -> None:
        raise RetiredError("the rollout was retired")


class LosesLateMarks(MemoryStore):
    """The fence of freeze swallows marks as well: a loss that is noticed late is never seen."""

    async def _say(self, rollout_id: str, model_call_id: str, outcome: Outcome, detail: str) -> None:
        if not self.state.rollouts.get(rollout_id, Rollout()).version:
            await super()._say(rollout_id, model_call_id, outcome, detail)


class VersionStandsStill(MemoryStore):
    """A late mark is stored, but the version that nobody saw it in can be retired with it."""

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        pass


class VersionMovesWithEveryMark(MemoryStore):
    """A repeated mark makes a new version: two consumers that retry chase each other for ever."""

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        if rollout.version:
            rollout.version += 1


class VersionMovesAtTheNextFreeze(MemoryStore):
    """A late mark takes effect when somebody freezes again; until then the old version is retired, mark and all."""

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        if rollout.version and rollout.outcomes() != before:
            rollout.late_notes.append(("", "pending"))

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        rollout = self._present(rollout_id)
        if rollout.version and rollout.late_notes and not rollout.retired:
            rollout.version += len(rollout.late_notes)
            rollout.late_notes.clear()
        return await super().freeze(rollout_id)


class MarksBeatRecords(MemoryStore):
    """The last word counts: a mark after a put throws a healthy call away."""

    async def _say(self, rollout_id: str, model_call_id: str, outcome: Outcome, detail: str) -> None:
        rollout = self.state.rollouts.get(rollout_id)
        if rollout is not None and not rollout.version and model_call_id in rollout.calls:
            rollout.calls[model_call_id].choices = 99
        await super()._say(rollout_id, model_call_id, outcome, detail)


# ---- calls and attempts


class ForgetsIntents(MemoryStore):
    """begin_call is only logged: a call whose put and mark both failed leaves no trace."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        if self.state.rollouts.get(rollout_id, Rollout()).version:
            raise FrozenError(f"rollout {rollout_id} is frozen")


class FirstChoiceEndsACall(MemoryStore):
    """begin_call ignores choices: two of three answers look like all."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await super().begin_call(rollout_id, model_call_id)


class AbortedIsALoss(MemoryStore):
    """A client that went away, or a 429 with a retry, makes the whole rollout incomplete."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        if any(call.outcome in ("aborted", "no_generation") for call in snapshot.calls):
            snapshot.incomplete = True
        return snapshot


class StragglersJoinTheNewAttempt(MemoryStore):
    """A put is keyed by the rollout id alone: one of the attempt before lands in the new one."""

    def _refuse_stale(self, rollout_id: str, model_call_id: str) -> None:
        pass


class DerivesTheSnapshotId(MemoryStore):
    """The snapshot id is a hash of the rollout id, so that every life of a rollout has the same one."""

    def _present(self, rollout_id: str) -> Rollout:
        derived = hashlib.md5(rollout_id.encode()).hexdigest()
        return self.state.rollouts.setdefault(rollout_id, Rollout(snapshot_id=derived))


# ---- interface


class RepairsIds(MemoryStore):
    """Ids are stripped before they are checked, so that two ids mean one rollout."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        return await super().freeze(rollout_id.strip())


class PutsWithoutACoroutine(MemoryStore):
    """put is a plain function that does its work at once: the caller's await fails after the record was stored."""

    def put(self, entry: TokenEntry) -> None:  # type: ignore[override]
        self._put([entry])


class ClosesOnce(MemoryStore):
    """A second close is an error, on the way out of a server that closes twice."""

    async def close(self) -> None:
        if self.closed == "closed":
            raise RuntimeError("already closed")
        await super().close()


class HangsOnMarks(MemoryStore):
    """mark_incomplete waits for a lock that its own process holds."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await asyncio.Event().wait()


class BlocksTheLoop(MemoryStore):
    """mark_incomplete takes a lock that another task of the same loop holds, with a blocking call."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        time.sleep(60.0)


class SwallowsCancellation(MemoryStore):
    """A retry loop that catches everything, so that a caller's time-out never ends it."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        while not self.closed:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                continue


class LosesSettlementsInACrash(MemoryStore):
    """settle_call is fire and forget: a killed process takes the statement with it."""

    async def crash(self) -> None:
        await super().crash()
        for rollout in self.state.rollouts.values():
            for call in rollout.calls.values():
                call.settled -= {"no_generation", "aborted"}


class TakesLostForNothing(MemoryStore):
    """settle_call stores what it is told, and only mark_incomplete makes a snapshot incomplete."""

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        await super().settle_call(rollout_id, model_call_id, "no_generation" if outcome == "lost" else outcome, detail)


class KeepsNothing(MemoryStore):
    """A stub that was meant to be replaced: every operation succeeds, and nothing is kept."""

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        pass

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        pass

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        pass

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        pass

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        return MemorySnapshot(rollout_id, Rollout(version=1))

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return True

    async def reset(self, *rollout_ids: str) -> None:
        pass
