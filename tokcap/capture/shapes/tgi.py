"""Text Generation Inference: `/generate` with `details` and `decoder_input_details`."""

from __future__ import annotations

from typing import Any

from ...arrays import shown
from ...errors import UnusableAnswerError
from .answer import Asked, ParsedAnswer, Shape
from .assembly import Draft, Head, Problems, assemble, reader_for
from .items import text_items
from .log_probs import from_plain
from .places import as_dict, count, text

__all__ = ("SHAPES",)


def _answer(payload: object) -> dict[str, Any]:
    # The compatibility route wraps its only answer into a list.
    return as_dict(payload[0] if isinstance(payload, list) and len(payload) == 1 else payload)


def _is_generate(payload: object) -> bool:
    answer = _answer(payload)
    return "generated_text" in answer and isinstance(answer.get("details"), dict)


def _parse(payload: Any, asked: Asked, shape: str) -> ParsedAnswer:
    answer = _answer(payload)
    details = as_dict(answer.get("details"))
    problems = Problems()
    # Without `decoder_input_details` the list is there and empty, which is no empty prompt.
    prefill = details.get("prefill") or None
    tokens = details.get("tokens")
    log_probs = problems.attempt(_members, tokens, "logprob", "details.tokens")
    source = problems.attempt(from_plain, log_probs, "details.tokens[].logprob")
    draft = Draft(
        place="details",
        index=0,
        prompt=[("details.prefill[].id", problems.attempt(_members, prefill, "id", "details.prefill"))],
        sampled=[("details.tokens[].id", problems.attempt(_members, tokens, "id", "details.tokens", ids=True))],
        log_probs=[] if source is None else [source],
        finish_reason=text(details.get("finish_reason")),
        output_items=text_items(answer.get("generated_text")),
        extra={} if details.get("seed") is None else {"seed": details["seed"]},
        problems=problems,
    )
    head = Head(
        completion_tokens=details.get("generated_tokens"),
        prompt_tokens=count(details.get("input_length")),
        completion_tokens_at="details.generated_tokens",
        prompt_tokens_at="details.input_length",
    )
    return assemble([draft], head, asked, reader_for(asked), shape)


def _members(entries: object, key: str, place: str) -> list[Any] | None:
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise UnusableAnswerError(f"{place} is {shown(entries)}, expected a list of tokens")
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UnusableAnswerError(f"{place}[{position}] is {shown(entry)}, expected a token with an id")
    return [entry.get(key) for entry in entries]


SHAPES = (
    Shape(
        "tgi-generate",
        "Text Generation Inference",
        "details, decoder_input_details",
        "/generate",
        "details.prefill[].id; never streamed",
        "details.tokens[].id",
        "details.tokens[].logprob",
        _is_generate,
        _parse,
    ),
)
