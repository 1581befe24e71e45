"""Text for the page: bounded, and as far from markup as the script can make it, which shows it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ..content import name_of
from ..inspection import Texts
from ..inspection.text import told_bytes
from ..trajectory.recorded import Call

__all__ = ("LONGEST_CONTENT", "LONGEST_PIECE", "Vocabulary", "bounded", "content_text", "piece_text")

LONGEST_PIECE = 200
"""Characters that are kept of the text of one token."""

LONGEST_CONTENT = 4000
"""Characters that are kept of what a record carries besides tokens."""


def bounded(text: str, most: int) -> str:
    """`text`, or its beginning and how long it was."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def piece_text(piece: bytes) -> str:
    """The text of a token; bytes that are no UTF-8 by themselves as `\\xNN`."""
    return bounded(piece.decode("utf-8", "backslashreplace"), LONGEST_PIECE)


def content_text(value: Any, *, indent: int | None = None) -> str:
    """A JSON value as text to read, bounded; empty for what is empty."""
    if value is None or value == {} or value == [] or value == () or value == "":
        return ""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr, indent=indent)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes out, or a full stack
        text = name_of(value)
    return bounded(text, LONGEST_CONTENT)


class Vocabulary:
    """The text of token ids, per model: what the engine told with one call explains the prompt of another.

    Where a call says something else of an id than another call, the id has no text of its own, and the call keeps what
    it said.
    """

    def __init__(self, texts: Texts | None = None) -> None:
        self._known: dict[str, dict[int, str | None]] = {}
        self._asked: dict[str, set[int]] = {}
        self._texts = texts
        self._answers: list[tuple[dict[str, Any], str, list[int], list[str]]] = []

    def learn(self, call: Call, told: dict[str, Any]) -> None:
        """Remember the pieces of a call, if it has any; `told` is what the page says of it (see `settle`)."""
        pieces = call.pieces
        if pieces is None or len(pieces) != call.sampled:
            return
        known = self._known.setdefault(call.model, {})
        ids, texts = call.generation_token_ids.tolist(), list(map(piece_text, pieces))
        for token, piece in told_bytes(ids, pieces):
            text = piece_text(piece)
            if known.setdefault(token, text) != text:
                known[token] = None
        self._answers.append((told, call.model, ids, texts))

    def ask(self, model: str, ids: Iterable[int]) -> None:
        """These ids are in the page: look them up where no call of it tells their bytes."""
        self._asked.setdefault(model, set()).update(ids)

    def settle(self) -> list[tuple[str, list[int], list[str]]]:
        """(model, ids, their texts) for every model; and for every call that was learnt from, under `pieces` of what is
        told of it, (position, text) where that differs."""
        if self._texts is not None:
            for model, ids in self._asked.items():
                known = self._known.setdefault(model, {})
                for token in ids.difference(known):
                    piece = self._texts.get(token, (model,))
                    known[token] = None if piece is None else piece_text(piece)
        for told, model, sampled, texts in self._answers:
            known = self._known[model]
            own = [
                (at, text)
                for at, (token, text) in enumerate(zip(sampled, texts, strict=True))
                if known.get(token) != text
            ]
            if own:
                told["pieces"] = own
        settled = []
        for model, known in sorted(self._known.items()):
            there = {token: text for token, text in known.items() if text is not None}
            settled.append((bounded(model, LONGEST_CONTENT), list(there), list(there.values())))
        return settled
