"""A rollout id that is used again: does the earlier attempt leave the later one alone? For stores that can reset."""

from __future__ import annotations

from ..errors import StaleAttemptError
from .checks_chains import chain
from .kit import Kit, expect, expect_answer, expect_entries, expect_incomplete, expect_outcome, expect_refusal
from .registry import behaviour
from .samples import entry_of

_STALE = (
    "A call remembers the incarnation of its begin_call; after a reset it raises StaleAttemptError and changes nothing."
)


@behaviour(_STALE, "begin_call", "reset")
async def a_put_of_an_earlier_attempt_is_refused(kit: Kit) -> None:
    for reborn in (False, True):
        rollout = kit.rollout()
        straggler, newcomer = await kit.sink(), await kit.sink()
        early = entry_of(rollout, "call-1", content="first attempt")
        late = entry_of(rollout, "call-2", content="first attempt")
        fresh = entry_of(rollout, "call-3", content="second attempt")
        await straggler.begin_call(rollout, "call-1")
        await straggler.put(early)
        await straggler.begin_call(rollout, "call-2")
        await kit.reset(rollout)
        if reborn:
            await newcomer.begin_call(rollout, "call-3")
            await newcomer.put(fresh)
        did = (
            f"begin_call, reset{', put of a new attempt through another sink' if reborn else ''}, put of the first call"
        )
        await expect_refusal(straggler.put(late), StaleAttemptError, did=did)
        await expect_refusal(straggler.put(early), StaleAttemptError, did=f"{did} that was stored before the reset")
        snapshot = await kit.freeze(rollout)
        expect_entries(snapshot, [fresh] if reborn else [], did=f"{did}, freeze")
        expect(
            len(snapshot.calls) == int(reborn),
            did=f"{did}, freeze",
            expected=f"{int(reborn)} calls, none of them of the first attempt",
            seen=f"{[call.model_call_id for call in snapshot.calls]}",
        )
        expect_incomplete(snapshot, False, did=f"{did}, freeze")


@behaviour(_STALE, "begin_call", "settle_call", "reset")
async def marks_and_settlements_of_an_earlier_attempt_are_refused(kit: Kit) -> None:
    rollout = kit.rollout()
    straggler, newcomer = await kit.sink(), await kit.sink()
    await straggler.begin_call(rollout, "call-1")
    await kit.reset(rollout)
    fresh = entry_of(rollout, "call-2")
    await newcomer.put(fresh)
    did = "begin_call, reset, put of a new attempt"
    settling = straggler.settle_call(rollout, "call-1", "lost")
    await expect_refusal(settling, StaleAttemptError, did=f"{did}, settle_call of the first call")
    marking = straggler.mark_incomplete(rollout, "call-1")
    await expect_refusal(marking, StaleAttemptError, did=f"{did}, mark_incomplete of the first call")
    snapshot = await kit.freeze(rollout)
    expect_entries(snapshot, [fresh], did=f"{did}, try to settle and mark the first call, freeze")
    expect_incomplete(snapshot, False, did=f"{did}, try to settle and mark the first call, freeze")


@behaviour(
    "Without begin_call a put belongs to the current incarnation; equal ids of both attempts don't meet.", "reset"
)
async def a_reset_rollout_starts_from_nothing(kit: Kit) -> None:
    sink = await kit.sink()
    for state in ("open", "frozen", "retired"):
        rollout, neighbour = kit.rollout(), kit.rollout()
        first, second = chain(rollout, 5), [entry_of(rollout, f"call-{number}", content="b") for number in range(3)]
        kept = entry_of(neighbour, "call-1")
        await kit.put_in_order(sink, [*first, kept])
        await sink.mark_incomplete(rollout, "lost")
        identity = ""
        if state != "open":
            snapshot = await kit.freeze(rollout)
            identity = snapshot.snapshot_id
            if state == "retired":
                await kit.retire(rollout, identity, snapshot.version)
        await kit.reset(rollout)
        await kit.reset(rollout)
        await kit.put_in_order(sink, second)
        again = await kit.freeze(rollout)
        did = f"put 5 calls and mark a sixth, reset the {state} rollout, put other contents for the same ids, freeze"
        expect_entries(again, second, did=did)
        expect_incomplete(again, False, did=did)
        expect_outcome(again, "call-0", "recorded", did=did)
        expect(again.version == 1, did=did, expected="version 1 of a new snapshot", seen=f"version {again.version}")
        expect(again.snapshot_id != identity, did=did, expected="a new snapshot_id", seen=f"{identity} again")
        expect_entries(await kit.freeze(neighbour), [kept], did=f"{did} another rollout")


@behaviour("A pair that was valid in an earlier life of the rollout id retires nothing.", "reset")
async def an_earlier_life_cannot_retire_a_later_one(kit: Kit) -> None:
    for retired_before in (False, True):
        rollout = kit.rollout()
        sink = await kit.sink()
        entry = entry_of(rollout, "call-1")
        await sink.put(entry)
        old = await kit.freeze(rollout)
        if retired_before:
            await kit.retire(rollout, old.snapshot_id, old.version)
        await kit.reset(rollout)
        did = f"put, freeze{', retire' if retired_before else ''}, reset"
        absent = await kit.retire(rollout, old.snapshot_id, old.version)
        expect_answer(absent, False, did=f"{did}, retire the old pair")
        await sink.put(entry)
        new = await kit.freeze(rollout)
        stale = await kit.retire(rollout, old.snapshot_id, old.version)
        expect_answer(stale, False, did=f"{did}, put, freeze, retire the old pair")
        expect_entries(await kit.freeze(rollout), [entry], did=f"{did}, put, freeze, retire the old pair, freeze")
        current = await kit.retire(rollout, new.snapshot_id, new.version)
        expect_answer(current, True, did=f"{did}, put, freeze, retire the new pair")


@behaviour("A snapshot stays readable after its rollout is reset, until it is closed.", "reset")
async def a_snapshot_stays_readable_after_reset(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = chain(rollout, 10, start=1_000)
    await kit.put_in_order(sink, entries)
    snapshot = await kit.freeze(rollout)
    await kit.reset(rollout)
    await sink.put(entry_of(rollout, "call-0", content="b"))
    did = "put 10 calls, freeze, reset, put of a new attempt, and only then read the snapshot"
    expect_entries(snapshot, entries, did=did)
    snapshot.close()


@behaviour("Resetting a rollout that doesn't exist is a no-op.", "reset")
async def reset_of_an_absent_rollout_is_a_no_op(kit: Kit) -> None:
    rollout, other = kit.rollout(), kit.rollout()
    await kit.reset(rollout, other)
    entry = entry_of(rollout, "call-1")
    await (await kit.sink()).put(entry)
    expect_entries(await kit.freeze(rollout), [entry], did="reset two rollouts that don't exist, put, freeze")
