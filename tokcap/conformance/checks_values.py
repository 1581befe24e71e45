"""Does a put come back exactly, whatever it holds, and is it the store's own afterwards?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..entry import TokenEntry
from .kit import Kit, ViolationError, expect, expect_entries
from .registry import behaviour
from .samples import entry_of, full_entry, ids_of, key_of

_EXACT = "Values come back exactly as they were put: ids by value, floats by bit pattern, contents equal."


async def _comes_back(kit: Kit, entries: list[TokenEntry], *, did: str) -> None:
    sink = await kit.sink()
    for entry in entries:
        await sink.put(entry)
    expect_entries(await kit.freeze(entries[0].rollout_id), entries, did=f"put {did}, freeze through another instance")


@behaviour(_EXACT)
async def every_field_comes_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    await _comes_back(kit, [full_entry(rollout, "call-1"), entry_of(rollout, "call-2")], did="an entry with all fields")


@behaviour("None becomes NaN; NaN and infinities are kept, never dropped, padded or refused, and cost no other record.")
async def non_finite_log_probs_come_back(kit: Kit) -> None:
    rollout = kit.rollout()
    values: list[list[float | None]] = [
        [None, -0.5, None, -0.25],
        [math.nan, -0.5],
        [-math.inf, -1.0, math.inf],
        [None],
        [-0.125],
    ]
    entries = [
        entry_of(rollout, f"call-{number}", generation=ids_of(f"g{number}", len(row)), log_probs=row)
        for number, row in enumerate(values)
    ]
    await _comes_back(kit, entries, did=f"log-probs {values}")


@behaviour("Positive log-probs are kept and flagged, not refused or clipped.")
async def positive_log_probs_are_kept(kit: Kit) -> None:
    rollout = kit.rollout()
    entry = entry_of(rollout, "call-1", generation=[5, 6, 7, 8], log_probs=[1e-7, 0.0, 3.5, -0.5])
    await _comes_back(kit, [entry], did="log-probs [1e-07, 0.0, 3.5, -0.5]")


@behaviour("Log-probs are float64; storage may be narrower only where that loses nothing.")
async def log_probs_keep_every_bit(kit: Kit) -> None:
    rollout = kit.rollout()
    single = [float(np.float32(-0.1)), float(np.float32(-1e-30)), -0.5, -1.0]
    double = [-0.1, -0.0, 0.0, -5e-324, -1e-300, -1.7976931348623157e308, -1.0000000000000002, math.pi]
    entries = [
        entry_of(rollout, "single", generation=ids_of("s", len(single)), log_probs=single),
        entry_of(rollout, "double", generation=ids_of("d", len(double)), log_probs=double),
        entry_of(rollout, "mixed", generation=ids_of("m", 12), log_probs=single + double),
    ]
    await _comes_back(kit, entries, did="log-probs that need 64 bits, -0.0 and denormals")


@behaviour("Token ids are 0..2^31-1.")
async def token_ids_keep_their_full_range(kit: Kit) -> None:
    rollout = kit.rollout()
    edges = [0, 1, 127, 128, 255, 256, 32_767, 32_768, 65_535, 65_536, 2**24 - 1, 2**24, 2**31 - 1]
    entries = [
        entry_of(rollout, "both", prompt=edges, generation=edges[::-1]),
        entry_of(rollout, "zeros", prompt=[0] * 50, generation=[0] * 50),
        entry_of(rollout, "largest", prompt=[2**31 - 1] * 3, generation=[2**31 - 1]),
    ]
    await _comes_back(kit, entries, did="token ids at the edges of 8, 16, 24 and 31 bits")


@behaviour("The prompt and the generation may be empty.")
async def empty_prompts_and_generations_come_back(kit: Kit) -> None:
    rollout = kit.rollout()
    entries = [
        entry_of(rollout, "no-prompt", prompt=[]),
        entry_of(rollout, "no-generation", generation=[], log_probs=[], pieces=[]),
        entry_of(rollout, "neither", prompt=[], generation=[], log_probs=[]),
        entry_of(rollout, "both"),
    ]
    await _comes_back(kit, entries, did="entries with an empty prompt, an empty generation, or both")


@behaviour("routed_experts keeps its dtype, its shape and its bytes.")
async def routed_experts_keep_dtype_and_shape(kit: Kit) -> None:
    rollout = kit.rollout()
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        np.arange(6, dtype=">i4").reshape(3, 2),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.array([0.5, math.nan, -0.0], dtype=np.float16),
        np.zeros((0, 4), dtype=np.int64),
        np.array([[True, False]]),
        np.array(7, dtype=np.uint16),
    ]
    entries = [entry_of(rollout, f"call-{number}", routed_experts=array) for number, array in enumerate(arrays)]
    await _comes_back(kit, entries, did=f"routed_experts of {[f'{a.dtype}{a.shape}' for a in arrays]}")


@behaviour("Contents never cost the token record: integers of any size, NaN and lone surrogates come back equal.")
async def big_integers_and_lone_surrogates_come_back(kit: Kit) -> None:
    rollout = kit.rollout()
    awkward: dict[str, Any] = {
        "big": [2**63, 2**64, 2**70 + 1, -(2**63) - 1, -(2**200), 2**63 - 1, -(2**63)],
        "surrogate": "broken \ud83d text \udc00",
        "key \ud800": {"\udfff": 1},
        "floats": [math.inf, -math.inf, 1e308, 5e-324, -0.0],
        "nan": math.nan,
        "kinds": [1, 1.0, True, None, "1", "", [], {}],
        "text": "\x00\x1f\u2028\ufeff\U0010ffff",
        "nested": _nested(100),
    }
    items = [{"type": "function_call", "arguments": '{"id": 1180591620717411303424}', "call": awkward}]
    entries = [
        entry_of(rollout, "call-1", output_items=items, sampling={"seed": 2**70}, extra=awkward),
        entry_of(rollout, "call-2", model="model \ud83d", response_id="\udc00", finish_reason="stop"),
    ]
    await _comes_back(kit, entries, did="70-bit integers, lone surrogates and other awkward JSON in all content fields")


def _nested(depth: int) -> Any:
    value: Any = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"in": value}
    return value


@behaviour("What JSON has no word for is replaced, and costs neither the token record nor its neighbours.")
async def contents_that_cannot_be_stored_do_not_cost_the_tokens(kit: Kit) -> None:
    rollout = kit.rollout()
    entries = [
        entry_of(rollout, "call-1", extra={"set": {1}, "bytes": b"\xff", "object": complex(1, 2), "keys": {1: 2}}),
        entry_of(rollout, "call-2"),
    ]
    await _comes_back(kit, entries, did="extra with a set, bytes, an object and integer keys")


@behaviour(_EXACT)
async def a_big_entry_comes_back_exact(kit: Kit) -> None:
    rollout = kit.rollout()
    entry = entry_of(
        rollout, "call-1", prompt=ids_of("big prompt", 200_000), generation=ids_of("big generation", 20_000)
    )
    await _comes_back(kit, [entry, entry_of(rollout, "call-2")], did="an entry of 220,000 tokens and a small one")


@behaviour("An entry owns its data: what a caller changes after the put reaches neither the store nor a snapshot.")
async def later_changes_by_the_caller_do_not_reach_the_store(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    prompt, generation = np.array(ids_of("p", 50), np.int32), np.array(ids_of("g", 10), np.int32)
    log_probs, experts = np.linspace(-2.0, -0.1, 10), np.ones((10, 2), np.uint8)
    item: dict[str, Any] = {"type": "message", "content": [{"text": "as put"}]}
    extra: dict[str, Any] = {"note": ["as put"]}
    pieces = [b"p"] * 10

    def made() -> TokenEntry:
        return entry_of(
            rollout,
            "call-1",
            prompt=prompt,
            generation=generation,
            log_probs=log_probs,
            routed_experts=experts,
            output_items=[item],
            extra=extra,
            pieces=pieces,
        )

    given, kept = made(), made()
    await sink.put(given)
    for array in (prompt, generation, log_probs, experts):
        array.fill(1)
    for content in (item["content"][0], extra):
        content["note"] = "changed by the caller"
    given.extra["note"] = "changed in the entry"
    given.output_items.append({"type": "added to the entry"})
    given.sampling["temperature"] = 9.9
    assert given.pieces is not None
    given.pieces.clear()
    did = "put an entry, change the caller's arrays and dicts and those of the entry object, freeze"
    expect_entries(await kit.freeze(rollout), [kept], did=did)


@behaviour("A snapshot belongs to its reader: what he changes in its contents reaches nobody else.")
async def changes_by_a_reader_do_not_reach_the_next_reader(kit: Kit) -> None:
    rollout = kit.rollout()
    sink, one, other = await kit.sink(), await kit.source(), await kit.source()
    entry = entry_of(rollout, "call-1", extra={"note": "as put"}, output_items=[{"type": "message"}])
    await sink.put(entry)
    first = (await one.freeze(rollout)).entries[0]
    first.extra["note"] = "changed by a reader"
    first.output_items.clear()
    for source in (one, other):
        snapshot = await source.freeze(rollout)
        expect_entries(snapshot, [entry], did="freeze, change extra and output_items of the entry read, freeze again")


@behaviour("Arrays handed out are read-only, int32 for ids and float64 for log-probs; `entries` is immutable.")
async def arrays_of_a_snapshot_are_read_only(kit: Kit) -> None:
    rollout = kit.rollout()
    sink = await kit.sink()
    entry = full_entry(rollout, "call-1")
    await sink.put(entry)
    snapshot = await kit.freeze(rollout)
    expect_entries(snapshot, [entry], did="put, freeze")
    expect(
        not hasattr(snapshot.entries, "append") and not hasattr(snapshot.entries, "__setitem__"),
        did="look at snapshot.entries",
        expected="an immutable sequence, a tuple for example",
        seen=f"a {type(snapshot.entries).__name__}, which can be changed",
    )
    for entry in snapshot.entries:
        for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"):
            _is_read_only(entry, field)


def _is_read_only(entry: TokenEntry, field: str) -> None:
    array = getattr(entry, field)
    dtypes = {"generation_log_probs": np.float64, "routed_experts": np.uint8}
    did = f"look at {field} of call {key_of(entry)[0]} in a snapshot"
    if not isinstance(array, np.ndarray):
        raise ViolationError(did, "a numpy array", f"a {type(array).__name__}")
    wanted = np.dtype(dtypes.get(field, np.int32))
    expect(
        array.dtype == wanted and not array.flags.writeable,
        did=did,
        expected=f"{wanted}, not writeable",
        seen=f"{array.dtype}, {'writeable' if array.flags.writeable else 'not writeable'}",
    )
