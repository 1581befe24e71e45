"""NeMo Gym and NeMo RL: three fields on the message of a chat answer. Their Responses form is in `responses`."""

from __future__ import annotations

from .answer import Shape
from .openai import carries, choice_dicts, is_chat, parse_choices
from .places import as_dict

__all__ = ("SHAPES",)


def _is_carried(payload: object) -> bool:
    return is_chat(payload) and any(carries(as_dict(choice.get("message"))) for choice in choice_dicts(payload))


SHAPES = (
    Shape(
        "nemo-chat",
        "NeMo Gym, NeMo RL",
        "0.7",
        "/v1/chat/completions",
        "choices[].message.prompt_token_ids",
        "choices[].message.generation_token_ids",
        "choices[].message.generation_log_probs",
        _is_carried,
        parse_choices,
    ),
)
