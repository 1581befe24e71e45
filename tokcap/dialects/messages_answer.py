"""What an Anthropic client sees of a chat answer: blocks, why it ended, usage, errors.

A tool call keeps the id that the engine gave it, and its `input` is the JSON of its arguments. Arguments that are no
JSON object become `{"INVALID_JSON": "<the arguments>"}`, the wrapper that Anthropic's guide to fine-grained tool
streaming gives for them: vLLM answers with an error there, but what was sampled is recorded and must reach the client.
In a stream they come as they are, as they do from vLLM, and the client has to read them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from .blocks import Block, blocks_of
from .chat import Ending, Usage, json_object, read_error, read_message

__all__ = (
    "INVALID_JSON",
    "call_id",
    "error_body",
    "message_head",
    "messages_answer",
    "signature",
    "stop_of",
    "usage_of",
)

INVALID_JSON = "INVALID_JSON"

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def messages_answer(chat: Mapping[str, Any], request: Mapping[str, Any], response_id: str) -> dict[str, Any]:
    """The message. An empty answer has one empty text block, because clients look at the first."""
    pieces, ending = read_message(chat)
    blocks = blocks_of(pieces)
    stop_reason, stop_sequence = stop_of(ending, blocks)
    return {
        **message_head(ending, request, response_id),
        "content": [_content_block(block, response_id) for block in blocks] or [{"type": "text", "text": ""}],
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        **ending.transfer,
    }


def message_head(ending: Ending, request: Mapping[str, Any], response_id: str) -> dict[str, Any]:
    """The message before anything is said."""
    return {
        "id": response_id,
        "type": "message",
        "role": "assistant",
        "model": ending.model or request.get("model") or "",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(ending.usage),
    }


def _content_block(block: Block, response_id: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": signature(block)}
    if block.kind == "call":
        return {"type": "tool_use", "id": call_id(block, response_id), "name": block.name, "input": _input(block.text)}
    return {"type": "text", "text": block.text}


def _input(arguments: str) -> dict[str, Any]:
    if not arguments.strip():
        return {}
    found = json_object(arguments)
    return {INVALID_JSON: arguments} if found is None else found


def signature(block: Block) -> str:
    """What stands where Anthropic signs; it proves nothing, and is the same for the same reasoning."""
    return hashlib.blake2b(block.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def call_id(block: Block, response_id: str) -> str:
    """The id that the engine gave the call, else one made of the answer's."""
    return block.id or f"call_{response_id.partition('_')[2]}_{block.call}"


def stop_of(ending: Ending, blocks: Sequence[Block]) -> tuple[str | None, str | None]:
    """Stop reason and stop sequence, as vLLM maps them; None for a reason of which the dialect has no word.

    Whole tool calls are what counts, also where chat says `stop` (a call that was forced by name), and a stop string
    counts for more than a call that it cut.
    """
    if ending.finish_reason == "length":
        return "max_tokens", None
    if ending.finish_reason == "content_filter" or any(block.kind == "refusal" for block in blocks):
        return "refusal", None
    if ending.finish_reason not in ("stop", "tool_calls"):
        return None, None
    calls = [block for block in blocks if block.kind == "call"]
    whole = bool(calls) and (not calls[-1].text.strip() or json_object(calls[-1].text) is not None)
    if isinstance(ending.stop, str) and not whole:
        return "stop_sequence", ending.stop
    return ("tool_use" if calls or ending.finish_reason == "tool_calls" else "end_turn"), None


def usage_of(usage: Usage) -> dict[str, int]:
    """The counts: Anthropic's input tokens are those that no cache held or took."""
    cached, written = usage.cached, usage.cache_written
    counts = {"input_tokens": max(0, usage.prompt - (cached or 0) - (written or 0)), "output_tokens": usage.completion}
    if cached is not None:
        counts["cache_read_input_tokens"] = cached
    if written is not None:
        counts["cache_creation_input_tokens"] = written
    return counts


def error_body(chat_error: Any, status: int) -> dict[str, Any]:
    """The error in Anthropic's words, which are chosen by the status; the message is the engine's."""
    message, _, _, _ = read_error(chat_error)
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message or f"status {status}"}}
