"""NeMo Gym's `TokenCaptureStore`, as it writes by default and with its option `delta_records`."""

from __future__ import annotations

from pathlib import Path

from ..peer import ListedCall, listed, load
from ..workload import Call
from .base import WithIntents

__all__ = ("NemoGym", "NemoGymDelta")


class NemoGym(WithIntents[ListedCall]):
    """Entries, checked by pydantic and with their lineage, are made of ready lists inside the measured time."""

    packages = ("nemo-gym", "pydantic", "orjson")
    delta = False
    """Whether of a call that continues another only the rest of the prompt is stored."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._peer = load()
        self._store = self._peer.store(directory)

    @classmethod
    def require(cls) -> None:
        load()

    def prepared(self, conversation: list[Call]) -> list[ListedCall]:
        return list(listed(conversation))

    async def begin(self, item: ListedCall) -> None:
        await self._store.begin_call(item.rollout_id, item.model_call_id)

    async def put(self, item: ListedCall) -> None:
        await self._store.put(self._peer.entry(item, delta=self.delta))


class NemoGymDelta(NemoGym):
    """The same with `delta_records: true`."""

    delta = True
