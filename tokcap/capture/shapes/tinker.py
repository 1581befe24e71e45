"""Tinker: sampled sequences. The prompt is the caller's, so that an answer is refused unless a gateway adds it."""

from __future__ import annotations

from typing import Any

from .answer import Asked, ParsedAnswer, Shape
from .assembly import Draft, Head, Problems, assemble, reader_for
from .log_probs import from_plain
from .openai import finish
from .places import as_dict, as_list

__all__ = ("SHAPES",)


def _is_sample(payload: object) -> bool:
    sequences = as_list(as_dict(payload).get("sequences"))
    return any("tokens" in as_dict(sequence) for sequence in sequences)


def _parse(payload: dict[str, Any], asked: Asked, shape: str) -> ParsedAnswer:
    drafts = []
    for position, sequence in enumerate(map(as_dict, as_list(payload.get("sequences")))):
        place, problems = f"sequences[{position}]", Problems()
        source = problems.attempt(from_plain, sequence.get("logprobs"), f"{place}.logprobs")
        drafts.append(
            Draft(
                place=place,
                index=position,
                prompt=[("prompt_token_ids", payload.get("prompt_token_ids"))],
                sampled=[(f"{place}.tokens", sequence.get("tokens"))],
                log_probs=[] if source is None else [source],
                finish_reason=finish(sequence.get("stop_reason"))[0],
                problems=problems,
            )
        )
    return assemble(drafts, Head(payload.get("model")), asked, reader_for(asked), shape)


SHAPES = (
    Shape(
        "tinker-sample",
        "Tinker",
        "SampleResponse",
        "sample",
        "none: refused without prompt_token_ids at the root",
        "sequences[].tokens",
        "sequences[].logprobs",
        _is_sample,
        _parse,
    ),
)
