"""An OpenAI Responses request as the chat request of which vLLM's own `/v1/responses` renders the same prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import Fields
from .responses_items import goes_on, input_messages
from .responses_tools import read_tools

__all__ = ("DROPPED", "hides_reasoning", "responses_chat_request", "wants_log_probs")

DROPPED: Mapping[str, str] = {
    "metadata": "comes back in the answer",
    "user": "names the end user",
    "safety_identifier": "the same",
    "prompt_cache_key": "finds OpenAI's prompt cache; local engines cache every prefix",
    "prompt_cache_options": "the same",
    "prompt_cache_retention": "the same",
    "service_tier": "chooses a queue at OpenAI",
    "client_metadata": "names the client (Codex)",
    "max_tool_calls": "counts calls of tools that the server runs, of which there are none",
    "stream_options": "whether deltas are padded against eavesdroppers",
    "top_logprobs": "means nothing without message.output_text.logprobs in include",
    "mm_payload": "vLLM's, for rendering without generation",
    "return_mm_kwargs": "the same",
}
"""What is left out, and why nothing is lost."""

_REFUSED = {
    "previous_response_id": "nothing is stored that it could name; send the items themselves",
    "conversation": "nothing is stored that it could name; send the items themselves",
    "store": "answers are not kept for the client; leave it out or say false",
    "background": "the answer can't be fetched later",
    "background_options": "the answer can't be fetched later",
    "prompt": "prompt templates lie at OpenAI",
    "previous_input_messages": "can't be shown through a chat template",
    "context_management": "local engines don't edit a conversation",
    "moderation": "local engines don't moderate",
    "enable_response_messages": "asks this engine for ids in its own way, which needs no translation",
    "request_id": "the id of the answer is chosen here",
    "media_io_kwargs": "only text can be carried over",
    "mm_processor_kwargs": "only text can be carried over",
    "image": "only text can be carried over",
    "access_programs": "chooses models at OpenAI",
    "n": "the dialect has one answer",
}
_CARRIED = (
    "temperature",
    "top_p",
    "parallel_tool_calls",
    # vLLM's own, which both of its routes know
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "cache_salt",
    "priority",
    "session_id",
    "watermarking",
    "vllm_xargs",
    "kv_transfer_params",
    "ec_transfer_params",
    "chat_template_kwargs",
)
_LOG_PROBS = "message.output_text.logprobs"
_OF_OTHER_ITEMS = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
    # The answer has the reasoning itself.
    "reasoning.encrypted_content",
)


def responses_chat_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request. Raises `UntranslatableError`."""
    fields = Fields(request)
    given = fields.take("input", needed=True)
    messages = input_messages(given, fields.path("input"))
    instructions = fields.text("instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    chat: dict[str, Any] = {"messages": messages}
    model = fields.text("model")
    if model:
        chat["model"] = model
    if goes_on(given):
        chat["continue_final_message"], chat["add_generation_prompt"] = True, False
    limit = fields.take("max_output_tokens")
    if limit is not None:
        chat["max_tokens"] = limit
    for key in _CARRIED:
        value = fields.take(key)
        if value is not None:
            chat[key] = value
    _add_tools(chat, fields)
    _add_text(chat, fields)
    _add_reasoning(chat, fields)
    _add_include(chat, fields, request)
    _add_truncation(chat, fields)
    if fields.flag("stream"):
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    fields.done(DROPPED, _REFUSED)
    return chat


def wants_log_probs(request: Mapping[str, Any]) -> bool:
    """Whether the client asked for the log-probs of the text."""
    include = request.get("include")
    return isinstance(include, (list, tuple)) and _LOG_PROBS in include


def hides_reasoning(request: Mapping[str, Any]) -> bool:
    """Whether the client wants none of the reasoning (vLLM's `include_reasoning`)."""
    return request.get("include_reasoning") is False


def _add_tools(chat: dict[str, Any], fields: Fields) -> None:
    tools, names = read_tools(fields.take("tools"), fields.path("tools"))
    if tools:
        chat["tools"] = tools
    choice = fields.take("tool_choice")
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise fields.refuse("tool_choice", f"{choice} is no tool choice of this dialect")
        chosen: Any = choice
    else:
        wanted = Fields(choice, fields.path("tool_choice"))
        kind = wanted.text("type", needed=True)
        if kind not in ("function", "custom"):
            raise wanted.refuse("type", f"{kind} has no counterpart in chat")
        name = wanted.text("name", needed=True)
        wanted.done({})
        chosen = {"type": "function", "function": {"name": names.named(name)}}
        if names.named(name) is None:
            raise wanted.refuse("name", "is not the name of exactly one of the tools")
    if tools:
        chat["tool_choice"] = chosen
    elif chosen == "required":
        raise fields.refuse("tool_choice", "asks for a tool, but tools is empty")


def _add_text(chat: dict[str, Any], fields: Fields) -> None:
    given = fields.take("text")
    if given is None:
        return
    text = Fields(given, fields.path("text"))
    verbosity = text.take("verbosity")
    if verbosity is not None:
        chat["verbosity"] = verbosity
    wanted = text.take("format")
    text.done({})
    if wanted is None:
        return
    form = Fields(wanted, text.path("format"))
    kind = form.text("type", needed=True)
    if kind == "json_schema":
        schema = {key: form.take(key) for key in ("name", "description", "schema", "strict")}
        response_format: dict[str, Any] = {
            "type": kind,
            "json_schema": {key: value for key, value in schema.items() if value is not None},
        }
    elif kind in ("json_object", "text"):
        response_format = {"type": kind}
    else:
        raise form.refuse("type", f"{kind} is no format of this dialect")
    form.done({})
    if kind != "text":
        chat["response_format"] = response_format
        if "structured_outputs" in chat:
            raise fields.refuse("structured_outputs", "contradicts text.format")


def _add_reasoning(chat: dict[str, Any], fields: Fields) -> None:
    given = fields.take("reasoning")
    if given is None:
        return
    reasoning = Fields(given, fields.path("reasoning"))
    effort = reasoning.take("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if reasoning.take("context") not in (None, "auto"):
        raise reasoning.refuse("context", "the chat template decides which reasoning it shows again")
    if reasoning.take("mode") not in (None, "standard"):
        raise reasoning.refuse("mode", "local engines have one mode")
    why = "local engines show the reasoning itself, and make no summary of it"
    reasoning.done({"summary": why, "generate_summary": why})


def _add_include(chat: dict[str, Any], fields: Fields, request: Mapping[str, Any]) -> None:
    for index, wanted in enumerate(fields.take("include") or ()):
        if wanted != _LOG_PROBS and wanted not in _OF_OTHER_ITEMS:
            raise fields.refuse(f"include[{index}]", "this is not known")
    if wants_log_probs(request):
        chat["logprobs"] = True
        top = fields.take("top_logprobs")
        if top:
            chat["top_logprobs"] = top
    # Engines give no ids without the reasoning, so that it is left out of the answer instead.
    if fields.take("include_reasoning") is False and {"response_format", "structured_outputs"} & set(chat):
        raise fields.refuse("include_reasoning", "with a grammar it changes where the grammar begins")


def _add_truncation(chat: dict[str, Any], fields: Fields) -> None:
    truncation = fields.take("truncation")
    if truncation == "auto":
        chat["truncate_prompt_tokens"] = -1  # to the length of the context, as vLLM does
    elif truncation not in (None, "disabled"):
        raise fields.refuse("truncation", "expected auto or disabled")
