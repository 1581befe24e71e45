"""One captured call between its request and its answer: what is known of it, and how it ended."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from ..capture import CaptureContext, capture_tokens, captured_call, note_delivery, settle
from ..capture.request import requested_choices
from ..capture.shapes import PromptReader, StreamJoiner, parse_answer
from ..errors import TokcapError, UnusableAnswerError
from ..protocol import Delivered, TokenSink
from .asks import Asked
from .client import Client
from .interface import Headers
from .metrics import Metrics
from .policy import PolicyStamp
from .refusals import intent_refusal
from .routes import Route
from .urls import CaptureUrl

__all__ = ("Call",)

_PROVES_NOTHING = (408, 499)
"""A time-out, or a client that went away: the engine may have been sampling."""
_AFTER_SAMPLING = (
    # Python's JSON encoder of a NaN among log-probs: vLLM from 0.18 on makes a 400 of it
    "Out of range float values are not JSON compliant",
    # SGLang, 503
    "Request running timeout reached",
    "Retracted under decode memory pressure",
)
_NOT_READY = (501, 503)
"""What a server answers that doesn't take the request."""


class Call:
    """A call of training capture. Its intent is written by `admit`, and `end` sees to it that it has an outcome."""

    def __init__(
        self,
        url: CaptureUrl,
        route: Route,
        client: Client,
        sink: TokenSink,
        asked: Asked,
        policy: PolicyStamp,
        metrics: Metrics,
        prompts: PromptReader,
        known: Mapping[str, Any],
    ) -> None:
        self.model_call_id = uuid.uuid4().hex
        self.route = route
        self.client = client
        self.asked = asked
        self.prompts = prompts
        """What reads long prompt ids of the answer."""
        self.context: CaptureContext | None = None
        """None before the intent is durable."""
        self.engine_state: dict[str, Any] | None = None
        """What vLLM notes of a request in its own process: `request_metadata` as soon as the engine is asked."""
        self._url = url
        self._sink = sink
        self._policy = policy
        self._metrics = metrics
        self._known = known
        self._stack = AsyncExitStack()
        self._admission = asyncio.Lock()
        self._conclusion: asyncio.Task[None] | None = None
        """What is said of the answer, once; whoever asks again waits for the same, however often it is cancelled."""

    @property
    def choices(self) -> int:
        """How many answers the request asks for."""
        return requested_choices(self._known.get("request"))

    @property
    def outcome(self) -> str:
        """What is known durably: `recorded` or another outcome; `open` before there is one."""
        context = self.context
        if context is None:
            return ""
        return context.outcome or ("recorded" if context.committed else "open")

    @property
    def reason(self) -> str:
        """Why the call has no record, or none that is whole."""
        return self.context.reason if self.context is not None else ""

    async def admit(self) -> None:
        """Write the intent; from now on the call is the current one. Raises `RefusalError`. Repeating is a no-op."""
        async with self._admission:
            if self.context is not None:
                return
            begun = time.perf_counter()
            try:
                self.context = await self._stack.enter_async_context(
                    captured_call(
                        self._sink,
                        self._url.rollout_id,
                        self.model_call_id,
                        policy_version=self._policy.at_entry(),
                        **self._known,
                    )
                )
            except TokcapError as error:
                self._metrics.refused(error)
                self._metrics.pending(self._sink)
                raise intent_refusal(error, self._url.rollout_id) from error
            self._metrics.intent_seconds(time.perf_counter() - begun)
            self._metrics.begun()
            self._metrics.pending(self._sink)

    def answering(self, status: int, headers: Headers, payload: Any, problem: str) -> asyncio.Task[None]:
        """A whole answer came. When the task is done its record is durable, or the call is settled.

        payload: the decoded body, None if it is no JSON; then `problem` says what it is. The task has taken what it
        needs of it when it waits for the first time.
        """
        return self._concluded(lambda: self._answered(status, headers, payload, problem))

    async def streamed(self, joiner: StreamJoiner, headers: Headers) -> None:
        """A stream came to its end, or to what is the end of it. The same promise when this returns."""
        await asyncio.shield(self._concluded(lambda: self._streamed(joiner, headers)))

    async def opaque(self, what: str) -> None:
        """An answer passed that is neither JSON nor a stream of events."""
        await asyncio.shield(self._concluded(lambda: self._unreadable(what)))

    def _concluded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        if self._conclusion is None:
            self._conclusion = asyncio.create_task(work())
        return self._conclusion

    async def _answered(self, status: int, headers: Headers, payload: Any, problem: str) -> None:
        if self.context is None:
            return
        if status >= 400:
            await self._refused(status, payload)
        elif status >= 300:
            await settle("no_generation", f"redirected with status {status}", context=self.context)
        elif not isinstance(payload, (dict, list)):
            await self._unreadable(problem)
        else:
            await self._record(payload, headers, status)
            if self.outcome == "open":  # an error in the clothes of an answer
                await self._refused(self.context.error_status or 500, payload)

    async def _streamed(self, joiner: StreamJoiner, headers: Headers) -> None:
        if self.context is None:
            return
        if self.client.gone and not joiner.ended and not _has_ids(joiner):
            # Late ids, such as those of SGLang, come after the last finish reason.
            await settle("aborted", "the client had gone before any id", context=self.context)
            return
        await self._record(joiner, headers, 200)

    async def failed(self, error: BaseException) -> None:
        """The application raised. If it never asked for the body, it can't have made the model sample."""
        if self.context is not None and (not self.client.body_taken or self._engine_says() == "untouched"):
            await asyncio.shield(self._concluded(self._never_asked))

    async def unanswered(self) -> None:
        """The application returned, and gave no answer or no end of it."""
        if self.context is None or self._conclusion is not None or self.outcome != "open":
            return
        if self.client.gone:
            await settle("aborted", "the client had gone before the answer", context=self.context)
        elif not self.client.body_taken:
            why = "the application gave no answer, and never read the request"
            await settle("no_generation", why, context=self.context)
        else:
            await settle("lost", "the application gave no answer", context=self.context)

    async def _never_asked(self) -> None:
        await settle("no_generation", "the application failed before the engine was asked", context=self.context)

    async def delivered(self, how: Delivered) -> None:
        """Note how much of the answer was sent, after it was sent."""
        if self.context is not None and (self.context.stored_choices or self.outcome == "aborted"):
            await note_delivery(how, context=self.context)

    async def end(self, error: BaseException | None) -> None:
        """Leave the call: without an outcome it gets the one that `captured_call` gives. Never raises `error`."""
        if self.context is None:
            return
        if self._conclusion is not None and not self._conclusion.done():
            await asyncio.wait({self._conclusion})
        arguments = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        try:
            await self._stack.__aexit__(*arguments)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            stored = self.context.stored.values()
            self._metrics.ended(
                self.outcome,
                prompt_tokens=sum(len(entry.prompt_token_ids) for entry in stored),
                sampled_tokens=sum(len(entry.generation_token_ids) for entry in stored),
            )
            self._metrics.pending(self._sink)

    async def _record(self, answer: Any, headers: Headers, status: int) -> None:
        assert self.context is not None
        self._policy.at_exit(self.context, headers)
        if not self.route.known and not _has_ids(answer):
            await settle("lost", "unknown_route: its answer holds no token ids", context=self.context)
            return
        begun = time.perf_counter()
        await capture_tokens(answer, status=status, context=self.context)
        self._metrics.put_seconds(time.perf_counter() - begun)

    async def _refused(self, status: int, payload: Any) -> None:
        assert self.context is not None
        if not self.client.body_taken:
            outcome, why = "no_generation", f"answered with status {status} before the request was read"
        elif self.outcome != "open":
            return  # the application has said so itself
        elif (proof := self._engine_says()) == "untouched":
            outcome, why = "no_generation", f"refused with status {status} before the engine was asked"
        elif proof == "answered" or _was_sampled(payload):
            outcome, why = "lost", f"answered with status {status} after tokens were sampled"
        elif status in _NOT_READY or (400 <= status < 500 and status not in _PROVES_NOTHING):
            outcome, why = "no_generation", f"refused with status {status}"
        elif self.client.gone:
            outcome, why = "aborted", f"the client had gone, and the answer has status {status}"
        else:
            outcome, why = "lost", f"answered with status {status}, which tokens may have been sampled before"
        await settle(outcome, why, context=self.context)  # type: ignore[arg-type]

    def _engine_says(self) -> str:
        """`untouched`, `answered`, or empty if there is no proof; only vLLM's own routes in this process give one."""
        if self.engine_state is None:
            return ""
        metadata = self.engine_state.get("request_metadata")
        if metadata is None:
            return "untouched"
        return "answered" if getattr(metadata, "final_usage_info", None) is not None else ""

    async def _unreadable(self, what: str) -> None:
        if self.context is None:
            return
        if self.client.gone:
            await settle("aborted", f"the client had gone, and {what}", context=self.context)
        else:
            await settle("lost", what if self.route.known else f"unknown_route: {what}", context=self.context)


def _was_sampled(payload: Any) -> bool:
    """Whether the words of an error say that tokens had been sampled, whatever its status."""
    body = payload if isinstance(payload, dict) else {}
    error = body.get("error", body.get("message"))
    message = error.get("message") if isinstance(error, dict) else error
    return isinstance(message, str) and any(words in message for words in _AFTER_SAMPLING)


def _has_ids(answer: Any) -> bool:
    """Whether there is anything that ids could be read from."""
    try:
        payload = answer.answer() if isinstance(answer, StreamJoiner) else answer
        return parse_answer(payload, partial=True).evidence != "none"
    except UnusableAnswerError:
        return True
