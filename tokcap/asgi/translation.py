"""One request of a dialect without ids, asked as chat and answered as itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..dialects import Dialect

__all__ = ("Translation", "translation_of")


class Translation:
    """The dialect of one call, with what its answer needs to know of the request."""

    def __init__(self, dialect: Dialect, request: Mapping[str, Any]) -> None:
        from ..dialects import new_response_id

        self.response_id = new_response_id(dialect.name)
        """The id of the answer that the client sees."""
        self.chat_request = dialect.chat_request(request)
        """What the engine is asked. Making it raises `UntranslatableError`."""
        self._dialect = dialect
        self._request = request
        self._stream = dialect.stream(request, response_id=self.response_id)
        self._over = False

    def answer(self, chat: Any) -> Any:
        """A whole chat answer as one of the dialect."""
        return self._dialect.answer(chat, self._request, response_id=self.response_id)

    def failure(self, payload: Any, status: int) -> Any:
        """An error body as one of the dialect."""
        return self._dialect.error(payload, status)

    def chunk(self, event: Any) -> bytes:
        """One event of a chat stream as those of the dialect; they may be none."""
        if self._over or not isinstance(event, dict):
            return b""
        if event.get("error") is not None:
            self._over = True
            return b"".join(self._stream.fail(event))
        return b"".join(self._stream.feed(event))

    def aside(self, raw: bytes) -> bytes:
        """What is no event: comments pass, the `[DONE]` of chat does not."""
        return raw if raw.startswith(b":") or not raw.strip() else b""

    def end(self, *, complete: bool) -> bytes:
        """What ends the stream, once; nothing for one that was cut short, which must not look whole."""
        if self._over or not complete:
            return b""
        self._over = True
        return b"".join(self._stream.end())


def translation_of(dialect: str, request: Mapping[str, Any], application: Any = None) -> Translation | None:
    """For a dialect that carries no ids; None for others. Raises `UntranslatableError`.

    application: that of the server, as vLLM's shows what its own route does with system messages between others (which
    not every template takes), and with thinking that is switched off.
    """
    from ..dialects import MessagesDialect, dialect_of

    serving = getattr(getattr(application, "state", None), "anthropic_serving_messages", None)
    if dialect == "messages" and serving is not None:
        merge_system = getattr(serving, "_merge_inline_system", False) is True
        effort = getattr(serving, "_disabled_thinking_effort", None)
        return Translation(MessagesDialect(merge_system, effort if isinstance(effort, str) else "none"), request)
    found = dialect_of(dialect)
    return None if found is None else Translation(found, request)
