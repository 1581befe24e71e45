"""Capture URLs and rollout tokens as an attacker would send them, against what the middleware makes of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from tests.proofs.security_corpora import paths
from tokcap.asgi import CaptureMiddleware
from tokcap.asgi.urls import capture_url
from tokcap.errors import InvalidIdError

__all__ = ("SECRET", "Served", "check_path", "check_token", "right_token", "sent")

SECRET = "a secret of thirty-two bytes, say"
_FIRST = set(string.ascii_letters + string.digits)
_OTHERS = _FIRST | set("._-")
ANSWER = {
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "token_ids": [3],
            "message": {"role": "assistant", "content": "x"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}]},
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
}


def is_id(text: str) -> bool:
    """Whether it may be a rollout id, by the words of the contract."""
    return 0 < len(text) <= 200 and text[0] in _FIRST and set(text) <= _OTHERS


def right_token(rollout_id: str, secret: str = SECRET) -> str:
    """The token, made by the words of the documentation."""
    digest = hmac.new(secret.encode(), rollout_id.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest[:24]).decode().replace("+", "-").replace("/", "_")


def expected(raw: bytes) -> tuple[str, bytes | None] | str:
    """What a path says: an id and a token, `other` for a path without the prefix, `refused`."""
    if not unquote(raw.decode("latin-1")).startswith("/ng-rollout/"):
        return "other"
    if not raw.startswith(b"/ng-rollout/"):
        return "refused"
    name, mark, token = unquote_to_bytes(raw.split(b"/")[2]).partition(b"~")
    rollout_id = name.decode("latin-1")
    return (rollout_id, token if mark else None) if is_id(rollout_id) else "refused"


def scope_of(raw: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> dict[str, Any]:
    """As uvicorn makes it."""
    return {
        "type": "http",
        "method": "POST",
        "path": unquote(raw.decode("latin-1")),
        "raw_path": raw,
        "query_string": b"",
        "root_path": "",
        "headers": headers or [],
    }


def check_path(seed: int, number: int) -> list[str]:
    """What is wrong with how one drawn path is read."""
    raw = paths(seed, number)
    scope = scope_of(raw)
    wanted = expected(raw)
    try:
        url = capture_url(scope)
        got: object = "other" if url is None else (url.rollout_id, url.token)
    except InvalidIdError:
        got, url = "refused", None
    if got != wanted and not (got == "refused" and len(raw.split(b"/")[2]) > 600):
        return [f"path {number} of seed {seed}, {raw[:200]!r}: read as {got}, expected {wanted}"]
    if url is None:
        return []
    inner = url.stripped(scope)
    if not raw.endswith(inner["raw_path"]) and inner["raw_path"] != b"/":
        return [f"path {number} of seed {seed}, {raw[:200]!r}: the application gets {inner['raw_path']!r}"]
    return []


class Served:
    """The middleware around an engine that answers every request; counts what reaches it."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.reached: list[Mapping[str, Any]] = []
        self.body_reads = 0
        config = {
            "token_id_capture": {"enabled": True, "dir": str(directory / "store")},
            "model_call_capture_dir": str(directory / "calls"),
            "observability_enabled": True,
        }
        self.app = CaptureMiddleware(self._engine, config, engine="vllm", **settings)

    async def _engine(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope)
        await receive()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(ANSWER).encode()})

    async def ask(self, raw: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> tuple[int, bytes]:
        """Status and body of one chat request."""
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            self.body_reads += 1
            if self.body_reads > 1:
                await asyncio.sleep(3600)
            body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        self.body_reads = 0
        await self.app(scope_of(raw, [(b"content-type", b"application/json"), *(headers or [])]), receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    def written(self) -> list[str]:
        """The rollouts that left a trace, in either store."""
        return sorted({path.name for path in self.directory.glob("**/rollouts/*/*")})


def sent(served: Served, raw: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> tuple[int, bytes]:
    """`ask`, outside an event loop."""
    return asyncio.run(served.ask(raw, headers))


async def check_token(served: Served, seed: int, number: int) -> list[str]:
    """What is wrong with how one drawn token is taken. A right one is among them."""
    draw = random.Random(f"tokens/{seed}/{number}")
    rollout = f"t-{number}"
    right = right_token(rollout)
    shown = _token(draw, right, rollout)
    in_url = draw.random() < 0.5
    segment, headers = rollout.encode(), list[tuple[bytes, bytes]]()
    if in_url:
        segment += b"~" + shown
        is_right = unquote_to_bytes(shown) == right.encode()
    else:
        headers = [(draw.choice((b"x-tokcap-rollout-token", b"X-Tokcap-Rollout-Token")), shown)]
        is_right = shown.strip() == right.encode()
    training = draw.choice((b"/training-token-capture", b""))
    path = b"/ng-rollout/" + segment + training + draw.choice((b"/v1/chat/completions", b"/v1/models", b"/"))
    before = len(served.reached)
    status, body = await served.ask(path, headers)
    reached = len(served.reached) - before
    where = f"token {number} of seed {seed}, {path!r} {headers}"
    if is_right:
        if status != 200 or reached != 1:
            return [f"{where}: the right one is answered {status} {body!r}"]
        seen = repr(served.reached[-1]["headers"]) + repr(served.reached[-1]["raw_path"])
        return [f"{where}: the application sees it"] if right in seen else []
    if status != 403 or reached or served.body_reads:
        return [f"{where}: answered {status}, {reached} reached the engine, {served.body_reads} bodies read"]
    if right in body.decode() or rollout in served.written():
        return [f"{where}: left a trace"]
    return []


def _token(draw: random.Random, right: str, rollout: str) -> bytes:
    at = draw.randrange(len(right))
    other = chr(ord(right[at]) ^ (1 << draw.randrange(5)))
    return draw.choice(
        (
            right.encode(),
            f"%{ord(right[0]):02x}{right[1:]}".encode(),
            b"",
            right[:at].encode(),
            (right + right[at]).encode(),
            f"{right}={''}".encode(),
            (right[:at] + other + right[at + 1 :]).encode("utf-8").replace(b"/", b"%2F").replace(b"?", b"%3F"),
            right.swapcase().encode(),
            right_token(rollout + "0").encode(),
            right_token(rollout, SECRET + "0").encode(),
            right[::-1].encode(),
            f"{right}~{right}".encode(),
            f"{right}%00".encode(),
            f"{right}%0a".encode(),
            b"A" * draw.choice((32, 64, 65, 300)),
            hashlib.sha256(rollout.encode()).hexdigest().encode(),
            b"\xff\xfe" if at % 2 else b"null",
        )
    )
