"""NVIDIA Dynamo: `nvext.engine_data` at the root, with or without choices of the same chunk around it."""

from __future__ import annotations

from .answer import Shape
from .openai import parse_choices
from .places import as_dict, as_list

__all__ = ("SHAPES",)


def _has_engine_data(payload: object) -> bool:
    answer = as_dict(payload)
    return bool(as_list(answer.get("choices")) and as_dict(as_dict(answer.get("nvext")).get("engine_data")))


SHAPES = (
    Shape(
        "dynamo",
        "Dynamo",
        "extra_fields: engine_data",
        "/v1/chat/completions, /v1/completions",
        "nvext.engine_data.prompt_token_ids",
        "nvext.engine_data.completion_token_ids",
        "nvext.engine_data.completion_logprobs",
        _has_engine_data,
        parse_choices,
    ),
)
