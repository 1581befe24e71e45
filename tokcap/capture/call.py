"""One captured call as a context manager: no way out of it leaves the call without an outcome."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from ..protocol import TokenSink
from .context import CaptureContext, reset_capture_context, set_capture_context
from .point import register_call_intent
from .statements import apart, described, settle_as

__all__ = ("captured_call",)

_GONE = (asyncio.CancelledError, GeneratorExit)
_PROVES_NOTHING = (408, 499)
"""A time-out, or a client that went away: the engine may have been sampling."""


@asynccontextmanager
async def captured_call(
    sink: TokenSink | None, rollout_id: str, model_call_id: str | None = None, **known: Any
) -> AsyncIterator[CaptureContext]:
    """Begin a call, make it current, and see to it that it has an outcome at the end.

    model_call_id: minted if it is None. known: the keyword arguments of `CaptureContext`.

    Inside, generate and hand the answer to `capture_tokens` or `commit_entry`. If neither was called, the call is
    `aborted` on a cancellation; `no_generation` if the engine refused it, by an error or an error body with a status
    from 400 to 499; else `lost`. Raises `InvalidIdError`, and what `register_call_intent` raises, before anything is
    generated.
    """
    call_id = uuid.uuid4().hex if model_call_id is None else model_call_id
    context = CaptureContext(rollout_id, call_id, sink, **known)
    token = set_capture_context(context)
    try:
        try:
            await register_call_intent()
        except asyncio.CancelledError:
            await apart(context, partial(_withdraw, context))
            raise
        try:
            yield context
        except (Exception, *_GONE) as error:
            await apart(context, partial(_end, context, error))
            raise
        await apart(context, partial(_end, context, None))
    finally:
        with suppress(ValueError):  # a generator may be closed by another task than the one that ran it
            reset_capture_context(token)


async def _withdraw(context: CaptureContext) -> None:
    if context.intent_registered:
        await settle_as(context, "no_generation", "cancelled before generation")


async def _end(context: CaptureContext, error: BaseException | None) -> None:
    if context.committed or context.outcome is not None:
        return
    status = context.error_status if error is None else _status(error)
    words = "no answer was captured" if error is None else f"the call failed: {described(error)}"
    if isinstance(error, _GONE):
        await settle_as(context, "aborted", "cancelled while it was being answered")
    elif context.stored_choices:
        stored = f"{len(context.stored_choices)} of {context.choices} choices were recorded"
        await settle_as(context, "lost", stored if error is None else f"{stored}; {words}")
    elif status is not None and 400 <= status < 500 and status not in _PROVES_NOTHING:
        await settle_as(context, "no_generation", f"refused with status {status}")
    elif error is None and status is not None:
        await settle_as(context, "lost", f"the answer is an error with status {status or 'unknown'}")
    else:
        await settle_as(context, "lost", words)


def _status(error: BaseException) -> int | None:
    """The HTTP status that the errors of the usual clients and servers carry."""
    with suppress(Exception):  # properties of foreign errors
        for bearer in (error, getattr(error, "response", None)):
            for name in ("status_code", "status"):
                status = getattr(bearer, name, None)
                if type(status) is int:
                    return status
    return None
