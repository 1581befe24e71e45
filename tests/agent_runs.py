"""Agent runs against a pretended engine, recorded as a capture point would, for tests of delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from tests.memory_store import MemoryState, MemoryStore
from tokcap import FileStore, TokenEntry

__all__ = ("AgentRun", "MakeStore", "carriers", "function_call", "message", "reasoning", "result", "stores")

MakeStore = Callable[[], Any]
"""A new store object on the same storage."""


@pytest.fixture(params=["file", "memory"])
def stores(request: pytest.FixtureRequest) -> MakeStore:
    """The file store, and a plain source that knows nothing but the protocol."""
    if request.param == "memory":
        state = MemoryState()
        return lambda: MemoryStore(state)
    directory = request.getfixturevalue("store_dir")
    return lambda: FileStore(directory)


class AgentRun:
    """One conversation: each call's prompt is everything before it, and what was read since."""

    def __init__(self, store: Any, rollout_id: str, prompt: Iterable[int] = (1, 2, 3)) -> None:
        self.store, self.rollout_id = store, rollout_id
        self.ids = list(prompt)
        self._next = 100

    async def call(
        self,
        call_id: str,
        items: Sequence[Mapping[str, Any]] = (),
        *,
        sampled: Sequence[int] | None = None,
        log_probs: Sequence[float | None] | None = None,
        **fields: Any,
    ) -> TokenEntry:
        """A call that is answered and stored."""
        await self.store.begin_call(self.rollout_id, call_id)
        return await self.answer(call_id, items, sampled=sampled, log_probs=log_probs, **fields)

    async def answer(
        self,
        call_id: str,
        items: Sequence[Mapping[str, Any]] = (),
        *,
        sampled: Sequence[int] | None = None,
        log_probs: Sequence[float | None] | None = None,
        **fields: Any,
    ) -> TokenEntry:
        """The answer of a call that was begun."""
        if sampled is None:
            sampled = [self._next, self._next + 1]
            self._next += 2
        known = [-0.5 - i / 8 for i in range(len(sampled))] if log_probs is None else log_probs
        fields = {"model": "policy", "response_id": f"resp_{call_id}", **fields}
        entry = TokenEntry(self.rollout_id, call_id, self.ids, sampled, known, output_items=list(items), **fields)
        await self.store.put(entry)
        self.ids = [*self.ids, *sampled]
        return entry

    def read(self, *ids: int) -> None:
        """What a tool or the user says stands in the next prompt."""
        self.ids = [*self.ids, *ids]

    def drift(self) -> None:
        """The client renders the last answer otherwise: its last id is another one from now on."""
        self.ids = [*self.ids[:-1], self.ids[-1] + 5000]


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def function_call(name: str, arguments: str = "{}", call_id: str = "") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id or f"call_{name}"}


def result(call_id: str, text: str = "42") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def carriers(record: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(prompt, generation) of every output item that carries tokens."""
    output = record["response"]["output"]
    return [
        (item["prompt_token_ids"], item["generation_token_ids"]) for item in output if item.get("generation_token_ids")
    ]
