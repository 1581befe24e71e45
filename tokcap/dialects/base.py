"""What a dialect is: a way to ask a model that carries no token ids, and the chat request that asks the same."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ("ChatTranslation", "Dialect", "new_response_id")

_ID_PREFIXES = {"messages": "msg", "responses": "resp"}


class ChatTranslation(Protocol):
    """A chat stream on its way to a client that speaks another dialect. Never raises; keeps what is not yet told."""

    def feed(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """The server-sent events, with their blank lines, that one `chat.completion.chunk` becomes; there may be none.

        chunk: the decoded JSON. A chunk that holds `error` is the same as `fail`; after the end nothing comes.
        """

    def end(self) -> list[bytes]:
        """What ends the stream: for a chat stream that is whole, once. Of one that was cut short nothing is to end."""

    def fail(self, error: Any) -> list[bytes]:
        """An error in mid-stream, in the form in which `Dialect.error` takes it. It is the end of the stream."""


class Dialect(Protocol):
    """The translation of one dialect to chat and back: pure, without I/O; its objects may be shared."""

    @property
    def name(self) -> str:
        """`messages` or `responses`."""

    def chat_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request of which an engine renders the same prompt as of `request`, and samples alike.

        request: the decoded JSON body; it is not changed, but parts of it may be shared by the result. Raises
        `UntranslatableError` for whatever chat can't carry, and for what is no request of the dialect.
        """

    def answer(self, chat: Mapping[str, Any], request: Mapping[str, Any], *, response_id: str) -> dict[str, Any]:
        """A whole `chat.completion` in the dialect. Never raises: it is called after generation.

        request: the one that was translated. response_id: of `new_response_id`; the ids of items derive from it, so
        that an answer is the same streamed or not.
        """

    def stream(self, request: Mapping[str, Any], *, response_id: str) -> ChatTranslation:
        """The same for an answer that is streamed."""

    def error(self, chat_error: Any, status: int) -> dict[str, Any]:
        """An error body as OpenAI-style servers have it, in the dialect. Never raises.

        chat_error: decoded JSON (`{"error": {...}}`, or a flat one), or text, or None.
        """


def new_response_id(dialect: str) -> str:
    """A fresh id for an answer: `msg_` (messages) or `resp_` (responses) and 32 random hex digits."""
    return f"{_ID_PREFIXES[dialect]}_{uuid.uuid4().hex}"
