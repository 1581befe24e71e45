"""What survives when a process dies: everything that was acknowledged; all else whole or absent.

The crash hook of the author kills one instance. Operations are in flight at different moments when it strikes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..entry import TokenEntry
from ..errors import ConflictError, FrozenError, RetiredError
from ..protocol import TokenCaptureSnapshot
from .checks_chains import chain
from .kit import (
    Kit,
    ViolationError,
    expect,
    expect_answer,
    expect_entries,
    expect_incomplete,
    expect_outcome,
    expect_pair,
    expect_refusal,
    returned,
)
from .registry import behaviour
from .samples import entry_of, ids_of, key_of

_ACKNOWLEDGED = (
    "When put, begin_call, settle_call or mark_incomplete returns, its record survives the death of the process."
)
_WHOLE = "A record that was not acknowledged is whole and exact, or absent; it harms no record before or after it."
_MOMENTS = (0, 1, 2, 3, 4, 6, 9, 14)
"""Turns of the event loop before the crash; the last ones also wait some milliseconds."""


async def _until(moment: int) -> None:
    for _ in range(moment):
        await asyncio.sleep(0)
    if moment > 4:
        await asyncio.sleep(0.0004 * moment)


@behaviour(_ACKNOWLEDGED, "crash")
async def a_crash_keeps_every_acknowledged_put(kit: Kit) -> None:
    rollout, short = kit.rollout(), kit.rollout()
    victim, survivor = await kit.sink(), await kit.sink()
    entries = chain(rollout, 60, start=300)
    await kit.put_in_order(victim, entries[:40])
    await kit.put_in_order(survivor, entries[40:50])
    first = entry_of(short, "call-1")
    await victim.put(first)  # the last thing before the crash, and the first record of its rollout
    await kit.crash(victim)
    await kit.put_in_order(survivor, entries[50:])
    did = "put 40 calls through one sink and 10 through another, crash the first, put 10 more through the other, freeze"
    expect_entries(await kit.freeze(rollout), entries, did=did)
    expect_entries(await kit.freeze(short), [first], did="put the first call of a rollout, crash the sink, freeze")


@behaviour(_ACKNOWLEDGED, "crash")
async def a_crash_keeps_acknowledged_marks(kit: Kit) -> None:
    rollout, frozen = kit.rollout(), kit.rollout()
    victim = await kit.sink()
    await victim.put(entry_of(frozen, "call-1"))
    before = await kit.freeze(frozen)
    await victim.mark_incomplete(rollout, "call-1")
    await victim.mark_incomplete(frozen, "late")
    await kit.crash(victim)
    snapshot = await kit.freeze(rollout)
    expect_outcome(snapshot, "call-1", "lost", did="mark_incomplete, crash the sink, freeze")
    expect_incomplete(snapshot, True, did="mark_incomplete, crash the sink, freeze")
    did = "put, freeze, mark_incomplete of another call, crash the sink"
    stale = await kit.retire(frozen, before.snapshot_id, before.version)
    expect_answer(stale, False, did=f"{did}, retire the version frozen before")
    after = await kit.freeze(frozen)
    expect_pair(after, before.snapshot_id, before.version + 1, did=f"{did}, freeze")
    expect_outcome(after, "late", "lost", did=f"{did}, freeze")


@behaviour(_ACKNOWLEDGED, "crash", "begin_call")
async def a_crash_keeps_begun_calls_open(kit: Kit) -> None:
    rollout = kit.rollout()
    victim = await kit.sink()
    entry = entry_of(rollout, "call-1")
    await victim.begin_call(rollout, "call-1")
    await victim.put(entry)
    await victim.begin_call(rollout, "call-2")
    await kit.crash(victim)
    snapshot = await kit.freeze(rollout)
    did = "begin_call and put of one call, begin_call of another, crash the sink, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-2", "open", did=did)
    expect_incomplete(snapshot, True, did=did)


@behaviour(_ACKNOWLEDGED, "crash", "settle_call")
async def a_crash_keeps_acknowledged_settlements(kit: Kit) -> None:
    rollout = kit.rollout()
    victim = await kit.sink()
    await victim.settle_call(rollout, "refused", "no_generation")
    await victim.settle_call(rollout, "cut-off", "aborted")
    await victim.settle_call(rollout, "gone", "lost")
    await kit.crash(victim)
    snapshot = await kit.freeze(rollout)
    for call, outcome in (("refused", "no_generation"), ("cut-off", "aborted"), ("gone", "lost")):
        expect_outcome(snapshot, call, outcome, did="settle three calls, crash the sink, freeze")


@behaviour("A conflict is durable before its error is raised.", "crash")
async def a_crash_keeps_a_conflict(kit: Kit) -> None:
    rollout = kit.rollout()
    victim, other = await kit.sink(), await kit.sink()
    untouched = entry_of(rollout, "call-2")
    await other.put(entry_of(rollout, "call-1", content="a"))
    await other.put(untouched)
    conflicting = entry_of(rollout, "call-1", content="b")
    await expect_refusal(victim.put(conflicting), ConflictError, did="put two contents of one call")
    await kit.crash(victim)
    snapshot = await kit.freeze(rollout)
    did = "put two contents of one call, crash the sink that got the ConflictError, freeze"
    expect_outcome(snapshot, "call-1", "conflict", did=did)
    expect_outcome(snapshot, "call-2", "recorded", did=did)


@behaviour(_WHOLE, "crash")
async def a_put_in_flight_at_a_crash_is_whole_or_absent(kit: Kit) -> None:
    for moment in _MOMENTS:
        rollout = kit.rollout()
        victim, survivor = await kit.sink(), await kit.sink()
        entries = chain(rollout, 12, start=3_000)
        await kit.put_in_order(survivor, entries[:2])
        puts = [kit.start(victim.put(entry)) for entry in entries[2:10]]
        await _until(moment)
        await kit.crash(victim)
        await kit.finished(puts)
        # Appended after whatever the crash left: it must not be glued to it.
        await survivor.put(entries[10])
        await (await kit.sink()).put(entries[11])
        did = (
            f"put 2 calls, start 8 puts of another sink, crash it after {moment} turns of the loop, put 2 more, freeze"
        )
        acknowledged = [entry for entry, put in zip(entries[2:10], puts, strict=True) if returned(put)]
        snapshot = await kit.freeze(rollout)
        _holds(snapshot, [*entries[:2], *acknowledged, *entries[10:]], entries, did=did)
        expect_incomplete(snapshot, False, did=did)


@behaviour("What a crash leaves of a put can be put again.", "crash")
async def a_put_in_flight_at_a_crash_can_be_repeated(kit: Kit) -> None:
    for moment in _MOMENTS:
        rollout = kit.rollout()
        victim = await kit.sink()
        entries = chain(rollout, 8, start=3_000)
        puts = [kit.start(victim.put(entry)) for entry in entries]
        await _until(moment)
        await kit.crash(victim)
        await kit.finished(puts)
        await kit.put_in_order(await kit.sink(), entries)
        snapshot = await kit.freeze(rollout)
        did = f"start 8 puts, crash the sink after {moment} turns of the loop, put all 8 through a new sink, freeze"
        expect_entries(snapshot, entries, did=did)
        expect_incomplete(snapshot, False, did=did)


@behaviour("put_many stores the choices of one call atomically, also if the process dies.", "crash", "put_many")
async def a_put_many_in_flight_at_a_crash_is_whole_or_absent(kit: Kit) -> None:
    for moment in _MOMENTS:
        rollout = kit.rollout()
        victim = await kit.sink()
        prompt = ids_of("prompt", 2_000)
        calls = [
            [entry_of(rollout, f"call-{call}", prompt=prompt, choice_index=choice) for choice in range(6)]
            for call in range(4)
        ]
        puts = [kit.start(victim.put_many(call)) for call in calls]
        await _until(moment)
        await kit.crash(victim)
        await kit.finished(puts)
        snapshot = await kit.freeze(rollout)
        did = f"start put_many of 4 calls with 6 choices, crash the sink after {moment} turns of the loop, freeze"
        kept = {key_of(entry)[0] for entry in snapshot.entries}
        expected = [
            entry
            for call, put in zip(calls, puts, strict=True)
            if returned(put) or key_of(call[0])[0] in kept
            for entry in call
        ]
        expect_entries(snapshot, expected, did=did)


@behaviour(_WHOLE, "crash")
async def a_crash_in_one_rollout_leaves_others_usable(kit: Kit) -> None:
    rollouts = [kit.rollout() for _ in range(4)]
    victim, survivor = await kit.sink(), await kit.sink()
    entries = {rollout: chain(rollout, 5) for rollout in rollouts}
    for rollout in rollouts:
        await kit.put_in_order(survivor, entries[rollout][:2])
    puts = [kit.start(victim.put(entry)) for entry in entries[rollouts[0]][2:]]
    await _until(2)
    await kit.crash(victim)
    await kit.finished(puts)
    did = "put 2 calls into each of 4 rollouts, crash a sink that writes to the first, go on with the other 3, freeze"
    for rollout in rollouts[1:]:
        await kit.put_in_order(survivor, entries[rollout][2:])
        expect_entries(await kit.freeze(rollout), entries[rollout], did=did)
    acknowledged = [e for e, put in zip(entries[rollouts[0]][2:], puts, strict=True) if returned(put)]
    snapshot = await kit.freeze(rollouts[0])
    _holds(snapshot, entries[rollouts[0]][:2] + acknowledged, entries[rollouts[0]], did=did)


@behaviour(
    "What freeze returned stays so: the fence, the entries, snapshot_id and version survive the process.", "crash"
)
async def a_crash_keeps_a_freeze(kit: Kit) -> None:
    rollout = kit.rollout()
    sink, victim = await kit.sink(), await kit.source()
    entries = chain(rollout, 5)
    await kit.put_in_order(sink, entries[:4])
    frozen = await victim.freeze(rollout)
    pair = frozen.snapshot_id, frozen.version
    await kit.crash(victim)
    did = "put 4 calls, freeze, crash the source"
    await expect_refusal(sink.put(entries[4]), FrozenError, did=f"{did}, put")
    again = await kit.freeze(rollout)
    expect_pair(again, *pair, did=f"{did}, freeze through a new source")
    expect_entries(again, entries[:4], did=f"{did}, freeze through a new source")


@behaviour("A snapshot appears complete or not at all; a crash in freeze leaves the rollout open or frozen.", "crash")
async def a_crash_during_freeze_leaves_the_rollout_open_or_frozen(kit: Kit) -> None:
    for moment in _MOMENTS:
        rollout = kit.rollout()
        sink, victim = await kit.sink(), await kit.source()
        entries = chain(rollout, 6, start=2_000)
        await kit.put_in_order(sink, entries[:5])
        freezing = kit.start(victim.freeze(rollout))
        await _until(moment)
        await kit.crash(victim)
        await kit.finished([freezing])
        did = f"put 5 calls, start a freeze, crash its source after {moment} turns of the loop, put a sixth"
        expected = entries[:5]
        try:
            await sink.put(entries[5])
            expected = entries
        except FrozenError:
            pass
        if returned(freezing) and len(expected) == 6:
            raise ViolationError(did, "FrozenError, since the freeze returned", "the put returned")
        snapshot = await kit.freeze(rollout)
        expect_entries(snapshot, expected, did=f"{did}, freeze through a new source")
        answer = await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
        expect_answer(answer, True, did=f"{did}, freeze and retire through a new source")


@behaviour("retire takes effect at once or not at all, and what it did survives the process.", "crash")
async def a_crash_during_retire_leaves_the_rollout_frozen_or_retired(kit: Kit) -> None:
    for moment in (*_MOMENTS, None):
        rollout = kit.rollout()
        sink, victim = await kit.sink(), await kit.source()
        entries = chain(rollout, 5, start=2_000)
        await kit.put_in_order(sink, entries)
        frozen = await kit.freeze(rollout)
        retiring = kit.start(victim.retire(rollout, snapshot_id=frozen.snapshot_id, version=frozen.version))
        if moment is None:
            await asyncio.wait([retiring])
        else:
            await _until(moment)
        await kit.crash(victim)
        await kit.finished([retiring])
        when = "its return" if moment is None else f"{moment} turns of the loop"
        did = f"put 5 calls, freeze, start retire, crash its source after {when}"
        try:
            again = await kit.freeze(rollout)
        except RetiredError:
            await expect_refusal(sink.put(entries[0]), RetiredError, did=f"{did}, put")
        else:
            expect(
                not returned(retiring),
                did=f"{did}, freeze",
                expected="RetiredError, since retire returned",
                seen="none",
            )
            expect_entries(again, entries, did=f"{did}, freeze")
            expect_pair(again, frozen.snapshot_id, frozen.version, did=f"{did}, freeze")
        answer = await kit.retire(rollout, frozen.snapshot_id, frozen.version)
        expect_answer(answer, True, did=f"{did}, retire again through a new source")
        expect_entries(frozen, entries, did=f"{did}, read the snapshot that was open all the time")


def _holds(
    snapshot: TokenCaptureSnapshot, wanted: Sequence[TokenEntry], possible: Sequence[TokenEntry], *, did: str
) -> None:
    """All that is wanted is there, and what else is there is one of the possible entries, exactly."""
    kept = {key_of(entry) for entry in snapshot.entries} | {key_of(entry) for entry in wanted}
    expect_entries(snapshot, [entry for entry in possible if key_of(entry) in kept], did=did)
