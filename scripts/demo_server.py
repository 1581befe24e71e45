"""The model server of the demo: an engine that answers with what was recorded, behind `CaptureMiddleware`.

`uvicorn --factory scripts.demo_server:app --workers 2`: every worker is spawned and makes an `app()` of its own, which
writes to the directory that `TOKCAP_DIR` names. A request says in two headers which recorded answer it wants.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests import recordings
from tokcap.asgi import CaptureMiddleware
from tokcap.asgi.interface import Receive, Scope, Send
from tokcap.config import close_process_endpoints

__all__ = ("GATE", "ROLLOUT", "SEQ", "SHOWN_FIRST", "WORKER", "app", "events_told", "replay", "told")

ROLLOUT, SEQ = "x-replay-rollout", "x-replay-seq"
"""Headers of a request: which answer."""
GATE = "x-replay-gate"
"""Header of a request for a stream: a file. Generation goes on after the first events only once it exists."""
SHOWN_FIRST = 3
"""So many events are sent before that."""
WORKER = "x-replay-worker"
"""Header of an answer: the process that gives it."""


_GATE_LOOKS_S = 0.002


def app() -> CaptureMiddleware:
    """The engine as it is served. Its Responses and messages pass as they are, because so they were recorded."""
    return CaptureMiddleware(replay, engine="vllm", engine_version="0.32.0", dialects="pass")


async def replay(scope: Scope, receive: Receive, send: Send) -> None:
    """The engine alone: an ASGI application that knows nothing of capture."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await close_process_endpoints()
        await send({"type": "lifespan.shutdown.complete"})
        return
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    if ROLLOUT not in headers:  # /health
        await _answer(send, 200, {})
        return
    request = json.loads(await _body(receive))
    call = _recorded(headers[ROLLOUT]).calls[int(headers[SEQ])]
    if call.sse is None:
        await asyncio.sleep(0)  # generation
        await _answer(send, call.status, told(call.response or {}, request))
        return
    await _start(send, call.status, content_type="text/event-stream")
    for number, event in enumerate(events_told(call.sse, request)):
        while number == SHOWN_FIRST and not os.path.exists(headers[GATE]):
            await asyncio.sleep(_GATE_LOOKS_S)
        await send({"type": "http.response.body", "body": f"data: {json.dumps(event)}\n\n".encode(), "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def told(answer: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine says of a recorded answer, or of an event of one, if it is asked like this.

    Ids and log-probs only on demand; those that were not recorded can't be had at all.
    """
    hidden: set[str] = set()
    if request.get("return_token_ids") is not True:
        hidden |= {"prompt_token_ids", "token_ids"}
    if request.get("logprobs") is None or request["logprobs"] is False:  # 0 asks for those of the sampled ones
        hidden.add("logprobs")
    shown: dict[str, Any] = {key: None if key in hidden else value for key, value in answer.items()}
    if "choices" in shown:
        shown["choices"] = [told(choice, request) for choice in shown["choices"]]
    return shown


def events_told(sse: Iterable[str], request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a recorded stream, without its `[DONE]`. Every recorded one ends with the usage."""
    *events, usage = (json.loads(line.removeprefix("data: ")) for line in sse if line != "data: [DONE]")
    if (request.get("stream_options") or {}).get("include_usage"):
        events.append(usage)
    else:  # then the event before is the last one, and tells what only the last one does
        events[-1]["system_fingerprint"] = usage["system_fingerprint"]
    return (told(event, request) for event in events)


_recorded = functools.cache(recordings.load)


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, status: int, answer: Mapping[str, Any]) -> None:
    body = json.dumps(answer).encode()
    await _start(send, status, content_type="application/json", content_length=str(len(body)))
    await send({"type": "http.response.body", "body": body})


async def _start(send: Send, status: int, **headers: str) -> None:
    headers[WORKER] = str(os.getpid())
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
