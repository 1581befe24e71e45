"""The capture point: every way in which a model call can end leaves the outcome that is true of it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.memory_store import MemoryState, MemoryStore
from tests.recordings import RecordedCall, rollouts
from tokcap import FileStore, TokenEntry
from tokcap.capture import (
    CaptureContext,
    capture_parsed,
    capture_tokens,
    captured_call,
    commit_entry,
    current_capture_context,
    note_delivery,
    register_call_intent,
    reset_capture_context,
    set_capture_context,
    settle,
)
from tokcap.capture.shapes import StreamJoiner, parse_answer
from tokcap.digests import answer_digest, request_digests
from tokcap.errors import (
    CaptureError,
    FrozenError,
    InvalidEntryError,
    InvalidIdError,
    InvalidOutcomeError,
    RetiredError,
)

ROLLOUT, CALL = "r-1", "c-1"
PROMPT, IDS, LOG_PROBS = [11, 12, 13], [7001, 7002], [-0.25, -1.5]
REQUEST = {"messages": [{"role": "user", "content": "a secret question"}], "temperature": 0.7, "top_p": None}


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, store_dir: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryStore(MemoryState())
    else:
        with FileStore(store_dir, require_intent=True, sweep_every_s=0) as file_store:
            yield file_store


@pytest.fixture
def file_store(store_dir: Path) -> Iterator[FileStore]:
    with FileStore(store_dir, require_intent=True, sweep_every_s=0) as file_store:
        yield file_store


def choice_of(ids: list[int], log_probs: Sequence[float | None] | None, index: Any = 0, **more: Any) -> dict[str, Any]:
    content = [
        {"token": f"t{token}", "logprob": log_prob, "bytes": [120], "top_logprobs": []}
        for token, log_prob in zip(ids, log_probs or (), strict=False)
    ]
    return {
        "index": index,
        "message": {"role": "assistant", "content": "a secret answer"},
        "logprobs": None if log_probs is None else {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
        **more,
    }


def answer_of(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chat answer as vLLM gives it."""
    listed = list(choices) or [choice_of(IDS, LOG_PROBS)]
    sampled = sum(len(choice.get("token_ids") or ()) for choice in listed)
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "policy",
        "choices": listed,
        "prompt_token_ids": PROMPT,
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": sampled},
        **more,
    }


def without_ids(**usage: int) -> dict[str, Any]:
    choice = choice_of(IDS, LOG_PROBS)
    del choice["token_ids"]
    answer = answer_of(choice, usage={"prompt_tokens": 3, "completion_tokens": 2, **usage})
    del answer["prompt_token_ids"]
    return answer


def entry_of(call: str = CALL, ids: list[int] = IDS, *, rollout: str = ROLLOUT, **fields: Any) -> TokenEntry:
    return TokenEntry(rollout, call, PROMPT, ids, [-0.25] * len(ids), **fields)


def run(action: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(action)


async def under(context: CaptureContext, *actions: Callable[[], Coroutine[Any, Any, Any]]) -> CaptureContext:
    """Run the actions in turn with `context` as the current one."""
    token = set_capture_context(context)
    try:
        for action in actions:
            await action()
    finally:
        reset_capture_context(token)
    return context


async def captured(store: Any, response: Any, **known: Any) -> CaptureContext:
    """Intent and capture of one answer, as a server does it."""
    context = CaptureContext(ROLLOUT, CALL, store, **known)
    return await under(context, register_call_intent, lambda: capture_tokens(response))


async def frozen(store: Any, rollout: str = ROLLOUT) -> tuple[dict[str, str], list[TokenEntry], str]:
    """The outcomes by call, the entries, and all that was said about why."""
    with await store.freeze(rollout) as snapshot:
        outcomes = {call.model_call_id: call.outcome for call in snapshot.calls}
        details = " ".join(call.detail for call in snapshot.calls)
        return outcomes, list(snapshot.entries), details


async def outcome_of(store: Any) -> str:
    outcomes, _, _ = await frozen(store)
    assert list(outcomes) == [CALL]
    return outcomes[CALL]


# ---- the sinks that servers bring


class MinimalSink:
    """What every sink has, and nothing else."""

    def __init__(self) -> None:
        self.entries: list[TokenEntry] = []
        self.marked: list[tuple[str, str]] = []

    async def put(self, entry: TokenEntry) -> None:
        self.entries.append(entry)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.marked.append((rollout_id, model_call_id))

    async def close(self) -> None: ...


class FailingSink:
    """A store, some methods of which fail."""

    def __init__(self, store: Any, **errors: BaseException) -> None:
        self._store, self._errors = store, errors

    def __getattr__(self, name: str) -> Any:
        if name not in self._errors:
            return getattr(self._store, name)

        async def fail(*arguments: Any, **known: Any) -> None:
            raise self._errors[name]

        return fail


class GatedSink:
    """A store whose puts wait at a gate."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(self, entry: TokenEntry) -> None:
        self.reached.set()
        await self.gate.wait()
        await self._store.put(entry)


# ---- durable before return


def test_the_record_is_durable_before_capture_returns(file_store: FileStore, store_dir: Path) -> None:
    async def serve() -> None:
        await captured(file_store, answer_of(), request=REQUEST)
        with FileStore(store_dir, read_only=True) as onlooker, onlooker.read_now(ROLLOUT) as seen:
            entry = seen.entries[0]
            assert [call.outcome for call in seen.calls] == ["recorded"]
        assert entry.prompt_token_ids.tolist() == PROMPT
        assert entry.generation_token_ids.tolist() == IDS
        assert entry.generation_log_probs.tolist() == LOG_PROBS

    run(serve())


def test_the_intent_is_durable_before_generation(file_store: FileStore, store_dir: Path) -> None:
    async def serve() -> None:
        context = CaptureContext(
            ROLLOUT, CALL, file_store, request=REQUEST, retry_count=2, idempotency_key="k", choices=1
        )
        await under(context, register_call_intent)
        with FileStore(store_dir, read_only=True) as onlooker, onlooker.read_now(ROLLOUT) as seen:
            (call,) = seen.calls
        assert (call.model_call_id, call.outcome, call.retry_count, call.idempotency_key) == (CALL, "open", 2, "k")
        assert tuple(call.request_digests) == request_digests(REQUEST)

    run(serve())


def test_digests_that_are_given_are_stored_as_they_are(file_store: FileStore) -> None:
    async def serve() -> None:
        digests = (b"0" * 16, b"1" * 16)
        await captured(file_store, answer_of(), request=REQUEST, request_digests=digests)
        with await file_store.freeze(ROLLOUT) as snapshot:
            assert tuple(snapshot.calls[0].request_digests) == digests

    run(serve())


# ---- the answers of the table


def null_log_probs() -> dict[str, Any]:
    return answer_of(choice_of([1, 2, 3], [-0.5, None, math.nan]))


TABLE = {
    "recorded": (answer_of(), 1, "recorded", ""),
    "recorded-two-choices": (
        answer_of(choice_of(IDS, LOG_PROBS), choice_of([5], [-0.5], 1)),
        2,
        "recorded",
        "",
    ),
    "log-probs-null-in-places": (null_log_probs(), 1, "recorded", ""),
    "log-probs-missing": (answer_of(choice_of(IDS, None)), 1, "recorded", ""),
    "nothing-sampled": (without_ids(completion_tokens=0), 1, "no_generation", "usage"),
    "no-ids": (without_ids(), 1, "lost", "the answer holds no token ids"),
    "ids-on-one-choice-only": (
        answer_of(choice_of(IDS, LOG_PROBS), choice_of(IDS, LOG_PROBS, 1, token_ids=None)),
        2,
        "lost",
        "",
    ),
    "fewer-choices-than-asked": (answer_of(), 2, "lost", ""),
    "two-sources-disagree": (
        answer_of(choice_of(IDS, LOG_PROBS, message={"content": "x", "generation_token_ids": [1, 2]})),
        1,
        "lost",
        "",
    ),
    "fewer-ids-than-sampled": (answer_of(usage={"prompt_tokens": 3, "completion_tokens": 3}), 1, "lost", ""),
    "no-json": ("<html>", 1, "lost", "str"),
    "empty": (None, 1, "lost", "NoneType"),
    "engine-aborted": (answer_of(choice_of(IDS, LOG_PROBS, finish_reason="abort")), 1, "aborted", ""),
}


@pytest.mark.parametrize("case", TABLE)
def test_each_answer_has_its_outcome(store: Any, case: str) -> None:
    response, choices, outcome, why = TABLE[case]

    async def serve() -> None:
        await captured(store, response, choices=choices)
        outcomes, entries, details = await frozen(store)
        assert outcomes == {CALL: outcome}
        assert why in details
        assert bool(details) == (outcome != "recorded")
        assert len(entries) == (choices if outcome == "recorded" else outcome == "aborted")

    run(serve())


def test_hazard_10_fewer_ids_than_the_engine_counted_say_so(store: Any) -> None:
    """A parser swallowed a chunk."""
    run(captured(store, TABLE["fewer-ids-than-sampled"][0]))
    _, entries, details = run(frozen(store))
    assert entries == []
    assert "2" in details
    assert "3" in details


def test_hazard_09_unknown_log_probs_are_nan_in_their_places_and_nowhere_else(store: Any) -> None:
    """Never 0.0, never shifted."""
    run(captured(store, null_log_probs()))
    _, (entry,), _ = run(frozen(store))
    assert np.isnan(entry.generation_log_probs).tolist() == [False, True, True]
    assert entry.generation_log_probs[0] == -0.5
    assert "log_probs_missing" not in entry.extra


def test_missing_log_probs_are_all_nan_and_flagged(store: Any) -> None:
    run(captured(store, TABLE["log-probs-missing"][0]))
    _, (entry,), _ = run(frozen(store))
    assert np.isnan(entry.generation_log_probs).tolist() == [True, True]
    assert entry.extra["log_probs_missing"] is True


def test_an_answer_with_fewer_choices_than_the_call_has_is_lost_and_keeps_what_it_has(store: Any) -> None:
    async def serve() -> None:
        answer = parse_answer(answer_of())
        context = CaptureContext(ROLLOUT, CALL, store, choices=2)
        await under(context, register_call_intent, lambda: capture_parsed(answer))
        outcomes, entries, details = await frozen(store)
        assert (outcomes, len(entries)) == ({CALL: "lost"}, 1)
        assert "1 of 2" in details

    run(serve())


def test_an_answer_that_mentions_an_error_is_still_an_answer(store: Any) -> None:
    run(captured(store, answer_of(error={"message": "a warning", "code": 400})))
    assert run(outcome_of(store)) == "recorded"


def test_the_reason_of_a_loss_names_the_route(store: Any) -> None:
    run(captured(store, TABLE["two-sources-disagree"][0], path="/v1/chat/completions"))
    assert "/v1/chat/completions" in run(frozen(store))[2]


def test_choices_are_put_together(store: Any) -> None:
    together = []

    class Watched(FailingSink):
        async def put_many(self, entries: Iterable[TokenEntry]) -> None:
            listed = list(entries)
            together.append(len(listed))
            await self._store.put_many(listed)

    run(captured(Watched(store), TABLE["recorded-two-choices"][0], choices=2))
    assert together == [2]


def test_an_answer_that_the_engine_aborted_keeps_the_tokens_seen(store: Any) -> None:
    run(captured(store, TABLE["engine-aborted"][0]))
    _, (entry,), _ = run(frozen(store))
    assert entry.generation_token_ids.tolist() == IDS
    assert entry.finish_reason == "aborted"


@pytest.mark.parametrize("ids", [IDS, []])
def test_a_stream_that_ended_early_is_aborted_with_the_tokens_seen(store: Any, ids: list[int]) -> None:
    async def serve() -> None:
        log_probs: list[float | None] = [-0.5] * len(ids)
        seen = parse_answer(answer_of(choice_of(ids, log_probs, finish_reason=None)))
        context = CaptureContext(ROLLOUT, CALL, store)
        await under(context, register_call_intent, lambda: capture_parsed(seen, aborted=True))
        outcomes, entries, _ = await frozen(store)
        assert outcomes == {CALL: "aborted"}
        assert [(entry.generation_token_ids.tolist(), entry.finish_reason) for entry in entries] == (
            [(ids, "aborted")] if ids else []
        )

    run(serve())


@pytest.mark.parametrize("wrap", [lambda body: SimpleNamespace(model_dump=lambda: body), dict, json.loads])
def test_mappings_and_models_are_taken_alike(store: Any, wrap: Callable[[Any], Any]) -> None:
    response = wrap(json.dumps(answer_of()) if wrap is json.loads else answer_of())
    run(captured(store, response))
    assert run(outcome_of(store)) == "recorded"


def test_a_batch_of_native_answers_is_one_choice_each(store: Any) -> None:
    def native(ids: list[int]) -> dict[str, Any]:
        triples = [[-0.5, token, None] for token in ids]
        meta = {"id": "rid", "finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": len(ids)}
        return {
            "text": "x",
            "output_ids": ids,
            "prompt_token_ids": PROMPT,
            "meta_info": {**meta, "output_token_logprobs": triples},
        }

    request = {"input_ids": PROMPT, "sampling_params": {"n": 2, "temperature": 0.5, "max_new_tokens": 8}}
    run(captured(store, [native(IDS), native([9])], request=request, path="/generate"))
    outcomes, entries, _ = run(frozen(store))
    assert outcomes == {CALL: "recorded"}
    assert sorted((entry.choice_index, entry.generation_token_ids.tolist()) for entry in entries) == [
        (0, IDS),
        (1, [9]),
    ]
    assert entries[0].sampling == {"n": 2, "temperature": 0.5, "max_new_tokens": 8}


# ---- errors


@pytest.mark.parametrize(
    ("body", "status", "outcome"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 200, "no_generation"),
        ({"object": "error", "message": "too long", "code": 400}, 200, "no_generation"),
        ({"error": {"message": "slow down", "code": "rate_limit"}}, 429, "no_generation"),
        ({"error": {"message": "boom", "code": 500}}, 500, "lost"),
        ({"error": "boom"}, 200, "lost"),
        ({"detail": "gone"}, 499, "lost"),
    ],
)
def test_an_error_body_is_left_to_the_caller(store: Any, body: Any, status: int, outcome: str) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL) as context:
            await capture_tokens(body, status=status)
            assert (context.outcome, context.committed) == (None, False)
        assert await outcome_of(store) == outcome

    run(serve())


ROUTE = "http://engine:8000/v1/chat/completions"


class RefusedError(Exception):
    """As the usual clients raise it: with the URL at one place or another."""

    def __init__(self, status: int, url: str | None = ROUTE, at: str = "request") -> None:
        super().__init__("a secret answer")
        self.status_code = status
        if at:
            setattr(self, at, SimpleNamespace(url=url))
        else:
            self.url = url


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RefusedError(429), "no_generation"),
        (RefusedError(400, f"{ROUTE}/?a=b", "response"), "no_generation"),
        (RefusedError(404, "http://engine/inference/v1/generate", "request_info"), "no_generation"),
        (RefusedError(413, "http://engine/v1/responses", ""), "no_generation"),
        (RefusedError(404, "http://tools/v1/files"), "lost"),
        (RefusedError(404, "http://tools/?next=/v1/responses"), "lost"),
        (RefusedError(404, None), "lost"),
        (RefusedError(408), "lost"),
        (RefusedError(499), "lost"),
        (RefusedError(500), "lost"),
        (ValueError("a secret answer"), "lost"),
        (asyncio.CancelledError(), "aborted"),
    ],
)
def test_a_call_that_raises_has_an_outcome(store: Any, error: BaseException, outcome: str) -> None:
    async def serve() -> None:
        with pytest.raises(type(error)) as raised:
            async with captured_call(store, ROLLOUT, CALL):
                raise error
        assert raised.value is error
        outcomes, _, details = await frozen(store)
        assert outcomes == {CALL: outcome}
        assert "secret" not in details

    run(serve())


@pytest.mark.parametrize(("raised", "outcome"), [(429, "no_generation"), (404, "lost")])
def test_an_error_body_proves_a_refusal_that_is_raised_on_with_its_status(
    store: Any, raised: int, outcome: str
) -> None:
    async def serve() -> None:
        with suppress(RefusedError):
            async with captured_call(store, ROLLOUT, CALL):
                await capture_tokens({"error": {"message": "slow down"}}, status=429)
                raise RefusedError(raised, None)
        assert await outcome_of(store) == outcome

    run(serve())


def test_hazard_21_refusals_before_a_successful_retry_do_not_make_the_rollout_incomplete(store: Any) -> None:

    async def serve() -> None:
        for status in (429, 400):
            with suppress(RefusedError):
                async with captured_call(store, ROLLOUT):
                    raise RefusedError(status)
        async with captured_call(store, ROLLOUT):
            await capture_tokens(answer_of())
        with await store.freeze(ROLLOUT) as snapshot:
            assert snapshot.incomplete is False
            assert sorted(call.outcome for call in snapshot.calls) == ["no_generation", "no_generation", "recorded"]

    run(serve())


def test_a_call_in_which_nothing_was_captured_is_lost(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL):
            pass
        outcomes, _, details = await frozen(store)
        assert outcomes == {CALL: "lost"}
        assert "no answer was captured" in details

    run(serve())


def test_what_was_settled_or_recorded_inside_stays(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, "settled", CALL):
            await settle("no_generation", "the engine says so")
        with suppress(KeyError):
            async with captured_call(store, "recorded", CALL):
                await capture_tokens(answer_of())
                raise KeyError("after the answer")
        assert (await frozen(store, "settled"))[0] == {CALL: "no_generation"}
        assert (await frozen(store, "recorded"))[0] == {CALL: "recorded"}

    run(serve())


def test_ids_are_minted_and_different(store: Any) -> None:
    async def serve() -> list[str]:
        minted = []
        for _ in range(3):
            async with captured_call(store, ROLLOUT) as context:
                await capture_tokens(answer_of())
                minted.append(context.model_call_id)
        return minted

    assert set(run(serve())) == set(run(frozen(store))[0])
    assert len(run(frozen(store))[1]) == 3


# ---- the intent


def test_an_intent_that_is_refused_stops_the_call_before_generation(store: Any) -> None:
    async def serve() -> None:
        generated = []
        with await store.freeze(ROLLOUT) as snapshot:
            pass
        with pytest.raises(FrozenError):
            async with captured_call(store, ROLLOUT):
                generated.append(1)
        assert await store.retire(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        with pytest.raises(RetiredError):
            async with captured_call(store, ROLLOUT):
                generated.append(1)
        assert generated == []
        assert current_capture_context() is None

    run(serve())


def test_a_refused_intent_leaves_a_frozen_rollout_as_it_is(store: Any) -> None:
    async def serve() -> None:
        with await store.freeze(ROLLOUT) as before, suppress(FrozenError):
            async with captured_call(store, ROLLOUT):
                pass
        with await store.freeze(ROLLOUT) as after:
            assert (after.version, list(after.calls)) == (before.version, [])

    run(serve())


@pytest.mark.parametrize("error", [RuntimeError("down"), OSError(5, "io"), TypeError("no")])
def test_any_other_failure_of_the_intent_is_a_capture_error(store: Any, error: Exception) -> None:
    sink = FailingSink(store, begin_call=error)
    with pytest.raises(CaptureError, match=f"rollout {ROLLOUT}, call {CALL}") as raised:
        run(under(CaptureContext(ROLLOUT, CALL, sink), register_call_intent))
    assert raised.value.__cause__ is error


def test_an_intent_is_registered_once(store: Any) -> None:
    begun = []

    class CountingSink(FailingSink):
        async def begin_call(self, *ids: str, **known: Any) -> None:
            begun.append(ids)
            await self._store.begin_call(*ids, **known)

    run(under(CaptureContext(ROLLOUT, CALL, CountingSink(store)), register_call_intent, register_call_intent))
    assert begun == [(ROLLOUT, CALL)]


class TwoArguments(MinimalSink):
    begun: ClassVar[list[Any]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        self.begun.append({})


class ThreeArguments(MinimalSink):
    begun: ClassVar[list[Any]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1) -> None:
        self.begun.append({"choices": choices})


class AnyArguments(MinimalSink):
    begun: ClassVar[list[Any]] = []

    async def begin_call(self, rollout_id: str, model_call_id: str, **known: Any) -> None:
        self.begun.append(known)


def test_a_sink_is_told_what_its_begin_call_takes() -> None:
    for sink in (TwoArguments(), ThreeArguments(), AnyArguments()):
        for _ in range(2):
            context = CaptureContext(
                ROLLOUT, CALL, sink, choices=3, retry_count=1, idempotency_key="k", request=REQUEST
            )
            run(under(context, register_call_intent))
            assert context.intent_registered
    assert TwoArguments.begun == [{}, {}]
    assert ThreeArguments.begun == [{"choices": 3}] * 2
    everything = {"choices": 3, "retry_count": 1, "idempotency_key": "k", "request_digests": request_digests(REQUEST)}
    assert AnyArguments.begun == [everything] * 2


class SlowIntents(FailingSink):
    """A store whose intents wait at a gate."""

    def __init__(self, store: Any, **errors: BaseException) -> None:
        super().__init__(store, **errors)
        self.reached, self.gate = asyncio.Event(), asyncio.Event()

    async def begin_call(self, *ids: str, **known: Any) -> None:
        self.reached.set()
        await self.gate.wait()
        await self._store.begin_call(*ids, **known)


async def cancelled_while_beginning(sink: SlowIntents) -> None:
    async def call() -> None:
        async with captured_call(sink, ROLLOUT, CALL):
            raise AssertionError("generated")

    task = asyncio.create_task(call())
    await sink.reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    sink.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancellation_while_the_intent_is_written_proves_that_nothing_was_sampled(store: Any) -> None:
    async def serve() -> None:
        await cancelled_while_beginning(SlowIntents(store))
        assert await outcome_of(store) == "no_generation"

    run(serve())


def test_a_cancelled_intent_that_was_refused_is_not_settled(store: Any) -> None:
    async def serve() -> None:
        with await store.freeze(ROLLOUT) as before:
            await cancelled_while_beginning(SlowIntents(store))
        with await store.freeze(ROLLOUT) as after:
            assert (after.version, list(after.calls)) == (before.version, [])

    run(serve())


# ---- after generation nothing fails the call


def test_a_put_that_fails_makes_the_call_lost_and_not_the_answer_an_error(store: Any) -> None:
    sink = FailingSink(store, put=OSError(28, "No space left on device"))
    context = run(captured(sink, answer_of()))
    outcomes, entries, details = run(frozen(store))
    assert (outcomes, entries) == ({CALL: "lost"}, [])
    assert "No space left on device" in details
    assert context.outcome == "lost"


def test_hazard_08_put_and_mark_both_fail_and_the_intent_still_shows_the_call(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broken = RuntimeError("a secret answer")
    sink = FailingSink(store, put=broken, settle_call=broken, mark_incomplete=broken)
    context = run(captured(sink, answer_of()))
    assert run(outcome_of(store)) == "open"
    assert context.outcome is None
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "its intent is stored and shows it as open" in record.getMessage()


def test_without_an_intent_the_log_says_that_nothing_shows_the_call(caplog: pytest.LogCaptureFixture) -> None:
    broken = RuntimeError("down")
    sink = FailingSink(MinimalSink(), put=broken, mark_incomplete=broken, begin_call=broken, settle_call=broken)
    run(under(CaptureContext(ROLLOUT, CALL, sink), lambda: capture_tokens(answer_of())))
    assert "nothing stored shows that this call happened" in caplog.text


def test_a_capture_without_intent_is_lost_where_intents_are_required(file_store: FileStore) -> None:
    run(under(CaptureContext(ROLLOUT, CALL, file_store), lambda: capture_tokens(answer_of())))
    assert run(outcome_of(file_store)) == "lost"


def test_hazard_30_an_answer_that_comes_after_the_freeze_is_lost_in_a_new_version(store: Any) -> None:
    """It is seen, and nothing is written into the snapshot."""

    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL):
            with await store.freeze(ROLLOUT) as first:
                assert [call.outcome for call in first.calls] == ["open"]
            await capture_tokens(answer_of())
        with await store.freeze(ROLLOUT) as second:
            assert [call.outcome for call in second.calls] == ["lost"]
            assert (second.version, len(second.entries)) == (first.version + 1, 0)

    run(serve())


def test_hazard_16_a_straggler_of_a_reset_attempt_changes_nothing(store: Any, caplog: pytest.LogCaptureFixture) -> None:

    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL):
            await store.reset(ROLLOUT)
            async with captured_call(store, ROLLOUT, "new"):
                await capture_tokens(answer_of())
            await capture_tokens(answer_of())
        assert (await frozen(store))[0] == {"new": "recorded"}

    run(serve())
    assert "the reset removed its intent" in caplog.text
    assert "shows it as open" not in caplog.text


class Unreadable:
    def model_dump(self) -> Any:
        raise RecursionError("a secret answer")


ODD_ANSWERS: list[Any] = [
    Unreadable(),
    [],
    [None],
    {},
    {"choices": None},
    {"choices": [None]},
    {"choices": "x"},
    {"choices": [{"token_ids": "abc"}]},
    answer_of(choice_of([2**70], [-0.5])),
    answer_of(choice_of([-1, 5], LOG_PROBS)),
    answer_of(choice_of(IDS, LOG_PROBS, index="0")),
    answer_of(prompt_token_ids={"a": 1}),
    b"{}",
]


@pytest.mark.parametrize("at", range(len(ODD_ANSWERS)))
def test_no_answer_makes_the_capture_raise(store: Any, at: int) -> None:
    run(captured(store, ODD_ANSWERS[at]))
    outcomes, entries, details = run(frozen(store))
    assert (outcomes, entries) == ({CALL: "lost"}, [])
    assert details
    assert "secret" not in details


def test_hazard_26_odd_content_costs_no_record(store: Any) -> None:
    """A lone surrogate and a 70-bit integer."""
    call = {"id": "c", "type": "function", "function": {"name": "f\ud800", "arguments": '{"n": ' + str(2**70) + "}"}}
    message = {"role": "assistant", "content": "\udfff", "tool_calls": [call], "odd": 2**70}
    request = {"messages": [message], "seed": 2**70, "stop": ["\ud800"]}
    run(captured(store, answer_of(choice_of(IDS, LOG_PROBS, message=message)), request=request))
    outcomes, (entry,), _ = run(frozen(store))
    assert outcomes == {CALL: "recorded"}
    assert answer_digest(entry.output_items) == answer_digest([message])
    assert entry.sampling["seed"] == 2**70
    assert entry.sampling["stop"] == ["\ud800"]


def test_hazard_25_answers_that_differ_only_in_hidden_reasoning_stay_two_records(store: Any) -> None:

    async def serve() -> None:
        for call, ids in (("one", [1, 2]), ("two", [3, 2])):
            message = {"role": "assistant", "content": "42", "reasoning": f"hidden {call}"}
            async with captured_call(store, ROLLOUT, call):
                await capture_tokens(answer_of(choice_of(ids, LOG_PROBS, message=message)))
        outcomes, entries, _ = await frozen(store)
        assert set(outcomes.values()) == {"recorded"}
        assert {entry.model_call_id: entry.generation_token_ids.tolist() for entry in entries} == {
            "one": [1, 2],
            "two": [3, 2],
        }
        assert len({answer_digest(entry.output_items) for entry in entries}) == 1

    run(serve())


# ---- no context


def test_hazard_22_traffic_that_is_not_captured_leaves_no_trace(store: Any) -> None:

    async def serve() -> None:
        assert current_capture_context() is None
        await register_call_intent()
        await capture_tokens(answer_of())
        await commit_entry(entry_of())
        await settle("lost")
        await note_delivery("full")

    run(serve())
    assert run(frozen(store)) == ({}, [], "")


def test_concurrent_calls_do_not_see_each_other(store: Any) -> None:
    async def call(number: int) -> None:
        async with captured_call(store, ROLLOUT, f"c-{number}") as context:
            await asyncio.sleep(0)
            assert current_capture_context() is context
            await asyncio.gather(capture_tokens(answer_of(choice_of([number], [-0.5]))))
            assert current_capture_context() is context

    async def serve() -> None:
        await asyncio.gather(*(call(number) for number in range(30)))
        assert current_capture_context() is None
        _, entries, _ = await frozen(store)
        assert {entry.model_call_id: entry.generation_token_ids.tolist() for entry in entries} == {
            f"c-{number}": [number] for number in range(30)
        }

    run(serve())


def test_a_call_within_a_call_gives_the_outer_one_back(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, "outer") as outer:
            async with captured_call(store, ROLLOUT, "inner"):
                await capture_tokens(answer_of())
            assert current_capture_context() is outer
            await capture_tokens(answer_of(choice_of([9], [-0.5])))
        outcomes, _, _ = await frozen(store)
        assert outcomes == {"outer": "recorded", "inner": "recorded"}

    run(serve())


def test_a_generator_that_is_closed_elsewhere_still_settles_its_call(store: Any) -> None:
    async def stream() -> AsyncIterator[int]:
        async with captured_call(store, ROLLOUT, CALL):
            yield 1
            yield 2

    async def serve() -> None:
        events = stream()
        await asyncio.create_task(anext(events))  # type: ignore[arg-type]
        await events.aclose()  # type: ignore[attr-defined]
        assert await outcome_of(store) == "aborted"

    run(serve())


# ---- generators that take turns


Answering = Callable[[Any, str, bool], AsyncIterator[str]]


async def answering(store: Any, name: str, explicit: bool) -> AsyncIterator[str]:
    """A handler that streams: in a rollout and a call of its own name, with its first letter as the token id."""
    async with captured_call(store, name, name) as context:
        yield "chunk"
        answer = answer_of(choice_of([ord(name[0])], [-0.5]))
        await capture_tokens(answer, context=context if explicit else None)
        yield "last"


@asynccontextmanager
async def wrapped(store: Any, name: str) -> AsyncIterator[CaptureContext]:
    async with captured_call(store, name, name) as context:
        yield context


async def answering_in_a_wrapper(store: Any, name: str, explicit: bool) -> AsyncIterator[str]:
    async with wrapped(store, name) as context:
        yield "chunk"
        answer = answer_of(choice_of([ord(name[0])], [-0.5]))
        await asyncio.gather(capture_tokens(answer, context=context if explicit else None))
        yield "last"


ORDERS = ["abababc", "aabbb", "ababba", "abbaab", "abbbaa", "abcabcabc", "abccbacba", "abcacbbca"]


async def take_turns(store: Any, order: str, handler: Answering, *, explicit: bool) -> dict[str, tuple[str, list[int]]]:
    """Iterate one handler per letter in the given order, all in this task; then the outcome and ids of each."""
    handlers = {name: handler(store, name, explicit) for name in sorted(set(order))}
    for name in order:
        await anext(handlers[name], "")
    for events in handlers.values():
        async for _ in events:
            pass
    assert current_capture_context() is None
    await capture_tokens(answer_of(choice_of([1], [-0.5])))
    found = {}
    for name in handlers:
        outcomes, entries, _ = await frozen(store, name)
        found[name] = (outcomes[name], [int(each) for entry in entries for each in entry.generation_token_ids])
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("handler", [answering, answering_in_a_wrapper])
def test_generators_that_take_turns_and_pass_the_call_are_recorded(store: Any, order: str, handler: Answering) -> None:
    found = run(take_turns(store, order, handler, explicit=True))
    assert found == {name: ("recorded", [ord(name)]) for name in sorted(set(order))}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("handler", [answering, answering_in_a_wrapper])
def test_generators_that_take_turns_never_record_under_the_call_of_another(
    store: Any, order: str, handler: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    found = run(take_turns(store, order, handler, explicit=False))
    assert all(seen in (("recorded", [ord(name)]), ("lost", [])) for name, seen in found.items())
    if order.startswith("aba"):
        assert found["a"] == ("lost", [])
        assert "take turns in one task" in caplog.text


def test_a_block_that_ends_does_not_take_the_current_call_from_one_that_goes_on(store: Any) -> None:
    found = run(take_turns(store, "abaabb", answering, explicit=False))
    assert found == {"a": ("lost", []), "b": ("recorded", [ord("b")])}


def test_a_dropped_answer_is_lost_and_not_aborted_when_its_generator_is_closed(store: Any) -> None:
    async def serve() -> None:
        first, second = answering(store, "a", False), answering(store, "b", True)
        for events in (first, second, first):
            await anext(events)
        await first.aclose()  # type: ignore[attr-defined]
        await second.aclose()  # type: ignore[attr-defined]
        assert (await frozen(store, "a"))[0] == {"a": "lost"}

    run(serve())


def test_a_generator_that_runs_on_its_own_needs_not_pass_the_call(store: Any) -> None:
    async def serve() -> None:
        for name in "ab":
            assert [chunk async for chunk in answering(store, name, False)] == ["chunk", "last"]
        async with captured_call(store, "outer", "outer"):
            async for _ in answering(store, "c", False):
                pass
            await capture_tokens(answer_of())
        for name in ("a", "b", "c", "outer"):
            assert (await frozen(store, name))[0] == {name: "recorded"}

    run(serve())


def test_what_a_reader_captures_is_not_of_the_generator_that_it_reads(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, "reader", "reader") as reader:
            events = answering(store, "a", True)
            await anext(events)
            await capture_tokens(answer_of())  # whose is it?
            await capture_tokens(answer_of(), context=reader)
            async for _ in events:
                pass
        assert (await frozen(store, "reader"))[0] == {"reader": "recorded"}
        assert (await frozen(store, "a"))[1][0].generation_token_ids.tolist() == [ord("a")]

    run(serve())


def test_the_call_of_an_abandoned_generator_takes_nothing_more(store: Any) -> None:
    async def serve() -> None:
        async for _ in answering(store, "a", True):
            break
        async with asyncio.timeout(10):
            while current_capture_context() is not None:  # the loop closes the generator in a task of its own
                await asyncio.sleep(0.001)
        await capture_tokens(answer_of())
        outcomes, entries, _ = await frozen(store, "a")
        assert (outcomes, entries) == ({"a": "aborted"}, [])

    run(serve())


# ---- after the end


def test_a_task_that_is_left_over_says_nothing_more_of_its_call(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> None:
        left = asyncio.Event()
        seen = []

        async def leftover() -> None:
            await left.wait()
            seen.append(current_capture_context())
            await capture_tokens(answer_of())
            await commit_entry(entry_of())
            await settle("no_generation")

        async with captured_call(store, ROLLOUT, "outer") as outer:
            async with captured_call(store, ROLLOUT, CALL) as context:
                task = asyncio.create_task(leftover())
                await capture_tokens(without_ids())
            assert current_capture_context() is outer
            left.set()
            await task
            await capture_tokens(answer_of(), context=context)
            await capture_parsed(parse_answer(answer_of()), context=context)
            await commit_entry(entry_of(), context=context)
            await settle("no_generation", context=context)
            assert not outer.committed
            await capture_tokens(answer_of())
        outcomes, entries, details = await frozen(store)
        assert outcomes == {"outer": "recorded", CALL: "lost"}
        assert [entry.model_call_id for entry in entries] == ["outer"]
        assert details.strip() == "the answer holds no token ids"
        assert seen == [None]

    run(serve())
    assert caplog.text.count("has ended") == 7


def test_delivery_may_be_noted_after_the_end(file_store: FileStore) -> None:
    async def serve() -> None:
        async with captured_call(file_store, ROLLOUT, CALL) as context:
            await capture_tokens(answer_of())
        await note_delivery("full", context=context)
        with await file_store.freeze(ROLLOUT) as snapshot:
            assert snapshot.calls[0].delivered == "full"

    run(serve())


def test_the_call_that_is_given_goes_before_the_current_one(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, "outer") as outer, captured_call(store, ROLLOUT, "inner"):
            await settle("aborted", "gone", context=outer)
            await commit_entry(entry_of("outer"), context=outer)
            await capture_tokens(answer_of())
        outcomes, entries, _ = await frozen(store)
        assert outcomes == {"outer": "aborted", "inner": "recorded"}
        assert len(entries) == 2

    run(serve())


# ---- cancellation


class Cancelling:
    def model_dump(self) -> Any:
        raise asyncio.CancelledError


@pytest.mark.parametrize("method", ["put", "put_many", "model_dump"])
def test_a_cancellation_that_nobody_asked_for_is_a_failure_of_its_source(store: Any, method: str) -> None:
    async def serve() -> str:
        sink = FailingSink(store, **{method: asyncio.CancelledError()})
        two = answer_of(choice_of(IDS, LOG_PROBS), choice_of([5], [-0.5], 1))
        async with captured_call(sink, ROLLOUT, CALL, choices=2 if method == "put_many" else 1):
            await capture_tokens({"put": answer_of(), "put_many": two}.get(method, Cancelling()))
        return "the answer"

    assert run(serve()) == "the answer"
    outcomes, _, details = run(frozen(store))
    assert outcomes == {CALL: "lost"}
    assert "CancelledError" in details


def test_a_settlement_or_intent_that_cancels_itself_is_a_failure(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    cancelled = asyncio.CancelledError()
    run(captured(FailingSink(store, settle_call=cancelled), without_ids()))
    assert "could not be settled as lost" in caplog.text
    with pytest.raises(CaptureError, match="CancelledError"):
        run(captured(FailingSink(store, begin_call=cancelled), answer_of()))
    run(under(CaptureContext(ROLLOUT, CALL, FailingSink(store, note_delivery=cancelled)), lambda: note_delivery("no")))
    assert "could not be noted" in caplog.text


def test_a_put_goes_on_when_its_caller_is_cancelled(store: Any) -> None:
    async def serve() -> None:
        sink = GatedSink(store)

        async def call() -> None:
            async with captured_call(sink, ROLLOUT, CALL):
                await capture_tokens(answer_of())

        task = asyncio.create_task(call())
        await sink.reached.wait()
        task.cancel()
        await asyncio.sleep(0)
        sink.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        outcomes, entries, _ = await frozen(store)
        assert outcomes == {CALL: "recorded"}
        assert entries[0].generation_token_ids.tolist() == IDS

    run(serve())


def test_a_scope_that_cancels_every_await_again_costs_no_record(store: Any) -> None:
    async def serve() -> None:
        sink = GatedSink(store)
        context = CaptureContext(ROLLOUT, CALL, sink)
        task = asyncio.create_task(under(context, register_call_intent, lambda: capture_tokens(answer_of())))
        await sink.reached.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert context.stored_choices == set()
        sink.gate.set()
        await asyncio.wait({context.writing or task})
        assert context.committed
        assert await outcome_of(store) == "recorded"

    run(serve())


@pytest.mark.parametrize("turns", range(12))
def test_a_cancelled_capture_is_whole_or_absent(store_dir: Path, turns: int) -> None:
    async def serve() -> None:
        with FileStore(store_dir, require_intent=True, sweep_every_s=0) as store:
            context = CaptureContext(ROLLOUT, CALL, store)
            task = asyncio.create_task(under(context, register_call_intent, lambda: capture_tokens(answer_of())))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if context.writing is not None:
                await asyncio.wait({context.writing})
            outcomes, entries, _ = await frozen(store)
            assert outcomes in ({}, {CALL: "open"}, {CALL: "recorded"})
            assert [entry.generation_token_ids.tolist() for entry in entries] == [IDS] * context.committed

    run(serve())


# ---- entries that are ready


def test_committed_entries_are_durable_and_capture_adds_nothing(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL) as context:
            await commit_entry(entry_of())
            assert context.committed
            await commit_entry(entry_of())
            richer = {"role": "assistant", "content": "a secret answer", "reasoning": "more"}
            await capture_tokens(answer_of(choice_of(IDS, [-0.25, -0.25000001], message=richer)))
            await capture_tokens(answer_of(choice_of(IDS, [None, -9999.0])))
            await capture_tokens(answer_of(choice_of(IDS, None)))
            await capture_parsed(parse_answer(answer_of(choice_of(IDS[:1], [-0.25]))), aborted=True)
            await capture_tokens(without_ids())
            await capture_tokens(without_ids(completion_tokens=0))
            await capture_tokens("<html>")
            assert context.outcome is None
        outcomes, entries, _ = await frozen(store)
        assert outcomes == {CALL: "recorded"}
        assert entries == [entry_of()]

    run(serve())


def test_choices_that_were_not_committed_come_from_the_answer(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL, choices=2):
            await commit_entry([entry_of(ids=[5], choice_index=1)])
            await capture_tokens(answer_of(choice_of(IDS, LOG_PROBS), choice_of([5], [-0.25], 1)))
        outcomes, entries, _ = await frozen(store)
        assert outcomes == {CALL: "recorded"}
        assert {entry.choice_index: entry.generation_token_ids.tolist() for entry in entries} == {0: IDS, 1: [5]}

    run(serve())


def test_some_choices_are_not_all(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL, choices=2):
            await commit_entry(entry_of())
        outcomes, _, details = await frozen(store)
        assert outcomes == {CALL: "lost"}
        assert "1 of 2" in details

    run(serve())


@pytest.mark.parametrize(
    "given",
    [
        entry_of("other"),
        entry_of(rollout="other"),
        [entry_of(), entry_of("other", choice_index=1)],
        [],
        "no entry",
        5,
        [entry_of(), 5],
    ],
)
def test_entries_of_another_call_are_not_stored_and_the_call_is_lost(store: Any, given: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL):
            await commit_entry(given)
        outcomes, entries, details = await frozen(store)
        assert (outcomes, entries) == ({CALL: "lost"}, [])
        assert "an entry of this call was to be committed" in details
        assert (await frozen(store, "other"))[0] == {}

    run(serve())


def test_another_content_for_the_call_is_a_conflict_and_is_logged(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL) as context:
            await commit_entry(entry_of())
            await commit_entry(entry_of(ids=[1]))
            assert context.outcome == "conflict"
        assert await outcome_of(store) == "conflict"

    run(serve())
    assert "another content is stored" in caplog.text


@pytest.mark.parametrize(
    "second",
    [
        answer_of(choice_of([1, 2], LOG_PROBS)),
        answer_of(choice_of(IDS, [-0.25, -1.75])),
        answer_of(prompt_token_ids=[1, 2, 3]),
        [entry_of(ids=[9])],
    ],
)
def test_other_tokens_for_a_recorded_choice_are_a_conflict(
    store: Any, caplog: pytest.LogCaptureFixture, second: Any
) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL) as context:
            await capture_tokens(answer_of())
            await (commit_entry(second) if isinstance(second, list) else capture_tokens(second))
            assert context.outcome == "conflict"
        assert await outcome_of(store) == "conflict"

    run(serve())
    assert "another content is stored" in caplog.text


def test_an_entry_of_the_tokens_that_are_recorded_adds_nothing(store: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL):
            await capture_tokens(answer_of())
            await commit_entry(TokenEntry(ROLLOUT, CALL, PROMPT, IDS, LOG_PROBS))
        assert await outcome_of(store) == "recorded"

    run(serve())


def test_a_minimal_sink_is_marked_for_a_conflict_that_it_does_not_see() -> None:
    async def serve() -> None:
        sink = MinimalSink()
        async with captured_call(sink, ROLLOUT, CALL) as context:
            await commit_entry(entry_of())
            await capture_tokens(answer_of(choice_of([1], [-0.5])))
            assert context.outcome == "conflict"
        assert sink.marked == [(ROLLOUT, CALL)]

    run(serve())


def test_an_engine_with_an_event_loop_of_its_own_may_commit(file_store: FileStore) -> None:
    async def serve() -> None:
        sink = GatedSink(file_store)
        async with captured_call(sink, ROLLOUT, CALL, choices=2) as context:
            in_the_server = asyncio.create_task(commit_entry(entry_of()))
            await sink.reached.wait()

            def in_the_engine() -> None:
                context.sink = file_store
                asyncio.run(commit_entry(entry_of(choice_index=1)))

            await asyncio.to_thread(in_the_engine)
            sink.gate.set()
            await in_the_server
        outcomes, entries, _ = await frozen(file_store)
        assert outcomes == {CALL: "recorded"}
        assert len(entries) == 2

    run(serve())


# ---- who stores elsewhere


def test_without_a_sink_only_the_identity_is_known() -> None:
    async def serve() -> None:
        async with captured_call(None, ROLLOUT, CALL) as context:
            assert context.committed
            await capture_tokens(answer_of())
            await commit_entry(entry_of())
            await note_delivery("full")
            assert context.stored_choices == {0}
            await settle("aborted", "gone")
            assert context.outcome == "aborted"

    run(serve())


# ---- minimal sinks


def test_a_minimal_sink_gets_its_puts_and_marks() -> None:
    async def serve(response: Any, choices: int = 1) -> MinimalSink:
        sink = MinimalSink()
        async with captured_call(sink, ROLLOUT, CALL, choices=choices):
            await capture_tokens(response)
        return sink

    both = run(serve(TABLE["recorded-two-choices"][0], 2))
    assert [(entry.choice_index, entry.generation_token_ids.tolist()) for entry in both.entries] == [(0, IDS), (1, [5])]
    assert both.marked == []
    assert run(serve(without_ids())).marked == [(ROLLOUT, CALL)]
    assert run(serve(without_ids(completion_tokens=0))).marked == []
    assert run(serve(TABLE["engine-aborted"][0])).marked == [(ROLLOUT, CALL)]


def test_a_minimal_sink_is_marked_when_a_later_choice_fails() -> None:
    class Second(MinimalSink):
        async def put(self, entry: TokenEntry) -> None:
            if entry.choice_index:
                raise RuntimeError("down")
            await super().put(entry)

    sink = Second()
    run(captured(sink, TABLE["recorded-two-choices"][0], choices=2))
    assert len(sink.entries) == 1
    assert sink.marked == [(ROLLOUT, CALL)]


# ---- settling


@pytest.mark.parametrize("outcome", ["no_generation", "aborted", "lost"])
def test_settling_says_how_the_call_ended(store: Any, outcome: Any) -> None:
    async def serve() -> None:
        async with captured_call(store, ROLLOUT, CALL) as context:
            await settle(outcome, "because")
            await settle(outcome, "again")
            assert (context.outcome, context.reason) == (outcome, "because")
        outcomes, _, details = await frozen(store)
        assert (outcomes, details) == ({CALL: outcome}, "because")

    run(serve())


@pytest.mark.parametrize("outcome", ["recorded", "open", "conflict", "", None])
def test_no_other_outcome_can_be_settled(outcome: Any) -> None:
    with pytest.raises(InvalidOutcomeError, match="settle takes"):
        run(settle(outcome))


def test_delivery_is_noted_with_the_call(file_store: FileStore) -> None:
    async def serve() -> None:
        async with captured_call(file_store, ROLLOUT, CALL):
            await capture_tokens(answer_of())
            await note_delivery("partly")
        with await file_store.freeze(ROLLOUT) as snapshot:
            assert snapshot.calls[0].delivered == "partly"

    run(serve())


def test_delivery_that_cannot_be_noted_is_only_logged(file_store: FileStore, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidOutcomeError, match="note_delivery takes"):
        run(note_delivery("later"))  # type: ignore[arg-type]
    sink = FailingSink(file_store, note_delivery=OSError(5, "io"))
    run(under(CaptureContext(ROLLOUT, CALL, sink), register_call_intent, lambda: note_delivery("full")))
    assert "could not be noted" in caplog.text
    run(under(CaptureContext(ROLLOUT, CALL, MinimalSink()), lambda: note_delivery("full")))


# ---- what is stored with a call


def test_the_entry_holds_what_is_known_of_the_call(store: Any) -> None:
    request = {
        "messages": [{"role": "user", "content": "a secret question"}],
        "temperature": 0.7,
        "top_p": None,
        "max_completion_tokens": 9,
        "logit_bias": {"5": 1.0},
        "response_format": {"type": "json_object"},
    }
    response = answer_of(choice_of(IDS, [-0.25, -9999.0], stop_reason="END"))
    known = {
        "request": request,
        "sampling": {"temperature": 1.0, "top_k": 20, "logprobs_mode": "processed_logprobs"},
        "policy_version": "step-3",
        "response_id": "resp-client",
        "model": "policy-a",
        "extra": {"engine": "vllm 0.32"},
    }
    run(captured(store, response, **known))
    _, (entry,), _ = run(frozen(store))
    assert entry.sampling == {
        "temperature": 0.7,
        "top_k": 20,
        "logprobs_mode": "processed_logprobs",
        "max_completion_tokens": 9,
        "logit_bias": {"5": 1.0},
        "response_format": {"type": "json_object"},
    }
    assert [tuple(span) for span in entry.policy_versions] == [("step-3", 0, 2)]
    assert (entry.response_id, entry.model, entry.finish_reason) == ("resp-client", "policy-a", "stop")
    assert entry.created_at == 1_800_000_000
    assert entry.extra["engine"] == "vllm 0.32"
    assert entry.extra["stop_reason"] == "END"
    assert entry.extra["clamped"] == [1]
    assert entry.extra["id_sources"]
    assert entry.extra["shape"]
    assert entry.generation_log_probs.tolist() == [-0.25, -9999.0]


def test_spans_of_the_engine_go_before_the_version_that_is_given(store: Any) -> None:
    spans = [{"version": "v7", "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 2}]
    run(captured(store, answer_of(choice_of(IDS, LOG_PROBS, weight_versions=spans)), policy_version="v9"))
    _, (entry,), _ = run(frozen(store))
    assert [tuple(span) for span in entry.policy_versions] == [("v7", 0, 1), ("v8", 1, 2)]


@pytest.mark.parametrize(
    ("request_body", "choices"),
    [
        (None, 1),
        ({"messages": [], "n": 3}, 3),
        ({"messages": [], "n": "3"}, 1),
        ({"messages": [], "n": 0}, 1),
        ({"input": ["a", "b"]}, 1),
        ({"input": "a", "prompt": ["b", "c"]}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]], "n": 2}, 4),
        ({"prompt": ["a", "b"]}, 2),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, 2),
    ],
)
def test_a_request_says_how_many_answers_it_asks_for(request_body: Any, choices: int) -> None:
    assert CaptureContext(ROLLOUT, CALL, None, request=request_body).choices == choices


def test_grammars_of_the_responses_dialect_are_stored_but_prompts_are_not() -> None:
    async def sampling(request: dict[str, Any]) -> Any:
        sink = MinimalSink()
        await captured(sink, answer_of(), request=request, choices=1)
        return sink.entries[0].sampling

    grammar = {"type": "json_schema", "name": "x", "schema": {}}
    assert run(sampling({"input": "hi", "text": {"format": grammar}})) == {"response_format": grammar}
    assert run(sampling({"text": "a secret prompt", "sampling_params": {"top_k": 3}})) == {"top_k": 3}


@pytest.mark.parametrize(("rollout", "call"), [("bad/id", CALL), ("", CALL), (ROLLOUT, "a\n"), (ROLLOUT, "")])
def test_bad_ids_are_refused_before_anything_happens(rollout: str, call: str) -> None:
    with pytest.raises(InvalidIdError):
        CaptureContext(rollout, call, MinimalSink())


@pytest.mark.parametrize("choices", [0, -1, True, "2"])
def test_a_number_of_choices_that_cannot_be_is_refused(choices: Any) -> None:
    with pytest.raises(InvalidEntryError, match="choices"):
        CaptureContext(ROLLOUT, CALL, MinimalSink(), choices=choices)


# ---- logs


def test_logs_hold_neither_content_nor_ids(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    responses = [response for response, *_ in TABLE.values()]

    async def serve() -> None:
        for number, response in enumerate([*responses, *ODD_ANSWERS]):
            async with captured_call(store, ROLLOUT, f"c-{number}", request=REQUEST) as context:
                logging.getLogger("tokcap.capture").info("%r", context)
                await capture_tokens(response)
        sink = FailingSink(store, put=RuntimeError("a secret answer"))
        async with captured_call(sink, ROLLOUT, "put-fails"):
            await capture_tokens(answer_of())

    run(serve())
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("tokcap"))
    assert "put-fails" in logged
    assert "RuntimeError in test_capture.py" in logged
    assert "secret" not in logged
    assert not any(record.exc_info for record in caplog.records if record.name.startswith("tokcap"))
    assert all(str(ids) not in logged for ids in (IDS, PROMPT))


# ---- recorded traffic


def recorded_calls() -> Iterable[RecordedCall]:
    for rollout in rollouts():
        for call in rollout.calls:
            if call.generates:
                yield call


async def capture_recorded(call: RecordedCall, context: CaptureContext) -> None:
    if call.sse is None:
        await capture_tokens(call.response, status=call.status)
        return
    joiner = StreamJoiner(choices=context.choices)
    for line in call.sse:
        joiner.feed(f"{line}\n\n".encode())
    await capture_parsed(parse_answer(joiner.answer(), choices=context.choices, path=call.path))


def test_recorded_answers_give_the_entries_that_their_bodies_prove(file_store: FileStore) -> None:
    calls = list(recorded_calls())
    names = sorted({call.rollout_id for call in calls})
    expected = {(call.rollout_id, call.model_call_id): call.outcome for call in calls}
    entries = {
        (entry.rollout_id, entry.model_call_id, entry.choice_index): entry for call in calls for entry in call.entries
    }

    async def serve(call: RecordedCall) -> None:
        known = {"request": call.request, "path": call.path}
        async with captured_call(file_store, call.rollout_id, call.model_call_id, **known) as context:
            await capture_recorded(call, context)

    async def serve_all() -> None:
        await asyncio.gather(*map(serve, calls))
        for name in names:
            with await file_store.freeze(name) as snapshot:
                for record in snapshot.calls:
                    assert record.outcome == expected.pop((name, record.model_call_id)), record
                for entry in snapshot.entries:
                    proven = entries.pop((name, entry.model_call_id, entry.choice_index))
                    assert entry.prompt_token_ids.tolist() == proven.prompt_token_ids.tolist()
                    assert entry.generation_token_ids.tolist() == proven.generation_token_ids.tolist()
                    assert np.array_equal(entry.generation_log_probs, proven.generation_log_probs, equal_nan=True)
                    assert (entry.model, entry.response_id) == (proven.model, proven.response_id)
                    assert entry.finish_reason == proven.finish_reason
                    assert entry.sampling.get("temperature") == proven.sampling.get("temperature")

    run(serve_all())
    assert (expected, entries) == ({}, {})
    assert len(calls) > 100


@pytest.mark.parametrize("name", ["linear-0", "stream-0"])
def test_a_recorded_answer_stands_in_the_digests_of_the_next_intent(file_store: FileStore, name: str) -> None:
    calls = [call for call in recorded_calls() if call.rollout_id == name]

    async def serve() -> None:
        for call in calls:
            async with captured_call(file_store, name, call.model_call_id, request=call.request) as context:
                await capture_recorded(call, context)
        with await file_store.freeze(name) as snapshot:
            digests = {record.model_call_id: list(record.request_digests) for record in snapshot.calls}
            answers = {entry.model_call_id: answer_digest(entry.output_items) for entry in snapshot.entries}
        assert len(answers) == len(calls) > 5
        for call, following in pairwise(calls):
            assert digests[following.model_call_id][-2] == answers[call.model_call_id]

    run(serve())


# ---- streams


def stream_of(*chunks: dict[str, Any], done: bool = True) -> StreamJoiner:
    """A chat stream of vLLM, as far as it came."""
    joiner = StreamJoiner()
    for chunk in chunks:
        joiner.feed(b"data: " + json.dumps({"id": "chatcmpl-1", "model": "policy", **chunk}).encode() + b"\n\n")
    if done:
        joiner.feed(b"data: [DONE]\n\n")
    return joiner


OPENING = {
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    "prompt_token_ids": PROMPT,
}


def token_chunk(token: int, finish: str | None = None) -> dict[str, Any]:
    content = [{"token": f"t{token}", "logprob": -0.5, "bytes": [120]}]
    delta = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": content}, "token_ids": [token]}
    return {"object": "chat.completion.chunk", "choices": [{**delta, "finish_reason": finish}]}


def test_a_stream_that_came_to_its_end_is_recorded(store: Any) -> None:
    run(captured(store, stream_of(OPENING, token_chunk(11), token_chunk(12, "stop"))))
    outcomes, entries, _ = run(frozen(store))
    assert outcomes == {CALL: "recorded"}
    assert entries[0].generation_token_ids.tolist() == [11, 12]
    assert entries[0].finish_reason == "stop"


@pytest.mark.parametrize("end", ["cut", "error"])
def test_a_joined_stream_that_ended_early_is_aborted_with_the_tokens_seen(store: Any, end: str) -> None:
    joiner = stream_of(OPENING, token_chunk(11), token_chunk(12), done=False)
    if end == "error":
        joiner.feed(b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n')
    run(captured(store, joiner))
    outcomes, entries, _ = run(frozen(store))
    assert outcomes == {CALL: "aborted"}
    assert entries[0].generation_token_ids.tolist() == [11, 12]
    assert entries[0].finish_reason == "aborted"


def test_a_stream_that_ended_before_its_first_token_is_aborted_without_an_entry(store: Any) -> None:
    run(captured(store, StreamJoiner()))
    outcomes, entries, _ = run(frozen(store))
    assert outcomes == {CALL: "aborted"}
    assert entries == []


def test_a_stream_that_contradicts_itself_is_lost_and_fails_nothing(store: Any) -> None:
    other = {**OPENING, "prompt_token_ids": [*PROMPT, 9]}
    run(captured(store, stream_of(OPENING, token_chunk(11), other, token_chunk(12, "stop"))))
    outcomes, entries, details = run(frozen(store))
    assert outcomes == {CALL: "lost"}
    assert entries == []
    assert "two different prompts" in details
