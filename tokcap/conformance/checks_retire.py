"""Does retire remove exactly what was consumed, and never anything else?"""

from __future__ import annotations

import uuid

from ..errors import FrozenError, RetiredError
from .checks_chains import chain
from .kit import Kit, expect_answer, expect_entries, expect_pair, expect_refusal
from .registry import behaviour
from .samples import entry_of, full_entry

_EXACT = (
    "retire names the snapshot by snapshot_id and version; it is True for exactly that pair, and again when repeated."
)


@behaviour(_EXACT)
async def an_exact_retire_succeeds_and_repeats(kit: Kit) -> None:
    rollout = kit.rollout()
    sink, other = await kit.sink(), await kit.source()
    entries = chain(rollout, 3)
    await kit.put_in_order(sink, entries)
    snapshot = await kit.freeze(rollout)
    expect_entries(snapshot, entries, did="put, freeze")
    for source in (await kit.reader(), await kit.reader(), other, await kit.source()):
        answer = await source.retire(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        expect_answer(answer, True, did="put, freeze, retire the snapshot, and again through this and other sources")


@behaviour(_EXACT)
async def concurrent_retires_agree(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    sources = [await kit.source() for _ in range(3)]
    entries = chain(rollout, 3)
    await kit.put_in_order(sink, entries)
    snapshot = await kit.freeze(rollout)
    expect_entries(snapshot, entries, did="put, freeze")
    answers = await kit.together(
        source.retire(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version) for source in sources
    )
    for answer in answers:
        expect_answer(answer, True, did="put, freeze, retire the snapshot through three sources at once")


@behaviour("retire with another snapshot_id is False and leaves the evidence intact.")
async def a_foreign_snapshot_id_retires_nothing(kit: Kit) -> None:
    rollout, neighbour = kit.rollout(), kit.rollout()
    sink = await kit.sink()
    entries = chain(rollout, 3)
    await kit.put_in_order(sink, [*entries, entry_of(neighbour, "call-1")])
    foreign = (await kit.freeze(neighbour)).snapshot_id
    snapshot = await kit.freeze(rollout)
    for snapshot_id in (uuid.uuid4().hex, foreign, "", snapshot.snapshot_id[:-1]):
        did = f"put, freeze, retire with snapshot_id {snapshot_id!r} instead of {snapshot.snapshot_id!r}"
        expect_answer(await kit.retire(rollout, snapshot_id, snapshot.version), False, did=did)
        again = await kit.freeze(rollout)
        expect_entries(again, entries, did=f"{did}, freeze")
        expect_pair(again, snapshot.snapshot_id, snapshot.version, did=f"{did}, freeze")


@behaviour("retire with another version is False and leaves the evidence intact.")
async def another_version_retires_nothing(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = chain(rollout, 3)
    await kit.put_in_order(sink, entries)
    snapshot = await kit.freeze(rollout)
    for version in (snapshot.version + 1, snapshot.version - 1, -1, 2**40):
        did = f"put, freeze, retire with version {version} instead of {snapshot.version}"
        expect_answer(await kit.retire(rollout, snapshot.snapshot_id, version), False, did=did)
        expect_entries(await kit.freeze(rollout), entries, did=f"{did}, freeze")


@behaviour("Retiring a rollout that doesn't exist is False and creates nothing.")
async def retire_of_an_absent_rollout_is_false(kit: Kit) -> None:
    rollout = kit.rollout()
    did = "retire a rollout that nobody wrote to"
    expect_answer(await kit.retire(rollout, uuid.uuid4().hex, 1), False, did=did)
    sink = await kit.sink()
    entry = entry_of(rollout, "call-1")
    await sink.put(entry)
    expect_entries(await kit.freeze(rollout), [entry], did=f"{did}, put, freeze")


@behaviour("Retiring a rollout that is not frozen is False and leaves the evidence intact.")
async def retire_of_an_open_rollout_is_false_and_keeps_the_evidence(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = chain(rollout, 4)
    await kit.put_in_order(sink, entries[:3])
    did = "put, retire without a freeze"
    for version in (0, 1):
        expect_answer(await kit.retire(rollout, uuid.uuid4().hex, version), False, did=did)
    await sink.put(entries[3])
    expect_entries(await kit.freeze(rollout), entries, did=f"{did}, put again, freeze")


@behaviour("After retire, put and freeze raise RetiredError.")
async def a_retired_rollout_refuses_put_and_freeze(kit: Kit) -> None:
    rollout = kit.rollout()
    writer, other = await kit.sink(), await kit.sink()
    entries = chain(rollout, 3)
    await kit.put_in_order(writer, entries[:2])
    snapshot = await kit.freeze(rollout)
    await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
    did = "put, freeze, retire"
    for sink in (writer, other, await kit.sink()):
        await expect_refusal(sink.put(entries[2]), RetiredError, did=f"{did}, put a new call")
        await expect_refusal(sink.put(entries[0]), RetiredError, did=f"{did}, put a call that was stored")
    for source in (await kit.reader(), await kit.source()):
        await expect_refusal(source.freeze(rollout), RetiredError, did=f"{did}, freeze")


@behaviour("After retire, begin_call raises RetiredError.", "begin_call")
async def a_retired_rollout_refuses_begin_call(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    await sink.put(entry_of(rollout, "call-1"))
    snapshot = await kit.freeze(rollout)
    await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
    await expect_refusal(sink.begin_call(rollout, "call-2"), RetiredError, did="put, freeze, retire, begin_call")
    await expect_refusal(kit.freeze(rollout), RetiredError, did="put, freeze, retire, try begin_call, freeze")


@behaviour("Nothing revives a retired rollout, and only the pair that was retired is answered with True.")
async def late_puts_and_stale_retires_after_retire_change_nothing(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = chain(rollout, 4)
    await kit.put_in_order(sink, entries[:3])
    old = await kit.freeze(rollout)
    await expect_refusal(sink.put(entries[3]), FrozenError, did="put 3 calls, freeze, put")
    await sink.mark_incomplete(rollout, entries[3].model_call_id)
    new = await kit.freeze(rollout)
    did = "put 3 calls, freeze, mark_incomplete of a fourth, freeze"
    expect_answer(
        await kit.retire(rollout, old.snapshot_id, old.version), False, did=f"{did}, retire the first version"
    )
    expect_answer(
        await kit.retire(rollout, new.snapshot_id, new.version), True, did=f"{did}, retire the second version"
    )
    did += ", retire"
    for _ in range(2):
        await expect_refusal(sink.put(entries[3]), RetiredError, did=f"{did}, put")
        stale = await kit.retire(rollout, old.snapshot_id, old.version)
        expect_answer(stale, False, did=f"{did}, put, retire the first version")
        foreign = await kit.retire(rollout, uuid.uuid4().hex, new.version)
        expect_answer(foreign, False, did=f"{did}, put, retire a foreign snapshot_id")
        repeated = await kit.retire(rollout, new.snapshot_id, new.version)
        expect_answer(repeated, True, did=f"{did}, put, retire the second version again")
        await expect_refusal(kit.freeze(rollout), RetiredError, did=f"{did}, put, retire, freeze")


@behaviour("A snapshot stays readable after its rollout is retired, until it is closed; arrays read before stay valid.")
async def a_snapshot_stays_readable_after_retire(kit: Kit) -> None:
    rollout = kit.rollout()
    sink, other = await kit.sink(), await kit.source()
    entries = [*chain(rollout, 20, start=2_000), full_entry(rollout, "full")]
    await kit.put_in_order(sink, entries)
    unread = await kit.freeze(rollout)
    begun = await other.freeze(rollout)
    early = next(iter(begun.entries))
    prompt = early.prompt_token_ids
    copy = prompt.tolist()
    expect_answer(await kit.retire(rollout, unread.snapshot_id, unread.version), True, did="put, freeze, retire")
    did = "put 21 calls, freeze, retire, and only then read the snapshot"
    expect_entries(unread, entries, did=did)
    expect_entries(begun, entries, did="put 21 calls, freeze, read one entry, retire, read all")
    unread.close()
    begun.close()
    expect_answer(prompt.tolist() == copy, True, did="read an array, retire, close the snapshot, compare the array")
