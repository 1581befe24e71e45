"""`FileStore`: sink and source in one directory of this node."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from ..entry import TokenEntry
from ..errors import ClosedError, ReadOnlyError
from ..ids import check_rollout_id
from ..protocol import Delivered, RolloutState, SettledOutcome
from . import fence
from .engine import Engine
from .files import Files, Modes, durability_error
from .layout import Directory, Layout, absolute
from .lifecycle import Freeze, Lifecycle, Reset, Retire
from .liveness import Liveness
from .looking import Looker, RolloutStat
from .operations import Begin, Operation
from .requests import Requests
from .rollout import Rollout
from .root import boot_id, group_id_of, open_root, read_marker, sync_threads_for
from .snapshot import Snapshot
from .sweep import Housekeeper, Usage, directories, sweep, usage
from .waiters import Mailbox, in_thread

__all__ = ("FileStore",)

_STORES: weakref.WeakSet[FileStore] = weakref.WeakSet()
"""Only so that a forked child can close what it inherited."""

_ROOTS: set[str] = set()
"""Directories of stores that this process has opened, closed ones included: for the same purpose."""

_HOUR = 3600.0


class FileStore:
    """The default sink and source: rollouts as segment files in a directory of this node.

    Every async method has a blocking twin with the suffix `_now`; both kinds mix freely across threads and event
    loops. Several objects on one directory, in one process or in many, work together. An unclosed store never blocks
    the exit of the interpreter; `close` seals what it wrote.

    dir: absolute or relative path; made (0700, durable) if it is missing.
    read_only: for copies and other people's directories: no checks, no locks, nothing is written.
    require_intent: refuse a put whose call has no `begin_call` in the current incarnation (`StaleAttemptError`).
    group: name or id of a group that shares the store (directories 2770, files 0660).
    allow_unsafe_fs: use file systems that are known to break hard links or locks (NFS, CIFS, FUSE), at your own risk.
    lock_timeout_s: how long to wait for another process before `BusyError`.
    segment_bytes: a segment that has grown to this size is sealed and another one started.
    max_entry_bytes: larger entries are refused.
    cache_bytes: bound on what is kept in memory of open rollouts.
    sync_threads: syncs in flight; chosen by the type of the file system if None.
    sweep_every_s, tombstone_age_s: the store sweeps tombstones of that age by itself; 0 turns it off.

    Raises `UnsafeDirectoryError`, `UnsafeFilesystemError`, `NewerFormatError` or `DurabilityError` on first use, the
    first two also when made.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        *,
        read_only: bool = False,
        require_intent: bool = False,
        group: str | int | None = None,
        allow_unsafe_fs: bool = False,
        lock_timeout_s: float = 30.0,
        segment_bytes: int = 64 << 20,
        max_entry_bytes: int = 1 << 30,
        cache_bytes: int = 24 << 20,
        sync_threads: int | None = None,
        sweep_every_s: float = _HOUR,
        tombstone_age_s: float = 24 * _HOUR,
        files: Files | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "dir": absolute(dir),
            "read_only": read_only,
            "require_intent": require_intent,
            "group": group,
            "allow_unsafe_fs": allow_unsafe_fs,
            "lock_timeout_s": lock_timeout_s,
            "segment_bytes": segment_bytes,
            "max_entry_bytes": max_entry_bytes,
            "cache_bytes": cache_bytes,
            "sync_threads": sync_threads,
            "sweep_every_s": sweep_every_s,
            "tombstone_age_s": tombstone_age_s,
        }
        self._files = files or Files(Modes(group_id_of(group)))
        self._layout = Layout(self._settings["dir"])
        self._boot_id = boot_id()
        self._looker = Looker(self._files, self._layout, self._boot_id)
        self._closed = False
        self._start()
        _STORES.add(self)
        if read_only:
            read_marker(self._files, self._layout)
        else:
            self._running()

    def _start(self) -> None:
        """Everything that a fork must not share."""
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._engine: Engine | None = None
        self._requests = Requests(
            require_intent=self._settings["require_intent"], max_entry_bytes=self._settings["max_entry_bytes"]
        )
        self._liveness = Liveness(self._files, self._layout)
        self._signalling: set[int] = set()
        """Descriptors that show others that a freeze waits for open calls."""
        self._mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()
        self._housekeeper: Housekeeper | None = None

    # ---- the machinery behind every method

    def _running(self) -> Engine:
        if self._closed:
            raise ClosedError(f"the store on {self._layout.root} is closed")
        engine = self._engine
        if engine is not None:
            return engine
        settings = self._settings
        if settings["read_only"]:
            raise ReadOnlyError(f"{self._layout.root} was opened with read_only=True")
        with self._guard:
            if self._engine is None:
                kind = open_root(self._files, self._layout, allow_unsafe_fs=settings["allow_unsafe_fs"])
                _ROOTS.add(self._layout.root)
                self._engine = Engine(
                    self._files,
                    self._layout,
                    boot_id=self._boot_id,
                    sync_threads=settings["sync_threads"] or sync_threads_for(kind),
                    cache_bytes=settings["cache_bytes"],
                    segment_bytes=settings["segment_bytes"],
                    descriptors=_descriptor_budget(),
                    lock_timeout_s=settings["lock_timeout_s"],
                )
                if settings["sweep_every_s"]:
                    self._housekeeper = Housekeeper(self, FileStore._sweep_if_due, first_s=1.0, then_s=60.0)
            return self._engine

    def _looking(self) -> Looker:
        if self._closed:
            raise ClosedError(f"the store on {self._layout.root} is closed")
        return self._looker

    async def _await(self, operation: Operation) -> Any:
        import asyncio

        engine = self._running()
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = Mailbox(loop)
        future: asyncio.Future[Any] = loop.create_future()
        operation.waiter = (mailbox, future)
        engine.submit(operation)
        return await future

    def _call(self, operation: Operation) -> Any:
        return self._running().call(operation)

    # ---- sink

    async def put(self, entry: TokenEntry) -> None:
        """Store one entry; when this returns it is durable and every process on the node sees it.

        Repeating it is a no-op. Raises `ConflictError` (another content is stored for this call; the conflict is
        durable), `FrozenError`, `RetiredError`, `StaleAttemptError`, `BusyError`, `DurabilityError`. Cancelled, it
        is whole or absent, and others are not affected.
        """
        await self._await(self._requests.put((entry,)))

    def put_now(self, entry: TokenEntry) -> None:
        """`put`, blocking."""
        self._call(self._requests.put((entry,)))

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        """Store several entries; the choices of one call become durable together or not at all.

        All are tried; the first error is raised.
        """
        import asyncio

        operations = self._requests.put_many(entries)
        _raise_first(await asyncio.gather(*(self._await(o) for o in operations), return_exceptions=True))

    def put_many_now(self, entries: Iterable[TokenEntry]) -> None:
        """`put_many`, blocking."""
        _raise_first(self._running().call_many(self._requests.put_many(entries)))

    async def begin_call(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int = 1,
        *,
        request_digests: Iterable[bytes] = (),
        retry_count: int = 0,
        idempotency_key: str = "",
    ) -> None:
        """A durable intent, before generation: a call that never comes back then shows as `open`.

        If it raises, don't generate: `FrozenError` (also while a freeze waits), `RetiredError`, `DurabilityError` ...
        request_digests: 16 bytes per message of the request; a repeated history is stored once.
        """
        await self._await(
            self._begin(rollout_id, model_call_id, choices, request_digests, retry_count, idempotency_key)
        )

    def begin_call_now(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int = 1,
        *,
        request_digests: Iterable[bytes] = (),
        retry_count: int = 0,
        idempotency_key: str = "",
    ) -> None:
        """`begin_call`, blocking."""
        self._call(self._begin(rollout_id, model_call_id, choices, request_digests, retry_count, idempotency_key))

    def _begin(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int,
        request_digests: Iterable[bytes],
        retry_count: int,
        idempotency_key: str,
    ) -> Begin:
        self._running()
        writer = self._liveness.name(rollout_id)
        return self._requests.begin(
            rollout_id, model_call_id, choices, writer, request_digests, retry_count, idempotency_key
        )

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        """Say how a call ended that has no entry: `no_generation` (only on proof), `aborted` or `lost`.

        On a frozen rollout it makes a new version if the call's outcome changes; on a retired one it is noted beside
        the tombstone. Raises `InvalidOutcomeError`, `StaleAttemptError`, `BusyError`, `DurabilityError`.
        """
        await self._await(self._requests.settle(rollout_id, model_call_id, outcome, detail))

    def settle_call_now(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        """`settle_call`, blocking."""
        self._call(self._requests.settle(rollout_id, model_call_id, outcome, detail))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """A call happened and its record is lost; an empty id is one unnamed lost call."""
        await self._await(self._requests.mark(rollout_id, model_call_id))

    def mark_incomplete_now(self, rollout_id: str, model_call_id: str = "") -> None:
        """`mark_incomplete`, blocking."""
        self._call(self._requests.mark(rollout_id, model_call_id))

    async def note_delivery(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        """How much of the answer the client received. After a freeze it makes no new version."""
        await self._await(self._requests.deliver(rollout_id, model_call_id, delivered))

    def note_delivery_now(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        """`note_delivery`, blocking."""
        self._call(self._requests.deliver(rollout_id, model_call_id, delivered))

    async def finish(self, rollout_id: str, meta: dict[str, Any] | None = None) -> None:
        """A durable note by the owner of the rollout (reward, group ...); the consumer finds it in `snapshot.meta`."""
        await self._await(self._requests.finish(rollout_id, meta))

    def finish_now(self, rollout_id: str, meta: dict[str, Any] | None = None) -> None:
        """`finish`, blocking."""
        self._call(self._requests.finish(rollout_id, meta))

    # ---- source

    async def freeze(self, rollout_id: str, *, wait_open_s: float = 0.0) -> Snapshot:
        """Fence the rollout against writers and return its snapshot; the same one when repeated.

        Every put that succeeded before is in it, none succeeds after. With `wait_open_s` open calls of live processes
        may finish first, while new ones are refused. Raises `RetiredError`, `BusyError`, `DurabilityError`. Damage
        doesn't raise: it shows in `snapshot.calls`.
        """
        import asyncio

        check_rollout_id(rollout_id)
        if self._settings["read_only"]:
            return await in_thread(lambda: self.freeze_now(rollout_id))
        if wait_open_s > 0:
            with self._closing(rollout_id) as waiting:
                deadline = time.monotonic() + wait_open_s
                while waiting and await self._await(_OpenCalls(rollout_id, self._liveness.is_alive)):
                    if time.monotonic() >= deadline:
                        break
                    await asyncio.sleep(0.01)
                return await self._freeze(rollout_id)
        return await self._freeze(rollout_id)

    async def _freeze(self, rollout_id: str) -> Snapshot:
        snapshot: Snapshot = await self._await(Freeze(rollout_id))
        return snapshot

    def freeze_now(self, rollout_id: str, *, wait_open_s: float = 0.0) -> Snapshot:
        """`freeze`, blocking."""
        check_rollout_id(rollout_id)
        if self._settings["read_only"]:
            return self._looking().published(rollout_id)
        snapshot: Snapshot
        if wait_open_s > 0:
            with self._closing(rollout_id) as waiting:
                deadline = time.monotonic() + wait_open_s
                while waiting and self._call(_OpenCalls(rollout_id, self._liveness.is_alive)):
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.01)
                snapshot = self._call(Freeze(rollout_id))
                return snapshot
        snapshot = self._call(Freeze(rollout_id))
        return snapshot

    async def freeze_many(self, rollout_ids: Iterable[str]) -> list[Snapshot]:
        """Freeze several rollouts at once, their syncs overlapping; the snapshots in the same order."""
        import asyncio

        ids = [check_rollout_id(rollout_id) for rollout_id in rollout_ids]
        if self._settings["read_only"]:
            return await in_thread(lambda: self.freeze_many_now(ids))
        results = await asyncio.gather(*(self._await(Freeze(i)) for i in ids), return_exceptions=True)
        return _all_or_close(results)

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
        _raise_first(await asyncio.gather(*(self._await(o) for o in operations), return_exceptions=True))

    def reset_now(self, *rollout_ids: str) -> None:
        """`reset`, blocking."""
        _raise_first(self._running().call_many([Reset(check_rollout_id(rollout_id)) for rollout_id in rollout_ids]))

    # ---- looking

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

    async def sweep(self, older_than_s: float, *, dry_run: bool = False) -> int:
        """Remove tombstones older than that (0: every one) and what crashes left; how many tombstones went."""
        return await in_thread(lambda: self.sweep_now(older_than_s, dry_run=dry_run))

    def sweep_now(self, older_than_s: float, *, dry_run: bool = False) -> int:
        """`sweep`, blocking."""
        return sweep(self._running(), older_than_s, dry_run=dry_run)

    def _sweep_if_due(self) -> None:
        from filelock import FileLock, Timeout

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
        """Remove open and frozen rollouts that nobody has touched for that long, consumed or not; how many went."""
        return await in_thread(lambda: self.expire_now(older_than_s))

    def expire_now(self, older_than_s: float) -> int:
        """`expire`, blocking."""
        limit = time.time() - older_than_s
        engine = self._running()
        return sum(
            bool(engine.call(Reset(rollout_id, changed_before=limit)))
            for rollout_id, directory in directories(self._files, self._layout)
            if isinstance(directory, Directory) and directory.state in ("open", "frozen")
        )

    # ---- the end, forks, copies

    async def close(self) -> None:
        """Finish what is queued, seal the segments of this object, free its threads and descriptors. Repeatable."""
        if not self._closed:
            await in_thread(self.close_now)

    def close_now(self) -> None:
        """`close`, blocking."""
        with self._guard:
            engine, self._engine = self._engine, None
            already, self._closed = self._closed, True
        if already:
            return
        if self._housekeeper is not None:
            self._housekeeper.stop()
        errors = engine.close() if engine is not None else []
        self._liveness.end()
        if errors:
            raise errors[0]

    async def __aenter__(self) -> FileStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_now()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._settings,)

    def __repr__(self) -> str:
        return f"FileStore({self._layout.root!r})"

    def _after_fork(self) -> None:
        if self._engine is not None:
            self._engine.abandon()
        self._liveness.abandon()
        for fd in self._signalling:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._start()

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
            fence.signal(fd, fence.CLOSING)
            yield True
        finally:
            if fd in self._signalling:  # not in a child that was forked meanwhile
                self._signalling.discard(fd)
                self._files.close(fd)


class Rollouts:
    """Iterates over `(rollout_id, state)` pairs, in either way."""

    def __init__(self, looker: Looker) -> None:
        self._looker = looker

    def __iter__(self) -> Iterator[tuple[str, RolloutState]]:
        return self._looker.rollouts()

    async def __aiter__(self) -> AsyncIterator[tuple[str, RolloutState]]:
        for pair in await in_thread(lambda: list(self)):
            yield pair


class _OpenCalls(Lifecycle):
    """Whether a call is open whose writer is still alive."""

    __slots__ = ("is_alive",)

    def __init__(self, rollout_id: str, is_alive: Callable[[str], bool]) -> None:
        super().__init__(rollout_id)
        self.is_alive = is_alive

    def run(self, rollout: Rollout) -> bool:
        log = rollout.log
        if log is None:
            directory = rollout.look()
            if directory.state != "open":
                return False
            log = rollout.load(directory)
        writers = {call.writer for call in log.ledger.calls.values() if call.writer and call.outcome == "open"}
        return any(self.is_alive(writer) for writer in writers)


def _reopen(settings: dict[str, Any]) -> FileStore:
    return FileStore(**settings)


def _descriptor_budget() -> int:
    """Half of what this process may open, so that the server around us keeps the other half."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft // 2, 8192)) if soft != resource.RLIM_INFINITY else 8192


def _raise_first(results: Iterable[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _all_or_close(results: Sequence[Any]) -> list[Snapshot]:
    try:
        _raise_first(results)
    except BaseException:
        for result in results:
            if isinstance(result, Snapshot):
                result.close()
        raise
    return list(results)


def _forget_in_child() -> None:
    for store in list(_STORES):
        store._after_fork()
    for root in list(_ROOTS):
        _close_inherited(os.path.realpath(root))


def _close_inherited(root: str) -> None:
    """Close every descriptor that carries a lock below `root`, also one that a thread was just opening or closing.

    Kernel locks live as long as any copy of their descriptor: one that stays behind here would outlive the parent.
    """
    fences, writers = f"{root}/rollouts/", f"{root}/writers/"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            # Files below the fences carry no lock, and a mapping of a snapshot may own the descriptor.
            if target.startswith(writers) or (target.startswith(fences) and stat.S_ISDIR(os.fstat(int(name)).st_mode)):
                os.close(int(name))


os.register_at_fork(after_in_child=_forget_in_child)
