"""Dialects that carry no token ids, asked as chat, which does, and answered as themselves.

| | `messages` (Anthropic) | `responses` (OpenAI) |
|---|---|---|
| reasoning | `thinking` blocks | `reasoning` items |
| a tool call's id | kept as the engine gave it | kept, as `call_id` |
| its arguments | parsed: `input`; `{"INVALID_JSON": ...}` if they are no JSON object | kept to the byte |
| what can't be carried over | refused, with the field and the reason | refused |

Nothing is dropped in silence: fields that change nothing for a local engine are listed, with the reason (`DROPPED` in
`messages_request`, `responses_request` and `responses_items`); any other that is not translated is refused. The prompt
is the one that vLLM's own routes for these dialects would have rendered, and the events are in their order.
"""

from __future__ import annotations

from .base import ChatTranslation, Dialect, new_response_id
from .messages import MessagesDialect
from .responses import ResponsesDialect

__all__ = ("ChatTranslation", "Dialect", "MessagesDialect", "ResponsesDialect", "dialect_of", "new_response_id")

_DIALECTS: dict[str, Dialect] = {"messages": MessagesDialect(), "responses": ResponsesDialect()}


def dialect_of(name: str) -> Dialect | None:
    """The dialect of that name, with its defaults; None for one that isn't translated, chat itself included."""
    return _DIALECTS.get(name)
