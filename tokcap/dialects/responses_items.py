"""The input of a Responses request as chat messages, grouped as vLLM groups them.

What an answer was cut into (reasoning, message, function calls) is one assistant message again: an item goes to the
assistant message before it if that has no such part yet, else it begins another one.
"""

from __future__ import annotations

from typing import Any

from .fields import ONLY_TEXT, Fields, kind_of, objects, texts
from .responses_tools import custom_arguments, flat_name

__all__ = ("DROPPED", "goes_on", "input_messages")

_OF_ANSWER = {"id": "names an item of an answer", "status": "whether the item was whole"}

DROPPED: dict[str, dict[str, str]] = {
    "message": {**_OF_ANSWER, "phase": "what OpenAI's models make of a message; no chat template has a place for it"},
    "part": {"logprobs": "what an engine said of its own text", "prompt_cache_breakpoint": "marks where a cache cuts"},
    "reasoning": _OF_ANSWER,
    "call": _OF_ANSWER,
    "output": _OF_ANSWER,
}
"""What is left out, by the kind of item, and why nothing is lost."""

_TEXT = ("input_text", "output_text", "text")
_ENCRYPTED = "encrypted reasoning can only be read by the server that made it"
_REFUSED_CALL = {
    "async": "chat has no asynchronous tools",
    "toolset_name": "local engines know no tool sets",
}


def input_messages(value: Any, at: str) -> list[dict[str, Any]]:
    """The messages. value: a text, or the items. Raises `UntranslatableError`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for item in objects(value, at):
        kind = item.text("type") or "message"
        if kind == "message":
            _add_message(messages, item)
        elif kind == "reasoning":
            _merge(messages, _reasoning(item))
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(messages, _call(item, kind))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(_output(item))
        elif kind == "item_reference":
            raise item.refuse("type", "item_reference: nothing is stored that it could refer to")
        else:
            raise item.refuse("type", f"{kind} has no counterpart in chat")
    return messages


def goes_on(value: Any) -> bool:
    """Whether the input ends in an answer that is not whole, which the engine is to go on with."""
    last = value[-1] if isinstance(value, (list, tuple)) and value else None
    if not isinstance(last, dict) or last.get("status") not in ("in_progress", "incomplete"):
        return False
    kind = last.get("type") or "message"
    return kind == "reasoning" or (kind == "message" and last.get("role") == "assistant")


def _merge(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else {}
    told = [key for key in message if key != "role"]
    if last.get("role") == "assistant" and all(last.get(key) is None for key in told):
        last.update(message)
    else:
        messages.append(message)


def _add_message(messages: list[dict[str, Any]], item: Fields) -> None:
    role = item.text("role", needed=True)
    content = item.take("content", needed=True)
    if role not in ("user", "assistant", "system", "developer"):
        raise item.refuse("role", f"{role} is no role of this dialect")
    found: str | list[dict[str, str]]
    if isinstance(content, str):
        found = content
    elif role == "assistant":
        found = "".join(_said(content, item.path("content")))
    else:
        parts = texts(content, item.path("content"), _TEXT, DROPPED["part"])
        found = parts[0] if len(parts) == 1 else [{"type": "text", "text": part} for part in parts]
    item.done(DROPPED["message"])
    message = {"role": role, "content": found}
    if role == "assistant":
        _merge(messages, message)
    else:
        messages.append(message)


def _said(content: Any, at: str) -> list[str]:
    """The texts of an answer; a refusal is one, too."""
    found = []
    for part in objects(content, at):
        kind = part.text("type", needed=True)
        if kind not in ("refusal", *_TEXT):
            raise part.refuse("type", f"{kind}: {ONLY_TEXT}")
        found.append(part.text("refusal" if kind == "refusal" else "text", needed=True))
        part.done(DROPPED["part"], {"annotations": "citations have no place in chat"})
    return found


def _reasoning(item: Fields) -> dict[str, Any]:
    if item.take("encrypted_content"):
        raise item.refuse("encrypted_content", _ENCRYPTED)
    content, summary = item.take("content"), item.take("summary")
    if content:
        text = "".join(texts(content, item.path("content"), ("reasoning_text", "text"), {}))
    else:
        # All that a client has of reasoning that was not its own server's; vLLM shows it in the same place.
        text = "\n".join(texts(summary or [], item.path("summary"), ("summary_text",), {}))
    item.done(DROPPED["reasoning"])
    # The one is the present name, the other what SGLang and older vLLM read.
    return {"role": "assistant", "reasoning": text, "reasoning_content": text}


def _call(item: Fields, kind: str) -> dict[str, Any]:
    call_id, name = item.text("call_id", needed=True), item.text("name", needed=True)
    if kind == "custom_tool_call":
        arguments = custom_arguments(item.text("input"))
    else:
        arguments = item.text("arguments", needed=True)
    namespace = item.text("namespace")
    _check_caller(item)
    item.done(DROPPED["call"], _REFUSED_CALL)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": flat_name(namespace, name), "arguments": arguments},
    }


def _check_caller(item: Fields) -> None:
    caller = item.take("caller")
    if caller is not None and caller != {"type": "direct"}:
        raise item.refuse("caller", "only the model itself calls tools here")


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _output(item: Fields) -> dict[str, Any]:
    call_id, output = item.text("call_id", needed=True), item.take("output", needed=True)
    if not isinstance(output, (str, list, tuple)):
        raise item.refuse("output", f"expected a string or an array, not {kind_of(output)}")
    if not isinstance(output, str):
        output = "\n".join(texts(output, item.path("output"), _TEXT, DROPPED["part"]))
    for key in ("name", "namespace"):
        item.text(key)  # of the call, which says them itself
    _check_caller(item)
    item.done(DROPPED["output"], _REFUSED_CALL)
    return {"role": "tool", "tool_call_id": call_id, "content": output}
