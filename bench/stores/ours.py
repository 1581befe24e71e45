"""tokcap, given arrays or Python lists."""

from __future__ import annotations

from pathlib import Path

from tokcap import FileStore, TokenEntry

from ..peer import ListedCall, listed
from ..workload import Call
from .base import Item, WithIntents

__all__ = ("Tokcap", "TokcapLists")


class _Tokcap(WithIntents[Item]):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._store = FileStore(directory / "store")

    def close(self) -> None:
        self._store.close_now()


class Tokcap(_Tokcap[Call]):
    """`FileStore`; entries are made of arrays inside the measured time, which copies each."""

    packages = ("numpy", "msgspec", "filelock")

    def prepared(self, conversation: list[Call]) -> list[Call]:
        return conversation

    async def begin(self, item: Call) -> None:
        await self._store.begin_call(item.rollout_id, item.model_call_id)

    async def put(self, item: Call) -> None:
        entry = TokenEntry(item.rollout_id, item.model_call_id, item.prompt, item.generated, item.log_probs)
        await self._store.put(entry)


class TokcapLists(_Tokcap[ListedCall]):
    """The same; entries are made of lists that are ready made, as a JSON body gives them."""

    def prepared(self, conversation: list[Call]) -> list[ListedCall]:
        return list(listed(conversation))

    async def begin(self, item: ListedCall) -> None:
        await self._store.begin_call(item.rollout_id, item.model_call_id)

    async def put(self, item: ListedCall) -> None:
        entry = TokenEntry(item.rollout_id, item.model_call_id, item.prompt, item.generated, item.log_probs)
        await self._store.put(entry)
