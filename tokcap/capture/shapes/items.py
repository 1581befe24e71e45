"""The content of an answer as Responses output items, without token arrays."""

from __future__ import annotations

from typing import Any

from .places import as_dict, as_list, text

__all__ = ("CARRIED", "chat_items", "responses_items", "text_items")

CARRIED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The fields in which NeMo Gym and NeMo RL carry ids and log-probs on a message or an output item."""

Items = list[dict[str, Any]]


def text_items(value: object) -> Items:
    """One message with that text; none if it is no string."""
    return [_message([_output_text(value)])] if isinstance(value, str) else []


def chat_items(message: dict[str, Any]) -> Items:
    """Reasoning, then what was said, then the tool calls of a chat message."""
    items = []
    reasoning = text(message.get("reasoning")) or text(message.get("reasoning_content"))
    if reasoning:
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content, "status": "completed"})
    calls = _tool_calls(message)
    parts = _parts(message.get("content"))
    if message.get("refusal"):
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    if parts or not calls:
        items.append(_message(parts or [_output_text("")]))
    return items + calls


def responses_items(output: list[Any]) -> Items:
    """The items as they are; token arrays and the log-probs of their text left out."""
    return [_bare(item) for item in output if isinstance(item, dict)]


def _message(content: Items) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "status": "completed", "content": content}


def _output_text(value: str) -> dict[str, Any]:
    return {"type": "output_text", "text": value, "annotations": []}


def _parts(content: object) -> Items:
    if isinstance(content, str):
        return [_output_text(content)] if content else []
    parts = []
    for part in as_list(content):
        if isinstance(part, str):
            parts.append(_output_text(part))
        elif isinstance(part, dict):
            is_text = part.get("type") == "text" and isinstance(part.get("text"), str)
            parts.append(_output_text(part["text"]) if is_text else part)
    return parts


def _tool_calls(message: dict[str, Any]) -> Items:
    items = []
    for call in as_list(message.get("tool_calls")):
        function = as_dict(as_dict(call).get("function"))
        items.append(
            {
                "type": "function_call",
                "call_id": as_dict(call).get("id") or "",
                "name": function.get("name") or "",
                # As the engine wrote them: parsing and writing them again would change numbers and escapes.
                "arguments": function.get("arguments", ""),
            }
        )
    function = as_dict(message.get("function_call"))
    if function and not items:
        arguments = function.get("arguments", "")
        items.append(
            {"type": "function_call", "call_id": "", "name": function.get("name") or "", "arguments": arguments}
        )
    return items


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    bare = {key: value for key, value in item.items() if key not in CARRIED and key != "routed_experts"}
    if isinstance(bare.get("content"), list):
        bare["content"] = [
            {key: value for key, value in part.items() if key != "logprobs"} if isinstance(part, dict) else part
            for part in bare["content"]
        ]
    return bare
