"""A chat stream as events of the Responses dialect, in the order of vLLM's.

`response.created`, `response.in_progress`, then for each item `response.output_item.added`, the events of its content
and `response.output_item.done`, then `response.completed` with the whole response; as in vLLM that is also how an
answer ends whose status is `incomplete`. One item is open at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .blocks import Block, Blocks, Step
from .chat import ChatReader, read_error
from .responses_answer import Items, response_object
from .sse import event

__all__ = ("ResponsesStream",)

_BROKEN = "the engine went on with a tool call that was whole"
_DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "refusal": "response.refusal",
    "call": "response.function_call_arguments",
}


class ResponsesStream:
    """The translation of one stream; a `ChatTranslation`."""

    def __init__(self, request: Mapping[str, Any], response_id: str) -> None:
        self._request = request
        self._id = response_id
        self._items = Items(request, response_id)
        self._reader = ChatReader()
        self._blocks = Blocks()
        self._number = 0
        self._started = self._over = False

    def feed(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """The events that one chunk becomes."""
        if self._over:
            return []
        if chunk.get("error") is not None:
            return self.fail(chunk)
        pieces = self._items.visible(list(self._reader.read(chunk)))
        return self._written([*self._start(), *self._told(self._blocks.add(pieces))])

    def end(self) -> list[bytes]:
        """The events that end the response."""
        if self._over:
            return []
        events = [*self._start(), *self._told(self._blocks.end())]
        self._over = True
        output = [self._items.item(block) for block in self._blocks.closed]
        return self._written([*events, self._of_response("response.completed", output, over=True)])

    def fail(self, error: Any) -> list[bytes]:
        """`error`, which OpenAI's client raises, and `response.failed`."""
        if self._over:
            return []
        self._over = True
        return self._written([*self._start(), *self._failed(error)])

    def _start(self) -> Iterator[dict[str, Any]]:
        if not self._started:
            self._started = True
            yield self._of_response("response.created", [])
            yield self._of_response("response.in_progress", [])

    def _failed(self, error: Any) -> Iterator[dict[str, Any]]:
        message, kind, param, code = read_error(error)
        words = {"code": str(code or kind or "server_error"), "message": message, "param": param}
        yield {"type": "error", **words, "error": {"type": kind or "server_error", **words}}
        output = [self._items.item(block) for block in self._blocks.closed]
        yield self._of_response("response.failed", output, error={"code": "server_error", "message": message})

    def _of_response(self, name: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        known = {"over": False, **more}
        response = response_object(self._request, self._reader.ending, self._id, output=output, **known)
        return {"type": name, "response": response}

    def _told(self, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
        for step in steps:
            if step.what == "open":
                yield from self._opened(step.block)
            elif step.what == "delta":
                if not self._items.is_custom(step.block):
                    yield self._delta(step)
            elif step.what == "close":
                yield from self._closed(step.block)
            else:
                self._over = True
                yield from self._failed(_BROKEN)

    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._items.item(block, status="in_progress")
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            part = self._items.part(block, begun=True)
            yield {"type": "response.content_part.added", **self._at(block), "part": part}

    def _at(self, block: Block) -> dict[str, Any]:
        at = {"item_id": self._items.item_id(block), "output_index": block.index}
        return at if block.kind == "call" else {**at, "content_index": 0}

    def _delta(self, step: Step) -> dict[str, Any]:
        delta = {"type": f"{_DELTAS[step.block.kind]}.delta", **self._at(step.block), "delta": step.text}
        if step.block.kind == "text":
            delta["logprobs"] = self._items.delta_log_probs(step.log_probs)
        return delta

    def _closed(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._items.item(block)
        done = {"type": f"{_DELTAS[block.kind]}.done", **self._at(block)}
        if self._items.is_custom(block):
            # Its text is known once the JSON around it is whole.
            name = "response.custom_tool_call_input"
            if item["input"]:
                yield {"type": f"{name}.delta", **self._at(block), "delta": item["input"]}
            yield {"type": f"{name}.done", **self._at(block), "input": item["input"]}
        elif block.kind == "call":
            yield {**done, "name": item["name"], "arguments": block.text}
        else:
            if block.kind == "text":
                done["logprobs"] = []
            yield {**done, "refusal" if block.kind == "refusal" else "text": block.text}
            yield {"type": "response.content_part.done", **self._at(block), "part": item["content"][0]}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _written(self, events: Iterable[dict[str, Any]]) -> list[bytes]:
        written = []
        for data in events:
            written.append(event({**data, "sequence_number": self._number}))
            self._number += 1
        return written
