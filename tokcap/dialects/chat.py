"""Chat answers and chunks, read leniently: whatever an engine leaves out or adds, what it did say comes through."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

__all__ = ("ChatReader", "Ending", "Piece", "Usage", "json_object", "read_error", "read_message")

Kind: TypeAlias = Literal["reasoning", "text", "refusal", "call"]

_TRANSFER = ("kv_transfer_params", "ec_transfer_params")


class Piece(msgspec.Struct):
    """A part of what the model said: some text, reasoning or arguments of one tool call."""

    kind: Kind
    text: str
    call: int = -1
    """Which tool call, counted from 0 in the order of their first pieces; -1 if it is none."""
    id: str = ""
    name: str = ""
    log_probs: list[Any] = []
    """The entries of `logprobs.content` that came with it."""


class Usage(msgspec.Struct, frozen=True):
    """The counts of tokens; None where the engine doesn't say."""

    prompt: int = 0
    completion: int = 0
    cached: int | None = None
    cache_written: int | None = None
    reasoning: int | None = None


class Ending(msgspec.Struct):
    """What a chat answer says beside its content, as far as it was read."""

    model: str = ""
    created: int = 0
    finish_reason: str | None = None
    stop: int | str | None = None
    """The stop string or token id that ended it, if the engine tells."""
    usage: Usage = Usage()
    transfer: dict[str, Any] = {}
    """Parameters of disaggregated serving, which the client has to send on."""


class ChatReader:
    """The first choice of one chat answer, from one body or from chunks; `ending` holds what was read beside it."""

    def __init__(self) -> None:
        self.ending = Ending()
        self._calls: dict[Any, Piece] = {}  # what is known of each call, by what its pieces say
        self._calls_made: list[Piece] = []

    def read(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """The pieces of a chunk (`delta`) or of a whole answer (`message`): reasoning, then text, then tool calls."""
        self._read_root(body)
        for choice in _list(body.get("choices")):
            if isinstance(choice, Mapping) and choice.get("index", 0) in (0, None):
                yield from self._read_choice(choice)

    def _read_root(self, body: Mapping[str, Any]) -> None:
        ending = self.ending
        ending.model = _text(body.get("model")) or ending.model
        if type(body.get("created")) is int:
            ending.created = body["created"]
        if isinstance(body.get("usage"), Mapping):
            ending.usage = _usage(body["usage"])
        transfer = {key: body[key] for key in _TRANSFER if body.get(key) is not None}
        if transfer:
            ending.transfer = {**ending.transfer, **transfer}

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[Piece]:
        whole = not isinstance(choice.get("delta"), Mapping)
        said = _mapping(choice.get("message" if whole else "delta"))
        yield from self._read_said(said, _list(_mapping(choice.get("logprobs")).get("content")), whole)
        if isinstance(choice.get("finish_reason"), str):
            self.ending.finish_reason = choice["finish_reason"]
        # vLLM and SGLang name it differently.
        stop = choice.get("stop_reason") if choice.get("stop_reason") is not None else choice.get("matched_stop")
        if isinstance(stop, (int, str)):
            self.ending.stop = stop

    def _read_said(self, said: Mapping[str, Any], log_probs: list[Any], whole: bool) -> Iterator[Piece]:
        reasoning = _text(said.get("reasoning")) or _text(said.get("reasoning_content"))
        if reasoning:
            yield Piece("reasoning", reasoning)
        text = _content(said.get("content"))
        if text:
            yield Piece("text", text, log_probs=log_probs)
        refused = _text(said.get("refusal"))
        if refused:
            yield Piece("refusal", refused)
        for position, call in enumerate(_list(said.get("tool_calls"))):
            if isinstance(call, Mapping):
                yield self._call(call, position if whole else self._key_in_stream(call))

    def _call(self, part: Mapping[str, Any], key: Any) -> Piece:
        function = _mapping(part.get("function"))
        call_id, name = _text(part.get("id")), _text(function.get("name"))
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):  # some servers give the object itself
            arguments = json.dumps(arguments, ensure_ascii=False)
        known = self._calls.get(key)
        if known is None or (name and call_id and known.id and call_id != known.id):
            # The second: a server that calls all of them number 0.
            known = self._calls[key] = Piece("call", "", len(self._calls_made))
            self._calls_made.append(known)
        known.id, known.name = known.id or call_id, known.name or name
        return Piece("call", _text(arguments), known.call, known.id, known.name)

    def _key_in_stream(self, part: Mapping[str, Any]) -> Any:
        """By what the pieces of one call are known. Servers that leave the index out name a call once, and go on with
        the one that was named last."""
        if type(part.get("index")) is int:
            return part["index"]
        if _text(part.get("id")):
            return part["id"]
        last = next(reversed(self._calls), None)
        named_again = last is not None and self._calls[last].name and _mapping(part.get("function")).get("name")
        return ("unnamed", len(self._calls_made)) if last is None or named_again else last


def read_message(body: Mapping[str, Any]) -> tuple[list[Piece], Ending]:
    """The pieces of a whole answer, and what it says beside them."""
    reader = ChatReader()
    return list(reader.read(body)), reader.ending


def read_error(body: Any) -> tuple[str, str, Any, Any]:
    """Message, type, parameter and code of an error body: nested as OpenAI's, flat as older servers', or any text."""
    found = body
    if isinstance(body, Mapping):
        found = body.get("error") if body.get("error") is not None else body
    if not isinstance(found, Mapping):
        return ("" if found is None else str(found)), "", None, None
    message = found.get("message", found.get("detail"))
    if message is None:
        message = json.dumps(found, default=str)
    elif not isinstance(message, str):
        message = json.dumps(message, default=str)
    return message, _text(found.get("type")), found.get("param"), found.get("code")


def json_object(arguments: str) -> dict[str, Any] | None:
    """The arguments of a tool call as the object that they should be; None if they are none.

    Integers of any size stay exact. NaN, infinities and numbers that overflow are no JSON.
    """
    try:
        value = json.loads(arguments, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_number(name: str) -> float:
    raise ValueError(name)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt, completion = _mapping(usage.get("prompt_tokens_details")), _mapping(usage.get("completion_tokens_details"))
    reasoning = _count(completion.get("reasoning_tokens"))
    return Usage(
        _count(usage.get("prompt_tokens")) or 0,
        _count(usage.get("completion_tokens")) or 0,
        _count(prompt.get("cached_tokens")),
        _count(prompt.get("created_cache_tokens")),
        _count(usage.get("reasoning_tokens")) if reasoning is None else reasoning,
    )


def _content(value: object) -> str:
    if isinstance(value, str):
        return value
    return "".join(_text(part.get("text")) for part in _list(value) if isinstance(part, Mapping))


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
