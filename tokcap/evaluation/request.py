"""What a request asks for, in any dialect: roles, names, counts and numbers, and nothing that anybody said.

| dialect | messages | tools | sampling |
|---|---|---|---|
| chat | `messages` | `tools`, `functions` | the body |
| completions | none | none | the body |
| Responses | `input`, `instructions` | `tools` | the body |
| Anthropic messages | `messages`, `system` | `tools` | the body |
| vLLM generate, SGLang generate | none | none | `sampling_params` |
| TGI | none | none | `parameters` |

All places are read whatever the dialect. Values may be anything that JSON holds: what is no name and no number where
one is expected is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec

from ..capture.shapes.places import as_dict, as_list
from .bounds import LOOKED_AT, bounded_names, name_of, number_of, tally

__all__ = ("RequestFacts", "request_facts")

_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "seed",
    "n",
    "best_of",
    "use_beam_search",
    "do_sample",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "min_tokens",
    "min_new_tokens",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "parallel_tool_calls",
)
_COUNTED = (
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "stop_regex",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
"""Of these it is stored how many there are: they may quote what was said."""
_GRAMMARS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
"""Of these it is stored that they are there."""


class RequestFacts(msgspec.Struct, frozen=True):
    """What is kept of a request."""

    model: str = ""
    streamed: bool = False
    message_count: int = 0
    roles: dict[str, int] = {}
    tool_count: int = 0
    tools: tuple[str, ...] = ()
    sampling: dict[str, bool | int | float | str] = {}


def request_facts(request: Mapping[str, Any] | None) -> RequestFacts:
    """What `request`, a decoded body or None, asks for. Never raises for what JSON can hold."""
    if not isinstance(request, Mapping):
        return RequestFacts()
    messages = request.get("messages")
    items = messages if isinstance(messages, list) else _input_items(request.get("input"))
    apart = [part for part in (request.get("system"), request.get("instructions")) if isinstance(part, (str, list))]
    beside = ["system" for part in apart if part]
    offered = [*as_list(request.get("tools"))[:LOOKED_AT], *as_list(request.get("functions"))[:LOOKED_AT]]
    tools, tool_count = bounded_names(map(_tool_name, offered))
    return RequestFacts(
        model=name_of(request.get("model")),
        streamed=request.get("stream") is True,
        message_count=len(items) + len(beside),
        roles=tally(chain(beside, map(_role, items))),
        tool_count=tool_count,
        tools=tools,
        sampling=_sampling(request),
    )


def _input_items(value: object) -> list[Any]:
    """The input of a Responses request: one text of the user, or a list of items."""
    return [{"role": "user"}] if isinstance(value, str) else as_list(value)


def _role(message: object) -> str:
    """Items of the Responses dialect that no role speaks go by their type: `function_call_output` ..."""
    if not isinstance(message, dict):
        return ""
    role = message.get("role")
    return role if type(role) is str and role else name_of(message.get("type"))


def _tool_name(tool: object) -> str:
    """Tools that the server brings along, such as a web search, have a type and no name."""
    given = as_dict(tool)
    names = (as_dict(given.get(kind)).get("name") for kind in ("function", "custom"))
    return name_of(*names, given.get("name"), given.get("type"))


def _sampling(request: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    found: dict[str, bool | int | float | str] = {}
    for body in (request, request.get("sampling_params"), request.get("parameters")):
        if isinstance(body, Mapping):
            found.update(_numbers(body))
            found.update((key, _size(body[key])) for key in _COUNTED if body.get(key) is not None)
            found.update((key, True) for key in _GRAMMARS if body.get(key) is not None)
    # Where chat and Responses have their grammars, and how hard a model is to think.
    grammar = request.get("response_format") or as_dict(request.get("text")).get("format")
    reasoning = request.get("reasoning")
    kinds = {
        "response_format": name_of(as_dict(grammar).get("type")),
        "reasoning_effort": name_of(request.get("reasoning_effort"), as_dict(reasoning).get("effort")),
    }
    found.update((key, kind) for key, kind in kinds.items() if kind)
    return found


def _numbers(body: Mapping[str, Any]) -> Iterator[tuple[str, bool | int | float]]:
    for key in _NUMBERS:
        number = number_of(body.get(key))
        if number is not None:
            yield key, number


def _size(value: object) -> int:
    return len(value) if isinstance(value, (list, dict)) else 1
