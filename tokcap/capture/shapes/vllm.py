"""vLLM: `/v1/chat/completions`, `/v1/completions`, `/inference/v1/generate`. Its Responses are in `responses`."""

from __future__ import annotations

from .answer import Shape
from .openai import choice_dicts, is_chat, is_completion, parse_choices

__all__ = ("CHAT_BY_NAME", "SHAPES")


def _has_token_ids(payload: object) -> bool:
    return any(choice.get("token_ids") is not None for choice in choice_dicts(payload))


def _is_chat(payload: object) -> bool:
    return is_chat(payload) and _has_token_ids(payload)


def _is_generate(payload: object) -> bool:
    return not is_chat(payload) and not is_completion(payload) and _has_token_ids(payload)


SHAPES = (
    Shape(
        "vllm-chat",
        "vLLM",
        "0.10.2 (return_token_ids)",
        "/v1/chat/completions",
        "prompt_token_ids",
        "choices[].token_ids",
        "choices[].logprobs.content[].logprob",
        _is_chat,
        parse_choices,
    ),
    Shape(
        "vllm-completions",
        "vLLM",
        "0.10.2 (return_token_ids)",
        "/v1/completions",
        "choices[].prompt_token_ids",
        "choices[].token_ids",
        "choices[].logprobs.token_logprobs",
        is_completion,
        parse_choices,
    ),
    Shape(
        "vllm-generate",
        "vLLM",
        "0.11; integer ids beside the log-probs from 0.32",
        "/inference/v1/generate",
        "prompt_token_ids",
        "choices[].token_ids",
        "choices[].logprobs.content[].logprob",
        _is_generate,
        parse_choices,
    ),
)

CHAT_BY_NAME = Shape(
    "vllm-chat-token-names",
    "vLLM and gateways",
    "before 0.10.2 (return_tokens_as_token_ids)",
    "/v1/chat/completions",
    "any place of another chat shape; else the answer is refused",
    "choices[].logprobs.content[].token",
    "choices[].logprobs.content[].logprob",
    is_chat,
    parse_choices,
)
"""Any chat answer that no other shape takes."""
