"""OpenAI's `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .responses_answer import error_body, responses_answer
from .responses_request import responses_chat_request
from .responses_stream import ResponsesStream

__all__ = ("ResponsesDialect",)


class ResponsesDialect(msgspec.Struct, frozen=True):
    """The dialect, without what needs a server that remembers: every request holds the whole conversation."""

    @property
    def name(self) -> str:
        """`responses`."""
        return "responses"

    def chat_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request as chat. Raises `UntranslatableError`."""
        return responses_chat_request(request)

    def answer(self, chat: Mapping[str, Any], request: Mapping[str, Any], *, response_id: str) -> dict[str, Any]:
        """A whole chat answer as a response."""
        return responses_answer(chat, request, response_id)

    def stream(self, request: Mapping[str, Any], *, response_id: str) -> ResponsesStream:
        """The same for a stream."""
        return ResponsesStream(request, response_id)

    def error(self, chat_error: Any, status: int) -> dict[str, Any]:
        """An error body."""
        return error_body(chat_error, status)
