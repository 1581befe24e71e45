"""The source: what consumers on the same node call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from ..ids import check_rollout_id
from . import fence
from .base import StoreBase, raise_first
from .files import durability_error
from .lifecycle import Freeze, Lifecycle, Reset, Retire
from .rollout import Rollout
from .snapshot import Snapshot
from .waiters import in_thread

__all__ = ("SourceMethods",)


class SourceMethods(StoreBase):
    """Everything that ends a rollout, and the way to its snapshot."""

    async def freeze(self, rollout_id: str, *, wait_open_s: float = 0.0, snapshot_id: str = "") -> Snapshot:
        """Fence the rollout against writers and return its snapshot; the same one when repeated.

        Every put that succeeded before is in it, none succeeds after. With `wait_open_s` open calls of live processes
        may finish first, while new ones are refused. `snapshot_id` names the incarnation that is meant (`stat` shows
        it): `StaleAttemptError` if the rollout was reset since, or while the freeze waited. Raises `RetiredError`,
        `BusyError`, `DurabilityError`. Damage doesn't raise: it shows in `snapshot.calls`.
        """
        import asyncio

        check_rollout_id(rollout_id)
        if self._settings["read_only"]:
            return await in_thread(lambda: self.freeze_now(rollout_id))
        if wait_open_s > 0:
            # Before the door is closed: what is begun after a reset is not what is waited for.
            snapshot_id = snapshot_id or await self._await(_Incarnation(rollout_id))
            with self._closing(rollout_id) as waiting:
                deadline = time.monotonic() + wait_open_s
                while waiting and (open_in := await self._await(_OpenCalls(rollout_id, self._liveness.is_alive))):
                    if open_in != snapshot_id or time.monotonic() >= deadline:
                        break
                    await asyncio.sleep(0.01)
                return await self._freeze(rollout_id, snapshot_id)
        return await self._freeze(rollout_id, snapshot_id)

    async def _freeze(self, rollout_id: str, incarnation: str) -> Snapshot:
        snapshot: Snapshot = await self._await(Freeze(rollout_id, incarnation))
        return snapshot

    def freeze_now(self, rollout_id: str, *, wait_open_s: float = 0.0, snapshot_id: str = "") -> Snapshot:
        """`freeze`, blocking."""
        check_rollout_id(rollout_id)
        if self._settings["read_only"]:
            return self._looking().published(rollout_id)
        snapshot: Snapshot
        if wait_open_s > 0:
            snapshot_id = snapshot_id or self._call(_Incarnation(rollout_id))
            with self._closing(rollout_id) as waiting:
                deadline = time.monotonic() + wait_open_s
                while waiting and (open_in := self._call(_OpenCalls(rollout_id, self._liveness.is_alive))):
                    if open_in != snapshot_id or time.monotonic() >= deadline:
                        break
                    time.sleep(0.01)
                snapshot = self._call(Freeze(rollout_id, snapshot_id))
                return snapshot
        snapshot = self._call(Freeze(rollout_id, snapshot_id))
        return snapshot

    async def freeze_many(self, rollout_ids: Iterable[str]) -> list[Snapshot]:
        """Freeze several rollouts at once, their syncs overlapping; the snapshots in the same order."""
        import asyncio

        ids = [check_rollout_id(rollout_id) for rollout_id in rollout_ids]
        if self._settings["read_only"]:
            return await in_thread(lambda: self.freeze_many_now(ids))
        engine = self._running()
        freezes = [Freeze(i) for i in ids]
        futures = [self._future(freeze) for freeze in freezes]
        engine.submit_together(freezes)
        return _all_or_close(await asyncio.gather(*futures, return_exceptions=True))

    def freeze_many_now(self, rollout_ids: Iterable[str]) -> list[Snapshot]:
        """`freeze_many`, blocking."""
        ids = [check_rollout_id(rollout_id) for rollout_id in rollout_ids]
        if self._settings["read_only"]:
            return [self._looking().published(rollout_id) for rollout_id in ids]
        return _all_or_close(self._running().call_many([Freeze(i) for i in ids]))

    def _retire_operation(self, rollout_id: str, snapshot_id: str, version: int) -> Retire:
        return Retire(check_rollout_id(rollout_id), snapshot_id, version)

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Remove exactly this version of this snapshot, after its consumer has it safely; a tombstone stays.

        True if it is gone, also when repeated. False, and nothing is touched, if the pair is not the published one:
        it is stale (a late mark made a new version), foreign, or the rollout is absent or open.
        """
        return bool(await self._await(self._retire_operation(rollout_id, snapshot_id, version)))

    def retire_now(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """`retire`, blocking."""
        return bool(self._call(self._retire_operation(rollout_id, snapshot_id, version)))

    async def reset(self, *rollout_ids: str) -> None:
        """Back to absent, from any state. What is put by calls that began before raises `StaleAttemptError`."""
        import asyncio

        operations = [Reset(check_rollout_id(rollout_id)) for rollout_id in rollout_ids]
        raise_first(await asyncio.gather(*(self._await(o) for o in operations), return_exceptions=True))

    def reset_now(self, *rollout_ids: str) -> None:
        """`reset`, blocking."""
        raise_first(self._running().call_many([Reset(check_rollout_id(rollout_id)) for rollout_id in rollout_ids]))

    @contextlib.contextmanager
    def _closing(self, rollout_id: str) -> Generator[bool, None, None]:
        """Show that a freeze waits for open calls; a waiter that dies leaves the rollout as it is."""
        self._running()
        path = self._layout.rollout(rollout_id)
        try:
            fd = fence.open_fence(self._files, path)
        except OSError as error:
            raise durability_error(error, f"rollout {rollout_id}: can't be closed to new calls", path) from error
        if fd is None:
            yield False
            return
        self._signalling.add(fd)
        try:
            try:
                fence.signal(fd, fence.CLOSING)
            except OSError as error:
                raise durability_error(error, f"rollout {rollout_id}: can't be closed to new calls", path) from error
            yield True
        finally:
            if fd in self._signalling:  # not in a child that was forked meanwhile
                self._signalling.discard(fd)
                with contextlib.suppress(OSError):  # nothing was written through it
                    self._files.close(fd)


class _Incarnation(Lifecycle):
    """The incarnation that there is; empty if the rollout is absent."""

    __slots__ = ()

    def run(self, rollout: Rollout) -> str:
        return rollout.look().incarnation


class _OpenCalls(Lifecycle):
    """In which incarnation a call is open whose writer is still alive; empty if in none."""

    __slots__ = ("is_alive",)

    def __init__(self, rollout_id: str, is_alive: Callable[[str], bool]) -> None:
        super().__init__(rollout_id)
        self.is_alive = is_alive

    def run(self, rollout: Rollout) -> str:
        directory = rollout.look()
        if directory.state != "open":
            return ""
        log = rollout.log
        if log is None or log.directory.incarnation != directory.incarnation:  # another process may have reset it
            log = rollout.load(directory)
        writers = {call.writer for call in log.ledger.calls.values() if call.writer and call.outcome == "open"}
        return log.directory.incarnation if any(self.is_alive(writer) for writer in writers) else ""


def _all_or_close(results: Sequence[Any]) -> list[Snapshot]:
    try:
        raise_first(results)
    except BaseException:
        for result in results:
            if isinstance(result, Snapshot):
                result.close()
        raise
    return list(results)
