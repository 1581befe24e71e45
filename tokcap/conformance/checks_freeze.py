"""Does freeze divide all puts cleanly into those that are in the snapshot and those that were refused?"""

from __future__ import annotations

import asyncio
import re

from ..entry import TokenEntry
from ..errors import FrozenError
from ..protocol import TokenSink
from .checks_chains import chain
from .kit import (
    Kit,
    ViolationError,
    expect,
    expect_entries,
    expect_incomplete,
    expect_outcome,
    expect_pair,
    expect_refusal,
)
from .registry import behaviour
from .samples import entry_of, ids_of

_FENCE = "After freeze returns no put succeeds, and every put that succeeded before is in the snapshot."


class _Acknowledged:
    """The entries whose put returned; `enough` is set when there are `count` of them, or when a writer failed."""

    def __init__(self, count: int) -> None:
        self.entries: list[TokenEntry] = []
        self.enough = asyncio.Event()
        self._count = count

    async def write(self, sink: TokenSink, entries: list[TokenEntry]) -> None:
        try:
            for entry in entries:
                try:
                    await sink.put(entry)
                except FrozenError:
                    continue
                self.entries.append(entry)
                if len(self.entries) == self._count:
                    self.enough.set()
                await asyncio.sleep(0)
        except BaseException:
            self.enough.set()
            raise


@behaviour(_FENCE)
async def freeze_fences_new_puts(kit: Kit) -> None:
    rollout = kit.rollout()
    writer, other = await kit.sink(), await kit.sink()
    entries = chain(rollout, 6)
    await kit.put_in_order(writer, entries[:5])
    snapshot = await kit.freeze(rollout)
    fresh = await kit.sink()
    for sink, name in ((writer, "the writer's sink"), (other, "a sink opened before"), (fresh, "a sink opened after")):
        did = f"put 5 calls, freeze, put a new call through {name}"
        await expect_refusal(sink.put(entries[5]), FrozenError, did=did)
    again = await kit.freeze(rollout)
    did = "put 5 calls, freeze, try to put a sixth, freeze again"
    expect_entries(snapshot, entries[:5], did=did)
    expect_entries(again, entries[:5], did=did)
    expect_pair(again, snapshot.snapshot_id, snapshot.version, did=did)


@behaviour("Repeating an identical put is a no-op, also after freeze: the record is in the snapshot.")
async def an_identical_put_after_freeze_is_a_no_op(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entries = chain(rollout, 3)
    await kit.put_in_order(one, entries)
    snapshot = await kit.freeze(rollout)
    await kit.put_in_order(one, entries)
    await kit.put_in_order(other, entries)
    again = await kit.freeze(rollout)
    did = "put 3 calls, freeze, put the same again through two sinks, freeze"
    expect_entries(again, entries, did=did)
    expect_pair(again, snapshot.snapshot_id, snapshot.version, did=did)
    expect_incomplete(again, False, did=did)


@behaviour(_FENCE)
async def freeze_among_concurrent_puts_divides_them_cleanly(kit: Kit) -> None:
    for after in (1, 10, 37, 80):
        rollout = kit.rollout()
        sinks = [await kit.sink() for _ in range(2)]
        writers = [chain(rollout, 30, name=f"agent-{number}", start=200) for number in range(4)]
        puts = _Acknowledged(after)
        running = [kit.start(puts.write(sinks[number % 2], entries)) for number, entries in enumerate(writers)]
        await puts.enough.wait()
        snapshot = await kit.freeze(rollout)
        await asyncio.gather(*running)
        did = f"4 writers put 120 entries through two sinks; freeze after {after} acknowledgements; let the writers end"
        expect_entries(snapshot, puts.entries, did=did)
        expect_entries(await kit.freeze(rollout), puts.entries, did=f"{did}; freeze again")


@behaviour("A put that races with freeze either returns and is in the snapshot, or raises FrozenError and is absent.")
async def freeze_just_before_the_last_put_is_exact(kit: Kit) -> None:
    for turns in range(12):
        rollout = kit.rollout()
        sinks = [await kit.sink(), await kit.sink()]
        entries = chain(rollout, 4)
        await kit.put_in_order(sinks[0], entries[:3])
        put_first = turns % 2 == 1
        source = await kit.source()
        if put_first:
            put = kit.start(sinks[1].put(entries[3]))
            await _a_little(turns)
        freeze = kit.start(source.freeze(rollout))
        if not put_first:
            await _a_little(turns)
            put = kit.start(sinks[1].put(entries[3]))
        await asyncio.wait([put, freeze])
        error = put.exception()
        did = f"put 3 calls; start {'put, then freeze' if put_first else 'freeze, then put'} of a fourth, closely"
        if error is not None and not isinstance(error, FrozenError):
            raise ViolationError(did, "the put returns or raises FrozenError", repr(error)) from error
        expect_entries(freeze.result(), entries[:3] if error else entries, did=did)
        expect_entries(await kit.freeze(rollout), entries[:3] if error else entries, did=f"{did}; freeze again")


async def _a_little(turns: int) -> None:
    """From nothing over a few turns of the loop to a few milliseconds."""
    for _ in range(turns // 2):
        await asyncio.sleep(0)
    if turns >= 8:
        await asyncio.sleep(0.0005 * (turns - 7))


@behaviour("A snapshot appears complete or not at all: a reader never meets a record that is half written.")
async def a_snapshot_is_never_torn(kit: Kit) -> None:
    for turns in (0, 1, 2, 4, 8):
        rollout = kit.rollout()
        sink, source = await kit.sink(), await kit.source()
        small = entry_of(rollout, "small")
        big = entry_of(rollout, "big", prompt=ids_of("big", 60_000), generation=ids_of("torn", 5_000))
        await sink.put(small)
        writing = kit.start(sink.put(big))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 8:
            await asyncio.sleep(0.001)
        snapshot = await source.freeze(rollout)
        await asyncio.wait([writing])
        error = writing.exception()
        did = f"start a put of 65,000 tokens, freeze after {turns} turns of the loop"
        if error is not None and not isinstance(error, FrozenError):
            raise ViolationError(did, "the put returns or raises FrozenError", repr(error)) from error
        expect_entries(snapshot, [small] if error else [small, big], did=did)
        expect_incomplete(snapshot, False, did=did)


@behaviour("Freezing again gives the same snapshot_id, and the same version unless an outcome changed since.")
async def freeze_twice_gives_the_same_snapshot(kit: Kit) -> None:
    rollout = kit.rollout()
    sink, other = await kit.sink(), await kit.source()
    entries = chain(rollout, 4)
    await kit.put_in_order(sink, entries)
    first = await kit.freeze(rollout)
    for source in (await kit.reader(), other, await kit.source()):
        again = await source.freeze(rollout)
        did = "put 4 calls, freeze, freeze again through this and another source"
        expect_pair(again, first.snapshot_id, first.version, did=did)
        expect_entries(again, entries, did=did)


@behaviour("Freezing again gives the same snapshot_id and version, also at the same time.")
async def concurrent_freezes_agree(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    sources = [await kit.source() for _ in range(4)]
    entries = chain(rollout, 4)
    await kit.put_in_order(sink, entries)
    snapshots = await kit.together(source.freeze(rollout) for source in sources)
    for snapshot in snapshots:
        did = "put 4 calls, freeze through four sources at once"
        expect_pair(snapshot, snapshots[0].snapshot_id, snapshots[0].version, did=did)
        expect_entries(snapshot, entries, did=did)


@behaviour("Freezing a rollout that doesn't exist publishes an empty snapshot, so that late writers are fenced.")
async def freeze_of_an_absent_rollout_fences_late_writers(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    snapshot = await kit.freeze(rollout)
    did = "freeze a rollout that nobody wrote to"
    expect_entries(snapshot, [], did=did)
    expect_incomplete(snapshot, False, did=did)
    await expect_refusal(sink.put(entry_of(rollout, "late")), FrozenError, did=f"{did}, put")
    again = await kit.freeze(rollout)
    expect_pair(again, snapshot.snapshot_id, snapshot.version, did=f"{did}, try to put, freeze again")
    expect_entries(again, [], did=f"{did}, try to put, freeze again")


@behaviour("begin_call after freeze raises FrozenError, so that no generation is spent.", "begin_call")
async def begin_call_after_freeze_is_refused(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    await sink.put(entry_of(rollout, "call-1"))
    snapshot = await kit.freeze(rollout)
    await expect_refusal(sink.begin_call(rollout, "late"), FrozenError, did="put, freeze, begin_call")
    again = await kit.freeze(rollout)
    did = "put, freeze, try begin_call, freeze again"
    expect_pair(again, snapshot.snapshot_id, snapshot.version, did=did)
    expect_incomplete(again, False, did=did)


@behaviour("snapshot_id is 32 random hex digits, version counts from 1, calls has one record per call.")
async def a_snapshot_has_the_promised_attributes(kit: Kit) -> None:
    rollout, other = kit.rollout(), kit.rollout()
    sink = await kit.sink()
    entries = [entry_of(rollout, f"call-{number}") for number in range(3)]
    await kit.put_in_order(sink, [*entries, entry_of(other, "call-0")])
    await sink.mark_incomplete(rollout, "lost")
    identity = (await kit.freeze(other)).snapshot_id
    did = "put 3 calls, mark a fourth as lost, freeze"
    with await kit.freeze(rollout) as snapshot:
        form = re.fullmatch("[0-9a-f]{32}", snapshot.snapshot_id) is not None
        expect(form, did=did, expected="a snapshot_id of 32 hex digits", seen=repr(snapshot.snapshot_id))
        expect(snapshot.snapshot_id != identity, did=did, expected="another snapshot_id per rollout", seen=identity)
        expect(
            type(snapshot.version) is int and snapshot.version == 1,
            did=did,
            expected="version 1",
            seen=repr(snapshot.version),
        )
        expect(snapshot.rollout_id == rollout, did=did, expected=rollout, seen=repr(snapshot.rollout_id))
        expect(len(snapshot.calls) == 4, did=did, expected="4 calls", seen=f"{len(snapshot.calls)} calls")
        for entry in entries:
            expect_outcome(snapshot, entry.model_call_id, "recorded", did=did)
        expect_outcome(snapshot, "lost", "lost", did=did)
        expect_incomplete(snapshot, True, did=did)
        count = len(snapshot.entries)
        expect(count == 3, did=did, expected="3 entries", seen=f"{count} entries")
