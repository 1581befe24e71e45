"""Is every acknowledged put there, once, and only there, whoever else writes at the same time?"""

from __future__ import annotations

import asyncio

from ..entry import TokenEntry
from ..errors import FrozenError
from .checks_chains import chain
from .kit import Kit, ViolationError, expect, expect_entries, expect_incomplete, expect_outcome, expect_same, returned
from .registry import behaviour
from .samples import entry_of, ids_of, key_of

_KEPT = "Every put that returned before the freeze is in the snapshot."


@behaviour(_KEPT)
async def concurrent_puts_of_several_sinks_are_all_kept(kit: Kit) -> None:
    rollout = kit.rollout()
    sinks = [await kit.sink() for _ in range(3)]
    entries = [entry_of(rollout, f"call-{number}") for number in range(120)]
    await kit.together(sinks[number % 3].put(entry) for number, entry in enumerate(entries))
    snapshot = await kit.freeze(rollout)
    did = "put 120 entries at once through three sinks, wait until all puts have returned, freeze"
    expect_entries(snapshot, entries, did=did)
    expect_incomplete(snapshot, False, did=did)
    for entry in entries:
        expect_outcome(snapshot, entry.model_call_id, "recorded", did=did)


@behaviour(_KEPT)
async def concurrent_chains_of_several_sinks_are_all_kept(kit: Kit) -> None:
    rollouts = [kit.rollout() for _ in range(4)]
    sinks = [await kit.sink() for _ in range(2)]
    entries = {
        (rollout, name): chain(rollout, 15, name=name, start=400) for rollout in rollouts for name in ("one", "other")
    }
    await kit.together(
        kit.put_in_order(sinks[number % 2], of_agent) for number, of_agent in enumerate(entries.values())
    )
    for rollout in rollouts:
        did = "put 120 entries, as two chains in each of four rollouts, through two sinks at the same time, freeze"
        expect_entries(await kit.freeze(rollout), entries[rollout, "one"] + entries[rollout, "other"], did=did)


@behaviour("When put returns, every other instance sees the record.")
async def a_returned_put_is_visible_to_other_instances(kit: Kit) -> None:
    sink = await kit.sink()
    for number in range(10):
        rollout = kit.rollout()
        entry = entry_of(rollout, "call-1")
        await sink.put(entry)
        source = await kit.source() if number % 2 else await kit.reader()
        expect_entries(await source.freeze(rollout), [entry], did="put, and freeze through another instance at once")


@behaviour("Repeating a put with identical content is a no-op, through any instance.")
async def an_identical_put_is_a_no_op(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entries = chain(rollout, 5)
    entries.append(entry_of(rollout, "unknown", generation=[3, 4], log_probs=[None, -1.0]))
    for _ in range(2):
        await kit.put_in_order(one, entries)
        await kit.put_in_order(other, entries)
    snapshot = await kit.freeze(rollout)
    did = "put the same entries four times through two sinks, freeze"
    expect_entries(snapshot, entries, did=did)
    expect_incomplete(snapshot, False, did=did)
    expect_outcome(snapshot, "unknown", "recorded", did=did)


@behaviour("Repeating a put with identical content is a no-op, also at the same time.")
async def concurrent_identical_puts_store_one_entry(kit: Kit) -> None:
    rollout = kit.rollout()
    sinks = [await kit.sink() for _ in range(3)]
    entries = [entry_of(rollout, f"call-{number}") for number in range(20)]
    await kit.together(sink.put(entry) for entry in entries for sink in sinks)
    snapshot = await kit.freeze(rollout)
    did = "put each of 20 entries at once through three sinks, freeze"
    expect_entries(snapshot, entries, did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour("(model_call_id, choice_index) identifies an entry; the choices of one call don't conflict.")
async def choices_of_one_call_are_separate_entries(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    prompt = ids_of("prompt", 60)
    entries = [entry_of(rollout, "call-1", prompt=prompt, choice_index=choice) for choice in (0, 1, 2, 7)]
    await kit.put_in_order(one, entries[:2])
    await kit.put_in_order(other, entries[2:])
    snapshot = await kit.freeze(rollout)
    did = "put choices 0, 1, 2 and 7 of one call, freeze"
    expect_entries(snapshot, entries, did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour("Rollouts share nothing: neither entries, nor marks, nor their end.")
async def rollouts_are_isolated_from_each_other(kit: Kit) -> None:
    sinks = [await kit.sink(), await kit.sink()]
    stem = kit.rollout()
    rollouts = [stem, *(f"{stem}-{number}" for number in range(20))]
    entries = {rollout: [entry_of(rollout, f"call-{number}") for number in range(5)] for rollout in rollouts}
    everything = [entry for number in range(5) for entry in (entries[rollout][number] for rollout in rollouts)]
    await kit.together(sinks[number % 2].put(entry) for number, entry in enumerate(everything))
    await sinks[0].mark_incomplete(rollouts[1], "lost-call")
    retired = await kit.freeze(rollouts[2])
    await kit.retire(rollouts[2], retired.snapshot_id, retired.version)
    did = "put calls with the same call ids into 21 rollouts at once, mark one rollout, retire another, freeze"
    identities = {retired.snapshot_id}
    for rollout in rollouts[:2] + rollouts[3:]:
        snapshot = await kit.freeze(rollout)
        expect_entries(snapshot, entries[rollout], did=did)
        expect_incomplete(snapshot, rollout == rollouts[1], did=did)
        identities.add(snapshot.snapshot_id)
    expect(
        len(identities) == len(rollouts),
        did=did,
        expected=f"{len(rollouts)} different snapshot ids",
        seen=f"{len(identities)} different snapshot ids",
    )


@behaviour("A cancelled put is whole or absent, and never affects other puts.")
async def a_cancelled_put_is_whole_or_absent(kit: Kit) -> None:
    for turns in (0, 1, 2, 3, 5):
        rollout = kit.rollout()
        sinks = [await kit.sink(), await kit.sink()]
        entries = chain(rollout, 40, start=500)
        puts = [kit.start(sinks[number % 2].put(entry)) for number, entry in enumerate(entries)]
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 5:
            await asyncio.sleep(0.001)
        for put in puts[::3]:
            put.cancel()
        await asyncio.wait(puts)
        did = f"start 40 puts through two sinks, cancel every third after {turns} turns of the loop"
        for number, put in enumerate(puts):
            if number % 3 or not put.cancelled():
                expect(
                    returned(put),
                    did=did,
                    expected="the puts that nobody cancelled return",
                    seen=f"{'cancelled' if put.cancelled() else repr(put.exception())}",
                )
        # Repeating a cancelled put must find the same content or none.
        again = entries[::6]
        await kit.put_in_order(sinks[1], again)
        snapshot = await kit.freeze(rollout)
        kept = {key_of(entry) for entry in snapshot.entries}
        wanted = {key_of(entry) for entry, put in zip(entries, puts, strict=True) if returned(put)}
        wanted |= {key_of(entry) for entry in again}
        present = [entry for entry in entries if key_of(entry) in kept | wanted]
        expect_entries(snapshot, present, did=f"{did}, put half of those again, freeze")
        expect_incomplete(snapshot, False, did=did)


@behaviour("put_many stores the choices of one call atomically: a snapshot has all of them or none.", "put_many")
async def put_many_is_visible_as_a_whole(kit: Kit) -> None:
    for turns in (0, 1, 2, 3, 5, 8):
        rollout = kit.rollout()
        sinks = [await kit.sink(), await kit.sink()]
        source = await kit.source()
        calls = [_choices(rollout, f"call-{number}", 6) for number in range(6)]
        puts = [kit.start(sinks[number % 2].put_many(call)) for number, call in enumerate(calls)]
        for _ in range(turns):
            await asyncio.sleep(0)
        snapshot = await source.freeze(rollout)
        await asyncio.wait(puts)
        did = f"start put_many of 6 calls with 6 choices each, freeze after {turns} turns of the loop"
        expected: list[TokenEntry] = []
        for call, put in zip(calls, puts, strict=True):
            if returned(put):
                expected += call
            elif not isinstance(put.exception(), FrozenError):
                raise ViolationError(did, "every put_many returns or raises FrozenError", repr(put.exception()))
        expect_entries(snapshot, expected, did=did)


@behaviour("put_many stores the choices of one call; repeating it is a no-op.", "put_many")
async def put_many_stores_every_choice(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = _choices(rollout, "call-1", 5)
    await sink.put_many(entries)
    await sink.put_many(entries)
    await sink.put(entries[2])
    snapshot = await kit.freeze(rollout)
    did = "put_many of 5 choices twice, put one of them again, freeze"
    expect_entries(snapshot, entries, did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    for entry in snapshot.entries:
        expect_same(entry, entries[entry.choice_index], did=did)


def _choices(rollout: str, call: str, count: int) -> list[TokenEntry]:
    return [entry_of(rollout, call, prompt=ids_of(call, 80), choice_index=choice) for choice in range(count)]
