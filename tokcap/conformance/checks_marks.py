"""Does a loss that somebody reports stay known, before freeze, after it and after retirement?"""

from __future__ import annotations

from ..errors import FrozenError, RetiredError
from .kit import Kit, expect_answer, expect_entries, expect_incomplete, expect_outcome, expect_pair, expect_refusal
from .registry import behaviour
from .samples import entry_of

_VERSION = (
    "A late mark that changes an outcome moves the version by one when it returns; "
    "from then on an older version can't be retired, even if nobody froze again."
)


@behaviour("mark_incomplete: the call happened and its record is lost; the rollout is incomplete.")
async def mark_incomplete_makes_the_call_lost(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await one.put(entry)
    await other.mark_incomplete(rollout, "call-2")
    await one.mark_incomplete(rollout, "call-2")
    snapshot = await kit.freeze(rollout)
    did = "put one call, mark_incomplete of another twice, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_outcome(snapshot, "call-2", "lost", did=did)
    expect_incomplete(snapshot, True, did=did)


@behaviour("mark_incomplete creates the rollout if it doesn't exist: its only call was lost.")
async def a_mark_alone_makes_a_rollout(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    await sink.mark_incomplete(rollout, "call-1")
    snapshot = await kit.freeze(rollout)
    did = "mark_incomplete in a new rollout, freeze"
    expect_entries(snapshot, [], did=did)
    expect_outcome(snapshot, "call-1", "lost", did=did)
    expect_incomplete(snapshot, True, did=did)


@behaviour("mark_incomplete without a call id is one unnamed lost call.")
async def a_mark_without_a_call_id_makes_the_rollout_incomplete(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entry = entry_of(rollout, "call-1")
    await sink.put(entry)
    await sink.mark_incomplete(rollout)
    snapshot = await kit.freeze(rollout)
    did = "put one call, mark_incomplete without a call id, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_outcome(snapshot, "", "lost", did=did)
    expect_incomplete(snapshot, True, did=did)


@behaviour("Outcomes have a precedence, `recorded` before `lost`: a put after a mark makes the call recorded.")
async def a_put_after_a_mark_makes_the_call_recorded(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await one.mark_incomplete(rollout, "call-1")
    await other.put(entry)
    snapshot = await kit.freeze(rollout)
    did = "mark_incomplete of a call, put its entry, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour("Outcomes have a precedence, `recorded` before `lost`: a mark can't lose an entry that is stored.")
async def a_mark_after_the_put_leaves_the_call_recorded(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await one.put(entry)
    await other.mark_incomplete(rollout, "call-1")
    snapshot = await kit.freeze(rollout)
    did = "put a call, mark_incomplete of the same call, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour(_VERSION)
async def a_late_mark_moves_the_version(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entry = entry_of(rollout, "call-1")
    await sink.put(entry)
    first = await kit.freeze(rollout)
    expect_incomplete(first, False, did="put, freeze")
    did = "put, freeze, mark_incomplete of another call"
    for number, call in enumerate(("late-1", ""), start=1):
        await sink.mark_incomplete(rollout, call)
        snapshot = await kit.freeze(rollout)
        expect_pair(snapshot, first.snapshot_id, first.version + number, did=f"{did}, freeze (mark {number})")
        expect_outcome(snapshot, call, "lost", did=f"{did}, freeze (mark {number})")
        expect_incomplete(snapshot, True, did=f"{did}, freeze (mark {number})")
        expect_entries(snapshot, [entry], did=f"{did}, freeze (mark {number})")
    expect_incomplete(first, False, did=f"{did}, look at the first snapshot again")
    await expect_refusal(sink.put(entry_of(rollout, "late-1")), FrozenError, did=f"{did}, put the entry of that call")


@behaviour(_VERSION)
async def a_version_is_stale_as_soon_as_a_late_mark_returned(kit: Kit) -> None:
    rollout = kit.rollout()
    sink, marker = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await sink.put(entry)
    first = await kit.freeze(rollout)
    await marker.mark_incomplete(rollout, "late")
    did = "put, freeze, mark_incomplete of another call"
    stale = await kit.retire(rollout, first.snapshot_id, first.version)
    expect_answer(stale, False, did=f"{did}, retire the version that was frozen before the mark")
    second = await kit.freeze(rollout)
    expect_pair(second, first.snapshot_id, first.version + 1, did=f"{did}, try to retire, freeze")
    expect_entries(second, [entry], did=f"{did}, try to retire, freeze")
    expect_outcome(second, "late", "lost", did=f"{did}, try to retire, freeze")
    current = await kit.retire(rollout, second.snapshot_id, second.version)
    expect_answer(current, True, did=f"{did}, freeze, retire the new version")


@behaviour("Repeating any operation is a no-op; a mark that changes no outcome makes no new version.")
async def a_late_mark_that_changes_nothing_keeps_the_version(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    await one.put(entry_of(rollout, "call-1"))
    await one.mark_incomplete(rollout, "call-2")
    first = await kit.freeze(rollout)
    await one.mark_incomplete(rollout, "call-2")
    await other.mark_incomplete(rollout, "call-2")
    did = "put, mark_incomplete of another call, freeze, repeat that mark"
    expect_pair(await kit.freeze(rollout), first.snapshot_id, first.version, did=f"{did}, freeze")
    answer = await kit.retire(rollout, first.snapshot_id, first.version)
    expect_answer(answer, True, did=f"{did}, retire")


@behaviour("A mark after retirement is accepted without an error, and never revives the rollout.")
async def marks_after_retirement_are_accepted_and_revive_nothing(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await one.put(entry)
    snapshot = await kit.freeze(rollout)
    await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
    await one.mark_incomplete(rollout, "late")
    await other.mark_incomplete(rollout, "call-1")
    await (await kit.sink()).mark_incomplete(rollout)
    did = "put, freeze, retire, mark_incomplete"
    await expect_refusal(kit.freeze(rollout), RetiredError, did=f"{did}, freeze")
    await expect_refusal(one.put(entry), RetiredError, did=f"{did}, put")
    newer = await kit.retire(rollout, snapshot.snapshot_id, snapshot.version + 1)
    expect_answer(newer, False, did=f"{did}, retire a version that nobody saw")
    repeated = await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
    expect_answer(repeated, True, did=f"{did}, repeat the retire")
    expect_entries(snapshot, [entry], did=f"{did}, read the snapshot")
    expect_incomplete(snapshot, False, did=f"{did}, read the snapshot")
