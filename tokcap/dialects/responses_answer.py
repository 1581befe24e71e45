"""What a client of the Responses dialect sees of a chat answer: items, status, usage, errors.

A function call keeps the id that the engine gave it (`call_id`), and its arguments to the byte. The ids of items derive
from that of the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UntranslatableError
from .blocks import Block, blocks_of
from .chat import Ending, Piece, Usage, read_error, read_message
from .responses_request import hides_reasoning, wants_log_probs
from .responses_tools import ToolNames, custom_input, read_tools

__all__ = ("Items", "error_body", "log_prob_entries", "response_object", "responses_answer")


def responses_answer(chat: Mapping[str, Any], request: Mapping[str, Any], response_id: str) -> dict[str, Any]:
    """The response."""
    pieces, ending = read_message(chat)
    items = Items(request, response_id)
    output = [items.item(block) for block in blocks_of(items.visible(pieces))]
    return response_object(request, ending, response_id, output=output, over=True)


class Items:
    """How the blocks of one answer become output items."""

    def __init__(self, request: Mapping[str, Any], response_id: str) -> None:
        self._response_id = response_id
        self._hides_reasoning = hides_reasoning(request)
        # Those of hidden reasoning would say what it was.
        self._log_probs = wants_log_probs(request) and not self._hides_reasoning
        self._names = _names(request)

    def visible(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Without what the client does not want to see."""
        return [piece for piece in pieces if not (self._hides_reasoning and piece.kind == "reasoning")]

    def is_custom(self, block: Block) -> bool:
        """Whether the block is a call of a custom tool."""
        return block.kind == "call" and block.name in self._names.custom

    def item_id(self, block: Block) -> str:
        """The id of the block's item."""
        prefix = {"reasoning": "rs", "call": "ctc" if self.is_custom(block) else "fc"}.get(block.kind, "msg")
        return f"{prefix}_{_digest(self._response_id, block.index)}"

    def item(self, block: Block, *, status: str = "completed") -> dict[str, Any]:
        """The item, as far as the block came. status: `in_progress` for one that was just opened, without content."""
        item: dict[str, Any] = {"id": self.item_id(block)}
        begun = status == "in_progress"
        if block.kind == "reasoning":
            content = None if begun else [self.part(block)]
            item |= {"type": "reasoning", "summary": [], "content": content}
            return {**item, "encrypted_content": None, "status": status}
        if block.kind != "call":
            content = [] if begun else [self.part(block)]
            return {**item, "type": "message", "role": "assistant", "content": content, "status": status}
        item["call_id"] = block.id or f"call_{_digest(self._response_id, block.index)}"
        if self.is_custom(block):
            given = "" if begun else custom_input(block.text)
            return {**item, "type": "custom_tool_call", "name": block.name, "input": given}
        namespace, name = self._names.namespaced.get(block.name, (None, block.name))
        item |= {"type": "function_call", "name": name, "namespace": namespace}
        return {**item, "arguments": "" if begun else block.text, "status": status}

    def part(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        """The content part of reasoning, a text or a refusal. begun: without what it holds."""
        text = "" if begun else block.text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        if block.kind == "refusal":
            return {"type": "refusal", "refusal": text}
        log_probs = log_prob_entries(block.log_probs) if self._log_probs else None
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if begun else log_probs}

    def delta_log_probs(self, entries: list[Any]) -> list[dict[str, Any]]:
        """Those of a delta, if they were asked for; they have no bytes there."""
        found = log_prob_entries(entries) if self._log_probs else []
        for entry in found:
            for each in (entry, *entry["top_logprobs"]):
                del each["bytes"]
        return found


def _names(request: Mapping[str, Any]) -> ToolNames:
    """What the tools are called; an answer is also made to a request whose tools can't be read."""
    try:
        return read_tools(request.get("tools"), "tools")[1]
    except UntranslatableError:
        return ToolNames()


def _digest(response_id: str, index: int) -> str:
    return hashlib.blake2b(f"{response_id}/{index}".encode(), digest_size=16).hexdigest()


def log_prob_entries(entries: Iterable[Any]) -> list[dict[str, Any]]:
    """Entries of chat log-probs in the form of the dialect."""
    found = []
    for entry in entries:
        if isinstance(entry, Mapping):
            top = entry.get("top_logprobs")
            tops = [_entry(each) for each in (top if isinstance(top, list) else ()) if isinstance(each, Mapping)]
            found.append({**_entry(entry), "top_logprobs": tops})
    return found


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry.get("token"), "logprob": entry.get("logprob"), "bytes": entry.get("bytes") or []}


def response_object(
    request: Mapping[str, Any],
    ending: Ending,
    response_id: str,
    *,
    output: list[dict[str, Any]],
    over: bool,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The response around its output. Sampling parameters that the request leaves to the engine are null.

    over: whether the answer is whole. error: what it failed of.
    """
    status, incomplete = _status(ending) if over else ("in_progress", None)
    tools = request.get("tools") or []
    return {
        "id": response_id,
        "object": "response",
        "created_at": ending.created,
        "status": "failed" if error is not None else status,
        "background": False,
        "error": error,
        "incomplete_details": incomplete,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "max_tool_calls": request.get("max_tool_calls"),
        "model": ending.model or request.get("model") or "",
        "output": output,
        "presence_penalty": request.get("presence_penalty"),
        "frequency_penalty": request.get("frequency_penalty"),
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": request.get("reasoning"),
        "service_tier": request.get("service_tier") or "auto",
        "temperature": request.get("temperature"),
        "text": request.get("text"),
        "tool_choice": request.get("tool_choice") or ("auto" if tools else "none"),
        "tools": tools,
        "top_logprobs": request.get("top_logprobs"),
        "top_p": request.get("top_p"),
        "truncation": request.get("truncation") or "disabled",
        "usage": _usage(ending.usage) if over else None,
        "user": request.get("user"),
        "metadata": request.get("metadata"),
        **ending.transfer,
    }


def _status(ending: Ending) -> tuple[str, dict[str, str] | None]:
    if ending.finish_reason == "length":
        return "incomplete", {"reason": "max_output_tokens"}
    if ending.finish_reason == "content_filter":
        return "incomplete", {"reason": "content_filter"}
    return ("cancelled" if ending.finish_reason == "abort" else "completed"), None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached or 0,
            "cache_write_tokens": usage.cache_written or 0,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def error_body(chat_error: Any, status: int) -> dict[str, Any]:
    """The error, nested as OpenAI nests it; an engine's own words stay."""
    message, kind, param, code = read_error(chat_error)
    fallback = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {
        "error": {
            "message": message or f"status {status}",
            "type": kind or fallback,
            "param": param,
            "code": status if code is None else code,
        }
    }
