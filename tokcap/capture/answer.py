"""From the answer of an engine to entries: what it is, and what is stored of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..entry import TokenEntry
from ..errors import UnusableAnswerError
from .context import CaptureContext
from .request import requested_sampling
from .shapes import ParsedAnswer, ParsedChoice

__all__ = ("answer_entries", "error_status", "is_aborted", "is_stored", "payload_of")

_ABORTED = "aborted"
_ABORT_REASONS = ("abort", _ABORTED, "cancelled")
_CLAMPED = -9999.0
_ANSWER_KEYS = ("choices", "output", "output_ids", "meta_info")


def payload_of(response: Any) -> Any:
    """The JSON value of a complete response: a mapping, a list of them (a batch), or an object with `model_dump`.

    Raises `UnusableAnswerError` for anything else.
    """
    if isinstance(response, (list, tuple)):
        return [_mapping_of(each) for each in response]
    return _mapping_of(response)


def _mapping_of(response: Any) -> dict[str, Any]:
    dump = getattr(response, "model_dump", None)
    payload = response if dump is None else dump()
    if isinstance(payload, Mapping):
        return payload if isinstance(payload, dict) else dict(payload)
    raise UnusableAnswerError(
        f"the answer is a {type(response).__name__}; capture takes a dict, a list of dicts or an object with model_dump"
    )


def error_status(payload: Any) -> int | None:
    """The status of a body that is an error instead of an answer, 0 if it tells none; None for an answer."""
    if not isinstance(payload, Mapping) or any(payload.get(key) is not None for key in _ANSWER_KEYS):
        return None
    error = payload.get("error")
    if not error and payload.get("object") != "error":
        return None
    for body in (error, payload):
        if isinstance(body, Mapping):
            for key in ("code", "status", "status_code"):
                if type(body.get(key)) is int:
                    return int(body[key])
    return 0


def is_aborted(answer: ParsedAnswer) -> bool:
    """Whether the engine itself says that it stopped in the middle."""
    return any(choice.finish_reason in _ABORT_REASONS for choice in answer.choices)


def answer_entries(context: CaptureContext, answer: ParsedAnswer, *, aborted: bool = False) -> list[TokenEntry]:
    """An entry for each choice that is not stored yet, or with other tokens. Raises `InvalidEntryError`.

    aborted: the answer is what was seen of one that did not end; choices without any token are left out.
    """
    return [
        _entry(context, answer, choice, aborted)
        for choice in answer.choices
        if not is_stored(context, choice, partial=aborted) and not (aborted and not len(choice.generation_token_ids))
    ]


def is_stored(context: CaptureContext, given: ParsedChoice | TokenEntry, *, partial: bool = False) -> bool:
    """Whether the tokens and log-probs of this choice are stored, as far as both sides know them.

    What else an answer holds may differ: a capture inside the engine knows no content. partial: a beginning will do.
    """
    index = given.choice_index
    stored = context.stored.get(index)
    if stored is None:
        return index in context.stored_choices
    count = len(given.generation_token_ids) if partial else len(stored.generation_token_ids)
    prompts = (stored.prompt_token_ids, given.prompt_token_ids)
    if all(len(prompt) for prompt in prompts) and not np.array_equal(*prompts):
        return False
    if not np.array_equal(stored.generation_token_ids[:count], given.generation_token_ids):
        return False
    one = np.asarray(stored.generation_log_probs[:count], dtype=np.float64)
    other = np.asarray(given.generation_log_probs, dtype=np.float64)
    # -9999 is what engines write for -inf, and for one that they don't know.
    known = np.isfinite(one) & np.isfinite(other) & (one > _CLAMPED) & (other > _CLAMPED)
    # An answer may give them with fewer digits than the engine has.
    return bool(np.allclose(one[known], other[known], rtol=1e-3, atol=1e-4))


def _entry(context: CaptureContext, answer: ParsedAnswer, choice: ParsedChoice, aborted: bool) -> TokenEntry:
    finish_reason = choice.finish_reason or (_ABORTED if aborted else "")
    spans = list(choice.policy_versions)
    if not spans and context.policy_version is not None:
        spans = [(context.policy_version, 0, len(choice.generation_token_ids))]
    return TokenEntry(
        context.rollout_id,
        context.model_call_id,
        choice.prompt_token_ids,
        choice.generation_token_ids,
        choice.generation_log_probs,
        choice_index=choice.choice_index,
        routed_experts=choice.routed_experts,
        output_items=choice.output_items,
        token_item_index=choice.token_item_index,
        model=context.model or answer.model,
        response_id=context.response_id or answer.response_id,
        finish_reason=_ABORTED if finish_reason in _ABORT_REASONS else finish_reason,
        created_at=answer.created_at or time.time(),
        policy_versions=spans,
        sampling={**context.sampling, **requested_sampling(context.request)},
        pieces=choice.pieces,
        extra=_extra(context, answer, choice),
    )


def _extra(context: CaptureContext, answer: ParsedAnswer, choice: ParsedChoice) -> dict[str, Any]:
    extra = {**context.extra, **choice.extra, "shape": answer.shape, "id_sources": list(answer.id_sources)}
    if choice.stop_reason is not None:
        extra["stop_reason"] = choice.stop_reason
    if len(choice.clamped):
        extra["clamped"] = [int(position) for position in choice.clamped]
    if not choice.log_probs_present:
        extra["log_probs_missing"] = True
    return extra
