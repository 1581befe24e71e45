"""All shapes, in the order in which they are tried, and the parser that tries them."""

from __future__ import annotations

from typing import Any

from . import dynamo, nemo, responses, sglang, tgi, tinker, trtllm, vllm
from .answer import Asked, ParsedAnswer, Shape
from .assembly import Head, assemble, reader_for
from .openai import first
from .places import as_dict

__all__ = ("SHAPES", "parse_answer")

SHAPES: tuple[Shape, ...] = (
    # What a gateway adds comes before what the engine behind it gives: all places are read in either case, but the
    # name should say who spoke.
    *nemo.SHAPES,
    *dynamo.SHAPES,
    *sglang.SHAPES,
    *trtllm.SHAPES,
    *vllm.SHAPES,
    vllm.CHAT_BY_NAME,
    *responses.SHAPES,
    *tgi.SHAPES,
    *tinker.SHAPES,
)
"""Every shape that `parse_answer` knows."""


def parse_answer(payload: Any, *, choices: int = 1, path: str = "", partial: bool = False) -> ParsedAnswer:
    """What is recorded of an answer: ids, log-probs and content of each choice.

    `payload`: the decoded JSON body of an answer, or `StreamJoiner.answer()`. `choices`: how many were asked for (`n`
    times the number of prompts). `path`: where the request went, for messages. `partial`: the answer was cut off, so
    that choices may be missing and usage proves nothing.

    Without any ids `evidence` is `none` and there are no choices, whatever the payload is. Raises
    `UnusableAnswerError` if ids are there from which no exact record can be made; the message names the place, the
    position and both values.
    """
    asked = Asked(choices, path, partial)
    for shape in SHAPES:
        if shape.matches(payload):
            return shape.parse(payload, asked, shape.name)
    answer = as_dict(payload)
    usage = as_dict(answer.get("usage"))
    head = Head(
        answer.get("model"),
        first(answer, "id", "request_id"),
        first(answer, "created", "created_at"),
        first(usage, "completion_tokens", "output_tokens"),
        first(usage, "prompt_tokens", "input_tokens"),
    )
    return assemble([], head, asked, reader_for(asked), "")
