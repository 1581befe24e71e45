"""Chat answers and completions, whatever engine or gateway gives them: all the places in which ids may stand."""

from __future__ import annotations

from typing import Any

from ...errors import UnusableAnswerError
from .answer import Asked, ParsedAnswer
from .assembly import Draft, Head, Problems, assemble, reader_for
from .items import CARRIED, chat_items, text_items
from .log_probs import from_logprobs, from_plain, from_triples
from .places import Found, as_dict, as_list, column, count, text

__all__ = (
    "carries",
    "choice_dicts",
    "engine_extra",
    "finish",
    "first",
    "first_of",
    "is_chat",
    "is_completion",
    "parse_choices",
    "prompt_of_triples",
    "triple_ids",
)


def choice_dicts(payload: object) -> list[dict[str, Any]]:
    """The choices of an answer; one that is no object counts as an empty one."""
    return [as_dict(choice) for choice in as_list(as_dict(payload).get("choices"))]


def is_chat(payload: object) -> bool:
    """Whether any choice has a message."""
    return any(isinstance(choice.get("message"), dict) for choice in choice_dicts(payload))


def is_completion(payload: object) -> bool:
    """Whether any choice has a text and none a message, and it isn't vLLM's own generate route."""
    choices = choice_dicts(payload)
    return (
        any(isinstance(choice.get("text"), str) for choice in choices)
        and not is_chat(payload)
        and ("request_id" not in as_dict(payload) or as_dict(payload).get("object") == "text_completion")
    )


def finish(value: object, stop: object = None) -> tuple[str, Any]:
    """The reason and what stopped it; SGLang's own route puts both into one object."""
    if isinstance(value, dict):
        return text(value.get("type")), value.get("matched") if stop is None else stop
    return text(value), stop


def triple_ids(rows: object, place: str) -> list[Any] | None:
    """The ids of `[log-prob, id, text]`; None if there are no such rows."""
    return column(rows, 1, place) if isinstance(rows, list) else None


def prompt_of_triples(meta: dict[str, Any], place: str) -> tuple[str, Any]:
    """The prompt ids among the log-probs of the prompt, if these cover all of it (`logprob_start_len: 0`)."""
    place = f"{place}.input_token_logprobs"
    rows = meta.get("input_token_logprobs")
    whole = isinstance(rows, list) and len(rows) == count(meta.get("prompt_tokens"))
    return f"{place}[][1]", triple_ids(rows, place) if whole else None


def parse_choices(payload: dict[str, Any], asked: Asked, shape: str) -> ParsedAnswer:
    """A chat answer, a completion, or an answer of vLLM's own generate route."""
    choices = choice_dicts(payload)
    drafts = [_draft(payload, choice, position, len(choices)) for position, choice in enumerate(choices)]
    return assemble(drafts, _head(payload), asked, reader_for(asked), shape)


def _head(payload: dict[str, Any]) -> Head:
    usage = as_dict(payload.get("usage"))
    return Head(
        payload.get("model"),
        first(payload, "id", "request_id"),
        payload.get("created"),
        usage.get("completion_tokens"),
        usage.get("prompt_tokens"),
        "batch" if is_completion(payload) else "shared",
    )


def _draft(payload: dict[str, Any], choice: dict[str, Any], position: int, total: int) -> Draft:
    place = f"choices[{position}]"
    message, meta = as_dict(choice.get("message")), as_dict(choice.get("meta_info"))
    sglext, metadata = as_dict(payload.get("sglext")), as_dict(payload.get("metadata"))
    data = as_dict(as_dict(payload.get("nvext")).get("engine_data"))
    triples, triples_at = meta.get("output_token_logprobs"), f"{place}.meta_info.output_token_logprobs"
    problems = Problems()

    def of_choice(value: object, at: str) -> tuple[str, Any]:
        return problems.attempt(_of_choice, value, at, position, total, ids=True) or (at, None)

    prompt: Found = [
        _prompt_of(payload.get("prompt_token_ids"), position, total),
        (f"{place}.prompt_token_ids", choice.get("prompt_token_ids")),
        (f"{place}.message.prompt_token_ids", message.get("prompt_token_ids")),
        (f"{place}.meta_info.prompt_token_ids", meta.get("prompt_token_ids")),
        problems.attempt(prompt_of_triples, meta, f"{place}.meta_info") or ("", None),
        ("sglext.input_ids", sglext.get("input_ids")),
        ("nvext.engine_data.prompt_token_ids", data.get("prompt_token_ids")),
    ]
    sampled: Found = [
        (f"{place}.token_ids", choice.get("token_ids")),
        (f"{place}.response_token_ids", choice.get("response_token_ids")),
        (f"{place}.message.generation_token_ids", message.get("generation_token_ids")),
        (f"{triples_at}[][1]", problems.attempt(triple_ids, triples, triples_at, ids=True)),
        of_choice(sglext.get("output_ids"), "sglext.output_ids"),
        of_choice(data.get("completion_token_ids"), "nvext.engine_data.completion_token_ids"),
    ]
    data_at, data_log_probs = of_choice(data.get("completion_logprobs"), "nvext.engine_data.completion_logprobs")
    log_probs = [
        problems.attempt(from_plain, message.get(CARRIED[2]), f"{place}.message.{CARRIED[2]}"),
        problems.attempt(from_triples, triples, triples_at),
        problems.attempt(from_plain, data_log_probs, data_at),
        problems.attempt(from_logprobs, choice.get("logprobs"), f"{place}.logprobs"),
    ]
    reason, stop = finish(choice.get("finish_reason"), first(choice, "stop_reason", "matched_stop"))
    # At the root SGLang speaks of its first choice only.
    own_metadata, own_sglext = (metadata if total == 1 else {}), (sglext if position == 0 else {})
    return Draft(
        place=place,
        index=position if choice.get("index") is None else choice["index"],
        prompt=prompt,
        sampled=sampled,
        log_probs=[source for source in log_probs if source is not None],
        finish_reason=reason,
        stop_reason=stop,
        output_items=chat_items(message) if "message" in choice else text_items(choice.get("text")),
        weight_versions=first_of("weight_versions", choice, meta, own_metadata),
        routed_experts=first_of("routed_experts", choice, message, meta, own_sglext),
        prompt_routed_experts=payload.get("prompt_routed_experts"),
        sampled_count=count(meta.get("completion_tokens")),
        prompt_count=count(meta.get("prompt_tokens")),
        extra=engine_extra(payload, choice, meta, metadata),
        problems=problems,
    )


def _prompt_of(value: object, position: int, total: int) -> tuple[str, Any]:
    """The prompt ids at the root: one list for all choices, or a list of lists, one for each prompt."""
    place = "prompt_token_ids"
    if not isinstance(value, list) or not value or not isinstance(value[0], list) or total % len(value):
        return place, value
    number = position // (total // len(value))
    return f"{place}[{number}]", value[number]


def _of_choice(value: object, place: str, position: int, total: int) -> tuple[str, Any]:
    """The part of one choice in what stands at the root: its list among lists, or the list of the only choice."""
    if isinstance(value, list) and len(value) == total and all(isinstance(item, (list, type(None))) for item in value):
        return f"{place}[{position}]", value[position]
    if value is not None and total > 1:
        raise UnusableAnswerError(f"{place} is no list for each of the {total} choices of the answer")
    return place, value


def first(source: dict[str, Any], *keys: str) -> Any:
    """The first of the values that is there and not null."""
    return next((source[key] for key in keys if source.get(key) is not None), None)


def first_of(key: str, *sources: dict[str, Any]) -> Any:
    """The value from the first source that has one."""
    return next((source[key] for source in sources if source.get(key) is not None), None)


def engine_extra(
    payload: dict[str, Any], choice: dict[str, Any], meta: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """What goes into `extra`: sampling masks, the label of the weights, the fingerprint of the engine."""
    found = {
        "sampling_mask": first(choice, "sampling_mask") or meta.get("output_token_sampling_mask"),
        "sampling_log_probs": meta.get("output_token_sampling_logprobs"),
        # One label for a whole answer doesn't say which weights sampled which token; so it makes no span.
        "weight_version": first_of("weight_version", meta, metadata),
        "system_fingerprint": payload.get("system_fingerprint"),
    }
    return {key: value for key, value in found.items() if value is not None}


def carries(message: dict[str, Any]) -> bool:
    """Whether a message or an output item has any of the three fields of NeMo Gym and NeMo RL."""
    return any(message.get(field) is not None for field in CARRIED)
