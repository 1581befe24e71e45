"""The capture point: called by the server around one generation, for the call that is current.

Before generation a failure must stop the model call (`register_call_intent` raises). After it, nothing here turns an
answer into an error: what can't be recorded makes the call `lost`, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any, get_args

from ..entry import TokenEntry
from ..errors import InvalidOutcomeError, UnusableAnswerError
from ..protocol import Delivered, SettledOutcome
from .answer import answer_entries, error_status, is_aborted, payload_of
from .context import CaptureContext, current_capture_context, target_of
from .shapes import ParsedAnswer, StreamJoiner, parse_answer
from .statements import apart, begin, deliver, described, settle_as, store

__all__ = ("capture_parsed", "capture_tokens", "commit_entry", "note_delivery", "register_call_intent", "settle")


async def register_call_intent() -> None:
    """Write the durable intent of the current call; to be awaited before generation starts. Repeating is a no-op.

    If it raises, don't generate: `FrozenError`, `RetiredError`, `DurabilityError` and other errors of tokcap as the
    sink raises them, anything else as `CaptureError`. Without a current call, and for sinks without `begin_call`,
    nothing happens.
    """
    context = current_capture_context()
    if context is not None and context.sink is not None:
        await apart(context, partial(begin, context))


async def capture_tokens(response: Any, *, status: int = 200, context: CaptureContext | None = None) -> None:
    """Record a complete answer for the current call; when this returns, the record is durable or the call is lost.

    response: the body as a dict, a list of dicts (a batch), an object with `model_dump`, or a `StreamJoiner` that was
        fed the stream as far as it came. A stream that ended early, or in an error, is `aborted` with the tokens seen.
    status: its HTTP status. An error, by status or by its body, is left to the caller to settle.
    context: the call, if it is not the current one; in an async generator always (see `captured_call`).

    Never raises, except for a cancellation, which leaves the write running. An answer without ids is `lost`, with
    no tokens sampled `no_generation`, and stopped by the engine `aborted`. Choices that are stored stay as they are;
    other tokens for one of them are a conflict. Without a current call, or after its end, nothing happens.
    """
    context = target_of(context, "an answer")
    if context is None or context.sink is None:
        return
    aborted = isinstance(response, StreamJoiner) and (response.error is not None or not response.finished)
    try:
        payload = response.answer() if isinstance(response, StreamJoiner) else payload_of(response)
        found = status if status >= 400 else error_status(payload)
        if found is not None and not aborted:
            context.error_status = found
            return
        answer = parse_answer(payload, choices=context.choices, path=context.path, partial=aborted)
    except UnusableAnswerError as error:
        await _lose_open(context, str(error))
    except (Exception, asyncio.CancelledError) as error:  # nothing was awaited, so nobody cancelled this
        await _lose_open(context, f"the answer could not be read: {described(error)}")
    else:
        if aborted and isinstance(response, StreamJoiner):
            aborted = not _ended_without_tokens(response, answer)
        await capture_parsed(answer, aborted=aborted, context=context)


def _ended_without_tokens(joiner: StreamJoiner, answer: ParsedAnswer) -> bool:
    """Whether a stream came to its end by itself and says that there was nothing to stream."""
    sampled = any(len(choice.generation_token_ids) for choice in answer.choices)
    return joiner.error is None and joiner.done and answer.usage_completion_tokens == 0 and not sampled


async def capture_parsed(answer: ParsedAnswer, *, aborted: bool = False, context: CaptureContext | None = None) -> None:
    """`capture_tokens` of an answer that is parsed already.

    aborted: it did not end; the tokens seen are stored, and the call is `aborted`.
    """
    context = target_of(context, "an answer")
    if context is None or context.sink is None:
        return
    try:
        aborted = aborted or is_aborted(answer)
        sampled = any(len(choice.generation_token_ids) for choice in answer.choices)
        if context.committed and (not sampled or answer.evidence == "none"):
            return
        if not aborted and not sampled and answer.usage_completion_tokens == 0:
            await apart(context, partial(settle_as, context, "no_generation", "usage says that no token was sampled"))
            return
        if not aborted and (answer.evidence == "none" or not answer.choices):
            await _lose(context, "the answer holds no token ids")
            return
        entries = answer_entries(context, answer, aborted=aborted) if answer.evidence != "none" else []
    except Exception as error:
        await _lose_open(context, f"no record can be made of the answer: {described(error)}")
        return
    if context.committed and not entries:
        return
    await apart(context, partial(_record, context, entries, aborted))


async def _record(context: CaptureContext, entries: list[TokenEntry], aborted: bool) -> None:
    if aborted and not context.committed:
        # Said first: a crash in between must not leave a part of an answer that counts as the whole.
        await settle_as(context, "aborted", f"it did not end; choices with tokens: {len(entries)}")
        await store(context, entries)
    elif await store(context, entries) and not context.committed:
        await settle_as(context, "lost", f"{len(context.stored_choices)} of {context.choices} choices were answered")


async def commit_entry(entry: TokenEntry | Iterable[TokenEntry], *, context: CaptureContext | None = None) -> None:
    """Record finished entries for the current call: for a capture inside the engine, which has the arrays already.

    entry: one entry, or several choices of the call; `put_many` stores them together. When this returns they are
    durable, or the call is lost (entries of another call included) or in conflict, and that is logged. Never raises,
    except for a cancellation. Repeating it is a no-op; without a current call, or after its end, nothing happens.
    context: the call, if it is not the current one.
    """
    context = target_of(context, "an entry")
    if context is None:
        return
    entries = [entry] if isinstance(entry, TokenEntry) else _entries(entry)
    identity = (context.rollout_id, context.model_call_id)
    foreign = [each for each in entries if (each.rollout_id, each.model_call_id) != identity]
    if not entries or foreign:
        found = f"an entry of rollout {foreign[0].rollout_id}, call {foreign[0].model_call_id}" if foreign else "none"
        await _lose(context, f"an entry of this call was to be committed, but was given {found}")
    elif context.sink is None:
        context.stored_choices.update(each.choice_index for each in entries)
    else:
        await apart(context, partial(store, context, entries))


def _entries(given: object) -> list[TokenEntry]:
    """The entries in `given`; empty if anything else is among them."""
    try:
        found = list(given) if isinstance(given, Iterable) else []
    except (Exception, asyncio.CancelledError):  # the caller's own iterator
        return []
    return found if all(isinstance(each, TokenEntry) for each in found) else []


async def settle(outcome: SettledOutcome, detail: str = "", *, context: CaptureContext | None = None) -> None:
    """Say how the current call ended: `no_generation` (only on proof that nothing was sampled), `aborted` or `lost`.

    detail: why, in words without content. context: the call, if it is not the current one. Raises
    `InvalidOutcomeError`; a sink that fails is logged, because generation is over. Sinks without `settle_call` are told
    of a lost or aborted call by `mark_incomplete`.
    """
    if outcome not in get_args(SettledOutcome):
        raise InvalidOutcomeError(f"settle takes {', '.join(get_args(SettledOutcome))}, not {outcome!r}")
    context = target_of(context, f"the outcome {outcome}")
    if context is not None:
        await apart(context, partial(settle_as, context, outcome, detail))


async def note_delivery(delivered: Delivered, *, context: CaptureContext | None = None) -> None:
    """Note how much of the answer the client received: `full`, `partly`, `no` or `unknown`.

    context: the call, if it is not the current one; it may have ended. Raises `InvalidOutcomeError` for anything else.
    Sinks that keep no such notes are not told; failures are logged.
    """
    if delivered not in get_args(Delivered):
        raise InvalidOutcomeError(f"note_delivery takes {', '.join(get_args(Delivered))}, not {delivered!r}")
    if context is None:
        context = target_of(None, "a delivery note")
    if context is not None:
        await apart(context, partial(deliver, context, delivered))


async def _lose_open(context: CaptureContext, reason: str) -> None:
    """An answer that can't be used takes nothing from what is stored."""
    if not context.committed:
        await _lose(context, reason)


async def _lose(context: CaptureContext, reason: str) -> None:
    await apart(context, partial(settle_as, context, "lost", reason))
