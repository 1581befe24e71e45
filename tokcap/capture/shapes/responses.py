"""Answers of `/v1/responses`: vLLM with `enable_response_messages`, and the items of NeMo Gym."""

from __future__ import annotations

from typing import Any

from ...errors import UnusableAnswerError
from .answer import Asked, ParsedAnswer, Shape
from .assembly import Draft, Head, Problems, assemble, reader_for
from .items import CARRIED, responses_items
from .log_probs import LogProbs, from_entries, from_plain
from .openai import carries
from .places import Found, as_dict, as_list, text

__all__ = ("SHAPES",)

_FINISH_REASONS = {"completed": "stop", "incomplete": "length", "cancelled": "abort", "failed": "error"}


def _items(payload: object) -> list[dict[str, Any]]:
    return [as_dict(item) for item in as_list(as_dict(payload).get("output"))]


def _is_responses(payload: object) -> bool:
    return isinstance(as_dict(payload).get("output"), list) and "choices" not in as_dict(payload)


def _is_carried(payload: object) -> bool:
    return _is_responses(payload) and any(map(carries, _items(payload)))


def _parse(payload: dict[str, Any], asked: Asked, shape: str) -> ParsedAnswer:
    problems = Problems()
    items = _items(payload)
    carrier = problems.attempt(_carrier, items, ids=True)
    carried = {} if carrier is None else items[carrier]
    at = f"output[{carrier}]"
    prompt: Found = [(f"{at}.{CARRIED[0]}", carried.get(CARRIED[0]))]
    sampled: Found = [(f"{at}.{CARRIED[1]}", carried.get(CARRIED[1]))]
    told = problems.attempt(_tokens_of_messages, payload, ids=True)
    if told is not None:
        prompt.append(("input_messages[0].tokens", told[0]))
        sampled.append(("output_messages[0].tokens", told[1]))
    log_probs = [
        problems.attempt(from_plain, carried.get(CARRIED[2]), f"{at}.{CARRIED[2]}"),
        problems.attempt(_log_probs_of_text, items, sampled),
    ]
    usage = as_dict(payload.get("usage"))
    draft = Draft(
        place="output",
        index=0,
        prompt=prompt,
        sampled=sampled,
        log_probs=[source for source in log_probs if source is not None],
        finish_reason=_finish_reason(payload),
        output_items=responses_items(items),
        token_item_index=carrier,
        routed_experts=carried.get("routed_experts"),
        problems=problems,
    )
    head = Head(
        payload.get("model"),
        payload.get("id"),
        payload.get("created_at"),
        usage.get("output_tokens"),
        usage.get("input_tokens"),
        completion_tokens_at="usage.output_tokens",
        prompt_tokens_at="usage.input_tokens",
    )
    return assemble([draft], head, asked, reader_for(asked), shape)


def _carrier(items: list[dict[str, Any]]) -> int | None:
    """The one item with the three fields. Several would be several model calls, and an entry is one of them."""
    carriers = [position for position, item in enumerate(items) if carries(item)]
    if len(carriers) > 1:
        places = ", ".join(f"output[{position}]" for position in carriers)
        raise UnusableAnswerError(f"{places} carry ids; one model call has them on one item")
    return carriers[0] if carriers else None


def _tokens_of_messages(payload: dict[str, Any]) -> tuple[Any, Any] | None:
    """Prompt and sampled ids of the raw messages of vLLM."""
    before, after = as_list(payload.get("input_messages")), as_list(payload.get("output_messages"))
    if not any(as_dict(message).get("tokens") is not None for message in after):
        return None
    if len(before) > 1 or len(after) > 1:
        # With the server's own tools they alternate: prompt and answer of each round.
        raise UnusableAnswerError(
            f"output_messages holds {len(after)} messages with {len(before)} in input_messages: "
            "several rounds in one answer, one is expected"
        )
    return as_dict(before[0]).get("tokens") if before else None, after[0]["tokens"]


def _log_probs_of_text(items: list[dict[str, Any]], sampled: Found) -> LogProbs | None:
    """Only parts with text carry log-probs, so that they are of use only if there is nothing else."""
    lengths = {len(value) for _, value in sampled if isinstance(value, list)}
    parts = [as_dict(part) for item in items for part in as_list(item.get("content"))]
    found = [part["logprobs"] for part in parts if isinstance(part.get("logprobs"), list)]
    if not found or any(item.get("type") != "message" for item in items):
        return None
    entries = [entry for column in found for entry in column]
    return from_entries(entries, "output[].content[].logprobs") if lengths == {len(entries)} else None


def _finish_reason(payload: dict[str, Any]) -> str:
    status = text(payload.get("status"))
    reason = text(as_dict(payload.get("incomplete_details")).get("reason"))
    if reason:
        return "length" if reason == "max_output_tokens" else reason
    return _FINISH_REASONS.get(status, status)


SHAPES = (
    Shape(
        "nemo-responses",
        "NeMo Gym, NeMo RL",
        "0.7",
        "/v1/responses",
        "output[].prompt_token_ids",
        "output[].generation_token_ids",
        "output[].generation_log_probs",
        _is_carried,
        _parse,
    ),
    Shape(
        "vllm-responses",
        "vLLM",
        "0.13 (enable_response_messages)",
        "/v1/responses",
        "input_messages[0].tokens",
        "output_messages[0].tokens",
        "output[].content[].logprobs, if they cover all ids",
        _is_responses,
        _parse,
    ),
)
