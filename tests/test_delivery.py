"""Finalizing records: what gets tokens, what is masked, what is kept, and what may be retired."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.agent_runs import (
    AgentRun,
    MakeStore,
    carriers,
    function_call,
    message,
    reasoning,
    result,
)
from tests.agent_runs import stores as _stores
from tokcap import FileStore
from tokcap.delivery import Finalized, finalize_rollout, reset_rollouts, retire_rollout, rollout_id_of
from tokcap.delivery.finalize import _plain
from tokcap.errors import BusyError, InvalidIdError, InvalidOptionError, StaleAttemptError
from tokcap.trajectory import rebuild_response

stores = _stores


async def finalized(record: dict[str, Any], source: Any, **options: Any) -> Finalized:
    done = await finalize_rollout(record, source, **options)
    assert done is not None
    return done


async def two_turns(store: Any, rollout_id: str = "r") -> AgentRun:
    """A tool call, its result, an answer."""
    run = AgentRun(store, rollout_id)
    await run.call("c1", [reasoning("hm"), function_call("add", '{"a": 1}')])
    run.read(7, 8)
    await run.call("c2", [message("It is 42.")])
    return run


def record_of(*output: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rollout_id": "r", "reward": 0.5, "response": {"id": "own", "output": list(output)}, **more}


TWO_TURNS = (function_call("add", '{"a": 1}'), result("call_add"), message("It is 42."))


# ---- which rollout a record names


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"rollout_id": "mine"}, "mine"),
        ({"_ng_rollout_id": "mine"}, "mine"),
        ({"rollout_id": "mine", "_ng_rollout_id": "mine"}, "mine"),
        ({"rollout_id": "mine", "_ng_task_index": 1, "_ng_rollout_index": 2}, "mine"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0}, "3-0"),
        ({"_ng_task_index": 3.0, "_ng_rollout_index": "4"}, "3-4"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_attempt_index": 0}, "3-0"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_attempt_index": 2}, "3-0-a2"),
        ({"_ng_rollout_id": "mine", "_ng_attempt_index": 1}, "mine-a1"),
        ({"_ng_task_index": 3}, None),
        ({"_ng_rollout_index": 3}, None),
        ({}, None),
    ],
)
def test_rollout_id_is_the_explicit_one_or_that_of_gym_indices(record: dict[str, Any], expected: str | None) -> None:
    assert rollout_id_of(record) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"rollout_id": "one", "_ng_rollout_id": "other"},
        {"rollout_id": "../up"},
        {"rollout_id": "line\n"},
        {"rollout_id": ""},
        {"rollout_id": 7},
        {"_ng_task_index": True, "_ng_rollout_index": 0},
        {"_ng_task_index": 0, "_ng_rollout_index": -1},
        {"_ng_task_index": 1.5, "_ng_rollout_index": 0},
        {"_ng_task_index": "x", "_ng_rollout_index": 0},
        {"rollout_id": "mine", "_ng_attempt_index": "first"},
    ],
)
def test_malformed_rollout_id_is_refused_and_never_repaired(record: dict[str, Any]) -> None:
    with pytest.raises(InvalidIdError):
        rollout_id_of(record)


# ---- what is replaced


def test_rule_25_only_the_output_changes_and_tool_results_stay_in_place(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        run = await two_turns(store)
        record = record_of(*TWO_TURNS, usage={"input_tokens": 1})
        before = copy.deepcopy(record)
        done = await finalized(record, store)
        assert not done.masked
        assert done.retirable
        assert [item["type"] for item in record["response"]["output"]] == [
            "reasoning",
            "function_call",
            "function_call_output",
            "message",
        ]
        assert record["response"]["output"][2] == before["response"]["output"][1]
        assert carriers(record) == [([1, 2, 3], [100, 101]), (run.ids[:-2], [102, 103])]
        told = record.pop("_ng_token_capture")
        assert told["delivered"] == 4
        assert told["delivered_fraction"] == 1.0
        assert told["reasons"] == []
        record["response"]["output"] = before["response"]["output"]
        assert record == before
        await store.close()

    asyncio.run(body())


def test_rule_23_a_record_without_a_response_gets_the_rebuilt_one(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record: dict[str, Any] = {"rollout_id": "r"}
        await finalized(record, store)
        assert len(carriers(record)) == 2
        assert record["response"]["usage"] == {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
        await store.close()

    asyncio.run(body())


def test_an_output_of_the_last_answer_alone_gets_the_calls_before_it(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(message("It is 42."))
        await finalized(record, store)
        assert [item["type"] for item in record["response"]["output"]] == ["reasoning", "function_call", "message"]
        assert len(carriers(record)) == 2
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("output", [(message("AGENT TIMED OUT"),), (function_call("add", '{"a": 1}'),)])
def test_rule_25_an_answer_that_nobody_captured_keeps_its_output(stores: MakeStore, output: tuple[Any, ...]) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*output)
        before = copy.deepcopy(record["response"])
        done = await finalized(record, store)
        assert done.reasons == ("not_aligned",)
        assert record["response"] == before
        await store.close()

    asyncio.run(body())


class ResponseObject:
    """A response that is no mapping."""

    output = (message("It is 42."),)


@pytest.mark.parametrize("response", ["text", 5, [], ResponseObject()], ids=["text", "number", "list", "object"])
def test_rule_25_a_response_that_is_no_mapping_is_kept_as_it_is(stores: MakeStore, response: object) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record: dict[str, Any] = {"rollout_id": "r", "response": response}
        done = await finalized(record, store)
        assert done.reasons == ("not_aligned",)
        assert record["response"] is response
        await store.close()

    asyncio.run(body())


def test_rule_25_tuples_and_mappings_that_cannot_be_changed_are_taken_too(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        response = MappingProxyType({"id": "own", "output": TWO_TURNS, "status": "completed"})
        record: dict[str, Any] = {"rollout_id": "r", "response": response}
        done = await finalized(record, store)
        assert not done.masked
        assert record["response"]["status"] == "completed"
        kinds = [item["type"] for item in record["response"]["output"]]
        assert kinds == ["reasoning", "function_call", "function_call_output", "message"]
        assert len(carriers(record)) == 2
        assert response["output"] == TWO_TURNS
        await store.close()

    asyncio.run(body())


def test_rule_25_a_tool_call_keeps_the_id_that_its_result_refers_to(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        call = {**function_call("add", '{"a": 1}'), "call_id": "short"}
        record = record_of(call, result("short"), message("It is 42."))
        await finalized(record, store)
        placed = {item["type"]: item for item in record["response"]["output"]}
        assert placed["function_call"]["call_id"] == placed["function_call_output"]["call_id"] == "short"
        await store.close()

    asyncio.run(body())


def test_rule_24_a_record_that_was_finalized_and_retired_before_stays_as_it_is(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*TWO_TURNS)
        assert await retire_rollout(await finalized(record, store), store)
        before = copy.deepcopy(record)
        again = await finalized(record, store)
        assert (again.native, again.masked, again.retirable) == (True, False, False)
        assert record == before
        without = await finalized(record_of(*TWO_TURNS), store)
        assert without.reasons == ("unreadable",)
        await store.close()

    asyncio.run(body())


def test_rule_25_what_cannot_be_aligned_keeps_its_output_and_its_evidence(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(function_call("subtract", '{"a": 1}'), result("x"), message("It is 42."))
        before = copy.deepcopy(record["response"])
        done = await finalized(record, store)
        assert done.reasons == ("not_aligned",)
        assert record["response"] == before
        assert record["mask_sample"] is True
        assert record["_ng_token_capture"]["reasons"] == ["not_aligned"]
        assert record["_ng_token_capture"]["delivered"] == 0
        assert not done.retirable
        assert not await retire_rollout(done, store)
        with await store.freeze("r") as snapshot:
            assert len(snapshot.entries) == 2
        await store.close()

    asyncio.run(body())


def test_hazard_07_earlier_segments_stay_without_tokens_and_the_delivered_fraction_says_so(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        run = AgentRun(store, "r")
        await run.call("c1", [function_call("add")])
        run.drift()
        run.read(7)
        await run.call("c2", [function_call("sub")])
        run.read(8)
        await run.call("c3", [message("done")])
        output = (function_call("add"), result("call_add"), function_call("sub"), result("call_sub"), message("done"))
        record = record_of(*copy.deepcopy(output))
        done = await finalized(record, store)
        assert not done.masked
        assert done.metrics["delivered_fraction"] == pytest.approx(4 / 6)
        assert done.metrics["segments"] == 2
        assert record["response"]["output"][:2] == [*output[:2]]
        assert [item[1] for item in carriers(record)] == [[102, 103], [104, 105]]
        masked = record_of(*copy.deepcopy(output))
        done = await finalized(masked, store, on_drift="mask")
        assert done.reasons == ("drift",)
        assert masked["response"]["output"] == [*output]
        await store.close()

    asyncio.run(body())


def test_an_on_drift_that_is_none_is_refused_before_anything_is_frozen(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            with pytest.raises(ValueError, match="on_drift"):
                await finalize_rollout({"rollout_id": "r"}, store, on_drift="bridge")  # type: ignore[arg-type]
            assert (await store.stat("r")).state == "absent"

    asyncio.run(body())


def test_mask_sample_is_set_when_masked_and_otherwise_left_as_it_is(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        for given in ({}, {"mask_sample": True}, {"mask_sample": False}):
            record = record_of(*TWO_TURNS, **given)
            assert not (await finalized(record, store)).masked
            assert {key: record[key] for key in ("mask_sample",) if key in record} == given
        nothing: dict[str, Any] = {"rollout_id": "empty", "mask_sample": False}
        assert (await finalized(nothing, store)).reasons == ("nothing_recorded",)
        assert nothing["mask_sample"] is True
        assert "response" not in nothing
        await store.close()

    asyncio.run(body())


def test_what_is_told_of_the_capture_is_plain_json(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        run = AgentRun(store, "r")
        await run.call("c1", [message("a")], log_probs=[None, -0.5])
        record: dict[str, Any] = {"rollout_id": "r"}
        done = await finalized(record, store)
        assert "unknown" in done.reasons
        told = json.loads(json.dumps(record["_ng_token_capture"], allow_nan=False))
        assert told == record["_ng_token_capture"]
        await store.close()

    asyncio.run(body())


def test_nothing_is_done_where_a_framework_reads_by_itself() -> None:
    record: dict[str, Any] = {"rollout_id": "../malformed"}
    assert asyncio.run(finalize_rollout(record, None)) is None
    assert record == {"rollout_id": "../malformed"}
    assert asyncio.run(retire_rollout(None, None)) is False


def test_a_named_call_decides_which_of_several_conversations_was_scored(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await AgentRun(store, "r").call("c1", [message("title")])
        other = AgentRun(store, "r", prompt=(9, 9))
        await other.call("c2", [message("answer")], sampled=[200])
        record: dict[str, Any] = {"rollout_id": "r"}
        assert (await finalized(record, store)).reasons == ("several_conversations",)
        record = {"rollout_id": "r"}
        assert not (await finalized(record, store, call_id="c2")).masked
        assert carriers(record) == [([9, 9], [200])]
        await store.close()

    asyncio.run(body())


def test_models_strict_and_declared_ids_reach_the_rebuild(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await AgentRun(store, "r").call("c1", [message("title")])
        await AgentRun(store, "r", prompt=(9, 9)).call("c2", [message("answer")], sampled=[200])
        await store.mark_incomplete("r", "c3")
        record: dict[str, Any] = {"rollout_id": "r"}
        assert not (await finalized(record, store, response_id="resp_c2")).masked
        assert carriers(record) == [([9, 9], [200])]
        masked = await finalized({"rollout_id": "r"}, store, response_id="resp_c2", strict=True)
        assert "strict:incomplete" in masked.reasons
        masked = await finalized({"rollout_id": "r"}, store, response_id="resp_c2", models="another")
        assert "other_model" in masked.reasons
        await store.close()

    asyncio.run(body())


def test_rule_25_prompts_that_do_not_extend_each_other_are_never_delivered(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        rebuilt = rebuild_response(*arguments, **options)
        rebuilt.items[1][0]["prompt_token_ids"][0] += 1
        return rebuilt

    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*copy.deepcopy(TWO_TURNS))
        monkeypatch.setattr("tokcap.delivery.finalize.rebuild_response", wrong)
        assert (await finalized(record, store)).reasons == ("not_aligned",)
        assert record["response"]["output"] == [*TWO_TURNS]
        await store.close()

    asyncio.run(body())


def test_numbers_that_json_lacks_are_null() -> None:
    told = _plain({"a": np.float64("inf"), "b": np.int64(3), "c": (1, np.float32(0.5)), "d": {1: b"x"}, "e": True})
    assert told == {"a": None, "b": 3, "c": [1, 0.5], "d": {"1": "b'x'"}, "e": True}
    json.dumps(told, allow_nan=False)


# ---- what goes wrong


class Broken:
    """A source that fails at one place."""

    def __init__(self, store: Any, *, freeze: BaseException | None = None, entries: Exception | None = None) -> None:
        self.store, self.error, self.entries = store, freeze, entries
        self.snapshots: list[Any] = []

    async def freeze(self, rollout_id: str) -> Any:
        if self.error is not None:
            raise self.error
        snapshot = BrokenSnapshot(await self.store.freeze(rollout_id), self.entries)
        self.snapshots.append(snapshot)
        return snapshot

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        raise BusyError("busy")

    async def close(self) -> None:
        await self.store.close()


class BrokenSnapshot:
    def __init__(self, snapshot: Any, error: Exception | None) -> None:
        self._snapshot, self._error = snapshot, error
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        if name == "entries" and self._error is not None:
            raise self._error
        return getattr(self._snapshot, name)

    def close(self) -> None:
        self.closed = True
        self._snapshot.close()


@pytest.mark.parametrize("failing", ["freeze", "entries"])
def test_a_failing_source_masks_the_record_with_the_error_and_raises_nothing(stores: MakeStore, failing: str) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        source = Broken(store, **{failing: OSError("the disk is gone")})
        record = record_of(*TWO_TURNS)
        before = copy.deepcopy(record["response"])
        done = await finalized(record, source)
        assert done.reasons == ("unreadable",)
        assert "the disk is gone" in record["_ng_token_capture"]["error"]
        assert record["response"] == before
        assert not done.retirable
        assert all(snapshot.closed for snapshot in source.snapshots)
        await store.close()

    asyncio.run(body())


def test_snapshots_are_closed_after_finalizing(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        source = Broken(store)
        assert (await finalized(record_of(*TWO_TURNS), source)).retirable
        assert [snapshot.closed for snapshot in source.snapshots] == [True]
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("record", [{"reward": 1.0}, {"rollout_id": "no/slash"}, {"_ng_task_index": -3}])
def test_a_record_that_names_no_rollout_is_masked(record: dict[str, Any], store_dir: Path) -> None:
    if "_ng_task_index" in record:
        record = {**record, "_ng_rollout_index": 1}

    async def body() -> None:
        async with FileStore(store_dir) as store:
            done = await finalized(record, store)
            assert done.reasons == ("no_rollout_id",)
            assert record["mask_sample"] is True
            assert not done.retirable
            assert [pair async for pair in store.rollouts()] == []

    asyncio.run(body())


def test_cancellation_passes_and_leaves_the_record_as_it_was(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*TWO_TURNS)
        before = copy.deepcopy(record)
        with pytest.raises(asyncio.CancelledError):
            await finalize_rollout(record, Broken(store, freeze=asyncio.CancelledError()))
        for turns in range(4):
            task = asyncio.ensure_future(finalize_rollout(record, store))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert record == before
        assert not (await finalized(record, store)).masked
        await store.close()

    asyncio.run(body())


def test_hazard_30_finalizing_waits_for_a_call_that_is_about_to_be_stored(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            run = await two_turns(store)
            await store.begin_call("r", "c3")
            record: dict[str, Any] = {"rollout_id": "r"}
            finalizing = asyncio.ensure_future(finalized(record, store))
            await asyncio.sleep(0.05)
            assert not finalizing.done()
            await run.answer("c3", [message("last")])
            assert not (await finalizing).masked
            assert len(carriers(record)) == 3
            await run.store.begin_call("other", "c1")
            assert (await finalized({"rollout_id": "other"}, store, wait_open_s=0)).reasons == ("nothing_recorded",)

    asyncio.run(body())


# ---- native ids


def native(
    item: dict[str, Any], prompt: Sequence[int], sampled: Sequence[int], log_probs: Any = None
) -> dict[str, Any]:
    known = [-0.5 - i / 8 for i in range(len(sampled))] if log_probs is None else log_probs
    return {
        **item,
        "prompt_token_ids": list(prompt),
        "generation_token_ids": list(sampled),
        "generation_log_probs": known,
    }


def native_turns(run: AgentRun) -> list[dict[str, Any]]:
    return native_turns_of(run.ids)


def native_turns_of(ids: Sequence[int]) -> list[dict[str, Any]]:
    return [native(TWO_TURNS[0], [1, 2, 3], [100, 101]), TWO_TURNS[1], native(TWO_TURNS[2], ids[:-2], [102, 103])]


def test_rule_24_native_ids_without_any_capture_are_untouched_unmasked_and_retirable(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        record = record_of(native(message("hi"), [1], [2]))
        before = copy.deepcopy(record)
        done = await finalized(record, store)
        assert record == before
        assert done.native
        assert not done.masked
        assert await retire_rollout(done, store)
        await store.close()

    asyncio.run(body())


def test_rule_24_native_ids_of_a_rollout_whose_calls_got_lost_are_masked(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await store.begin_call("r", "c1")
        done = await finalized(record_of(native(message("hi"), [1], [2])), store, wait_open_s=0)
        assert done.masked
        assert not done.retirable
        await store.close()

    asyncio.run(body())


def test_rule_24_native_ids_after_probes_and_refused_calls_only_are_untouched(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await store.begin_call("r", "c1")
        await store.settle_call("r", "c1", "no_generation")
        record = record_of(native(message("hi"), [1], [2]))
        assert not (await finalized(record, store)).masked
        assert "mask_sample" not in record
        await store.close()

    asyncio.run(body())


def test_rule_24_native_ids_that_equal_the_capture_are_untouched_and_retirable(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        run = await two_turns(store)
        output = native_turns(run)
        output[0]["generation_log_probs"] = [-0.5000000001, -0.6250000002]  # through text
        record = record_of(*output)
        before = copy.deepcopy(record)
        done = await finalized(record, store)
        assert record == before
        assert not done.masked
        assert await retire_rollout(done, store)
        await store.close()

    asyncio.run(body())


def test_rule_24_native_chat_messages_are_held_against_the_capture(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await AgentRun(store, "r").call("c1", [message("hi")])
        for sampled, masked in (([100, 101], False), ([100, 102], True)):
            chat = native({"role": "assistant", "content": "hi"}, [1, 2, 3], sampled)
            record = {"rollout_id": "r", "response": {"choices": [{"message": chat}]}}
            done = await finalized(record, store)
            assert done.native
            assert done.masked == masked
        await store.close()

    asyncio.run(body())


def test_finalizing_twice_before_retiring_is_fine(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*TWO_TURNS)
        first = await finalized(record, store)
        once = copy.deepcopy(record)
        again = await finalized(record, store)
        assert record == once
        assert again.native
        assert (again.snapshot_id, again.version, again.retirable) == (first.snapshot_id, first.version, True)
        await store.close()

    asyncio.run(body())


def _other_id(output: list[dict[str, Any]]) -> None:
    output[2]["generation_token_ids"][0] += 1


def _other_prompt(output: list[dict[str, Any]]) -> None:
    output[2]["prompt_token_ids"][0] += 1


def _other_log_prob(output: list[dict[str, Any]]) -> None:
    output[2]["generation_log_probs"][0] -= 1e-3


def _no_log_probs(output: list[dict[str, Any]]) -> None:
    del output[2]["generation_log_probs"]


def _unknown_log_prob(output: list[dict[str, Any]]) -> None:
    output[2]["generation_log_probs"][0] = None


def _text(output: list[dict[str, Any]]) -> None:
    output[2]["generation_token_ids"] = "102"


def _missing_call(output: list[dict[str, Any]]) -> None:
    for key in [key for key in output[0] if key.endswith(("_ids", "_probs"))]:
        del output[0][key]


def _fabricated(output: list[dict[str, Any]]) -> None:
    output[:] = [{**message("It is 42."), "generation_token_ids": [5]}]


def _one_more_that_is_none(output: list[dict[str, Any]]) -> None:
    output.append({**output[2], "prompt_token_ids": None})


def _twice(output: list[dict[str, Any]]) -> None:
    output.append(copy.deepcopy(output[2]))


@pytest.mark.parametrize(
    "change",
    [
        _other_id,
        _other_prompt,
        _other_log_prob,
        _no_log_probs,
        _unknown_log_prob,
        _text,
        _missing_call,
        _fabricated,
        _one_more_that_is_none,
        _twice,
    ],
)
def test_hazard_06_native_ids_that_differ_are_masked_and_the_evidence_is_kept(stores: MakeStore, change: Any) -> None:
    async def body() -> None:
        store = stores()
        run = await two_turns(store)
        output = native_turns(run)
        change(output)
        record = record_of(*output)
        before = copy.deepcopy(record["response"])
        done = await finalized(record, store)
        assert "native_ids_differ" in done.reasons
        assert record["response"] == before
        assert record["mask_sample"] is True
        assert not await retire_rollout(done, store)
        with await store.freeze("r") as snapshot:
            assert len(snapshot.entries) == 2
        await store.close()

    asyncio.run(body())


def test_hazard_06_each_native_item_is_another_call_with_its_own_prompt(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        run = await two_turns(store)
        await AgentRun(store, "r", prompt=(9, 9)).call("c3", [message("aside")], sampled=[102, 103])
        run.ids = run.ids[:-2]
        await run.call("c4", [message("It is 42.")], sampled=[102, 103])  # c2 sent again, answered alike
        run.ids = run.ids[:-2]
        repeated = native(TWO_TURNS[2], run.ids, [102, 103])
        elsewhere = native(TWO_TURNS[2], [8, 8], [102, 103])
        other = native(TWO_TURNS[2], run.ids, [102, 999])
        for extra, differs in ((), False), ((repeated,), False), ((elsewhere,), True), ((other,), True):
            record = record_of(*native_turns_of([*run.ids, 102, 103]), *extra)
            done = await finalized(record, store, call_id="c2")
            assert ("native_ids_differ" in done.reasons) == differs
        await store.close()

    asyncio.run(body())


def test_unknown_log_probs_of_native_ids_equal_unknown_ones(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await AgentRun(store, "r").call("c1", [message("hi")], log_probs=[None, -0.5])
        record = record_of(native(message("hi"), [1, 2, 3], [100, 101], [None, -0.5]))
        assert (await finalized(record, store)).reasons == ("unknown",)
        await store.close()

    asyncio.run(body())


def test_native_ids_tell_which_of_several_conversations_was_scored(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await AgentRun(store, "r").call("c1", [message("same")])
        await AgentRun(store, "r", prompt=(9, 9)).call("c2", [message("same")], sampled=[200])
        record = record_of(native(message("same"), [9, 9], [200]), id="x")
        assert not (await finalized(record, store)).masked
        forged = record_of(native(message("same"), [9, 9], [201]), id="x")
        assert "native_ids_differ" in (await finalized(forged, store)).reasons
        await store.close()

    asyncio.run(body())


def test_an_empty_list_of_native_ids_is_none(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*({**item, "generation_token_ids": []} for item in TWO_TURNS))
        done = await finalized(record, store)
        assert not done.native
        assert len(carriers(record)) == 2
        await store.close()

    asyncio.run(body())


def test_native_ids_of_a_record_without_an_id_have_nothing_to_be_held_against(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            record = {"response": {"output": [native(message("hi"), [1], [2])]}}
            before = copy.deepcopy(record)
            done = await finalized(record, store)
            assert record == before
            assert not done.masked
            assert not done.retirable

    asyncio.run(body())


# ---- the end of a rollout


def test_rule_26_finalizing_retires_nothing_and_retiring_names_exactly_what_was_read(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await two_turns(store)
            done = await finalized(record_of(*TWO_TURNS), store)
            assert (await store.stat("r")).state == "frozen"
            assert await retire_rollout(done, store)
            assert (await store.stat("r")).state == "retired"
            assert await retire_rollout(done, store)

    asyncio.run(body())


def test_retire_by_id_needs_the_pair_that_was_read(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        done = await finalized(record_of(*TWO_TURNS), store)
        with pytest.raises(TypeError, match="snapshot_id"):
            await retire_rollout("r", store)  # type: ignore[call-overload]
        assert not await retire_rollout("r", store, snapshot_id="0" * 32, version=done.version)
        assert not await retire_rollout("r", None, snapshot_id=done.snapshot_id, version=done.version)
        assert await retire_rollout("r", store, snapshot_id=done.snapshot_id, version=done.version)
        await store.close()

    asyncio.run(body())


def test_rule_26_a_late_mark_stops_a_stale_retire(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        record = record_of(*TWO_TURNS)
        done = await finalized(record, store)
        await stores().mark_incomplete("r")
        assert not await retire_rollout(done, store)
        with await store.freeze("r") as snapshot:
            assert len(snapshot.entries) == 2
            assert snapshot.version == done.version + 1
        await store.close()

    asyncio.run(body())


def test_hazard_18_a_retire_from_an_earlier_life_of_the_id_deletes_nothing(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        stale = await finalized(record_of(*TWO_TURNS), store)
        assert await reset_rollouts(["r"], store) == ("r",)
        await two_turns(stores())
        fresh = await finalized(record_of(*TWO_TURNS), store)
        assert fresh.version == stale.version
        assert not await retire_rollout(stale, store)
        assert await retire_rollout(fresh, store)
        await store.close()

    asyncio.run(body())


def test_hazard_17_marks_after_retirement_are_shown(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await two_turns(store)
            assert await retire_rollout(await finalized(record_of(*TWO_TURNS), store), store)
            await store.mark_incomplete("r", "c9")
            assert "c9" in " ".join((await store.stat("r")).late)

    asyncio.run(body())


def test_a_source_that_fails_to_retire_is_logged(stores: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store)
        done = await finalized(record_of(*TWO_TURNS), store)
        assert not await retire_rollout(done, Broken(store))
        assert "busy" in caplog.text
        assert await retire_rollout(done, store)
        await store.close()

    asyncio.run(body())


# ---- before a rollout is dispatched


class Resets:
    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    async def reset(self, *rollout_ids: str) -> None:
        self.calls.append(rollout_ids)


def test_rollouts_are_reset_in_one_call_each_once_and_those_without_an_id_skipped() -> None:
    source: Any = Resets()
    records: list[Any] = [{"rollout_id": "a"}, {}, "b", {"_ng_task_index": 1, "_ng_rollout_index": 2}, "a"]
    assert asyncio.run(reset_rollouts(records, source)) == ("a", "b", "1-2")
    assert asyncio.run(reset_rollouts("one", source)) == ("one",)
    assert asyncio.run(reset_rollouts({"rollout_id": "two"}, source)) == ("two",)
    assert asyncio.run(reset_rollouts([{}], source)) == ()
    assert source.calls == [("a", "b", "1-2"), ("one",), ("two",)]


def test_nothing_is_reset_if_one_id_is_malformed_or_the_source_cannot() -> None:
    source: Any = Resets()
    with pytest.raises(InvalidIdError):
        asyncio.run(reset_rollouts(["a", "b/c"], source))
    assert source.calls == []
    with pytest.raises(InvalidOptionError, match="reset"):
        asyncio.run(reset_rollouts(["a"], object()))  # type: ignore[arg-type]
    assert asyncio.run(reset_rollouts(["a"], None)) == ()


def test_hazard_16_a_straggler_of_the_last_attempt_reaches_nothing_after_a_reset(stores: MakeStore) -> None:
    async def body() -> None:
        writer, source = stores(), stores()
        straggler = AgentRun(writer, "r")
        await writer.begin_call("r", "old")
        await reset_rollouts([{"rollout_id": "r"}], source)
        await AgentRun(source, "r").call("c1", [message("new")])
        with pytest.raises(StaleAttemptError):
            await straggler.answer("old", [message("old")])
        record: dict[str, Any] = {"rollout_id": "r"}
        assert not (await finalized(record, source)).masked
        assert record["response"]["output"][0]["content"][0]["text"] == "new"
        await writer.close()
        await source.close()

    asyncio.run(body())
