"""What a request asks for, as far as it is stored with the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ("requested_choices", "requested_sampling")

_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "n",
    # where it ends
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "min_tokens",
    "min_new_tokens",
    "ignore_eos",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "stop_regex",
    # grammars
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
_PROMPTS = ("prompt", "text", "input_ids", "token_ids")


def requested_sampling(request: Mapping[str, Any] | None) -> dict[str, Any]:
    """The sampling parameters that a request body sets itself, grammars included, under the names it uses.

    Those of a native generate request (`sampling_params`) are taken out of their mapping; a list of them, one per
    prompt, stays as it is.
    """
    if not isinstance(request, Mapping):
        return {}
    found: dict[str, Any] = {}
    nested = request.get("sampling_params")
    for body in (request, nested):
        if isinstance(body, Mapping):
            found.update((key, body[key]) for key in _SAMPLING_KEYS if body.get(key) is not None)
    if isinstance(nested, list):
        found["sampling_params"] = nested
    choice = request.get("tool_choice")
    if choice not in (None, "none", "auto"):
        found["tool_choice"] = choice  # a grammar, too
    text = request.get("text")
    if isinstance(text, Mapping) and text.get("format") is not None:  # where the Responses dialect has its grammar
        found["response_format"] = text["format"]
    return found


def requested_choices(request: Mapping[str, Any] | None) -> int:
    """How many answers a request body asks for: `n` for each of its prompts. 1 if it says nothing that can be."""
    if not isinstance(request, Mapping):
        return 1
    nested = request.get("sampling_params")
    several = request.get("n", nested.get("n") if isinstance(nested, Mapping) else None)
    count = several if type(several) is int and several > 0 else 1
    return count if _is_conversation(request) else count * _prompt_count(request)


def _is_conversation(request: Mapping[str, Any]) -> bool:
    return request.get("messages") is not None or request.get("input") is not None


def _prompt_count(request: Mapping[str, Any]) -> int:
    for key in _PROMPTS:
        prompts = request.get(key)
        if isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list)):
            return len(prompts)
    return 1
