"""The rollouts that an engine keeps in memory, within bounds of memory and descriptors."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque

from .queue import Queued

__all__ = ("Kept",)

_EVICTED_AT_ONCE = 4
"""By one operation, at most: more than it can add, few enough to be no burden."""

_LOOKED_AT_ONCE = 2
"""Rollouts, when another one comes, whether they have ended: more than have come."""

_REMEMBERED = 20_000
"""Rollout ids, about 2 MB."""

_MOST_LOGS = 4096
"""Rollouts kept in memory, however small: beside those at work there are those that nobody ever ends."""

_COST_OF_A_HANDLE = 1000
"""Bytes that an idle rollout without a log takes, roughly."""

_ALL: dict[int, weakref.ref[Kept]] = {}
"""Those of this process that are in use: they share its descriptors."""

os.register_at_fork(after_in_child=_ALL.clear)


class Kept:
    """Rollouts and their queues. Those that are idle are let go of, least recently used first, where room is needed."""

    def __init__(self, cache_bytes: int, descriptors: int) -> None:
        self.cache_bytes, self.descriptors = cache_bytes, descriptors
        self._guard = threading.Lock()
        self._queued: OrderedDict[str, Queued] = OrderedDict()
        """Least recently used first."""
        self._with_descriptors: OrderedDict[str, Queued] = OrderedDict()
        self._to_look_at: deque[str] = deque()
        """Rollouts with descriptors, of which it is not known whether they have ended."""
        self._cached_bytes = 0
        self._unsealed: dict[str, None] = {}
        """Rollouts that were dropped from memory while open; `close` seals them too."""

    def _others_wait(self) -> int:
        """How many rollouts hold descriptors while they wait for their fence."""
        raise NotImplementedError

    def _ask_for_room(self) -> None:
        """Have `make_room` called by a thread of this engine."""
        raise NotImplementedError

    def _share_descriptors(self) -> None:
        """Join those of this process that share its descriptors."""
        others = [kept() for kept in list(_ALL.values())]
        key = id(self)
        _ALL[key] = weakref.ref(self, lambda _: _ALL.pop(key, None))
        for other in others:
            if other is not None and other._with_descriptors:
                other._ask_for_room()

    def _weigh(self, queued: Queued) -> None:
        """Count what a rollout takes of memory. The guard is held."""
        log = queued.rollout.log
        cost = _COST_OF_A_HANDLE if log is None else log.nbytes
        self._cached_bytes += cost - queued.cost
        queued.cost = cost

    def _drop_all(self) -> None:
        with self._guard:
            for queued in self._queued.values():
                queued.rollout.drop()
                queued.rollout.close_descriptors()
            self._queued.clear()
            self._with_descriptors.clear()
            self._unsealed.clear()
        _ALL.pop(id(self), None)

    def _evict(self, queued: Queued) -> None:
        """Keep memory and descriptors within their bounds. The guard is held, `queued` is idle."""
        rollout_id = queued.rollout.rollout_id
        is_new = rollout_id not in self._with_descriptors
        if queued.rollout.log is None:
            # Absent, frozen or retired: nothing worth keeping.
            queued.rollout.close_descriptors()
            self._forget(rollout_id)
            if queued.rollout.unstated:
                self._remember_unsealed(rollout_id)
        else:
            self._keep_descriptors(queued)
        self._free_memory()
        if is_new:  # what is there already adds none that could end unseen
            self._let_go_of_ended()

    def _keep_in_turn(self, queued: Queued) -> None:
        """`_evict` for a rollout that is asked for more already: between two turns, nobody serves it."""
        self._keep_descriptors(queued)
        self._free_memory()
        if self._cached_bytes > self.cache_bytes:  # the others are all at work, too: it reads its log again
            queued.rollout.drop()
            self._weigh(queued)

    def _free_memory(self) -> None:
        """Let go of rollouts that are idle, if what is kept takes too much memory. The guard is held."""
        for _ in range(_EVICTED_AT_ONCE):
            if (self._cached_bytes <= self.cache_bytes and len(self._queued) <= _MOST_LOGS) or len(self._queued) <= 1:
                break
            name, oldest = next(iter(self._queued.items()))
            self._queued.move_to_end(name)
            if not oldest.busy:
                oldest.rollout.drop()
                oldest.rollout.close_descriptors()
                self._forget(name)
                self._remember_unsealed(name)

    def _keep_descriptors(self, queued: Queued) -> None:
        """Leave a rollout its descriptors, if there is room. The guard is held, and nobody serves it at the moment."""
        rollout_id = queued.rollout.rollout_id
        if rollout_id in self._with_descriptors:
            self._with_descriptors.move_to_end(rollout_id)
            if not self._has_too_many():
                return
        self._with_descriptors[rollout_id] = queued
        self._free_descriptors()
        if self._has_too_many():  # the others are all about to be served
            queued.rollout.close_descriptors()
            self._with_descriptors.pop(rollout_id, None)

    def _has_too_many(self) -> bool:
        held = 2 * (len(self._with_descriptors) + self._others_wait())
        return held > self.descriptors // max(1, len(_ALL))

    def _free_descriptors(self) -> None:
        """Close those of rollouts that are idle, if with those that wait there are too many. The guard is held."""
        table = self._with_descriptors
        for _ in range(_EVICTED_AT_ONCE):
            if not table or not self._has_too_many():
                break
            name, oldest = next(iter(table.items()))
            table.move_to_end(name)
            if not oldest.busy:
                oldest.rollout.close_descriptors()
                del table[name]

    def let_go_of_ended(self) -> None:
        """Let go of every rollout that others froze or removed, also if nothing else is done here."""
        for _ in range(0, len(self._with_descriptors), _LOOKED_AT_ONCE):
            with self._guard:
                self._let_go_of_ended()

    def _let_go_of_ended(self) -> None:
        """Look at some rollouts, whether they have ended. The guard is held.

        Another process that freezes a rollout and retires it doesn't tell, and nothing more is ever asked of it here:
        as long as its descriptors are open, the space of its deleted files is not free.
        """
        for _ in range(_LOOKED_AT_ONCE):
            if not self._to_look_at:
                self._to_look_at.extend(self._with_descriptors)
                if not self._to_look_at:
                    return
            name = self._to_look_at.popleft()
            queued = self._with_descriptors.get(name)
            if queued is not None and not queued.busy and queued.rollout.has_ended():
                queued.rollout.drop()
                queued.rollout.close_descriptors()
                self._forget(name)
                if queued.rollout.unstated:
                    self._remember_unsealed(name)

    def make_room(self) -> None:
        """Another engine has come: its share of the descriptors is left to it."""
        with self._guard:
            for _ in range(0, len(self._with_descriptors), _EVICTED_AT_ONCE):
                self._free_descriptors()

    def _forget(self, rollout_id: str) -> None:
        queued = self._queued.pop(rollout_id, None)
        self._with_descriptors.pop(rollout_id, None)
        if queued is not None:
            self._cached_bytes -= queued.cost

    def _remember_unsealed(self, rollout_id: str) -> None:
        self._unsealed[rollout_id] = None
        while len(self._unsealed) > _REMEMBERED:
            del self._unsealed[next(iter(self._unsealed))]
