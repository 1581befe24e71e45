"""Anthropic's `/v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .messages_answer import error_body, messages_answer
from .messages_request import messages_chat_request
from .messages_stream import MessagesStream

__all__ = ("MessagesDialect",)


class MessagesDialect(msgspec.Struct, frozen=True):
    """The dialect, with what depends on the model's chat template and can't be known from a request."""

    merge_system: bool = False
    """Whether system messages within the conversation are put into the first one: for templates that raise on any
    other (Qwen's). vLLM finds it out by rendering such a conversation when it starts."""
    disabled_effort: str = "none"
    """The `reasoning_effort` that stands for `thinking: {"type": "disabled"}`; `low` for templates that can't switch
    thinking off. vLLM finds this out, too."""

    @property
    def name(self) -> str:
        """`messages`."""
        return "messages"

    def chat_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request as chat. Raises `UntranslatableError`."""
        return messages_chat_request(request, merge_system=self.merge_system, disabled_effort=self.disabled_effort)

    def answer(self, chat: Mapping[str, Any], request: Mapping[str, Any], *, response_id: str) -> dict[str, Any]:
        """A whole chat answer as a message."""
        return messages_answer(chat, request, response_id)

    def stream(self, request: Mapping[str, Any], *, response_id: str) -> MessagesStream:
        """The same for a stream."""
        return MessagesStream(request, response_id)

    def error(self, chat_error: Any, status: int) -> dict[str, Any]:
        """An error body."""
        return error_body(chat_error, status)
