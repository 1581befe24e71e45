"""A chat answer as the blocks that both dialects stream: one after another, each opened, filled and closed.

Chat may mix what it streams: fragments of several tool calls in turn, or text while a call is unfinished. Where a block
can't be closed yet, what belongs behind it waits; nothing is dropped, and nothing is told of a block that is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from .chat import Kind, Piece, json_object

__all__ = ("Block", "Blocks", "Step", "blocks_of")


class Block(msgspec.Struct, eq=False):
    """Reasoning, text, a refusal or one tool call, as far as it came."""

    kind: Kind
    index: int = -1
    """Its place among the blocks of the answer, from 0; -1 until it is opened."""
    call: int = -1
    id: str = ""
    name: str = ""
    parts: list[str] = []
    log_probs: list[Any] = []
    told: int = 0
    """How many of its parts the client has."""
    told_log_probs: int = 0
    whole: bool = False

    @property
    def text(self) -> str:
        """All of it: the arguments, if it is a tool call."""
        return "".join(self.parts)


class Step(msgspec.Struct, eq=False):
    """One thing to tell the client."""

    what: Literal["open", "delta", "close", "broken"]
    """`broken`: the chat stream went on with a tool call that was whole; it can't be told."""
    block: Block
    text: str = ""
    log_probs: list[Any] = []


class Blocks:
    """The blocks of one answer; `closed` are those that are whole, in order."""

    def __init__(self) -> None:
        self.closed: list[Block] = []
        self._queue: deque[Block] = deque()  # the first may be open, the others wait
        self._calls: dict[int, Block] = {}

    def add(self, pieces: Iterable[Piece]) -> Iterator[Step]:
        """What is to be told once these pieces have come; to be exhausted."""
        for piece in pieces:
            block = self._block_for(piece)
            if block.whole:
                if piece.text.strip():
                    yield Step("broken", block)
                    return
                continue  # white space behind the arguments
            block.id, block.name = block.id or piece.id, block.name or piece.name
            if piece.text:
                block.parts.append(piece.text)
            block.log_probs.extend(piece.log_probs)
            yield from self._advance()

    def end(self) -> Iterator[Step]:
        """What is left to tell once the answer is whole."""
        yield from self._advance(over=True)

    def _block_for(self, piece: Piece) -> Block:
        if piece.kind == "call":
            if piece.call not in self._calls:
                self._calls[piece.call] = self._append(Block("call", call=piece.call))
            return self._calls[piece.call]
        last = self._queue[-1] if self._queue else None
        return last if last is not None and last.kind == piece.kind else self._append(Block(piece.kind))

    def _append(self, block: Block) -> Block:
        self._queue.append(block)
        return block

    def _advance(self, *, over: bool = False) -> Iterator[Step]:
        while self._queue:
            block = self._queue[0]
            if block.index < 0:
                if block.kind == "call" and not (block.id and block.name) and not over:
                    return
                block.index = len(self.closed)
                yield Step("open", block)
            text = "".join(block.parts[block.told :])
            if text:
                yield Step("delta", block, text, block.log_probs[block.told_log_probs :])
                block.told, block.told_log_probs = len(block.parts), len(block.log_probs)
            if not over and (len(self._queue) == 1 or not _is_whole(block)):
                return
            self._queue.popleft()
            block.whole = True
            self.closed.append(block)
            yield Step("close", block)


def blocks_of(pieces: Iterable[Piece]) -> list[Block]:
    """The blocks of a whole answer."""
    blocks = Blocks()
    for _ in blocks.add(pieces):
        pass
    for _ in blocks.end():
        pass
    return blocks.closed


def _is_whole(block: Block) -> bool:
    """Whether nothing can follow in it, now that something else does."""
    if block.kind != "call":
        return True
    # Only an object that has just ended is worth a parse.
    return bool(block.parts) and block.parts[-1].rstrip().endswith("}") and json_object(block.text) is not None
