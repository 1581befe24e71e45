"""SGLang: its own `/generate`, and the two OpenAI routes."""

from __future__ import annotations

from typing import Any

from .answer import Asked, ParsedAnswer, Shape
from .assembly import Draft, Head, Problems, assemble, reader_for
from .items import text_items
from .log_probs import from_triples
from .openai import (
    choice_dicts,
    engine_extra,
    finish,
    first_of,
    is_chat,
    is_completion,
    parse_choices,
    prompt_of_triples,
    triple_ids,
)
from .places import as_dict, count

__all__ = ("SHAPES",)

_MARKS = ("response_token_ids", "meta_info", "matched_stop")


def _is_sglang(payload: object) -> bool:
    sglext = as_dict(as_dict(payload).get("sglext"))
    return sglext.get("output_ids") is not None or any(
        choice.get(mark) is not None for choice in choice_dicts(payload) for mark in _MARKS
    )


def _is_chat(payload: object) -> bool:
    return is_chat(payload) and _is_sglang(payload)


def _is_completion(payload: object) -> bool:
    return is_completion(payload) and _is_sglang(payload)


def _is_generate(payload: object) -> bool:
    answers = payload if isinstance(payload, list) else [payload]
    return any(isinstance(as_dict(answer).get("meta_info"), dict) for answer in answers)


def _parse_generate(payload: Any, asked: Asked, shape: str) -> ParsedAnswer:
    """One object, or for several choices or prompts a list of them: choices by position."""
    answers = [as_dict(answer) for answer in (payload if isinstance(payload, list) else [payload])]
    metas = [as_dict(answer.get("meta_info")) for answer in answers]
    sampled = [count(meta.get("completion_tokens")) for meta in metas]
    prompts = {count(meta.get("prompt_tokens")) for meta in metas}
    head = Head(
        response_id=metas[0].get("id"),
        completion_tokens=None if None in sampled else sum(number for number in sampled if number is not None),
        prompt_tokens=prompts.pop() if len(prompts) == 1 else None,
        completion_tokens_at="meta_info.completion_tokens",
        prompt_tokens_at="meta_info.prompt_tokens",
    )
    several = isinstance(payload, list)
    drafts = [
        _draft(answer, meta, position, f"[{position}]" if several else "meta_info", f"[{position}]." if several else "")
        for position, (answer, meta) in enumerate(zip(answers, metas, strict=True))
    ]
    return assemble(drafts, head, asked, reader_for(asked), shape)


def _draft(answer: dict[str, Any], meta: dict[str, Any], position: int, place: str, at: str) -> Draft:
    problems = Problems()
    triples, triples_at = meta.get("output_token_logprobs"), f"{at}meta_info.output_token_logprobs"
    log_probs = problems.attempt(from_triples, triples, triples_at)
    reason, stop = finish(meta.get("finish_reason"))
    return Draft(
        place=place,
        index=position,
        prompt=[
            (f"{at}prompt_token_ids", answer.get("prompt_token_ids")),
            (f"{at}meta_info.prompt_token_ids", meta.get("prompt_token_ids")),
            problems.attempt(prompt_of_triples, meta, f"{at}meta_info") or ("", None),
        ],
        sampled=[
            (f"{at}output_ids", answer.get("output_ids")),
            (f"{at}meta_info.output_ids", meta.get("output_ids")),
            (f"{triples_at}[][1]", problems.attempt(triple_ids, triples, triples_at, ids=True)),
        ],
        log_probs=[] if log_probs is None else [log_probs],
        finish_reason=reason,
        stop_reason=stop,
        output_items=text_items(answer.get("text")),
        weight_versions=meta.get("weight_versions"),
        routed_experts=first_of("routed_experts", meta, answer),
        sampled_count=count(meta.get("completion_tokens")),
        prompt_count=count(meta.get("prompt_tokens")),
        extra=engine_extra({}, answer, meta, {}),
        problems=problems,
    )


SHAPES = (
    Shape(
        "sglang-chat",
        "SGLang",
        "0.5.15 (meta_info), 0.5.18 (response_token_ids), 0.5.20 (sglext)",
        "/v1/chat/completions",
        "choices[].prompt_token_ids, sglext.input_ids",
        "choices[].response_token_ids, choices[].meta_info.output_token_logprobs[][1], sglext.output_ids[]",
        "choices[].meta_info.output_token_logprobs[][0], choices[].logprobs.content[].logprob",
        _is_chat,
        parse_choices,
    ),
    Shape(
        "sglang-completions",
        "SGLang",
        "0.5.18 (return_token_ids)",
        "/v1/completions",
        "choices[].prompt_token_ids",
        "choices[].token_ids",
        "choices[].logprobs.token_logprobs",
        _is_completion,
        parse_choices,
    ),
    Shape(
        "sglang-generate",
        "SGLang",
        "0.4.10",
        "/generate",
        "prompt_token_ids",
        "output_ids, meta_info.output_token_logprobs[][1]",
        "meta_info.output_token_logprobs[][0]",
        _is_generate,
        _parse_generate,
    ),
)
