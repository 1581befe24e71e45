"""The whole way on exchanges with a real engine: what it was asked, what is recorded, and what the client sees."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import exchanges, fake_vllm
from tests.fake_script import Script
from tests.serving_harness import InProcess, events_of
from tests.serving_lines import covers, covers_row
from tests.serving_steps import target

# The engine put the tokens of this one together in another way when it was asked again.
PAIRS = [
    (file, name)
    for file, name in exchanges.pairs("chat", "completions", "generate")
    if name != "force-include-usage/coalesced/stream"
]


class Replay:
    """An engine that answers every request with one recorded answer, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {}
        self.asked: bytes = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.asked = body
        answer = self.answer
        headers = [(name.encode(), value.encode()) for name, value in answer["headers"].items()]
        parts = [chunk.encode() for chunk in answer.get("chunks", ())]
        if "body" in answer:
            parts = [answer["body"].encode()]
            headers.append((b"content-length", str(len(parts[0])).encode()))
        await send({"type": "http.response.start", "status": answer["status"], "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def replay() -> Replay:
    return Replay()


@pytest.fixture
def harness(tmp_path: Path, replay: Replay) -> Iterator[InProcess]:
    made = InProcess(tmp_path, wrap=lambda _: replay, engine="vllm", engine_version="0.32.0")
    yield made
    made.close()


def state_of(server: str) -> SimpleNamespace:
    """What the state of the recorded server says of its parsers."""
    args = SimpleNamespace(
        api_key=None,
        reasoning_parser="qwen3" if "qwen3" in server else "",
        tool_call_parser="hermes" if "hermes" in server else None,
        enable_auto_tool_choice="hermes" in server,
        enable_force_include_usage=server == "force-include-usage",
    )
    model_config = SimpleNamespace(logprobs_mode="raw_logprobs", get_diff_sampling_param=dict)
    return SimpleNamespace(state=SimpleNamespace(args=args, vllm_config=SimpleNamespace(model_config=model_config)))


def by_choice(events: list[Any]) -> dict[Any, list[Any]]:
    """How the choices of a stream take turns is another matter every time."""
    found = defaultdict(list)
    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        found[choices[0]["index"] if choices else None].append(exchanges.comparable(event))
    return found


def view(answer: dict[str, Any]) -> Any:
    if "body" in answer:
        return exchanges.comparable(json.loads(answer["body"]))
    return by_choice(exchanges.events_of(answer["chunks"]))


def sampled(answer: dict[str, Any]) -> dict[int, list[int]]:
    """The ids of each choice of a flagged answer."""
    found: dict[int, list[int]] = {}
    for event in [json.loads(answer["body"])] if "body" in answer else exchanges.events_of(answer["chunks"]):
        for choice in event["choices"] if isinstance(event, dict) else ():
            found.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    return found


@covers(12, 13)
@covers_row("2xx with ids and log-probs")
@pytest.mark.parametrize(
    ("file", "server"),
    sorted({(file, exchanges.exchange(file, name)["server"]) for file, name in PAIRS}),
)
def test_recorded_calls_are_stored_and_look_as_if_nothing_had_been_asked_for(
    file: str, server: str, harness: InProcess, replay: Replay
) -> None:
    alike, total = 0, 0
    for of, name in PAIRS:
        pair = exchanges.exchange(of, name)
        if (of, pair["server"]) != (file, server) or pair["plain"]["status"] != 200:
            continue
        total += 1
        replay.answer = pair["with_flags"]
        harness.scope["app"] = state_of(pair["server"])
        rollout = harness.new_rollout()
        answer = harness.request(
            "POST",
            target(rollout, pair["path"]),
            headers=[("content-type", "application/json")],
            body=json.dumps(pair["request"]).encode(),
        )
        assert answer.status == 200, name
        if json.loads(replay.asked) != pair["request_with_flags"]:
            continue  # capture asks for something else than was recorded
        alike += 1
        ids = sampled(pair["with_flags"])
        if pair["request"].get("max_tokens") != 0:  # then it samples one that it shows to nobody
            assert harness.settled(rollout) == ["recorded"], (name, harness.calls(rollout)[0].detail)
            assert {e.choice_index: e.generation_token_ids.tolist() for e in harness.entries(rollout)} == ids, name
        shown: dict[str, Any]
        if "body" in pair["plain"]:
            shown = {"body": answer.body.decode()}
        else:
            shown = {"chunks": [f"data: {event}\n\n" for event in events_of(answer.body)]}
        seen, expected = view(shown), view(pair["plain"])
        if "body" not in pair["plain"] and len(ids) > 1:
            # vLLM names its fingerprint at the end of each choice, if the usage was not asked for; see `_fair`.
            seen, expected = _without_fingerprints(seen), _without_fingerprints(expected)
        assert seen == expected, name
    assert alike > 0.6 * total


def _without_fingerprints(events: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {
        choice: [
            [pair for pair in event if pair[0] != "system_fingerprint"] if isinstance(event, list) else event
            for event in chunks
        ]
        for choice, chunks in events.items()
    }


def keys(value: Any) -> Any:
    """Names and kinds, in their order; of a list its first item, of log-probs only that they are there."""
    if isinstance(value, dict):
        return [(name, "log-probs" if each and "logprobs" in name else keys(each)) for name, each in value.items()]
    if isinstance(value, list):
        return [keys(each) for each in value[:1]]
    return type(value).__name__


@pytest.mark.parametrize("asked", ["plain", "with_flags"])
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("chat", "no-parser/plain"),
        ("chat", "no-parser/plain/stream"),
        ("chat", "no-parser/client-logprobs"),
        ("chat", "no-parser/client-token-ids/stream"),
        ("chat", "no-parser/client-usage/stream"),
        ("chat", "no-parser/client-continuous-usage/stream"),
        ("completions", "no-parser/text"),
        ("completions", "no-parser/text/stream"),
        ("completions", "no-parser/echo/text"),
        ("completions", "no-parser/echo/text/stream"),
        ("generate", "no-parser/tokens"),
        ("generate", "no-parser/tokens/stream"),
        ("generate", "no-parser/client-usage/stream"),
    ],
)
def test_the_scripted_engine_writes_the_keys_of_the_real_one(file: str, name: str, asked: str) -> None:
    pair = exchanges.exchange(file, name)
    request, answer = pair["request" if asked == "plain" else "request_with_flags"], pair[asked]
    if "body" in answer:
        assert keys(fake_vllm.answer(pair["path"], request, Script())) == keys(json.loads(answer["body"]))
        return
    real = [event for event in exchanges.events_of(answer["chunks"]) if event != "[DONE]"]
    made = list(fake_vllm.events(pair["path"], request, Script()))
    for place in (0, 1, -2, -1):
        assert keys(made[place]) == keys(real[place]), place


@covers_row("4xx, 429, context overflow, 5xx before anything was sampled")
def test_recorded_errors_pass_unchanged_and_are_no_generation(harness: InProcess, replay: Replay) -> None:
    generating = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
    found = 0
    for name in exchanges.names("errors"):
        each = exchanges.exchange("errors", name)
        if each["path"] not in generating or each.get("method", "POST") != "POST" or each["plain"]["status"] < 400:
            continue
        found += 1
        replay.answer = each["plain"]
        rollout, request = harness.new_rollout(), each["request"]
        answer = harness.request(
            "POST",
            target(rollout, each["path"]),
            headers=[("content-type", "application/json")],
            body=request.encode() if isinstance(request, str) else json.dumps(request).encode(),
        )
        assert (answer.status, answer.body.decode()) == (each["plain"]["status"], each["plain"]["body"]), name
        assert harness.settled(rollout) == ["no_generation"], name
    assert found > 20


@covers(7)
def test_recorded_requests_that_generate_nothing_leave_no_trace(harness: InProcess, replay: Replay) -> None:
    found = 0
    for name in exchanges.names("errors"):
        each = exchanges.exchange("errors", name)
        if not name.startswith(("get/", "tokenize/", "detokenize", "no-scale-out/v1/")):
            continue
        found += 1
        replay.answer = each["plain"]
        rollout = harness.new_rollout()
        body = b"" if each.get("request") is None else json.dumps(each["request"]).encode()
        answer = harness.request(each.get("method", "POST"), target(rollout, each["path"]), body=body)
        assert answer.status == each["plain"]["status"], name
        assert not harness.exists(rollout), name
    assert found > 10
