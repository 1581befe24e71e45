"""Following a live store: what changed since the last look, at a bounded price however large the store is.

Names are listed where a directory says that it changed; open rollouts are looked at every time, the others in turn. Of
what changed, the logs are read until the bytes of one look are used up; the rest is read at the next one. Nothing is
missed by that, for what is told depends on when the store says that it happened, not on when it was seen. What was
retired or reset before anybody looked is gone.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Iterator

import msgspec

from ..errors import RetiredError, TokcapError
from ..ids import check_rollout_id
from ..protocol import Outcome
from ..store import FileStore, RolloutStat
from ..store.admission import floors
from ..store.layout import Layout
from ..store.root import boot_id
from .events import CallEvent, clock, events_of
from .fingerprint import NOTHING_SEEN, Seen, see
from .marks import is_unchanged
from .row import proper

__all__ = ("Disk", "Finished", "Follower", "OpenCall")

_BYTES_A_LOOK = 64 << 20
_SECONDS_A_LOOK = 0.25
_OTHERS_A_LOOK = 2000
"""Rollouts that are not open, whose directories are compared with what they were: each is a few `stat`."""
_SETTLED_NS = 2_000_000_000
_FINISHED = 20
"""Finished rollouts that are remembered."""


class OpenCall(msgspec.Struct, frozen=True):
    """A call of an open rollout that began and has not ended."""

    rollout_id: str
    model_call_id: str
    begun_at: float | None
    """CLOCK_BOOTTIME seconds; None if it began in another boot of the machine, or without an intent."""
    writer: str
    """Who holds its intent (`FileStore.is_writer_alive`); a dead one's calls stay open for ever."""


class Finished(msgspec.Struct, frozen=True):
    """A rollout that was finished: its owner said so."""

    rollout_id: str
    at: float
    """Unix seconds: when its directory last changed."""
    calls: int


class Disk(msgspec.Struct, frozen=True):
    """The file system of a store."""

    free_bytes: int
    all_bytes: int
    floor_bytes: int
    """With fewer free no call begins, unless the store was told otherwise."""
    free_inodes: int
    all_inodes: int
    floor_inodes: int

    @property
    def is_near_floor(self) -> bool:
        """Whether less is free than twice the floor."""
        return (self.all_bytes > 0 and self.free_bytes < 2 * self.floor_bytes) or (
            self.all_inodes > 0 and self.free_inodes < 2 * self.floor_inodes
        )


class _Followed(msgspec.Struct):
    """What is remembered of one rollout."""

    seen: Seen
    shard: str
    told: set[tuple[str, str, int, Outcome]] = set()


class Follower:
    """Looks again and again at a store.

    since: unix seconds; calls that ended before are not told.
    """

    def __init__(self, store: FileStore, *, since: float | None = None) -> None:
        self._store, self._layout = store, Layout(store.directory)
        self._since = time.time() if since is None else since
        self._boot, self._clock = boot_id(), clock()  # the same as long as it follows, also if the clock is set
        self._known: dict[str, _Followed] = {}
        self._shards: dict[str, tuple[int, int]] = {}
        """Modification time of each when it was listed, and when that was."""
        self._names: dict[str, list[str]] = {}
        self._new: deque[tuple[str, str]] = deque()
        self._waiting: dict[str, None] = {}
        """Rollouts whose calls are to be read."""
        self._others: deque[str] = deque()
        self._began = False
        """Whether every rollout was looked at once."""
        self.open_calls: dict[str, tuple[OpenCall, ...]] = {}
        """By rollout, as of the last read of each."""
        self.finished: dict[str, Finished] = {}
        """Newest of those that were finished while they were followed, or lately."""
        self.unreadable: dict[str, str] = {}
        """Rollouts, and directories of the store that can't be listed (`rollouts/XX`), and why."""
        self.grown: Counter[str] = Counter()
        """Bytes that rollouts grew by between the last two looks."""

    # ---- one look

    def look(self) -> list[CallEvent]:
        """What happened that was not told before, in the order in which it ended."""
        self.grown.clear()
        try:
            rollouts = os.open(self._layout.rollouts, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # renamed away, unmounted: it may come back
            return []
        try:
            self._list()
            until = time.monotonic() + _SECONDS_A_LOOK
            self._compare(rollouts)
            self._meet(rollouts, until)
        finally:
            os.close(rollouts)
        if not self._new and not self._began:
            self._began = True
            self._waiting.update(dict.fromkeys(self._newest_frozen()))
        return sorted(self._read(until), key=lambda event: event.at)

    @property
    def is_behind(self) -> bool:
        """Whether there is more to look at already."""
        return bool(self._new or self._waiting)

    def states(self) -> dict[str, int]:
        """Rollouts by state, as of the last look at each."""
        counts = Counter(
            "unreadable" if name in self.unreadable else one.seen.state for name, one in self._known.items()
        )
        return {state: counts[state] for state in ("open", "frozen", "retired", "unreadable") if counts[state]}

    def disk(self) -> Disk | None:
        """Room on the file system of the store; None if that can't be told."""
        try:
            free = self._store.files.free_space(self._layout.root)
        except OSError:
            return None
        return Disk(free.bytes, free.all_bytes, floors(free)[0], free.inodes, free.all_inodes, floors(free)[1])

    # ---- which rollouts there are

    def _list(self) -> None:
        now = time.time_ns()
        try:
            shards = set(os.listdir(self._layout.rollouts))
        except OSError:
            return
        for shard in self._names.keys() - shards:
            self._forget(self._names.pop(shard))
            self._shards.pop(shard, None)
            self.unreadable.pop(_listed(shard), None)
        for shard in shards:
            path = f"{self._layout.rollouts}/{shard}"
            try:
                changed = os.stat(path).st_mtime_ns
                before = self._shards.get(shard)
                if before is not None and before[0] == changed and before[1] - changed > _SETTLED_NS:
                    continue
                names = os.listdir(path)
            except OSError as error:
                if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                    self.unreadable[_listed(shard)] = proper(str(error))
                continue
            self.unreadable.pop(_listed(shard), None)
            self._shards[shard] = changed, now
            known = set(self._names.get(shard, ()))
            self._forget(known.difference(names))
            self._new.extend((name, shard) for name in names if name not in known)
            self._names[shard] = names

    def _newest_frozen(self) -> list[str]:
        frozen = [(one.seen.changed_at, name) for name, one in self._known.items() if one.seen.state == "frozen"]
        return [name for _, name in heapq.nlargest(_FINISHED, frozen)]

    def _forget(self, names: set[str] | list[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._waiting.pop(name, None)
            self.open_calls.pop(name, None)
            self.unreadable.pop(name, None)

    # ---- which of them changed

    def _compare(self, rollouts: int) -> None:
        names = [name for name, one in self._known.items() if one.seen.state not in ("frozen", "retired")]
        for _ in range(min(_OTHERS_A_LOOK, len(self._others))):
            name = self._others.popleft()
            one = self._known.get(name)
            if one is not None and one.seen.state in ("frozen", "retired"):
                names.append(name)
                self._others.append(name)
        for name in names:
            one = self._known[name]
            seen = one.seen
            if not is_unchanged(rollouts, f"{one.shard}/{name}", seen.mark, seen.folder, seen.names):
                self._see(rollouts, name, one.shard)

    def _meet(self, rollouts: int, until: float) -> None:
        while self._new and time.monotonic() < until:
            name, shard = self._new.popleft()
            self._see(rollouts, name, shard)

    def _see(self, rollouts: int, name: str, shard: str) -> None:
        try:
            seen = see(rollouts, f"{shard}/{check_rollout_id(name)}")
        except FileNotFoundError:  # it is being renamed, or it is gone: what its shard lists the next time tells
            self._names[shard] = [other for other in self._names.get(shard, ()) if other != name]
            self._shards.pop(shard, None)
            return
        except (TokcapError, OSError) as error:
            self.unreadable[name] = proper(str(error))
            self._known.setdefault(name, _Followed(NOTHING_SEEN, shard, set()))
            return
        one = self._known.get(name)
        if one is None:
            one = self._known[name] = _Followed(seen, shard, set())
            is_news = seen.state == "open" or seen.changed_at >= self._since - 2
            if seen.state in ("frozen", "retired"):
                self._others.append(name)
        else:
            if seen.bytes > one.seen.bytes:
                self.grown[name] = seen.bytes - one.seen.bytes
            is_news = True
            if one.seen.state == "open" and seen.state in ("frozen", "retired"):
                self._others.append(name)
            one.seen = seen
        if seen.state == "retired":
            one.told = set()
            self.open_calls.pop(name, None)
            self._waiting.pop(name, None)
        elif is_news:
            self._waiting[name] = None

    # ---- what happened in them

    def _read(self, until: float) -> Iterator[CallEvent]:
        spent = 0
        # Small ones first: a large one must not keep the others waiting, and is read alone when its turn comes.
        for name in sorted(self._waiting, key=lambda name: self._known[name].seen.bytes):
            one = self._known[name]
            if spent and (spent + one.seen.bytes > _BYTES_A_LOOK or time.monotonic() > until):
                return
            spent += one.seen.bytes
            del self._waiting[name]
            try:
                stat, snapshot = self._store.look_now(name, weigh=False)
            except RetiredError:
                continue
            except TokcapError as error:
                self.unreadable[name] = proper(str(error))
                continue
            self.unreadable.pop(name, None)
            self._note(name, one, stat)
            if snapshot is None:
                continue
            with snapshot:
                for event in events_of(stat, snapshot, one.seen.changed_at, self._boot, self._clock):
                    if event.at >= self._since and event.key not in one.told:
                        one.told.add(event.key)
                        yield event

    def _note(self, name: str, one: _Followed, stat: RolloutStat) -> None:
        if stat.finished:
            self.finished[name] = Finished(name, one.seen.changed_at, len(stat.calls))
            if len(self.finished) > _FINISHED:
                del self.finished[min(self.finished.values(), key=lambda one: one.at).rollout_id]
        # Of a frozen one nobody waits for calls any more, whether their writers live or not.
        found = [call for call in stat.calls if call.outcome == "open"] if stat.state == "open" else []
        self.open_calls.pop(name, None)
        if not found:
            return
        try:
            writers = self._store.writers_now(name)
        except TokcapError:
            writers = {}
        self.open_calls[name] = tuple(
            OpenCall(
                name,
                call.model_call_id,
                call.begun_at if call.boot_id == self._boot else None,
                writers.get(call.model_call_id, ""),
            )
            for call in found
        )


def _listed(shard: str) -> str:
    return f"rollouts/{shard}"
