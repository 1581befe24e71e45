"""Answers that the middleware gives itself, in the shape that clients of each dialect expect of an error."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import BusyError, FrozenError, InvalidIdError, NoSpaceError, RetiredError
from .interface import Send

__all__ = ("RefusalError", "error_body", "intent_refusal", "send_refusal")


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    408: "request_timeout",
    409: "rollout_frozen",
    410: "rollout_retired",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "untranslatable_request",
    503: "capture_unavailable",
}

_RETRY_AFTER_S: dict[type[Exception], int] = {BusyError: 1, NoSpaceError: 30}
"""A disk that can't follow may have caught up in a moment; somebody has to free space on one that is full."""
_RETRY_AFTER_ELSE_S = 5


class RefusalError(Exception):
    """A request that is not handed to the application, and why. `retry`: whether asking again may help."""

    def __init__(
        self, status: int, message: str, *, retry: bool = False, retry_after_s: int = 0, body: Any = None
    ) -> None:
        super().__init__(message)
        self.body = body
        """In place of the one that the dialect has."""
        self.status = status
        self.message = message
        self.retry = retry
        self.retry_after_s = retry_after_s
        """When it is worth to ask again; 0: nothing is said of that."""

    def shaped(self, dialect: str) -> Any:
        """The JSON body of the answer."""
        return error_body(dialect, self.status, self.message) if self.body is None else self.body


def intent_refusal(error: Exception, rollout_id: str) -> RefusalError:
    """What a client is told if the intent of its call could not be written; nothing has been generated."""
    if isinstance(error, FrozenError):
        return RefusalError(
            409,
            f"rollout {rollout_id} is frozen for its consumer, and this call was not sent to the engine: stop the "
            "agent, or reset the rollout to use its id again",
        )
    if isinstance(error, RetiredError):
        return RefusalError(
            410,
            f"rollout {rollout_id} was consumed and retired, and this call was not sent to the engine: stop the "
            "agent, or reset the rollout to use its id again",
        )
    if isinstance(error, InvalidIdError):
        return RefusalError(400, str(error))
    return RefusalError(
        503,
        f"nothing was generated, because the call can't be captured: {error}",
        retry=True,
        retry_after_s=_RETRY_AFTER_S.get(type(error), _RETRY_AFTER_ELSE_S),
    )


def error_body(dialect: str, status: int, message: str) -> dict[str, Any]:
    """The JSON body of an error: as Anthropic shapes it for `messages`, else as OpenAI does."""
    kind = _KINDS.get(status, "api_error")
    if dialect == "messages":
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def send_refusal(refusal: RefusalError, dialect: str, send: Send) -> None:
    """Send the whole answer. The official clients retry 409 by themselves unless they are told not to."""
    body = msgspec.json.encode(refusal.shaped(dialect))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if not refusal.retry:
        headers.append((b"x-should-retry", b"false"))
    if refusal.retry_after_s:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
