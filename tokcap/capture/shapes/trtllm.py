"""TensorRT-LLM: completions with the prompt ids at the root. The choices of its chat answers carry no ids."""

from __future__ import annotations

from .answer import Shape
from .openai import is_completion, parse_choices
from .places import as_dict

__all__ = ("SHAPES",)


def _has_root_prompt(payload: object) -> bool:
    return is_completion(payload) and as_dict(payload).get("prompt_token_ids") is not None


SHAPES = (
    Shape(
        "trtllm-completions",
        "TensorRT-LLM",
        "trtllm-serve",
        "/v1/completions",
        "prompt_token_ids, a list or one for each prompt",
        "choices[].token_ids",
        "choices[].logprobs.token_logprobs",
        _has_root_prompt,
        parse_choices,
    ),
)
