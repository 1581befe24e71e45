"""A chat stream as Anthropic's events.

`message_start`, then for each block `content_block_start`, its deltas and `content_block_stop`, then `message_delta`
with the stop reason and the usage, and `message_stop`. One block is open at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .blocks import Block, Blocks, Step
from .chat import ChatReader, read_error
from .messages_answer import call_id, error_body, message_head, signature, stop_of, usage_of
from .sse import event

__all__ = ("MessagesStream",)

_BROKEN = "the engine went on with a tool call that was whole"


class MessagesStream:
    """The translation of one stream; a `ChatTranslation`."""

    def __init__(self, request: Mapping[str, Any], response_id: str) -> None:
        self._request = request
        self._id = response_id
        self._reader = ChatReader()
        self._blocks = Blocks()
        self._started = self._over = False

    def feed(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """The events that one chunk becomes."""
        if self._over:
            return []
        if chunk.get("error") is not None:
            return self.fail(chunk)
        pieces = list(self._reader.read(chunk))
        return [event(data) for data in (*self._start(), *self._told(self._blocks.add(pieces)))]

    def end(self) -> list[bytes]:
        """The events that end the message."""
        if self._over:
            return []
        events = [*self._start(), *self._told(self._blocks.end())]
        if not self._blocks.closed:
            events += [*_opened({"type": "text", "text": ""}, 0), _closed(0)]
        self._over = True
        ending = self._reader.ending
        stop_reason, stop_sequence = stop_of(ending, self._blocks.closed)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        events += [
            {"type": "message_delta", "delta": delta, "usage": usage_of(ending.usage)},
            {"type": "message_stop"},
        ]
        return [event(data) for data in events]

    def fail(self, error: Any) -> list[bytes]:
        """One `error` event."""
        if self._over:
            return []
        self._over = True
        _, _, _, code = read_error(error)
        return [event(error_body(error, code if type(code) is int and 400 <= code < 600 else 500))]

    def _start(self) -> Iterator[dict[str, Any]]:
        if not self._started:
            self._started = True
            yield {
                "type": "message_start",
                "message": message_head(self._reader.ending, self._request, self._id),
            }

    def _told(self, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
        for step in steps:
            block = step.block
            if step.what == "open":
                yield from _opened(self._empty(block), block.index)
            elif step.what == "delta":
                yield _delta(block.index, _fragment(block, step.text))
            elif step.what == "close":
                if block.kind == "reasoning":
                    yield _delta(block.index, {"type": "signature_delta", "signature": signature(block)})
                yield _closed(block.index)
            else:
                self._over = True
                yield error_body(_BROKEN, 500)

    def _empty(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if block.kind == "call":
            return {"type": "tool_use", "id": call_id(block, self._id), "name": block.name, "input": {}}
        return {"type": "text", "text": ""}


def _opened(block: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    yield {"type": "content_block_start", "index": index, "content_block": block}


def _fragment(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": "text_delta", "text": text}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _closed(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}
