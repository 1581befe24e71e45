"""Cheap looks at every rollout of a source, to see which ones have changed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..errors import TokcapError
from ..foreign import uncancelled
from ..protocol import RolloutState
from ..store import FileStore
from ..store.layout import look
from ..store.sweep import rollout_ids
from .freezing import in_thread

__all__ = ("Look", "Looks", "SourceLooks", "StoreLooks", "looks_at")

logger = logging.getLogger("tokcap.delivery")

Mine = Callable[[str], bool]

_SETTLED_NS = 2_000_000_000
"""A modification time counts only when it is older than this: two changes may fall into one tick of its clock."""


class Look(msgspec.Struct, frozen=True):
    """One rollout as it is now."""

    state: RolloutState
    snapshot_id: str
    stamp: Any
    """Differs after everything that is written to the rollout."""


class Looks:
    """What following needs to know of a source."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def tell_once(self, rollout_id: str, error: BaseException) -> None:
        """Log what is wrong with a rollout, not again at every look."""
        if self._told.get(rollout_id) != str(error):
            self._told[rollout_id] = str(error)
            logger.warning("rollout %s can't be looked at: %s", rollout_id, error)

    async def all(self, mine: Mine) -> list[tuple[str, Look]]:
        """Every rollout that is `mine` and open or frozen; one that can't be looked at is logged."""
        raise NotImplementedError

    async def one(self, rollout_id: str) -> Look:
        raise NotImplementedError

    async def is_finished(self, rollout_id: str) -> bool:
        """Whether it has a finish note. Reads what is recorded."""
        raise NotImplementedError


def looks_at(source: Any) -> Looks:
    """For the file store by the names and times of its files, for any other source by its `rollouts` and `stat`."""
    return StoreLooks(source) if isinstance(source, FileStore) else SourceLooks(source)


class StoreLooks(Looks):
    """Reads no record to see whether a rollout has changed, and of one known to be retired not even its names."""

    def __init__(self, store: FileStore) -> None:
        super().__init__()
        self._store, self._files, self._layout = store, store._files, store._layout
        self._retired: dict[str, int] = {}
        """Modification time of the directory of each; names in it change when it is reset."""

    async def all(self, mine: Mine) -> list[tuple[str, Look]]:
        return await in_thread(lambda: list(self._all(mine)))

    async def one(self, rollout_id: str) -> Look:
        return await in_thread(lambda: self._one(rollout_id))

    async def is_finished(self, rollout_id: str) -> bool:
        return await in_thread(lambda: self._store.stat_now(rollout_id).finished)

    def _all(self, mine: Mine) -> Iterator[tuple[str, Look]]:
        retired, self._retired = self._retired, {}
        for rollout_id in self._ids():
            if not mine(rollout_id):
                continue
            try:
                changed = os.stat(self._layout.rollout(rollout_id)).st_mtime_ns
                if retired.get(rollout_id) == changed:
                    self._retired[rollout_id] = changed
                    continue
                found = self._one(rollout_id)
            except FileNotFoundError:
                continue  # it changed under our eyes: next time
            except (TokcapError, OSError) as error:
                self.tell_once(rollout_id, error)
                continue
            if found.state in ("open", "frozen"):
                yield rollout_id, found
            elif found.state == "retired" and changed < time.time_ns() - _SETTLED_NS:
                self._retired[rollout_id] = changed

    def _ids(self) -> Iterator[str]:
        try:
            yield from rollout_ids(self._files, self._layout)
        except TokcapError as error:  # after all that could be listed
            self.tell_once("", error)

    def _one(self, rollout_id: str) -> Look:
        found = look(self._files, self._layout.rollout(rollout_id))
        stamp = []
        if found.state == "open":
            for segment in found.segments:
                seen = os.stat(f"{found.incarnation_path}/{segment}")
                stamp.append((str(segment), seen.st_size, seen.st_mtime_ns))
        return Look(found.state, found.incarnation, stamp)


class SourceLooks(Looks):
    """A source that has `rollouts()`, an iterable of (id, state), and an async `stat(id)` as the file store has it."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source

    async def all(self, mine: Mine) -> list[tuple[str, Look]]:
        given = self._source.rollouts()
        pairs = [pair async for pair in given] if hasattr(given, "__aiter__") else list(given)
        found = []
        for rollout_id, state in pairs:
            if state not in ("open", "frozen") or not mine(rollout_id):
                continue
            try:
                found.append((rollout_id, await self.one(rollout_id)))
            except Exception as error:
                self.tell_once(rollout_id, error)
        return found

    async def one(self, rollout_id: str) -> Look:
        stat = await uncancelled(self._source.stat(rollout_id))
        return Look(stat.state, stat.snapshot_id, (stat.entries, stat.calls, stat.finished))

    async def is_finished(self, rollout_id: str) -> bool:
        return bool((await uncancelled(self._source.stat(rollout_id))).finished)
