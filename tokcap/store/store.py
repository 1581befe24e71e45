"""`FileStore`: sink and source in one directory of this node."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ..errors import TokcapError
from ..protocol import RolloutState
from .files import Files, durability_error
from .layout import Directory
from .lifecycle import Reset
from .looking import Looker, RolloutStat
from .operations import Operation
from .sink import SinkMethods
from .snapshot import Snapshot
from .source import SourceMethods
from .sweep import Usage, directories, sweep, usage
from .waiters import in_thread

__all__ = ("FileStore",)


class FileStore(SinkMethods, SourceMethods):
    """The default sink and source: rollouts as segment files in a directory of this node.

    Every async method has a blocking twin with the suffix `_now`; both kinds mix freely across threads and event
    loops. Several objects on one directory, in one process or in many, work together. An unclosed store never blocks
    the exit of the interpreter; `close` seals what it wrote.

    dir: absolute or relative path; made (0700, durable) if it is missing.
    read_only: for copies and other people's directories: no checks, no locks, nothing is written.
    require_intent: refuse a put whose call has no `begin_call` in the current incarnation (`StaleAttemptError`).
    group: name or id of a group that shares the store (directories 2770, files 0660).
    allow_unsafe_fs: use file systems that are known to break hard links or locks (NFS, CIFS, FUSE), at your own risk.
    lock_timeout_s: how long to wait for another process, or for room, before `BusyError`.
    segment_bytes: a segment that has grown to this size is sealed and another one started.
    max_entry_bytes: larger entries are refused.
    cache_bytes: bound on what is kept in memory of open rollouts (256 MB); of what is not kept, the next put reads the
        log again.
    max_pending_bytes, max_pending_operations: bounds on the records of this object that wait for the disk (1 GiB,
        65,536). Above them no call begins (`BusyError`), and puts wait for room, first come, first served, for
        `lock_timeout_s` (then `BusyError`). `pending` shows what waits.
    min_free_bytes, min_free_inodes: with less free on the file system no call begins (`NoSpaceError`); everything else
        goes on, so that the records of calls that have begun find room. If None, a hundredth of the file system, 64 MB
        and 1,000 inodes at most; 0 turns it off. Looked at once a second, sooner if much was written.
    sync_threads: syncs in flight; chosen by the type of the file system if None.
    sweep_every_s, tombstone_age_s: the store sweeps tombstones of that age by itself; 0 turns it off.

    files: another `Files`, for tests that inject faults or record what is done.

    Making one opens the directory and syncs what it makes there (a few milliseconds, once). Raises
    `UnsafeDirectoryError`, `UnsafeFilesystemError`, `NewerFormatError`, `DurabilityError`, or `InvalidOptionError`;
    with `read_only`, `StoreNotFoundError` where there is no store.
    """

    # ---- looking

    @property
    def directory(self) -> str:
        """Where it is: an absolute path."""
        return self._layout.root

    @property
    def files(self) -> Files:
        """What it reads and writes with."""
        return self._files

    async def read(self, rollout_id: str) -> Snapshot:
        """An unfrozen look (version 0) at an open rollout, the published snapshot of a frozen one. Takes no lock.

        An absent rollout gives an empty look; a retired one raises `RetiredError`.
        """
        return await in_thread(lambda: self.read_now(rollout_id))

    def read_now(self, rollout_id: str) -> Snapshot:
        """`read`, blocking."""
        return self._looking().read(rollout_id)

    async def stat(self, rollout_id: str) -> RolloutStat:
        """State, calls, size, damage and late notes of one rollout. Takes no lock."""
        return await in_thread(lambda: self.stat_now(rollout_id))

    def stat_now(self, rollout_id: str) -> RolloutStat:
        """`stat`, blocking."""
        return self._looking().stat(rollout_id)

    def look_now(self, rollout_id: str, *, weigh: bool = True) -> tuple[RolloutStat, Snapshot | None]:
        """`stat_now` and, of what is open or frozen, the snapshot that it tells of, in one look. Close that.

        weigh: False leaves `files` and `bytes` at 0.
        """
        return self._looking().look(rollout_id, weigh)

    async def open_calls(self, rollout_id: str) -> dict[str, bool]:
        """The calls of an open rollout that are open, and whether the process that holds the intent is still alive.

        A writer shows that it is alive by a lock; each is tried for a moment. In a copy nobody is.
        """
        return await in_thread(lambda: self.open_calls_now(rollout_id))

    def open_calls_now(self, rollout_id: str) -> dict[str, bool]:
        """`open_calls`, blocking."""
        writers = self.writers_now(rollout_id)
        alive = {writer: self.is_writer_alive(writer) for writer in set(writers.values())}
        return {call: alive[writer] for call, writer in writers.items()}

    def writers_now(self, rollout_id: str) -> dict[str, str]:
        """The open calls of an open rollout, each with the writer that holds its intent; empty if it has none."""
        return self._looking().open_calls(rollout_id)

    def is_writer_alive(self, writer: str) -> bool:
        """Whether the process behind a writer still runs. Its lock is tried for a moment; in a copy nobody is alive."""
        return bool(writer) and self._liveness.is_alive(writer)

    def rollouts(self) -> Rollouts:
        """Every rollout that is not absent, as `(rollout_id, state)`; for `for` and for `async for`."""
        return Rollouts(self._looking())

    rollouts_now = rollouts

    async def usage(self) -> dict[RolloutState, Usage]:
        """Rollouts, files and bytes per state."""
        return await in_thread(self.usage_now)

    def usage_now(self) -> dict[RolloutState, Usage]:
        """`usage`, blocking."""
        self._looking()
        return usage(self._files, self._layout)

    @property
    def unstorable(self) -> int:
        """How many values of entries put through this object had no JSON form and were replaced by their repr."""
        return self._requests.unstorable

    # ---- housekeeping

    def perform_now(self, operation: Operation) -> Any:
        """Do an operation that has no method here, under the fence of its rollout as any other; its result."""
        return self._running().call(operation)

    async def sweep(self, older_than_s: float, *, dry_run: bool = False) -> int:
        """Remove tombstones older than that (0: every one) and what crashes left; how many tombstones went."""
        return await in_thread(lambda: self.sweep_now(older_than_s, dry_run=dry_run))

    def sweep_now(self, older_than_s: float, *, dry_run: bool = False) -> int:
        """`sweep`, blocking."""
        return sweep(self._running(), older_than_s, dry_run=dry_run)

    def _sweep_if_due(self) -> None:
        from filelock import FileLock, Timeout

        if self._engine is not None:
            self._engine.let_go_of_ended()
        path = self._layout.sweep_lock
        try:
            age = time.time() - os.stat(path).st_mtime
        except FileNotFoundError:
            age = float("inf")
        if 0 <= age < self._settings["sweep_every_s"]:
            return
        mode = self._files.modes.file
        with contextlib.suppress(Timeout), FileLock(path, timeout=0, mode=mode, fallback_to_soft=False):
            os.utime(path)
            self.sweep_now(self._settings["tombstone_age_s"])

    async def expire(self, older_than_s: float) -> int:
        """Remove open and frozen rollouts that nobody has touched for that long, consumed or not; how many went.

        What fails for one of them is raised after all others.
        """
        return await in_thread(lambda: self.expire_now(older_than_s))

    def expire_now(self, older_than_s: float) -> int:
        """`expire`, blocking."""
        limit = time.time() - older_than_s
        engine = self._running()
        removed = 0
        failure: Exception | None = None
        for rollout_id, directory in directories(self._files, self._layout):
            try:
                if not isinstance(directory, Directory):
                    raise directory
                if directory.state in ("open", "frozen"):
                    removed += bool(engine.call(Reset(rollout_id, changed_before=limit)))
            except (TokcapError, OSError) as error:
                failure = failure or error
        if isinstance(failure, OSError):
            raise durability_error(failure, "can't look at every rollout", self._layout.rollouts) from failure
        if failure is not None:
            raise failure
        return removed


class Rollouts:
    """Iterates over `(rollout_id, state)` pairs, in either way."""

    def __init__(self, looker: Looker) -> None:
        self._looker = looker

    def __iter__(self) -> Iterator[tuple[str, RolloutState]]:
        return self._looker.rollouts()

    async def __aiter__(self) -> AsyncIterator[tuple[str, RolloutState]]:
        for pair in await in_thread(lambda: list(self)):
            yield pair
