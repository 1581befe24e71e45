"""What an answer says of itself, in any dialect: ids, names, reasons and counts, and nothing that the model said.

| dialect | choices | finish reasons | tool calls | usage |
|---|---|---|---|---|
| chat, completions, vLLM generate | `choices` | `.finish_reason` | `.message.tool_calls` | `usage` |
| Responses | one | `incomplete_details.reason`, else `status` | `output` | `usage` |
| Anthropic messages | one | `stop_reason` | `content` | `usage` |
| SGLang generate | one for each object | `meta_info.finish_reason` | none | `meta_info` |
| TGI | one | `details.finish_reason` | none | `details` |

Of a stream it takes what `StreamJoiner.answer()` makes of it. Which dialect it is shows in the answer itself; one that
is none of these gives nothing. Values may be anything that JSON holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from ..capture.shapes.places import as_dict, as_list, count
from .bounds import LOOKED_AT, NAMES_KEPT, bounded_names, name_of

__all__ = ("AnswerFacts", "TokenUsage", "answer_facts")

_UNFINISHED = ("", "in_progress", "queued")
"""What stands for the finish reason of an answer that goes on."""
_LARGEST_COUNT = 2**48
"""A larger number of tokens is none."""


class TokenUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tokens an answer says it took, whatever its dialect calls them; None: it doesn't say."""

    prompt_tokens: int | None = None
    """All of the prompt: of Anthropic's numbers, which leave them out, those read from and put into a cache as well."""
    completion_tokens: int | None = None
    """Over all choices."""
    total_tokens: int | None = None
    """As the answer gives it."""
    cached_tokens: int | None = None
    """Of the prompt: found in a cache."""
    reasoning_tokens: int | None = None
    """Of the completion."""


class AnswerFacts(msgspec.Struct, frozen=True):
    """What is kept of an answer."""

    model: str = ""
    response_id: str = ""
    usage: TokenUsage = TokenUsage()
    choice_count: int = 0
    finish_reasons: tuple[str, ...] = ()
    """One for each choice, as the engine calls it, empty where it gives none."""
    tool_call_count: int = 0
    tool_calls: tuple[str, ...] = ()
    finished: bool = False
    """Whether there is a choice, and each has ended."""


def answer_facts(answer: object, choices: int = 1) -> AnswerFacts:
    """What `answer`, a decoded body or a joined stream, says of itself. Never raises for what JSON can hold.

    choices: how many were asked for to each prompt; an engine that answers with a list repeats the prompt for each.
    """
    if isinstance(answer, list):
        return _batch(answer[:LOOKED_AT], len(answer), choices)
    if not isinstance(answer, dict):
        return answer_facts(dict(answer)) if isinstance(answer, Mapping) else AnswerFacts()
    if isinstance(answer.get("choices"), list):
        return _chunked(answer, answer["choices"])
    if isinstance(answer.get("output"), list):
        return _response(answer)
    if answer.get("type") == "message" or "stop_reason" in answer:
        return _message(answer)
    if isinstance(answer.get("meta_info"), dict):
        return _batch([answer], 1, 1)
    if "generated_text" in answer:
        return _generated(answer)
    return AnswerFacts(name_of(answer.get("model")), name_of(answer.get("id")), _usage(answer.get("usage")))


def _facts(
    answer: Mapping[str, Any], usage: TokenUsage, reasons: Sequence[str], total: int, calls: Iterable[str]
) -> AnswerFacts:
    tool_calls, tool_call_count = bounded_names(calls)
    return AnswerFacts(
        model=name_of(answer.get("model")),
        response_id=name_of(answer.get("id"), answer.get("request_id"), answer.get("rid")),
        usage=usage,
        choice_count=total,
        finish_reasons=tuple(reasons[:NAMES_KEPT]),
        tool_call_count=tool_call_count,
        tool_calls=tool_calls,
        finished=bool(reasons) and not any(reason in _UNFINISHED for reason in reasons),
    )


def _reason(value: object) -> str:
    """SGLang's own route has an object in place of a name."""
    return name_of(as_dict(value).get("type") if isinstance(value, dict) else value)


# ---- chat, completions, vLLM's own route


def _chunked(answer: Mapping[str, Any], choices: list[Any]) -> AnswerFacts:
    looked_at = [as_dict(choice) for choice in choices[:LOOKED_AT]]
    reasons = [_reason(choice.get("finish_reason")) for choice in looked_at]
    calls = (name for choice in looked_at for name in _called(as_dict(choice.get("message"))))
    return _facts(answer, _usage(answer.get("usage")), reasons, len(choices), calls)


def _called(message: dict[str, Any]) -> Iterator[str]:
    for call in as_list(message.get("tool_calls")):
        given = as_dict(call)
        names = (as_dict(given.get(kind)).get("name") for kind in ("function", "custom"))
        yield name_of(*names, given.get("name"), given.get("type"))
    if isinstance(message.get("function_call"), dict):
        yield name_of(message["function_call"].get("name"))


# ---- Responses


def _response(answer: Mapping[str, Any]) -> AnswerFacts:
    reason = name_of(as_dict(answer.get("incomplete_details")).get("reason"), answer.get("status"))
    items = map(as_dict, islice(answer["output"], LOOKED_AT))
    return _facts(answer, _usage(answer.get("usage")), [reason], 1, filter(None, map(_item_call, items)))


def _item_call(item: dict[str, Any]) -> str:
    """The name of the tool that an output item calls; the type of a call of the server's own tools; else empty."""
    kind = name_of(item.get("type"))
    return name_of(item.get("name"), kind) if kind.endswith("_call") else ""


# ---- Anthropic messages


def _message(answer: Mapping[str, Any]) -> AnswerFacts:
    blocks = map(as_dict, islice(as_list(answer.get("content")), LOOKED_AT))
    calls = (
        name_of(block.get("name"), block.get("type"))
        for block in blocks
        if name_of(block.get("type")).endswith("tool_use")
    )
    return _facts(answer, _usage(answer.get("usage")), [_reason(answer.get("stop_reason"))], 1, calls)


# ---- SGLang's own route, and TGI's


def _batch(answers: Sequence[object], total: int, choices: int) -> AnswerFacts:
    """One object, or a list of them: of several prompts, or of several choices of each."""
    given = [as_dict(answer) for answer in answers]
    if not given:
        return AnswerFacts()
    if any("generated_text" in answer for answer in given):
        return _generated(given[0])
    metas = [as_dict(answer.get("meta_info")) for answer in given]
    prompt, cached = (_sum(metas, key) for key in ("prompt_tokens", "cached_tokens"))
    repeated = choices if choices > 0 and len(metas) % choices == 0 else 1
    usage = TokenUsage(
        prompt_tokens=None if prompt is None else prompt // repeated,
        completion_tokens=_sum(metas, "completion_tokens"),
        cached_tokens=cached,
        reasoning_tokens=_sum(metas, "reasoning_tokens"),
    )
    reasons = [_reason(meta.get("finish_reason")) for meta in metas]
    named = {"model": given[0].get("model"), "id": metas[0].get("id")}
    return _facts(named, usage, reasons, total, ())


def _generated(answer: Mapping[str, Any]) -> AnswerFacts:
    details = as_dict(answer.get("details"))
    prompt = as_list(details.get("prefill"))
    usage = TokenUsage(
        prompt_tokens=len(prompt) or _tokens(details.get("input_length")),
        completion_tokens=_tokens(details.get("generated_tokens")),
    )
    # Without details the text alone shows that it has ended; a stream that was cut off has none.
    ended = isinstance(answer.get("generated_text"), str)
    reason = name_of(details.get("finish_reason"))
    found = _facts(answer, usage, [reason], 1, ())
    return msgspec.structs.replace(found, finished=ended)


# ---- usage


def _usage(value: object) -> TokenUsage:
    usage = as_dict(value)
    if not usage:
        return TokenUsage()
    of_prompt = as_dict(_first(usage, "prompt_tokens_details", "input_tokens_details"))
    of_completion = as_dict(_first(usage, "completion_tokens_details", "output_tokens_details"))
    prompt = _tokens(_first(usage, "prompt_tokens", "input_tokens"))
    read, written = (_tokens(usage.get(f"cache_{way}_input_tokens")) for way in ("read", "creation"))
    if prompt is not None:
        prompt += (read or 0) + (written or 0)
    cached = _tokens(of_prompt.get("cached_tokens"))
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=_tokens(_first(usage, "completion_tokens", "output_tokens")),
        total_tokens=_tokens(usage.get("total_tokens")),
        cached_tokens=read if cached is None else cached,
        reasoning_tokens=_tokens(_first({**usage, **of_completion}, "reasoning_tokens")),
    )


def _first(source: Mapping[str, Any], *keys: str) -> Any:
    return next((source[key] for key in keys if source.get(key) is not None), None)


def _tokens(value: object) -> int | None:
    tokens = count(value)
    return tokens if tokens is not None and tokens <= _LARGEST_COUNT else None


def _sum(metas: Sequence[dict[str, Any]], key: str) -> int | None:
    """None if any of them doesn't say."""
    counts = [_tokens(meta.get(key)) for meta in metas]
    known = [value for value in counts if value is not None]
    return sum(known) if len(known) == len(counts) else None
