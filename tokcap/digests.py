"""Digests of what a client sent and of what it will send back: which answer stands in which later request.

A digest is 16 bytes over the role, the visible content and the tool calls of one turn. It is the same in every dialect
and survives what harnesses do to an answer on its way back: reasoning dropped, white space at the ends stripped, tool
arguments serialised anew, tool call ids shortened, a string made a list of parts.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .content import encode_content, storable

__all__ = ("answer_digest", "message_digest", "request_digests")

_TEXT = ("text", "input_text", "output_text")
_REASONING = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")
_CALL_PARTS = ("tool_use", "server_tool_use", "mcp_tool_use")
_FUNCTION_ITEMS = ("function_call", "custom_tool_call")
_TEMPLATE_KEYS = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "reasoning",
    "thinking",
)
_NATIVE_PROMPTS = ("prompt", "text", "input_ids", "token_ids")
_MARKS_OF_TRANSPORT = ("id", "call_id", "status", "cache_control")


class _Turn(msgspec.Struct):
    """One turn of a conversation, whatever dialect it came in."""

    role: str
    parts: list[Any] = []
    """Text as str; anything else, such as an image, as it came."""
    calls: list[list[Any]] = []
    """(name, arguments) of each tool call."""

    def digest(self) -> bytes:
        return _digest([self.role, _joined(self.parts), self.calls])

    def add(self, other: _Turn) -> None:
        self.parts = self.parts + other.parts
        self.calls = self.calls + other.calls


def message_digest(message: Mapping[str, Any]) -> bytes:
    """16 bytes over the role, canonical content and tool calls of one message of a chat or Anthropic-messages request,
    or of one input item of a Responses request.

    A message that carries several tool results (Anthropic) gets one digest over those of its parts.
    """
    digests = [turn.digest() for turn in _turns(message)]
    return digests[0] if len(digests) == 1 else _digest(digests)


def request_digests(request: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The digests of a request body: of its tools and template arguments first, then of each message in order.

    request: the JSON body of a chat, Responses, completions, Anthropic-messages or native generate request. System
    prompts that stand beside the messages (`system`, `instructions`) count as a first message of that role. In a
    Responses request the consecutive items of one assistant turn make one message; reasoning items make none. An
    Anthropic message that carries tool results counts as one message per result, and one for what else it says.
    """
    settings = {key: request[key] for key in _TEMPLATE_KEYS if request.get(key)}
    digests = [_digest(["settings", _canonical(settings)])]
    digests += [_turn("system", request[key]).digest() for key in ("system", "instructions") if request.get(key)]
    if request.get("messages") is not None:
        for message in _listed(request["messages"]):
            plain = _plain_digest(message)
            digests += [turn.digest() for turn in _turns(message)] if plain is None else [plain]
    elif request.get("input") is not None:
        digests += [turn.digest() for turn in _grouped(_listed(request["input"]))]
    else:
        given = [request[key] for key in _NATIVE_PROMPTS if request.get(key) is not None]
        digests += [_prompt_digest(prompt) for prompt in (_prompts(given[0]) if given else ())]
    return tuple(digests)


def answer_digest(output_items: Sequence[Mapping[str, Any]]) -> bytes | None:
    """The digest that an answer has once a harness sends it back as an assistant message.

    output_items: the content of one answer as Responses output items (a chat message works, too). None if nothing of it
    is visible: no text, no tool call; then no later request can show it.
    """
    answer = _Turn("assistant")
    for item in output_items:
        for turn in _turns(item):
            answer.add(turn)
    return answer.digest() if _joined(answer.parts) or answer.calls else None


# ---- from a request to turns


def _prompts(given: Any) -> Sequence[Any]:
    """The prompts of a request without messages: one text, one list of ids, or several of either."""
    if isinstance(given, (list, tuple)) and given and not isinstance(given[0], int):
        return given
    return [given]


def _prompt_digest(prompt: Any) -> bytes:
    if isinstance(prompt, (list, tuple)):
        try:
            return _digest(["prompt", "ids", array("q", prompt).tobytes()])
        except (TypeError, OverflowError):  # no ids; the server will say so
            pass
    return _Turn("prompt", [prompt]).digest()


def _grouped(items: Sequence[Any]) -> Iterator[_Turn]:
    """The turns of Responses items; what the assistant says and calls in a row is one answer."""
    answer: _Turn | None = None
    for item in items:
        for turn in _turns(item):
            if turn.role != "assistant":
                if answer is not None:
                    yield answer
                    answer = None
                yield turn
            elif answer is None:
                answer = turn
            else:
                answer.add(turn)
    if answer is not None:
        yield answer


def _listed(value: Any) -> Sequence[Any]:
    """A conversation given as one string, or one item, is one message of the user."""
    return value if isinstance(value, (list, tuple)) else [value]


def _plain_digest(message: Any) -> bytes | None:
    """The digest of a message that is a role and a text and nothing else, as most are, at a third of the price; None
    for any other."""
    if type(message) is not dict or len(message) != 2:
        return None
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str or role in ("", "function"):
        return None
    text = content.strip()
    return _digest([role, [text] if text else [], []])


def _turns(message: Any) -> list[_Turn]:
    """What one message or item says: one turn; several for tool results within a message; none for reasoning."""
    if not isinstance(message, Mapping):
        return [_turn("user", message)]
    kind = message.get("type")
    if kind in _REASONING:
        return []
    if kind in _FUNCTION_ITEMS:
        return [_Turn("assistant", [], [_call(message.get("name"), message.get("arguments", message.get("input")))])]
    if "role" in message or kind == "message":
        return _message_turns(message)
    if isinstance(kind, str) and kind.endswith("_output"):
        return [_turn("tool", message.get("output"))]
    rest = {key: value for key, value in message.items() if key not in _MARKS_OF_TRANSPORT}
    if isinstance(kind, str) and kind.endswith("_call"):  # of a tool that the server runs itself
        return [_Turn("assistant", [], [[kind, "json", _canonical(rest)]])]
    return [_turn(kind if isinstance(kind, str) else "", [rest])]


def _message_turns(message: Mapping[str, Any]) -> list[_Turn]:
    role = str(message.get("role") or "assistant")
    content = message.get("content")
    if not content and message.get("refusal"):
        content = message["refusal"]
    turn = _turn("tool" if role == "function" else role, content)
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    turn.calls = turn.calls + [_chat_call(call) for call in _listed(calls)]
    results = [_turn("tool", part.get("content")) for part in turn.parts if _is_result(part)]
    if not results:
        return [turn]
    turn.parts = [part for part in turn.parts if not _is_result(part)]
    return [*results, turn] if _joined(turn.parts) or turn.calls else results


def _is_result(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "tool_result"


def _turn(role: str, content: Any) -> _Turn:
    parts: list[Any] = []
    calls: list[list[Any]] = []
    for part in () if content is None else _listed(content):
        if not isinstance(part, Mapping):
            parts.append(part)
            continue
        kind = part.get("type")
        if kind in _REASONING:
            continue
        if kind in _TEXT or (kind is None and "text" in part):
            parts.append(part.get("text") or "")
        elif kind == "refusal":
            parts.append(part.get("refusal") or "")
        elif kind in _CALL_PARTS:
            calls.append(_call(part.get("name"), part.get("input")))
        else:
            parts.append(part)
    return _Turn(role, parts, calls)


# ---- what counts as the same


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Neighbouring texts joined and stripped, empty ones dropped; other parts as canonical values."""
    joined: list[Any] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        _add_text(joined, texts)
        joined.append(["part", _canonical(part)])
    _add_text(joined, texts)
    return joined


def _add_text(joined: list[Any], texts: list[str]) -> None:
    text = "".join(texts).strip()
    texts.clear()
    if text:
        joined.append(text)


def _chat_call(call: Any) -> list[Any]:
    if not isinstance(call, Mapping):
        return _call(None, call)
    for key in ("function", "custom"):
        if isinstance(call.get(key), Mapping):
            call = call[key]
            break
    return _call(call.get("name"), call.get("arguments", call.get("input")))


def _call(name: Any, arguments: Any) -> list[Any]:
    """A call as name and arguments: their JSON value, or the text where it is none. Its id says nothing."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # cut off, or never meant to be JSON
            return [storable(name), "text", arguments.strip()]
    return [storable(name), "json", _canonical(arguments)]


def _canonical(value: Any) -> Any:
    return _whole_numbers(storable(value))


def _whole_numbers(value: Any) -> Any:
    """1.0 as 1, as harnesses write it; without what only marks where a prompt cache may cut."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list:
        return [_whole_numbers(item) for item in value]
    if type(value) is dict:
        return {key: _whole_numbers(item) for key, item in value.items() if key != "cache_control"}
    return value


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(encode_content(value, canonical=True), digest_size=16).digest()
