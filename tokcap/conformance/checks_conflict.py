"""Two different contents for one call: does everybody learn of it, and does the result depend on nothing else?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..entry import TokenEntry
from ..errors import ConflictError, FrozenError
from .kit import (
    Kit,
    ViolationError,
    expect,
    expect_entries,
    expect_incomplete,
    expect_outcome,
    expect_pair,
    expect_refusal,
    returned,
)
from .registry import behaviour
from .samples import difference, entry_of, ids_of, log_probs_of

_RULE = (
    "A put with other content for a stored call raises ConflictError, and the call is `conflict`, durably, before that."
)


@behaviour(_RULE)
async def a_conflicting_put_raises_and_marks_the_call(kit: Kit) -> None:
    for same_sink in (True, False):
        rollout = kit.rollout()
        one, other = await kit.sink(), await kit.sink()
        first, second = entry_of(rollout, "call-1", content="a"), entry_of(rollout, "call-1", content="b")
        await one.put(first)
        did = f"put two contents of one call through {'one sink' if same_sink else 'two sinks'}"
        await expect_refusal((one if same_sink else other).put(second), ConflictError, did=did)
        snapshot = await kit.freeze(rollout)
        did += ", freeze"
        expect_outcome(snapshot, "call-1", "conflict", did=did)
        expect_incomplete(snapshot, True, did=did)
        _is_one_of(snapshot.entries, (first, second), did=did)


@behaviour("Identical means equal field by field: equal tokens with any other field that differs are a conflict.")
async def any_field_that_differs_is_a_conflict(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    common: dict[str, Any] = {"prompt": ids_of("p", 30), "generation": [5, 6, 7]}
    differing: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "log-prob": ({"log_probs": [-1.0, -2.0, -3.0]}, {"log_probs": [-1.0, -2.0, -3.0000000000000004]}),
        "unknown-log-prob": ({"log_probs": [-1.0, None, -3.0]}, {"log_probs": [-1.0, 0.0, -3.0]}),
        "negative-zero": ({"log_probs": [-1.0, -0.0, -3.0]}, {"log_probs": [-1.0, 0.0, -3.0]}),
        "prompt": ({"prompt": ids_of("p", 30)}, {"prompt": ids_of("p", 30)[:-1]}),
        "extra": ({"extra": {"number": 1}}, {"extra": {"number": 1.5}}),
        "finish-reason": ({"finish_reason": "stop"}, {"finish_reason": "length"}),
        "routed-experts": ({"routed_experts": None}, {"routed_experts": [[1, 2]]}),
        "pieces": ({"pieces": None}, {"pieces": [b"a", b"b", b"c"]}),
    }
    for call, (first, second) in differing.items():
        await one.put(entry_of(rollout, call, **{**common, **first}))
        conflicting = entry_of(rollout, call, **{**common, **second})
        await expect_refusal(other.put(conflicting), ConflictError, did=f"put a call again with another {call}")
    snapshot = await kit.freeze(rollout)
    for call in differing:
        expect_outcome(snapshot, call, "conflict", did=f"put a call twice with another {call}, freeze")


@behaviour("Of two contents the same one is in the snapshot, whichever came first: no result depends on order.")
async def the_kept_entry_does_not_depend_on_the_order(kit: Kit) -> None:
    kept: list[dict[str, list[int]]] = []
    calls = [f"call-{number}" for number in range(10)]
    for order in (1, -1):
        rollout = kit.rollout()
        one, other = await kit.sink(), await kit.sink()
        for call in calls:
            # Nothing depends on the rollout id: both rollouts see the same two contents.
            pair = [
                entry_of(
                    rollout,
                    call,
                    prompt=ids_of(f"{call}/prompt", 20),
                    generation=ids_of(f"{call}/{name}", 10),
                    log_probs=log_probs_of(f"{call}/{name}", 10),
                )
                for name in ("a", "b")
            ][::order]
            await one.put(pair[0])
            await expect_refusal(other.put(pair[1]), ConflictError, did="put two contents of one call")
        snapshot = await kit.freeze(rollout)
        kept.append({entry.model_call_id: entry.generation_token_ids.tolist() for entry in snapshot.entries})
    expect(
        kept[0] == kept[1] and sorted(kept[0]) == sorted(calls),
        did="put contents A then B for ten calls of one rollout, B then A for the same calls of another, freeze both",
        expected="one entry per call, and for each call the same content in both snapshots",
        seen=f"{sum(kept[0].get(call) != kept[1].get(call) for call in calls)} calls differ; "
        f"{len(kept[0])} and {len(kept[1])} entries",
    )


@behaviour("A conflict concerns its call only; every other call of the rollout stays usable.")
async def a_conflict_leaves_other_calls_unharmed(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    before = [entry_of(rollout, f"before-{number}") for number in range(5)]
    after = [entry_of(rollout, f"after-{number}") for number in range(5)]
    await kit.put_in_order(one, before)
    first = entry_of(rollout, "disputed", content="a")
    second = entry_of(rollout, "disputed", content="b", prompt=before[0].prompt_token_ids)
    await one.put(first)
    await expect_refusal(other.put(second), ConflictError, did="put two contents of one call")
    await kit.put_in_order(one, after[:3])
    await kit.put_in_order(other, after[3:])
    snapshot = await kit.freeze(rollout)
    did = "put five calls, two contents of one call, five more calls, freeze"
    expect_entries(snapshot, [*before, *after, _is_one_of(snapshot.entries, (first, second), did=did)], did=did)
    for entry in before + after:
        expect_outcome(snapshot, entry.model_call_id, "recorded", did=did)


@behaviour("A conflict in one choice leaves the entries of the other choices as they are.")
async def a_conflict_in_one_choice_leaves_the_others(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    kept = [entry_of(rollout, "call-1", choice_index=choice) for choice in (0, 2)]
    first = entry_of(rollout, "call-1", choice_index=1, content="a")
    second = entry_of(rollout, "call-1", choice_index=1, content="b")
    await kit.put_in_order(sink, [kept[0], first, kept[1]])
    await expect_refusal(sink.put(second), ConflictError, did="put two contents of choice 1")
    snapshot = await kit.freeze(rollout)
    did = "put choices 0, 1 and 2 of one call, another content of choice 1, freeze"
    expect_entries(snapshot, [*kept, _is_one_of(snapshot.entries, (first, second), did=did)], did=did)
    expect_outcome(snapshot, "call-1", "conflict", did=did)


@behaviour("Two contents that race: at most one put returns, and the call is `conflict` either way.")
async def concurrent_conflicting_puts_mark_the_call(kit: Kit) -> None:
    rollout = kit.rollout()
    sinks = [await kit.sink(), await kit.sink()]
    pairs = [[entry_of(rollout, f"call-{number}", content=name) for name in "ab"] for number in range(20)]
    puts = [[kit.start(sinks[side].put(entry)) for side, entry in enumerate(pair)] for pair in pairs]
    await kit.finished((put for pair in puts for put in pair), within_s=20.0)
    snapshot = await kit.freeze(rollout)
    did = "put two contents of each of 20 calls at the same time through two sinks, freeze"
    for pair, (one, other) in zip(pairs, puts, strict=True):
        errors = [put.exception() for put in (one, other) if not returned(put) and not put.cancelled()]
        expect(
            bool(errors) and all(isinstance(error, ConflictError) for error in errors),
            did=did,
            expected=f"ConflictError for at least one put of {pair[0].model_call_id}, and no other error",
            seen=f"{[repr(error) for error in errors]}",
        )
        expect_outcome(snapshot, pair[0].model_call_id, "conflict", did=did)
        _is_one_of([e for e in snapshot.entries if e.model_call_id == pair[0].model_call_id], pair, did=did)
    expect_incomplete(snapshot, True, did=did)


@behaviour("A conflicting put after freeze raises FrozenError, and the call becomes `conflict` in a new version.")
async def a_conflicting_put_after_freeze_moves_the_version(kit: Kit) -> None:
    rollout = kit.rollout()
    one, other = await kit.sink(), await kit.sink()
    first, second = entry_of(rollout, "call-1", content="a"), entry_of(rollout, "call-1", content="b")
    untouched = entry_of(rollout, "call-2")
    await kit.put_in_order(one, [first, untouched])
    old = await kit.freeze(rollout)
    did = "put, freeze, put another content of the same call"
    await expect_refusal(other.put(second), FrozenError, did=did)
    stale = await kit.retire(rollout, old.snapshot_id, old.version)
    expect(stale is False, did=f"{did}, retire the frozen version", expected="False: it is stale", seen=repr(stale))
    new = await kit.freeze(rollout)
    did += ", freeze again"
    expect_pair(new, old.snapshot_id, old.version + 1, did=did)
    expect_outcome(new, "call-1", "conflict", did=did)
    expect_incomplete(new, True, did=did)
    expect_entries(new, [untouched, _is_one_of(new.entries, (first, second), did=did)], did=did)


def _is_one_of(entries: Sequence[TokenEntry], candidates: Sequence[TokenEntry], *, did: str) -> TokenEntry:
    """The one entry of the disputed call must be exactly one of the contents; which one is the store's choice."""
    call, choice = candidates[0].model_call_id, candidates[0].choice_index
    found = [entry for entry in entries if (entry.model_call_id, entry.choice_index) == (call, choice)]
    expect(
        len(found) == 1, did=did, expected=f"one entry of call {call}, choice {choice}", seen=f"{len(found)} entries"
    )
    for candidate in candidates:
        if not difference(found[0], candidate):
            return candidate
    raise ViolationError(did, f"one of the contents put for call {call}", difference(found[0], candidates[0]))
