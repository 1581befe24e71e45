"""Intents and settlements: is it known of every call that began how it ended? For sinks with the optional methods."""

from __future__ import annotations

from typing import Any, cast

from ..errors import ConflictError, FrozenError, RetiredError
from ..protocol import SettledOutcome
from .kit import Kit, expect_answer, expect_entries, expect_incomplete, expect_outcome, expect_pair, expect_refusal
from .registry import behaviour
from .samples import entry_of

_PRECEDENCE = "Of several statements the first of conflict, aborted, recorded, lost, no_generation, open holds."


@behaviour("A call that began and has no end makes the snapshot incomplete.", "begin_call")
async def an_open_call_makes_the_snapshot_incomplete(kit: Kit) -> None:
    rollout, only_begun = kit.rollout(), kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await one.begin_call(rollout, "call-1")
    await one.begin_call(rollout, "call-2")
    await one.put(entry)
    await other.begin_call(only_begun, "call-1")
    snapshot = await kit.freeze(rollout)
    did = "begin_call of two calls, put the first, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_outcome(snapshot, "call-2", "open", did=did)
    expect_incomplete(snapshot, True, did=did)
    await expect_refusal(one.put(entry_of(rollout, "call-2")), FrozenError, did=f"{did}, put the second")
    lonely = await kit.freeze(only_begun)
    expect_outcome(lonely, "call-1", "open", did="begin_call in a new rollout, freeze")
    expect_incomplete(lonely, True, did="begin_call in a new rollout, freeze")


@behaviour("A call that began and was put is recorded; repeating begin_call is a no-op.", "begin_call")
async def a_begun_and_answered_call_is_recorded(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entries = [entry_of(rollout, f"call-{number}") for number in range(10)]
    for entry in entries:
        await sink.begin_call(rollout, entry.model_call_id)
        await sink.begin_call(rollout, entry.model_call_id)
        await sink.put(entry)
        await sink.begin_call(rollout, entry.model_call_id)
    snapshot = await kit.freeze(rollout)
    did = "begin_call twice, put and begin_call again, for ten calls, freeze"
    expect_entries(snapshot, entries, did=did)
    for entry in entries:
        expect_outcome(snapshot, entry.model_call_id, "recorded", did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour("A call with choices=n is open until all n entries are stored.", "begin_call")
async def a_call_stays_open_until_all_choices_are_stored(kit: Kit) -> None:
    for stored, outcome in ((2, "open"), (3, "recorded")):
        rollout = kit.rollout()
        sink, other = await kit.sink(), await kit.sink()
        entries = [entry_of(rollout, "call-1", choice_index=choice) for choice in range(3)]
        await sink.begin_call(rollout, "call-1", choices=3)
        for entry in entries[:stored]:
            await sink.put(entry)
            await other.put(entry)
        snapshot = await kit.freeze(rollout)
        did = f"begin_call with choices=3, put {stored} choices, freeze"
        expect_entries(snapshot, entries[:stored], did=did)
        expect_outcome(snapshot, "call-1", outcome, did=did)
        expect_incomplete(snapshot, outcome == "open", did=did)


@behaviour(
    "A call with choices=n ends when it is settled, and keeps the entries stored so far.", "begin_call", "settle_call"
)
async def a_settlement_ends_a_call_with_missing_choices(kit: Kit) -> None:
    outcome: SettledOutcome
    for outcome in ("aborted", "lost"):
        rollout = kit.rollout()
        sink = await kit.sink()
        entry = entry_of(rollout, "call-1", choice_index=1)
        await sink.begin_call(rollout, "call-1", choices=2)
        await sink.put(entry)
        await sink.settle_call(rollout, "call-1", outcome, "the client went away")
        snapshot = await kit.freeze(rollout)
        did = f"begin_call with choices=2, put one choice, settle_call {outcome}, freeze"
        expect_entries(snapshot, [entry], did=did)
        expect_outcome(snapshot, "call-1", outcome, did=did)
        expect_incomplete(snapshot, outcome == "lost", did=did)


@behaviour("aborted and no_generation don't make a snapshot incomplete.", "settle_call")
async def no_generation_and_aborted_do_not_make_it_incomplete(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    entry = entry_of(rollout, "call-1")
    await one.put(entry)
    for _ in range(2):
        await one.settle_call(rollout, "refused", "no_generation", "HTTP 429")
        await other.settle_call(rollout, "cut-off", "aborted", "the client went away")
    snapshot = await kit.freeze(rollout)
    did = "put one call, settle two others as no_generation and aborted, twice, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_outcome(snapshot, "call-1", "recorded", did=did)
    expect_outcome(snapshot, "refused", "no_generation", did=did)
    expect_outcome(snapshot, "cut-off", "aborted", did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour("settle_call with `lost` says what mark_incomplete says.", "settle_call")
async def a_call_settled_as_lost_makes_it_incomplete(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    await sink.settle_call(rollout, "call-1", "lost", "fewer ids than usage.completion_tokens")
    snapshot = await kit.freeze(rollout)
    expect_outcome(snapshot, "call-1", "lost", did="settle_call lost in a new rollout, freeze")
    expect_incomplete(snapshot, True, did="settle_call lost in a new rollout, freeze")


@behaviour("settle_call takes no_generation, aborted and lost; anything else is a ValueError.", "settle_call")
async def an_unknown_outcome_is_refused(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entry = entry_of(rollout, "call-1")
    await sink.put(entry)
    for outcome in ("recorded", "open", "conflict", "finished", "", "LOST"):
        work = sink.settle_call(rollout, "call-2", cast(Any, outcome))
        await expect_refusal(work, ValueError, did=f"settle_call with outcome {outcome!r}")
    snapshot = await kit.freeze(rollout)
    did = "put one call, try to settle another with outcomes that don't exist, freeze"
    expect_entries(snapshot, [entry], did=did)
    expect_incomplete(snapshot, False, did=did)


@behaviour("An aborted call may have an entry with the tokens seen, and stays aborted.", "settle_call")
async def an_aborted_call_keeps_its_entry(kit: Kit) -> None:
    for settle_first in (True, False):
        rollout = kit.rollout()
        sink = await kit.sink()
        entry = entry_of(rollout, "call-1", finish_reason="aborted")
        if settle_first:
            await sink.settle_call(rollout, "call-1", "aborted")
        await sink.put(entry)
        if not settle_first:
            await sink.settle_call(rollout, "call-1", "aborted")
        snapshot = await kit.freeze(rollout)
        did = f"{'settle_call aborted, put' if settle_first else 'put, settle_call aborted'} of one call, freeze"
        expect_entries(snapshot, [entry], did=did)
        expect_outcome(snapshot, "call-1", "aborted", did=did)
        expect_incomplete(snapshot, False, did=did)


@behaviour(_PRECEDENCE, "settle_call")
async def outcomes_hold_by_precedence(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    statements: dict[str, tuple[list[str], str]] = {
        "put-after-no-generation": (["no_generation", "put"], "recorded"),
        "put-after-lost": (["lost", "put"], "recorded"),
        "no-generation-after-put": (["put", "no_generation"], "recorded"),
        "lost-after-no-generation": (["no_generation", "lost"], "lost"),
        "no-generation-after-lost": (["lost", "no_generation"], "lost"),
        "aborted-after-lost": (["lost", "aborted"], "aborted"),
        "lost-after-aborted": (["aborted", "lost"], "aborted"),
        "conflict-after-aborted": (["aborted", "put", "conflict"], "conflict"),
        "aborted-after-conflict": (["put", "conflict", "aborted"], "conflict"),
        "lost-after-conflict": (["put", "conflict", "lost"], "conflict"),
    }
    for call, (said, _) in statements.items():
        for statement in said:
            if statement == "put":
                await sink.put(entry_of(rollout, call))
            elif statement == "conflict":
                conflicting = entry_of(rollout, call, content="other")
                await expect_refusal(sink.put(conflicting), ConflictError, did="put two contents of one call")
            else:
                await sink.settle_call(rollout, call, cast(SettledOutcome, statement))
    snapshot = await kit.freeze(rollout)
    for call, (said, outcome) in statements.items():
        expect_outcome(snapshot, call, outcome, did=f"say {', then '.join(said)} of one call, freeze")


@behaviour(
    "A late settlement that changes an outcome moves the version by one when it returns.", "begin_call", "settle_call"
)
async def a_late_settlement_moves_the_version(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entry = entry_of(rollout, "call-1")
    await sink.begin_call(rollout, "call-2")
    await sink.put(entry)
    first = await kit.freeze(rollout)
    await sink.settle_call(rollout, "call-2", "aborted")
    did = "begin_call of one call, put another, freeze, settle the first as aborted"
    stale = await kit.retire(rollout, first.snapshot_id, first.version)
    expect_answer(stale, False, did=f"{did}, retire the version frozen before")
    second = await kit.freeze(rollout)
    expect_pair(second, first.snapshot_id, first.version + 1, did=f"{did}, freeze")
    expect_outcome(second, "call-2", "aborted", did=f"{did}, freeze")
    expect_incomplete(second, False, did=f"{did}, freeze")
    expect_entries(second, [entry], did=f"{did}, freeze")
    await sink.settle_call(rollout, "call-2", "aborted")
    third = await kit.freeze(rollout)
    expect_pair(third, second.snapshot_id, second.version, did=f"{did}, freeze, repeat the settlement, freeze")
    answer = await kit.retire(rollout, third.snapshot_id, third.version)
    expect_answer(answer, True, did=f"{did}, freeze, retire")


@behaviour("A settlement after retirement is accepted without an error, and never revives the rollout.", "settle_call")
async def settlements_after_retirement_are_accepted_and_revive_nothing(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    await one.put(entry_of(rollout, "call-1"))
    snapshot = await kit.freeze(rollout)
    await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
    await one.settle_call(rollout, "late", "lost")
    await other.settle_call(rollout, "call-1", "aborted")
    did = "put, freeze, retire, settle_call"
    await expect_refusal(kit.freeze(rollout), RetiredError, did=f"{did}, freeze")
    await expect_refusal(one.put(entry_of(rollout, "late")), RetiredError, did=f"{did}, put")
    repeated = await kit.retire(rollout, snapshot.snapshot_id, snapshot.version)
    expect_answer(repeated, True, did=f"{did}, repeat the retire")
