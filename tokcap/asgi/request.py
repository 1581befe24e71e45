"""One request that may generate, as the middleware hands it on: what its URL, its route and its server say."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from ..capture.shapes import RecentPrompts, decode_json
from .engines import Server
from .interface import Application, Headers, Receive, Scope, Send
from .known import retry_count
from .metrics import Metrics
from .policy import PolicyVersions
from .refusals import RefusalError
from .routes import Route
from .settings import ServingSettings
from .urls import CaptureUrl

if TYPE_CHECKING:
    from ..evaluation import CallObservation, EvaluationRecorder

__all__ = ("Request", "Serving", "decoded_request", "headers_of")


_MOST_MODELS = 1000
"""Names come from requests."""


class Serving(msgspec.Struct):
    """What all calls of one middleware share."""

    app: Application
    settings: ServingSettings
    policy: PolicyVersions
    metrics: Metrics
    prompts: RecentPrompts
    fingerprints: dict[str, Any] = {}
    """Model -> the `system_fingerprint` in its answers, None if they have none."""
    background: set[asyncio.Task[None]] = set()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something go on that nobody waits for; kept until it is over."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def fingerprint_of(self, model: str) -> Any:
        """UNSET until an answer told it."""
        return self.fingerprints.get(model, msgspec.UNSET)

    def learn_fingerprint(self, model: str, told: Any) -> None:
        """What an answer told; UNSET for nothing."""
        if told is not msgspec.UNSET and (model in self.fingerprints or len(self.fingerprints) < _MOST_MODELS):
            self.fingerprints[model] = told


class Request(msgspec.Struct):
    """One request to a route that may generate."""

    url: CaptureUrl
    route: Route
    server: Server
    scope: dict[str, Any]
    """Without the prefix."""
    path: str
    """Below `root_path`, decoded."""
    headers: Headers
    """Names in lower case."""
    receive: Receive
    send: Send
    summarised: bool = False
    """Whether evaluation capture has begun a summary of it."""

    def header(self, name: bytes) -> bytes:
        """The first value of a header; empty without."""
        return next((value for key, value in self.headers if key == name), b"")

    def observed_by(
        self,
        recorder: EvaluationRecorder | None,
        model_call_id: str,
        body: dict[str, Any] | None,
        size: int,
        *,
        training: bool,
    ) -> CallObservation | None:
        """The summary of this call, begun; None without evaluation capture. size: of the body, in bytes."""
        if recorder is None:
            return None
        self.summarised = True
        return recorder.begin(
            self.url.rollout_id,
            model_call_id,
            method=str(self.scope["method"]),
            path=self.path,
            dialect=self.route.dialect,
            request=body,
            request_bytes=size,
            training=training,
            retry_count=retry_count(self.headers),
            engine=" ".join(filter(None, (self.server.engine, self.server.version))),
        )

    async def refused(self, recorder: EvaluationRecorder | None, refusal: RefusalError) -> None:
        """Write the summary of a request that was refused before it was read."""
        observation = self.observed_by(recorder, uuid4().hex, None, 0, training=self.url.training)
        if observation is not None:
            observation.status(refusal.status)
            await observation.end(answer=None, error=refusal.shaped(self.route.dialect))


def headers_of(scope: Scope) -> Headers:
    """The headers of a request or of the beginning of an answer, names in lower case."""
    return [(bytes(name).lower(), bytes(value)) for name, value in scope.get("headers") or ()]


def decoded_request(body: bytes) -> dict[str, Any] | None:
    """The JSON object of a body; None for anything else, which the application will refuse in its own words."""
    try:
        request = decode_json(body)
    except ValueError:
        return None
    return request if isinstance(request, dict) else None
