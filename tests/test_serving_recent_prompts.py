"""Calls whose prompts are known from the calls before are captured, and shown to the client, as without a memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from tokcap import FileStore
from tokcap.asgi import CaptureMiddleware

FIRST = [(7919 * position) % 151_936 for position in range(1_500)]
OTHER = [(104_729 * position) % 151_936 for position in range(1_500)]
PROMPTS = {
    "r-1": [
        FIRST,
        [*FIRST, 12, 5],
        OTHER,  # a sub-agent
        [*FIRST, 12, 5, 7],
        [*OTHER, 1],
        [*FIRST, 123, 5],
        FIRST[:1_200],
        [*FIRST[:-1], 3, 4],
    ],
    "r-2": [[*FIRST, 12], [*FIRST, 12], OTHER],
}
CALLS = [(rollout_id, prompt) for rollout_id, prompts in PROMPTS.items() for prompt in prompts]

Message = MutableMapping[str, Any]


def chunk(prompt: list[int] | None, number: int, **more: Any) -> bytes:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {"index": 0, "logprobs": {"content": [entry]}, "token_ids": [number], "finish_reason": None, **more}
    head = {"id": f"chatcmpl-{number}", "choices": [choice], "note": "NaN, Infinity and \r\n are words here"}
    return json.dumps(head | ({} if prompt is None else {"prompt_token_ids": prompt}), separators=(",", ":")).encode()


def answer_of(number: int, prompt: list[int], stream: bool, line_end: bytes) -> list[bytes]:
    """What the engine sends."""
    if not stream:
        return [chunk(prompt, number, message={"role": "assistant", "content": "aa"}, finish_reason="stop")]
    first = chunk(prompt, number, delta={"role": "assistant", "content": "a"})
    last = chunk(None, number, delta={"content": "a"}, finish_reason="stop")
    return [b"data: " + event + 2 * line_end for event in (first, last, b"[DONE]")]


async def conversations(directory: Path, stream: bool, line_end: bytes, pieces: int, **settings: Any) -> list[bytes]:
    """All calls, in turn; what the client got of each."""
    shown: list[bytes] = []
    now = 0

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        kind = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        body = b"".join(answer_of(now, CALLS[now][1], stream, line_end))
        for start in range(0, len(body), pieces):
            await send({"type": "http.response.body", "body": body[start : start + pieces], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    config = {"token_id_capture": {"enabled": True, "dir": str(directory)}}
    app = CaptureMiddleware(engine, config, engine="vllm", **settings)
    for number, (rollout_id, _) in enumerate(CALLS):
        now = number
        asked = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        pending: list[Message] = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]
        got: list[bytes] = []

        async def receive(pending: list[Message] = pending) -> Message:
            while not pending:
                await asyncio.sleep(3600)
            return pending.pop()

        async def send(message: Message, got: list[bytes] = got) -> None:
            got.append(message.get("body", b""))

        path = f"/ng-rollout/{rollout_id}/training-token-capture/v1/chat/completions"
        await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        shown.append(b"".join(got))
    return shown


def captured(directory: Path) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Prompt and sampled ids of every record, in the order of the calls."""
    found = {}
    with FileStore(directory) as store:
        for rollout_id in PROMPTS:
            entries = sorted(store.read_now(rollout_id).entries, key=lambda entry: entry.generation_token_ids[0])
            found[rollout_id] = [(e.prompt_token_ids.tolist(), e.generation_token_ids.tolist()) for e in entries]
    return found


@pytest.mark.parametrize("pieces", [1 << 20, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("stream", [False, True])
def test_known_prompts_are_captured_and_shown_as_others(
    tmp_path: Path, stream: bool, line_end: bytes, pieces: int
) -> None:
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    shown = asyncio.run(conversations(known, stream, line_end, pieces))
    assert shown == asyncio.run(conversations(unknown, stream, line_end, pieces, prompt_memory_bytes=0))
    assert not any(b"7919" in each or b"104729" in each or b"were here" in each for each in shown)
    assert all(b'"content":"a' in each for each in shown)
    assert captured(known) == captured(unknown)
    for rollout_id, records in captured(known).items():
        assert [prompt for prompt, _ in records] == PROMPTS[rollout_id]
        assert len({tuple(sampled) for _, sampled in records}) == len(records)
