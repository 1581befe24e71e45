"""One captured call as a context manager: no way out of it leaves the call without an outcome."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ..protocol import TokenSink
from .context import CaptureContext, begin_block, end_block, leave_block
from .statements import apart, begin, described, settle_as

__all__ = ("captured_call",)

_GONE = (asyncio.CancelledError, GeneratorExit)
_PROVES_NOTHING = (408, 499)
"""A time-out, or a client that went away: the engine may have been sampling."""
_GENERATING = ("/completions", "/responses", "/messages", "/generate")
"""How the paths of the routes end that only a model answers."""


@asynccontextmanager
async def captured_call(
    sink: TokenSink | None, rollout_id: str, model_call_id: str | None = None, **known: Any
) -> AsyncIterator[CaptureContext]:
    """Begin a call, make it current, and see to it that it has an outcome at the end.

    model_call_id: minted if it is None. known: the keyword arguments of `CaptureContext`.

    Inside, generate and hand the answer to `capture_tokens` or `commit_entry`. If neither was called, the call is
    `aborted` on a cancellation; `no_generation` on proof that the engine refused it; else `lost`. Proof is a status
    from 400 to 499, other than 408 and 499, of an error body that `capture_tokens` was given (an exception may follow
    if it has the same status), or of an exception whose request or response URL is that of a generating route
    (`/chat/completions`, `/completions`, `/responses`, `/messages`, `/generate`). A status alone is none: other
    services have them, too. Raises `InvalidIdError`, and what `register_call_intent` raises, before anything is
    generated.

    In an async generator pass the context on: `capture_tokens(answer, context=call)`, likewise for the others. What is
    current belongs to the task that iterates it, and generators may take turns there. An answer that may then be of
    one call or of another is dropped and logged as an error, and those of the calls that get no record are `lost`.
    """
    call_id = uuid.uuid4().hex if model_call_id is None else model_call_id
    context = CaptureContext(rollout_id, call_id, sink, **known)
    begin_block(context)
    try:
        try:
            if sink is not None:
                await apart(context, partial(begin, context))
        except asyncio.CancelledError:
            await apart(context, partial(_withdraw, context))
            raise
        try:
            yield context
        except (Exception, *_GONE) as error:
            end_block(context)
            await apart(context, partial(_end, context, error))
            raise
        end_block(context)
        await apart(context, partial(_end, context, None))
    finally:
        leave_block(context)


async def _withdraw(context: CaptureContext) -> None:
    if context.intent_registered:
        await settle_as(context, "no_generation", "cancelled before generation")


async def _end(context: CaptureContext, error: BaseException | None) -> None:
    if context.committed or context.outcome is not None:
        return
    status = context.error_status if error is None else _refusal(context, error)
    words = "no answer was captured" if error is None else f"the call failed: {described(error)}"
    if context.interleaved:
        await settle_as(context, "lost", "an answer may have been of this call or of one that took turns with it")
    elif isinstance(error, _GONE):
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


def _refusal(context: CaptureContext, error: BaseException) -> int | None:
    """The status in `error`, if it is known to be an answer of the engine."""
    status = _status(error)
    if status is not None and (status == context.error_status or any(map(_generates, _urls(error)))):
        return status
    return None


def _urls(error: BaseException) -> Iterator[object]:
    """What was asked, as the errors of the usual clients tell."""
    for bearer in ("request", "response", "request_info", None):
        with suppress(Exception):  # properties of foreign errors
            yield getattr(error if bearer is None else getattr(error, bearer, None), "url", None)


def _generates(url: object) -> bool:
    with suppress(Exception):
        return url is not None and urlsplit(str(url)).path.rstrip("/").endswith(_GENERATING)
    return False


def _status(error: BaseException) -> int | None:
    """The HTTP status that the errors of the usual clients and servers carry."""
    with suppress(Exception):  # properties of foreign errors
        for bearer in (error, getattr(error, "response", None)):
            for name in ("status_code", "status"):
                status = getattr(bearer, name, None)
                if type(status) is int:
                    return status
    return None
