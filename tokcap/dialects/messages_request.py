"""An Anthropic messages request as a chat request: the one of which vLLM's own `/v1/messages` renders the same prompt.

Where chat has no place for the order of blocks, vLLM's is taken: the results of tools come before what else a user
message says, and the text of an assistant message before its tool calls. A last message of the assistant is a turn like
any other: no local engine goes on with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .fields import ONLY_TEXT, Fields, kind_of, objects, refusal, texts

__all__ = ("DROPPED", "messages_chat_request")

_CACHE = {"cache_control": "marks where Anthropic's prompt cache cuts; local engines cache every prefix"}

DROPPED: Mapping[str, Mapping[str, str]] = {
    "request": {
        **_CACHE,
        "metadata": "names the end user",
        "service_tier": "chooses a queue at Anthropic",
        "inference_geo": "chooses a data centre at Anthropic",
        "speed": "chooses hardware at Anthropic",
        "diagnostics": "asks what Anthropic's prompt cache did",
        "user_profile_id": "names the end user",
        "workspace_id": "names an account",
        "mm_payload": "vLLM's, for rendering without generation",
        "return_mm_kwargs": "the same",
    },
    "text": _CACHE,
    "thinking": {"signature": "Anthropic's proof that it wrote the block; local engines sign with random digits"},
    "tool_use": _CACHE,
    "tool_result": {**_CACHE, "is_error": "a chat tool message has no such mark; the text says what failed"},
    "tool": {**_CACHE, "eager_input_streaming": "how fine the arguments are streamed"},
    "thinking config": {"display": "local engines show all reasoning; without it the next prompt would differ"},
}
"""What is left out, by the place where it stands, and why nothing is lost."""

_REFUSED = {
    "container": "local engines run no containers",
    "mcp_servers": "local engines call no MCP servers",
    "compaction": "local engines don't compact a conversation",
    "fallbacks": "there is no other model to fall back on",
    "thread": "local engines keep no threads",
    "output_format": "is now output_config.format",
    "n": "the dialect has one answer",
}
_REFUSED_TOOL = {
    "defer_loading": "local engines don't search for tools",
    "allowed_callers": "only the model itself calls tools here",
    "input_examples": "chat tools have no examples",
}
_REFUSED_BLOCK = {
    "caller": "only the model itself calls tools here",
    "toolset_name": "local engines know no tool sets",
    "citations": "citations have no place in chat",
}
_CARRIED = (
    "temperature",
    "top_p",
    "top_k",
    # vLLM's own, which both of its routes know
    "cache_salt",
    "watermarking",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "chat_template_kwargs",
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ATTRIBUTION = "x-anthropic-billing-header"
"""How a system block of Claude Code begins that only names the client, other in each request; vLLM drops it, too."""


def messages_chat_request(
    request: Mapping[str, Any], *, merge_system: bool = False, disabled_effort: str = "none"
) -> dict[str, Any]:
    """The chat request. See `MessagesDialect` for the two options. Raises `UntranslatableError`."""
    fields = Fields(request)
    chat: dict[str, Any] = {
        "model": fields.text("model", needed=True),
        "messages": _messages(fields, merge_system),
        "max_tokens": fields.take("max_tokens", needed=True),
    }
    stops = fields.take("stop_sequences")
    if stops:
        chat["stop"] = stops
    for key in _CARRIED:
        value = fields.take(key)
        if value is not None:
            chat[key] = value
    _add_tools(chat, fields)
    _add_output_config(chat, fields)
    _add_thinking(chat, fields, disabled_effort)
    _check_context_management(fields)
    if fields.flag("stream"):
        chat["stream"] = True
        # The first event of the dialect says how long the prompt is, as vLLM's own does.
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    fields.done(DROPPED["request"], _REFUSED)
    return chat


# ---- messages


def _messages(fields: Fields, merge_system: bool) -> list[dict[str, Any]]:
    system = _system_texts(fields.take("system"), fields.path("system"))
    said: list[dict[str, Any]] = []
    for message in objects(fields.take("messages", needed=True), fields.path("messages")):
        role = message.text("role", needed=True)
        content, at = message.take("content", needed=True), message.path("content")
        message.done({})
        if role == "system":
            text = "".join(_system_texts(content, at))
            if text and merge_system:
                system.append(text)
            elif text:
                said.append({"role": "system", "content": text})
        elif role not in ("user", "assistant"):
            raise message.refuse("role", f"{role} is no role of this dialect")
        elif isinstance(content, str):
            said.append({"role": role, "content": content})
        elif role == "user":
            said += _user_messages(content, at)
        else:
            said.append(_assistant_message(content, at))
    joined = "".join(system)
    return [{"role": "system", "content": joined}, *said] if joined else said


def _system_texts(value: Any, at: str) -> list[str]:
    if value is None or isinstance(value, str):
        return [value] if value else []
    found = texts(value, at, ("text",), DROPPED["text"])
    return [text for text in found if text and not text.startswith(_ATTRIBUTION)]


def _user_messages(content: Any, at: str) -> list[dict[str, Any]]:
    """The results of tools, each a message, then one with the text."""
    results: list[dict[str, Any]] = []
    parts: list[str] = []
    for block in objects(content, at):
        kind = block.text("type", needed=True)
        if kind == "text":
            _add_text(parts, block)
        elif kind == "tool_result":
            results.append(_tool_message(block))
        else:
            raise _wrong_block(block, kind, "user")
    return [*results, {"role": "user", "content": _content(parts)}] if parts else results


def _assistant_message(content: Any, at: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    parts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in objects(content, at):
        kind = block.text("type", needed=True)
        if kind == "text":
            _add_text(parts, block)
        elif kind == "thinking":
            reasoning.append(block.text("thinking", needed=True))
            block.done(DROPPED["thinking"])
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        else:
            raise _wrong_block(block, kind, "assistant")
    if reasoning:
        # The one is the present name, the other what SGLang and older vLLM read.
        message["reasoning"] = message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = _content(parts)
    return message


def _add_text(parts: list[str], block: Fields) -> None:
    text = block.text("text", needed=True)
    block.done(DROPPED["text"], _REFUSED_BLOCK)
    if text:
        parts.append(text)


def _content(parts: Sequence[str]) -> str | list[dict[str, str]]:
    return parts[0] if len(parts) == 1 else [{"type": "text", "text": part} for part in parts]


def _tool_call(block: Fields) -> dict[str, Any]:
    given = block.take("input")
    if given is not None and not isinstance(given, Mapping):
        raise block.refuse("input", f"expected an object, not {kind_of(given)}")
    function = {"name": block.text("name", needed=True), "arguments": json.dumps(given or {})}
    call = {"id": block.text("id", needed=True), "type": "function", "function": function}
    _check_caller(block)
    block.done(DROPPED["tool_use"], _REFUSED_BLOCK)
    return call


def _check_caller(block: Fields) -> None:
    caller = block.take("caller")
    if caller is not None and caller != {"type": "direct"}:
        raise block.refuse("caller", _REFUSED_BLOCK["caller"])


def _tool_message(block: Fields) -> dict[str, Any]:
    content = block.take("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        text = "\n".join(texts(content, block.path("content"), ("text",), DROPPED["text"]))
    message = {"role": "tool", "tool_call_id": block.text("tool_use_id", needed=True), "content": text}
    block.done(DROPPED["tool_result"], _REFUSED_BLOCK)
    return message


def _wrong_block(block: Fields, kind: str, role: str) -> Exception:
    if kind == "redacted_thinking":
        return block.refuse("type", "redacted_thinking is encrypted for Anthropic; no other server can read it")
    if kind in ("tool_use", "tool_result", "thinking", "text"):
        return block.refuse("type", f"{kind} has no place in a message of the {role}")
    return block.refuse("type", f"{kind}: {ONLY_TEXT}, and what tools of the client say")


# ---- tools


def _add_tools(chat: dict[str, Any], fields: Fields) -> None:
    given = fields.take("tools")
    tools = [] if given is None else [_tool(tool) for tool in objects(given, fields.path("tools"))]
    if tools:
        chat["tools"] = tools
    wanted = fields.take("tool_choice")
    if wanted is None:
        return
    choice = Fields(wanted, fields.path("tool_choice"))
    kind = choice.text("type", needed=True)
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.text("name", needed=True)}}
    elif kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise choice.refuse("type", f"{kind} is no tool choice of this dialect")
    if choice.flag("disable_parallel_tool_use") and tools:
        chat["parallel_tool_calls"] = False
    choice.done({})
    if tools:
        chat["tool_choice"] = chosen
    elif kind in ("any", "tool"):
        raise fields.refuse("tool_choice", "asks for a tool, but tools is empty")


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type")
    if kind not in ("", "custom"):
        raise tool.refuse("type", f"{kind}: a local engine knows no tools of Anthropic, neither those that it runs")
    schema = tool.take("input_schema", needed=True)
    if not isinstance(schema, Mapping):
        raise tool.refuse("input_schema", f"expected an object, not {kind_of(schema)}")
    function: dict[str, Any] = {"name": tool.text("name", needed=True)}
    description = tool.take("description")
    if description is not None:
        function["description"] = description
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    strict = tool.take("strict")
    if strict is not None:
        function["strict"] = strict
    callers = tool.take("allowed_callers")
    if callers not in (None, [], ["direct"]):
        raise tool.refuse("allowed_callers", _REFUSED_TOOL["allowed_callers"])
    tool.done(DROPPED["tool"], _REFUSED_TOOL)
    return {"type": "function", "function": function}


# ---- how it is to answer


def _add_output_config(chat: dict[str, Any], fields: Fields) -> None:
    given = fields.take("output_config")
    if given is None:
        return
    config = Fields(given, fields.path("output_config"))
    effort = config.take("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    wanted = config.take("format")
    if wanted is not None:
        form = Fields(wanted, config.path("format"))
        kind = form.text("type", needed=True)
        if kind != "json_schema":
            raise form.refuse("type", f"{kind} is no format of this dialect")
        schema = form.take("schema", needed=True)
        form.done({})
        # vLLM names the schema so; the name is not shown to the model.
        chat["response_format"] = {"type": kind, "json_schema": {"name": kind, "schema": schema}}
    config.done({})


def _add_thinking(chat: dict[str, Any], fields: Fields, disabled_effort: str) -> None:
    given = fields.take("thinking")
    if given is None:
        return
    thinking = Fields(given, fields.path("thinking"))
    kind = thinking.text("type", needed=True)
    if kind == "enabled":
        budget = thinking.take("budget_tokens", needed=True)
        if type(budget) is not int or budget < 1024:
            raise thinking.refuse("budget_tokens", "expected an integer from 1024")
        if type(chat["max_tokens"]) is int and budget >= chat["max_tokens"]:
            raise thinking.refuse("budget_tokens", "expected less than max_tokens")
        chat["thinking_token_budget"] = budget
    elif kind == "disabled":
        chat["reasoning_effort"] = disabled_effort
    elif kind != "adaptive":  # which leaves it to the model
        raise thinking.refuse("type", f"{kind} has no counterpart in chat")
    thinking.done(DROPPED["thinking config"])


def _check_context_management(fields: Fields) -> None:
    """Only the edit that keeps everything, as Claude Code sends it, edits nothing."""
    given = fields.take("context_management")
    if given is None:
        return
    management = Fields(given, fields.path("context_management"))
    for edit in objects(management.take("edits") or [], management.path("edits")):
        kind = edit.text("type", needed=True)
        if kind != "clear_thinking_20251015" or edit.take("keep") != "all":
            raise refusal(edit.at, f"{kind}: local engines don't edit a conversation")
        edit.done({})
    management.done({})
