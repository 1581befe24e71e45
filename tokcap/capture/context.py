"""Which model call is being answered: known to whatever runs inside the request, and to nothing outside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Any

from ..errors import InvalidEntryError
from ..ids import check_model_call_id, check_rollout_id
from ..protocol import Outcome, TokenSink
from .request import requested_choices

__all__ = ("CaptureContext", "current_capture_context", "reset_capture_context", "set_capture_context")


class CaptureContext:
    """One model call that is to be captured, and what became of it so far. Mutable, used by one event loop.

    Raises `InvalidIdError` for an id that does not match the rule of `tokcap.ids`, `InvalidEntryError` for a number of
    choices below 1.
    """

    __slots__ = (
        "choices",
        "error_status",
        "extra",
        "idempotency_key",
        "intent_registered",
        "model",
        "model_call_id",
        "outcome",
        "path",
        "policy_version",
        "reason",
        "request",
        "request_digests",
        "response_id",
        "retry_count",
        "rollout_id",
        "sampling",
        "sink",
        "stored_choices",
        "writing",
    )

    def __init__(
        self,
        rollout_id: str,
        model_call_id: str,
        sink: TokenSink | None,
        *,
        choices: int | None = None,
        model: str = "",
        request: Mapping[str, Any] | None = None,
        path: str = "",
        request_digests: Iterable[bytes] | None = None,
        retry_count: int = 0,
        idempotency_key: str = "",
        sampling: Mapping[str, Any] | None = None,
        policy_version: str | int | None = None,
        response_id: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.rollout_id = check_rollout_id(rollout_id)
        self.model_call_id = check_model_call_id(model_call_id, rollout_id=rollout_id)
        self.sink = sink
        """None: another process stores the record; then only the identity is of use, and nothing is written here."""
        if choices is not None and (type(choices) is not int or choices < 1):
            raise InvalidEntryError(
                f"rollout {rollout_id}, call {model_call_id}: choices is {choices!r}, expected an integer from 1"
            )
        self.choices = requested_choices(request) if choices is None else choices
        """How many answers the call has; by default as many as the request asks for."""
        self.model = model
        """The model's name for the record; if empty, the one that the answer gives."""
        self.request = request
        """The JSON body as the engine got it: for the digests of its messages and the sampling parameters."""
        self.path = path
        """Of the route that was asked, for answers whose shape alone doesn't say what they are."""
        self.request_digests = None if request_digests is None else tuple(request_digests)
        """16 bytes per message; None: taken from `request` when the intent is written."""
        self.retry_count = retry_count
        self.idempotency_key = idempotency_key
        self.sampling = dict(sampling or {})
        """Sampling defaults of the server and its `logprobs_mode`; what `request` says itself goes before them."""
        self.policy_version = policy_version
        """The policy that answers, for engines that don't tell; may be set until the answer is captured."""
        self.response_id = response_id
        """The id of the answer as the client sees it; if empty, the one in the answer."""
        self.extra = dict(extra or {})
        """What else is to be stored with the record: the engine's name and version, for example."""
        self.intent_registered = False
        """Whether the sink holds an intent of this call; False with a sink that knows none."""
        self.stored_choices: set[int] = set()
        """The indexes of the choices whose entries are durable."""
        self.outcome: Outcome | None = None
        """What a durable settlement said last, or `conflict` if the sink refused the record for that; else None."""
        self.reason = ""
        """Why the call has no record, or none that is whole."""
        self.error_status: int | None = None
        """Of an answer that was no answer but an error: its HTTP status, 0 if it tells none."""
        self.writing: asyncio.Task[Any] | None = None
        """The write that was begun last. It goes on when its caller is cancelled."""

    @property
    def committed(self) -> bool:
        """Whether the entries of all choices are stored, or are stored by another process."""
        return self.sink is None or len(self.stored_choices) >= self.choices

    def __repr__(self) -> str:
        # Without the request: contexts are logged, and content must not be.
        said = "recorded" if self.committed else self.outcome or "open"
        return f"CaptureContext({self.rollout_id!r}, {self.model_call_id!r}, choices={self.choices}, {said})"


_current: ContextVar[CaptureContext | None] = ContextVar("tokcap_capture_context", default=None)


def set_capture_context(context: CaptureContext) -> Token[CaptureContext | None]:
    """Make `context` that of the running task and of tasks it starts; others don't see it.

    Returns what `reset_capture_context` takes.
    """
    return _current.set(context)


def reset_capture_context(token: Token[CaptureContext | None]) -> None:
    """Back to what was current before. Raises `ValueError` in a task that did not set it."""
    _current.reset(token)


def current_capture_context() -> CaptureContext | None:
    """The call that the running task answers; None for traffic that is not captured."""
    return _current.get()
