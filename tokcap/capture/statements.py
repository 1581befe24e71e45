"""What is said to a sink about one call, with the methods that the sink has. After generation nothing here raises."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ..digests import request_digests
from ..entry import TokenEntry
from ..errors import CaptureError, ConflictError, StaleAttemptError, TokcapError
from ..foreign import UnaskedCancellationError, accepted, uncancelled
from ..protocol import Delivered, SettledOutcome, TokenSink
from .answer import is_stored
from .context import CaptureContext

__all__ = ("apart", "begin", "deliver", "described", "settle_as", "store", "written")

logger = logging.getLogger("tokcap.capture")

_OPTIONAL = frozenset(("choices", "request_digests", "retry_count", "idempotency_key"))
"""What a `begin_call` may take beside the two ids."""

_running: set[asyncio.Task[None]] = set()
_MOST_WORDS = 1000


async def apart(context: CaptureContext, write: Callable[[], Awaitable[object]]) -> None:
    """Run `write` in a task of its own, after the writes of this call that were begun before it.

    A caller that is cancelled leaves it running: a client that goes away, or a cancel scope that cancels every await
    again, must not cost a record that is being written.
    """
    before = context.writing

    async def in_turn() -> None:
        # That of another event loop, as an engine may have one, can't be awaited here.
        if before is not None and not before.done() and before.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({before})
        await write()

    task = asyncio.create_task(in_turn())
    context.writing = task
    _running.add(task)  # the loop itself holds tasks weakly
    task.add_done_callback(partial(_let_go, context))
    await asyncio.shield(task)


async def written(within_s: float) -> None:
    """Wait until everything is written that calls of this event loop have begun to say, or the time is over."""
    loop = asyncio.get_running_loop()
    tasks = {task for task in _running if task.get_loop() is loop}
    if tasks:
        await asyncio.wait(tasks, timeout=within_s)


def _let_go(context: CaptureContext, task: asyncio.Task[None]) -> None:
    """A task that is over is not kept: it refers to its context, and that to all that the call holds."""
    _running.discard(task)
    if context.writing is task:
        context.writing = None


async def begin(context: CaptureContext) -> None:
    """The durable intent, if the sink knows intents. Raises `TokcapError`s of the sink, anything else as
    `CaptureError`."""
    begin_call = getattr(context.sink, "begin_call", None)
    if begin_call is None or context.intent_registered:
        return
    try:
        taken = accepted(begin_call, _OPTIONAL)
        known = {
            "choices": context.choices,
            "retry_count": context.retry_count,
            "idempotency_key": context.idempotency_key,
        }
        if "request_digests" in taken:
            known["request_digests"] = _digests(context)
        asked = {key: known[key] for key in known if key in taken}
        await uncancelled(begin_call(context.rollout_id, context.model_call_id, **asked))
    except TokcapError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{_where(context)}: the intent could not be written ({described(error)}); don't generate"
        ) from error
    context.intent_registered = True


async def store(context: CaptureContext, entries: Sequence[TokenEntry]) -> bool:
    """Put the entries of one call. True: they are durable. False: the call is in conflict, or settled as lost.

    What is stored already is left out; other tokens for a stored choice are put, because that makes the conflict.
    """
    entries = [entry for entry in entries if not is_stored(context, entry)]
    contradicted = any(entry.choice_index in context.stored_choices for entry in entries)
    try:
        if context.sink is not None:
            await _put(context.sink, context, entries)
            if contradicted:  # a sink that keeps the last one, or both
                await settle_as(context, "lost", "other tokens were given for a choice that was stored")
                context.outcome = "conflict"
                return False
    except ConflictError as error:
        # The sink has made the conflict durable, and it outranks whatever could be said here.
        context.outcome, context.reason = "conflict", described(error)
        logger.warning("%s: another content is stored for this call: %s", _where(context), context.reason)
    except Exception as error:
        await settle_as(context, "lost", f"the record could not be stored: {described(error)}")
    else:
        return True
    return False


async def _put(sink: TokenSink, context: CaptureContext, entries: Sequence[TokenEntry]) -> None:
    put_many = getattr(sink, "put_many", None)
    if put_many is not None and len(entries) > 1:
        await uncancelled(put_many(list(entries)))
        _remember(context, entries)
        return
    for entry in entries:
        await uncancelled(sink.put(entry))
        _remember(context, [entry])


def _remember(context: CaptureContext, entries: Sequence[TokenEntry]) -> None:
    for entry in entries:
        context.stored_choices.add(entry.choice_index)
        context.stored.setdefault(entry.choice_index, entry)


async def settle_as(context: CaptureContext, outcome: SettledOutcome, detail: str = "") -> None:
    """Say how a call ended. A sink that fails is logged, with what shows the call all the same."""
    if context.outcome == outcome:
        return
    detail = detail[:_MOST_WORDS]
    if outcome == "lost":
        logger.warning("%s: lost: %s", _where(context), detail)
    else:
        logger.debug("%s: %s: %s", _where(context), outcome, detail)
    if context.sink is not None:
        try:
            await _settle(context.sink, context, outcome, detail)
        except Exception as error:
            context.reason = detail
            if isinstance(error, StaleAttemptError):
                shown = "the reset removed its intent, too; the new attempt has no part in this call"
            elif context.intent_registered:
                shown = "its intent is stored and shows it as open"
            else:
                shown = "nothing stored shows that this call happened; don't train on the rollout"
            logger.error(
                "%s: could not be settled as %s (%s): %s; %s",
                _where(context),
                outcome,
                detail,
                described(error),
                shown,
            )
            return
    context.outcome, context.reason = outcome, detail


async def _settle(sink: TokenSink, context: CaptureContext, outcome: SettledOutcome, detail: str) -> None:
    settle_call = getattr(sink, "settle_call", None)
    if settle_call is not None:
        await uncancelled(settle_call(context.rollout_id, context.model_call_id, outcome, detail))
    elif outcome != "no_generation":
        await uncancelled(sink.mark_incomplete(context.rollout_id, context.model_call_id))


async def deliver(context: CaptureContext, delivered: Delivered) -> None:
    """Note how much of the answer the client received, if the sink keeps such notes."""
    note = getattr(context.sink, "note_delivery", None)
    if note is None:
        return
    try:
        await uncancelled(note(context.rollout_id, context.model_call_id, delivered))
    except Exception as error:
        logger.warning("%s: delivery %s could not be noted: %s", _where(context), delivered, described(error))


def described(error: BaseException) -> str:
    """An error in words that hold no content: messages of foreign errors may quote what a model said."""
    if isinstance(error, (TokcapError, OSError, UnaskedCancellationError)):
        return f"{type(error).__name__}: {error}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" in {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
    return f"{type(error).__name__}{place}"


def _where(context: CaptureContext) -> str:
    return f"rollout {context.rollout_id}, call {context.model_call_id}"


def _digests(context: CaptureContext) -> tuple[bytes, ...]:
    if context.request_digests is None:
        try:
            context.request_digests = () if context.request is None else request_digests(context.request)
        except Exception as error:  # a body that is none; the engine will say so
            context.request_digests = ()
            logger.warning("%s: the request has no digests: %s", _where(context), described(error))
    return context.request_digests
