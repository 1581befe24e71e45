"""Who reads rollouts: tokcap and NeMo Gym as the consumer of a rollout uses them, behind one interface."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokcap import FileStore
from tokcap.store.layout import Layout

from .figures import OURS
from .peer import PEER, Peer, PeerSnapshot
from .stock import stock, stock_peer, the_peer
from .workload import Call

__all__ = ("Consumer", "NemoGym", "Sums", "Tokcap", "check_sums", "consumers")

Sums = tuple[int, float]
"""Of all ids, and of all log-probs."""


class Consumer(Protocol):
    """One candidate, as its consumer uses it. What `freeze` and `open` give goes into `read` and `let_go`."""

    name: str

    def stock(self, conversations: Sequence[Sequence[Call]]) -> None:
        """Write these rollouts."""
        ...

    def freeze(self, rollout_id: str) -> Any: ...
    def open(self, rollout_id: str) -> Any: ...
    def read(self, opened: Any) -> Sums:
        """The sums of all ids and of all log-probs in it."""
        ...

    def let_go(self, opened: Any) -> None: ...
    async def freeze_many(self, rollout_ids: Sequence[str]) -> Sequence[Any]: ...
    async def retire(self, rollout_id: str, snapshot_id: str, version: int) -> bool: ...
    def bury(self, number: int) -> None:
        """Leave so many tombstones, as retiring leaves them."""
        ...

    def sweep(self) -> int:
        """Remove every tombstone; how many there were."""
        ...

    def close(self) -> None: ...


class Tokcap:
    """tokcap's `FileStore`."""

    name = OURS

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tokcap"
        self._writer, self._store = FileStore(self._directory), FileStore(self._directory)

    def stock(self, conversations: Sequence[Sequence[Call]]) -> None:
        stock(self._writer, conversations)

    def freeze(self, rollout_id: str) -> Any:
        return self._store.freeze_now(rollout_id)

    def open(self, rollout_id: str) -> Any:
        return self._store.read_now(rollout_id)

    def read(self, opened: Any) -> Sums:
        ids, log_probs = 0, 0.0
        for entry in opened.entries:
            ids += int(entry.prompt_token_ids.sum()) + int(entry.generation_token_ids.sum())
            log_probs += float(entry.generation_log_probs.sum())
        return ids, log_probs

    def let_go(self, opened: Any) -> None:
        opened.close()

    async def freeze_many(self, rollout_ids: Sequence[str]) -> Sequence[Any]:
        return await self._store.freeze_many(rollout_ids)

    async def retire(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        return await self._store.retire(rollout_id, snapshot_id=snapshot_id, version=version)

    def bury(self, number: int) -> None:
        # One is real; the others are copies of the names that it left, which are all there is to a tombstone.
        with self._store.freeze_now("tombstone") as snapshot:
            asyncio.run(self.retire("tombstone", snapshot.snapshot_id, snapshot.version))
        layout = Layout(str(self._directory))
        left = [path.name for path in Path(layout.rollout("tombstone")).iterdir()]
        rollout_id = ""
        for at in range(number - 1):
            rollout_id = f"tombstone-{at:06d}"
            for name in left:
                os.makedirs(f"{layout.rollout(rollout_id)}/{name}", mode=0o700)
        if rollout_id and self._store.stat_now(rollout_id).state != "retired":
            raise AssertionError(f"{rollout_id} is no tombstone")

    def sweep(self) -> int:
        return self._store.sweep_now(0)

    def close(self) -> None:
        self._store.close_now()
        self._writer.close_now()


class NemoGym:
    """NeMo Gym's `TokenCaptureStore`."""

    name = PEER

    def __init__(self, directory: Path, peer: Peer) -> None:
        self._peer, self._store = peer, peer.store(directory / "nemo-gym")

    def stock(self, conversations: Sequence[Sequence[Call]]) -> None:
        stock_peer(self._peer, self._store, conversations)

    def freeze(self, rollout_id: str) -> Any:
        return self._store.freeze_now(rollout_id)

    def open(self, rollout_id: str) -> Any:
        return self._store.freeze_now(rollout_id)

    def read(self, opened: Any) -> Sums:
        snapshot: PeerSnapshot = opened
        ids, log_probs = 0, 0.0
        for entry in snapshot.entries:
            ids += sum(entry.prompt_token_ids) + sum(entry.generation_token_ids)
            log_probs += sum(entry.generation_log_probs)
        return ids, log_probs

    def let_go(self, opened: Any) -> None:
        pass

    async def freeze_many(self, rollout_ids: Sequence[str]) -> Sequence[Any]:
        return await asyncio.gather(*map(self._store.freeze, rollout_ids))

    async def retire(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        return await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)

    def bury(self, number: int) -> None:
        snapshot = self._store.freeze_now("tombstone")
        asyncio.run(self.retire("tombstone", snapshot.snapshot_id, snapshot.version))
        state = self._store.state_path_for("tombstone").read_bytes()
        for at in range(number - 1):
            self._store.state_path_for(f"tombstone-{at:06d}").write_bytes(state)
            self._store.lock_path_for(f"tombstone-{at:06d}").touch()

    def sweep(self) -> int:
        return self._store.sweep_retired(0)

    def close(self) -> None:
        pass


def consumers(directory: Path) -> list[Consumer]:
    """The candidates that are there, each with an empty store under `directory`."""
    found: list[Consumer] = [Tokcap(directory)]
    peer = the_peer()
    if peer is not None:
        found.append(NemoGym(directory, peer))
    return found


def check_sums(candidate: Consumer, conversation: Sequence[Call], found: Sums) -> None:
    """Raise `AssertionError` if these are not the sums of these calls."""
    ids = sum(int(call.prompt.sum()) + int(call.generated.sum()) for call in conversation)
    log_probs = sum(float(call.log_probs.sum()) for call in conversation)
    if found[0] != ids or not math.isclose(found[1], log_probs, rel_tol=1e-9):
        raise AssertionError(f"{candidate.name}: read {found}, put {ids, log_probs}")
