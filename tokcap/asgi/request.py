"""One request that may generate, as the middleware hands it on: what its URL, its route and its server say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..capture.shapes import decode_json
from .engines import Server
from .interface import Application, Headers, Receive, Scope, Send
from .known import retry_count
from .metrics import Metrics
from .policy import PolicyVersions
from .routes import Route
from .settings import ServingSettings
from .urls import CaptureUrl

if TYPE_CHECKING:
    from ..evaluation import CallObservation, EvaluationRecorder

__all__ = ("Request", "Serving", "decoded_request", "headers_of")


class Serving(msgspec.Struct):
    """What all calls of one middleware share."""

    app: Application
    settings: ServingSettings
    policy: PolicyVersions
    metrics: Metrics
    fingerprint: Any = msgspec.UNSET
    """The `system_fingerprint` of the server, None if it has none, UNSET until an answer told it."""


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
            engine=self.server.engine,
        )


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
