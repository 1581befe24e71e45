"""In a Starlette application: added as a middleware, mounted, and among middleware of other kinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tests import recordings
from tokcap import FileStore
from tokcap.asgi import CaptureMiddleware, rollout_base_url

CALL = recordings.load("linear-0").calls[0]
STREAM = recordings.load("stream-0").calls[0]
CAPTURE: Any = CaptureMiddleware
TRAINING = "/ng-rollout/r-1/training-token-capture"
ASK = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}]}


async def chat(request: Request) -> Response:
    body = await request.json()
    if not body.get("stream"):
        return JSONResponse(CALL.response)

    async def events() -> AsyncIterator[str]:
        for line in STREAM.sse or ():
            yield f"{line}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(request: Request) -> Response:
    return JSONResponse({"path": request.url.path, "data": []})


def engine() -> Starlette:
    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models/", models)])


def asked(app: Any, *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(run())


def outcomes(directory: Path, rollout_id: str = "r-1") -> list[str]:
    with FileStore(directory, read_only=True).read_now(rollout_id) as snapshot:
        return [call.outcome for call in snapshot.calls]


@pytest.fixture
def settings(store_dir: Path) -> dict[str, Any]:
    return {"config": {"token_id_capture": {"enabled": True, "dir": str(store_dir)}}, "engine": "vllm"}


def test_added_to_an_application_it_captures(settings: dict[str, Any], store_dir: Path) -> None:
    app = engine()
    app.add_middleware(CAPTURE, **settings)
    path = f"{TRAINING}/v1/chat/completions"
    whole, stream = asked(app, ("POST", path, ASK), ("POST", path, {**ASK, "stream": True}))
    assert whole.json()["choices"][0]["token_ids"] is None
    assert '"token_ids":[' not in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")
    assert outcomes(store_dir) == ["recorded", "recorded"]


@pytest.mark.parametrize("inside", [True, False])
def test_middleware_of_other_kinds_may_stand_inside_or_outside(
    settings: dict[str, Any], store_dir: Path, inside: bool
) -> None:
    async def dispatch(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["x-seen"] = "yes"
        return response

    app = engine()
    others: list[tuple[Any, dict[str, Any]]] = [
        (GZipMiddleware, {"minimum_size": 1}),
        (BaseHTTPMiddleware, {"dispatch": dispatch}),
    ]
    for middleware, options in others if inside else []:
        app.add_middleware(middleware, **options)
    app.add_middleware(CAPTURE, **settings)
    for middleware, options in [] if inside else others:
        app.add_middleware(middleware, **options)
    path = f"{TRAINING}/v1/chat/completions"
    whole, stream = asked(app, ("POST", path, ASK), ("POST", path, {**ASK, "stream": True}))
    for answer in (whole, stream):
        assert answer.status_code == 200
        assert answer.headers["x-seen"] == "yes"
    assert whole.json()["choices"][0]["message"]["content"]
    assert stream.text.endswith("data: [DONE]\n\n")
    assert outcomes(store_dir) == ["recorded", "recorded"]


def test_around_a_mounted_application_the_prefix_stands_behind_its_root(
    settings: dict[str, Any], store_dir: Path
) -> None:
    app = Starlette(routes=[Mount("/api", CaptureMiddleware(engine(), **settings))])
    base = rollout_base_url("http://server/api/v1", "r-1")
    (answer,) = asked(app, ("POST", f"{base}/chat/completions", ASK))
    assert answer.status_code == 200
    assert outcomes(store_dir) == ["recorded"]


def test_a_redirect_keeps_the_prefix_and_leaves_no_trace(settings: dict[str, Any], store_dir: Path) -> None:
    app = CaptureMiddleware(engine(), **settings)
    get, post = asked(app, ("GET", f"{TRAINING}/v1/models", None), ("POST", f"{TRAINING}/v1/chat/completions/", ASK))
    assert (get.status_code, get.headers["location"]) == (307, f"http://server{TRAINING}/v1/models/")
    assert (post.status_code, post.headers["location"]) == (307, f"http://server{TRAINING}/v1/chat/completions")
    assert list(FileStore(store_dir, read_only=True).rollouts()) == []


def test_a_cancelled_request_is_aborted_with_the_tokens_seen(settings: dict[str, Any], store_dir: Path) -> None:
    """As servers do that cancel the task of a request whose client has gone."""
    lines = STREAM.sse or []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for line in lines[:4]:
            await send({"type": "http.response.body", "body": f"{line}\n\n".encode(), "more_body": True})
        seen.set()
        await asyncio.sleep(3600)

    async def run() -> None:
        body = json.dumps({**ASK, "stream": True}).encode()
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            while not pending:
                await asyncio.sleep(3600)
            return pending.pop(0)

        async def send(message: MutableMapping[str, Any]) -> None:
            pass

        path = f"{TRAINING}/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
        task = asyncio.create_task(CaptureMiddleware(app, **settings)(scope, receive, send))
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    seen = asyncio.Event()
    asyncio.run(run())
    with FileStore(store_dir, read_only=True).read_now("r-1") as snapshot:
        (call,), (entry,) = snapshot.calls, snapshot.entries
        assert (call.outcome, entry.finish_reason) == ("aborted", "aborted")
        assert entry.generation_token_ids.tolist() == STREAM.entries[0].generation_token_ids.tolist()[:3]
