"""How a live store does right now: rates, open calls, rollouts by state, room on the disk."""

from __future__ import annotations

import time
from collections import Counter, deque

import msgspec

from ..store import FileStore
from .following import Disk, Finished, Follower

__all__ = ("Frame", "OpenNow", "Pulse")

_WINDOW_S = 10.0
_MOST_OPEN = 100
_MOST_GROWN = 10


class OpenNow(msgspec.Struct, frozen=True):
    """A call of an open rollout that has not ended."""

    rollout_id: str
    model_call_id: str
    age_s: float | None
    """None if it began in another boot of the machine, or without an intent."""
    alive: bool
    """Whether its writer still runs; a call of a dead one never ends by itself."""


class Frame(msgspec.Struct, frozen=True):
    """One look."""

    at: float
    """Unix seconds."""
    window_s: float
    """Of the rates."""
    calls_per_s: float
    """Calls that ended, in whatever way."""
    sampled_per_s: float
    """Sampled ids that were recorded."""
    outcomes: dict[str, int]
    """Calls that ended since the first look, by outcome."""
    states: dict[str, int]
    """Rollouts by state."""
    unreadable: int
    """Those that can't be read, and directories of the store that can't be listed."""
    open_calls: int
    """Of open rollouts; what a freeze left open is counted by `tokcap stats`."""
    dead_calls: int
    """Open ones whose writer is dead."""
    oldest_open: tuple[OpenNow, ...]
    """Oldest first, a hundred at most."""
    finished: tuple[Finished, ...]
    """Newest first."""
    grown: dict[str, int]
    """Bytes by which rollouts grew since the look before, most first."""
    disk: Disk | None
    behind: bool
    """Whether a part of the store has not been looked at yet."""


class Pulse:
    """Looks at a store from time to time; what is read each time is bounded (`Follower`)."""

    def __init__(self, store: FileStore) -> None:
        self._store, self._follower = store, Follower(store)
        self._began = time.monotonic()
        self._ended: deque[tuple[float, int, int]] = deque()
        """Of each look: when it was, calls that ended, ids that were sampled."""
        self._outcomes: Counter[str] = Counter()

    @property
    def is_behind(self) -> bool:
        """Whether there is more to look at already."""
        return self._follower.is_behind

    def look(self) -> None:
        """Look once more."""
        events = self._follower.look()
        calls = {(event.snapshot_id, event.model_call_id): event for event in events}
        self._outcomes.update(event.outcome for event in calls.values())
        self._ended.append((time.monotonic(), len(calls), sum(event.sampled for event in events)))

    def frame(self) -> Frame:
        """What the last looks showed."""
        now = time.monotonic()
        window = max(min(_WINDOW_S, now - self._began), 1e-3)
        while self._ended and self._ended[0][0] < now - window:
            self._ended.popleft()
        follower = self._follower
        open_calls = self._open_now()
        return Frame(
            at=time.time(),
            window_s=window,
            calls_per_s=sum(calls for _, calls, _ in self._ended) / window,
            sampled_per_s=sum(sampled for _, _, sampled in self._ended) / window,
            outcomes=dict(self._outcomes.most_common()),
            states=follower.states(),
            unreadable=len(follower.unreadable),
            open_calls=len(open_calls),
            dead_calls=sum(not call.alive for call in open_calls),
            oldest_open=tuple(open_calls[:_MOST_OPEN]),
            finished=tuple(sorted(follower.finished.values(), key=lambda one: -one.at)),
            grown=dict(follower.grown.most_common(_MOST_GROWN)),
            disk=follower.disk(),
            behind=follower.is_behind,
        )

    def _open_now(self) -> list[OpenNow]:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        calls = [call for found in self._follower.open_calls.values() for call in found]
        alive = {writer: self._store.is_writer_alive(writer) for writer in {call.writer for call in calls}}
        found = [
            OpenNow(
                call.rollout_id,
                call.model_call_id,
                None if call.begun_at is None else now - call.begun_at,
                alive[call.writer],
            )
            for call in calls
        ]
        return sorted(found, key=lambda call: -(call.age_s or 0.0))
