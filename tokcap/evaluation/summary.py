"""`ModelCallSummary`: what evaluation keeps of a model call: names, counts, sizes and times; no content, no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .answer import TokenUsage, answer_facts
from .bounds import name_of, number_of
from .error_class import classify
from .request import request_facts

__all__ = ("ModelCallSummary", "TokenUsage", "begun", "ended")

DETAIL_LENGTH = 1000
"""Characters that are kept of the detail of a training outcome."""

_UNREAD_DIALECTS = ("", "other")


class ModelCallSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model call as a client met it, answered or not.

    Everything is bounded (`tokcap.evaluation.bounds`): names are cut at 200 characters, of a list of names the first
    128 are kept. What nobody told is 0, empty or None.
    """

    rollout_id: str
    model_call_id: str
    """The id of the training record, too, where there is one."""
    began_at: float = 0.0
    """Unix seconds."""
    method: str = ""
    path: str = ""
    """Of the route, without the capture prefix and without a query."""
    dialect: str = ""
    """As the capture point calls it: chat, completions, responses, messages ..."""
    engine: str = ""
    """Name of the engine, and its version if it is known."""
    retry_count: int = 0
    """How often its client had tried before, as the client says."""

    # ---- the request
    requested_model: str = ""
    streamed: bool = False
    """Whether a stream was asked for."""
    request_bytes: int = 0
    message_count: int = 0
    """Messages of the conversation, those given apart (`system`, `instructions`) included."""
    roles: dict[str, int] = {}
    """How many messages each role has; an item without a role goes by its type. At most 16 different ones."""
    tool_count: int = 0
    tools: tuple[str, ...] = ()
    """Names of the tools that were offered."""
    sampling: dict[str, bool | int | float | str] = {}
    """What the request sets itself, under the names it uses: numbers and truth values; of stop strings and lists of
    ids how many; of grammars their kind, or True."""

    # ---- the answer
    status: int = 0
    """HTTP status; 0: no answer began."""
    error_class: str = ""
    """A word of `ERROR_CLASSES`; empty if all went well, or if the call is open."""
    error_type: str = ""
    """What the error calls itself: its `type` or `code`, or the name of the exception."""
    latency_s: float | None = None
    """Seconds until the call was over; None while it is open."""
    first_token_s: float | None = None
    """Seconds until the first event with content was passed on; None if there was none, or no stream."""
    answer_bytes: int = 0
    """Of the body, as they were sent to the client."""
    model: str = ""
    """As the answer names it."""
    response_id: str = ""
    """As the client saw it."""
    usage: TokenUsage = TokenUsage()
    choice_count: int = 0
    finish_reasons: tuple[str, ...] = ()
    """One for each choice, as the engine calls it; empty where it gives none."""
    tool_call_count: int = 0
    tool_calls: tuple[str, ...] = ()
    """Names of the tools that the answer calls, in order, over all choices."""
    client_gone: bool = False
    """Whether the client left before it had the answer."""

    # ---- training
    training: bool = False
    """Whether the URL was one of training capture."""
    outcome: str = ""
    """The training outcome, where there is one (see `tokcap.protocol.Outcome`). `open` also for any call whose end
    nobody saw, because its server died or is still at it: then `latency_s` is None."""
    detail: str = ""
    """Why, in words; of the training outcome."""

    @property
    def is_open(self) -> bool:
        """Whether the end of the call was not seen."""
        return self.latency_s is None


def begun(
    rollout_id: str,
    model_call_id: str,
    *,
    began_at: float,
    method: str,
    path: str,
    dialect: str,
    engine: str,
    request: Mapping[str, Any] | None,
    request_bytes: int,
    training: bool,
    retry_count: int,
) -> ModelCallSummary:
    """What is known of a call when it begins. `request`: its decoded body, None if it has none."""
    facts = request_facts(request)
    path = name_of(path).partition("?")[0]
    return ModelCallSummary(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        began_at=began_at,
        method=name_of(method),
        path=path,
        dialect=name_of(dialect),
        engine=name_of(engine),
        retry_count=_size(retry_count),
        requested_model=facts.model,
        streamed=facts.streamed or path.endswith("_stream"),
        request_bytes=_size(request_bytes),
        message_count=facts.message_count,
        roles=facts.roles,
        tool_count=facts.tool_count,
        tools=facts.tools,
        sampling=facts.sampling,
        training=bool(training),
        outcome="open",
    )


def ended(
    summary: ModelCallSummary,
    *,
    answer: Mapping[str, Any] | list[Any] | None,
    error: object = None,
    status: int = 0,
    latency_s: float,
    first_token_s: float | None = None,
    answer_bytes: int = 0,
    client_gone: bool = False,
    outcome: str = "",
    detail: str = "",
) -> ModelCallSummary:
    """`summary` of a call that began, with what is known at its end.

    answer: the whole body, decoded, or what `StreamJoiner.answer()` gives of a stream; None if there is none that can
    be read. error: an exception, or the error that the answer holds. status: 0 if no answer began.
    """
    asked = summary.sampling.get("n", 1)
    facts = answer_facts(answer, asked if type(asked) is int else 1)
    error_class, error_type = classify(
        status,
        answer,
        facts,
        error,
        known=summary.dialect not in _UNREAD_DIALECTS,
        streamed=summary.streamed,
        client_gone=client_gone,
    )
    return msgspec.structs.replace(
        summary,
        status=status,
        error_class=error_class,
        error_type=error_type,
        latency_s=latency_s,
        first_token_s=first_token_s,
        answer_bytes=answer_bytes,
        model=facts.model,
        response_id=facts.response_id,
        usage=facts.usage,
        choice_count=facts.choice_count,
        finish_reasons=facts.finish_reasons,
        tool_call_count=facts.tool_call_count,
        tool_calls=facts.tool_calls,
        client_gone=client_gone,
        outcome=name_of(outcome),
        detail=detail[:DETAIL_LENGTH],
    )


def _size(value: object) -> int:
    number = number_of(value)
    return number if type(number) is int and 0 <= number < 2**31 else 0
