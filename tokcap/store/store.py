"""`FileStore`: sink and source in one directory of this node."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from ..content import storable
from ..entry import TokenEntry
from ..errors import (
    ClosedError,
    InvalidEntryError,
    InvalidOutcomeError,
    ReadOnlyError,
    RetiredError,
    TokcapError,
)
from ..ids import check_model_call_id, check_rollout_id
from ..protocol import CallRecord, Delivered, RolloutState, SettledOutcome
from . import fence
from .engine import Engine
from .files import Files, Modes, durability_error
from .layout import Directory, Layout, absolute, look
from .ledger import Damage
from .lifecycle import Freeze, Lifecycle, Reset, Retire
from .log import LogReader
from .notes import Notes
from .operations import Attempts, Begin, Deliver, Finish, Operation, Put, Settle
from .rollout import Rollout
from .root import boot_id, group_id_of, open_root, read_marker, sync_threads_for
from .snapshot import Snapshot, index_of, open_snapshot
from .sweep import Housekeeper, Usage, directories, sweep, usage, usage_of
from .waiters import Mailbox

__all__ = ("FileStore", "RolloutStat")

_T = TypeVar("_T")

_STORES: weakref.WeakSet[FileStore] = weakref.WeakSet()
"""Only so that a forked child can close what it inherited."""

_OUTCOMES = ("no_generation", "aborted", "lost")
_DELIVERED = ("full", "partly", "no", "unknown")
_HOUR = 3600.0


class RolloutStat(msgspec.Struct, frozen=True):
    """What the directory shows of one rollout."""

    rollout_id: str
    state: RolloutState
    snapshot_id: str = ""
    """Identity of the incarnation; empty if absent."""
    version: int = 0
    """Of the published snapshot, or of the one that was retired."""
    retired_at: float | None = None
    """Unix seconds."""
    entries: int = 0
    calls: tuple[CallRecord, ...] = ()
    incomplete: bool = False
    finished: bool = False
    meta: dict[str, Any] = {}
    late: tuple[str, ...] = ()
    """What was said after the log was closed, in words."""
    files: int = 0
    bytes: int = 0
    damage: tuple[Damage, ...] = ()
    torn: tuple[Damage, ...] = ()


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
        self._closed = False
        self._unstorable = 0
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
        self._attempts = Attempts()
        self._mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()
        self._writer = ""
        self._writer_fd = -1
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

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        """Run something long and rare in a thread of its own, which others don't need."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        def work() -> None:
            result: Any = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(finish, result, failure)

        threading.Thread(target=work, name="tokcap-task", daemon=True).start()
        return await future

    # ---- sink

    def _put_operation(self, entries: Sequence[TokenEntry]) -> Put:
        for entry in entries:
            if not isinstance(entry, TokenEntry):
                raise InvalidEntryError(f"put takes TokenEntry objects, not {type(entry).__name__}")
        operation = Put(entries, require_intent=self._settings["require_intent"])
        for entry, contents in zip(entries, operation.contents, strict=True):
            size = _size(entry) + len(contents)
            if size > self._settings["max_entry_bytes"]:
                raise InvalidEntryError(
                    f"rollout {entry.rollout_id}, call {entry.model_call_id}: the entry has {size} bytes, "
                    f"max_entry_bytes is {self._settings['max_entry_bytes']}"
                )
            if b"__tokcap_unstorable__" in contents:
                self._unstorable += contents.count(b"__tokcap_unstorable__")
        operation.attempts = self._attempts
        return operation

    async def put(self, entry: TokenEntry) -> None:
        """Store one entry; when this returns it is durable and every process on the node sees it.

        Repeating it is a no-op. Raises `ConflictError` (another content is stored for this call; the conflict is
        durable), `FrozenError`, `RetiredError`, `StaleAttemptError`, `BusyError`, `DurabilityError`. Cancelled, it
        is whole or absent, and others are not affected.
        """
        await self._await(self._put_operation((entry,)))

    def put_now(self, entry: TokenEntry) -> None:
        """`put`, blocking."""
        self._call(self._put_operation((entry,)))

    def _put_operations(self, entries: Iterable[TokenEntry]) -> list[Put]:
        by_rollout: dict[str, list[TokenEntry]] = {}
        for entry in entries:
            if not isinstance(entry, TokenEntry):
                raise InvalidEntryError(f"put_many takes TokenEntry objects, not {type(entry).__name__}")
            by_rollout.setdefault(entry.rollout_id, []).append(entry)
        operations = []
        for rollout_entries in by_rollout.values():
            by_call: dict[str, list[TokenEntry]] = {}
            for entry in rollout_entries:
                by_call.setdefault(entry.model_call_id, []).append(entry)
            operations += [self._put_operation(choices) for choices in by_call.values()]
        return operations

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        """Store several entries; the choices of one call become durable together or not at all.

        All are tried; the first error is raised.
        """
        import asyncio

        results = await asyncio.gather(
            *(self._await(operation) for operation in self._put_operations(entries)), return_exceptions=True
        )
        _raise_first(results)

    def put_many_now(self, entries: Iterable[TokenEntry]) -> None:
        """`put_many`, blocking."""
        _raise_first([_caught(self._call, operation) for operation in self._put_operations(entries)])

    def _begin_operation(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int,
        request_digests: Iterable[bytes],
        retry_count: int,
        idempotency_key: str,
    ) -> Begin:
        check_rollout_id(rollout_id)
        check_model_call_id(model_call_id, rollout_id=rollout_id)
        where = f"rollout {rollout_id}, call {model_call_id}"
        if isinstance(choices, bool) or not isinstance(choices, int) or not 1 <= choices < 2**31:
            raise InvalidEntryError(f"{where}: choices is {choices!r}, expected an integer from 1")
        digests = list(request_digests)
        if not all(isinstance(digest, bytes) and len(digest) == 16 for digest in digests):
            raise InvalidEntryError(f"{where}: request_digests must be 16 bytes each")
        if isinstance(retry_count, bool) or not isinstance(retry_count, int) or not 0 <= retry_count < 2**31:
            raise InvalidEntryError(f"{where}: retry_count is {retry_count!r}, expected an integer from 0")
        if not isinstance(idempotency_key, str):
            raise InvalidEntryError(f"{where}: idempotency_key is {idempotency_key!r}, expected a string")
        operation = Begin(
            rollout_id,
            model_call_id,
            choices,
            self._live_writer(),
            retry_count,
            _clean(idempotency_key),
            b"".join(digests),
        )
        operation.attempts = self._attempts
        return operation

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
        """
        await self._await(
            self._begin_operation(rollout_id, model_call_id, choices, request_digests, retry_count, idempotency_key)
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
        self._call(
            self._begin_operation(rollout_id, model_call_id, choices, request_digests, retry_count, idempotency_key)
        )

    def _settle_operation(self, rollout_id: str, model_call_id: str, outcome: str, detail: str) -> Settle:
        check_rollout_id(rollout_id)
        check_model_call_id(model_call_id, rollout_id=rollout_id)
        if outcome not in _OUTCOMES:
            raise InvalidOutcomeError(
                f"rollout {rollout_id}, call {model_call_id}: outcome is {outcome!r}, settle_call takes "
                f"{', '.join(_OUTCOMES)} (an entry that is put makes a call recorded)"
            )
        operation = Settle(rollout_id, model_call_id, outcome, _clean(detail))  # type: ignore[arg-type]
        operation.attempts = self._attempts
        return operation

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        """Say how a call ended that has no entry: `no_generation` (only on proof), `aborted` or `lost`.

        On a frozen rollout it makes a new version if the call's outcome changes; on a retired one it is noted beside
        the tombstone. Raises `InvalidOutcomeError`, `StaleAttemptError`, `BusyError`, `DurabilityError`.
        """
        await self._await(self._settle_operation(rollout_id, model_call_id, outcome, detail))

    def settle_call_now(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        """`settle_call`, blocking."""
        self._call(self._settle_operation(rollout_id, model_call_id, outcome, detail))

    def _mark_operation(self, rollout_id: str, model_call_id: str) -> Settle:
        check_rollout_id(rollout_id)
        if model_call_id != "":
            check_model_call_id(model_call_id, rollout_id=rollout_id)
        operation = Settle(rollout_id, model_call_id, "lost", "marked incomplete")
        operation.attempts = self._attempts
        return operation

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """A call happened and its record is lost; an empty id is one unnamed lost call."""
        await self._await(self._mark_operation(rollout_id, model_call_id))

    def mark_incomplete_now(self, rollout_id: str, model_call_id: str = "") -> None:
        """`mark_incomplete`, blocking."""
        self._call(self._mark_operation(rollout_id, model_call_id))

    def _delivery_operation(self, rollout_id: str, model_call_id: str, delivered: str) -> Deliver:
        check_rollout_id(rollout_id)
        check_model_call_id(model_call_id, rollout_id=rollout_id)
        if delivered not in _DELIVERED:
            raise InvalidOutcomeError(
                f"rollout {rollout_id}, call {model_call_id}: delivered is {delivered!r}, expected one of "
                f"{', '.join(_DELIVERED)}"
            )
        operation = Deliver(rollout_id, model_call_id, delivered)  # type: ignore[arg-type]
        operation.attempts = self._attempts
        return operation

    async def note_delivery(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        """How much of the answer the client received. After a freeze it makes no new version."""
        await self._await(self._delivery_operation(rollout_id, model_call_id, delivered))

    def note_delivery_now(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        """`note_delivery`, blocking."""
        self._call(self._delivery_operation(rollout_id, model_call_id, delivered))

    def _finish_operation(self, rollout_id: str, meta: dict[str, Any] | None) -> Finish:
        return Finish(check_rollout_id(rollout_id), storable(meta or {}))

    async def finish(self, rollout_id: str, meta: dict[str, Any] | None = None) -> None:
        """A durable note by the owner of the rollout (reward, group ...); the consumer finds it in `snapshot.meta`."""
        await self._await(self._finish_operation(rollout_id, meta))

    def finish_now(self, rollout_id: str, meta: dict[str, Any] | None = None) -> None:
        """`finish`, blocking."""
        self._call(self._finish_operation(rollout_id, meta))

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
            return await self._in_thread(lambda: self.freeze_now(rollout_id))
        if wait_open_s > 0:
            with self._closing(rollout_id) as waiting:
                deadline = time.monotonic() + wait_open_s
                while waiting and await self._await(_OpenCalls(rollout_id, self._is_alive)):
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
            return self._open_published(rollout_id)
        snapshot: Snapshot
        if wait_open_s > 0:
            with self._closing(rollout_id) as waiting:
                deadline = time.monotonic() + wait_open_s
                while waiting and self._call(_OpenCalls(rollout_id, self._is_alive)):
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
        results = await asyncio.gather(*(self._await(Freeze(i)) for i in ids), return_exceptions=True)
        return _all_or_close(results)

    def freeze_many_now(self, rollout_ids: Iterable[str]) -> list[Snapshot]:
        """`freeze_many`, blocking."""
        ids = [check_rollout_id(rollout_id) for rollout_id in rollout_ids]
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
        return await self._in_thread(lambda: self.read_now(rollout_id))

    def read_now(self, rollout_id: str) -> Snapshot:
        """`read`, blocking."""
        check_rollout_id(rollout_id)
        return self._patiently(rollout_id, lambda directory: self._read(rollout_id, directory))

    def _read(self, rollout_id: str, directory: Directory) -> Snapshot:
        if directory.state == "retired":
            raise RetiredError(f"rollout {rollout_id} was consumed and retired")
        if directory.state == "frozen":
            return open_snapshot(self._files, directory, rollout_id, self._boot_id)
        reader = LogReader(self._files, rollout_id, directory.incarnation, self._boot_id)
        reader.keep_buffers = True
        reader.read_open(directory)
        return Snapshot(index_of(reader, 0, []), reader.buffers, reader.paths)

    def _open_published(self, rollout_id: str) -> Snapshot:
        def opened(directory: Directory) -> Snapshot:
            if directory.state in ("open", "absent"):
                raise ReadOnlyError(
                    f"rollout {rollout_id} is {directory.state}; a read-only store can't freeze, only read"
                )
            return self._read(rollout_id, directory)

        return self._patiently(rollout_id, opened)

    def _patiently(self, rollout_id: str, function: Callable[[Directory], _T]) -> _T:
        """Look without a lock: what is renamed under our eyes is looked at again."""
        path = self._layout.rollout(rollout_id)
        for attempt in range(20):
            try:
                return function(look(self._files, path))
            except FileNotFoundError:
                time.sleep(0.001 * attempt)
            except OSError as error:
                raise durability_error(error, f"rollout {rollout_id}: can't read it", path) from error
        return function(look(self._files, path))

    async def stat(self, rollout_id: str) -> RolloutStat:
        """State, calls, size, damage and late notes of one rollout. Takes no lock."""
        return await self._in_thread(lambda: self.stat_now(rollout_id))

    def stat_now(self, rollout_id: str) -> RolloutStat:
        """`stat`, blocking."""
        check_rollout_id(rollout_id)
        return self._patiently(rollout_id, lambda directory: self._stat(rollout_id, directory))

    def _stat(self, rollout_id: str, directory: Directory) -> RolloutStat:
        if directory.state == "absent":
            return RolloutStat(rollout_id, "absent")
        weight = usage_of(self._files, directory)
        if directory.tombstone is not None:
            notes = Notes(self._files, directory.tombstone_path, directory.incarnation, directory.notes)
            return RolloutStat(
                rollout_id,
                "retired",
                directory.incarnation,
                directory.tombstone.version,
                directory.tombstone.retired_at,
                late=tuple(str(note) for note in notes.read()),
                files=weight.files,
                bytes=weight.bytes,
            )
        notes = Notes(self._files, directory.incarnation_path, directory.incarnation, directory.notes)
        with self._read(rollout_id, directory) as snapshot:
            return RolloutStat(
                rollout_id,
                directory.state,
                directory.incarnation,
                directory.version,
                entries=len(snapshot.entries),
                calls=snapshot.calls,
                incomplete=snapshot.incomplete,
                finished=snapshot.finished,
                meta=snapshot.meta,
                late=tuple(str(note) for note in notes.read()),
                files=weight.files,
                bytes=weight.bytes,
                damage=snapshot.damage,
                torn=snapshot.torn,
            )

    def rollouts(self) -> Rollouts:
        """Every rollout that is not absent, as `(rollout_id, state)`; for `for` and for `async for`."""
        return Rollouts(self)

    rollouts_now = rollouts

    async def usage(self) -> dict[RolloutState, Usage]:
        """Rollouts, files and bytes per state."""
        return await self._in_thread(self.usage_now)

    def usage_now(self) -> dict[RolloutState, Usage]:
        """`usage`, blocking."""
        return usage(self._files, self._layout)

    @property
    def unstorable(self) -> int:
        """How many values of entries put through this object had no JSON form and were replaced by their repr."""
        return self._unstorable

    # ---- housekeeping

    async def sweep(self, older_than_s: float, *, dry_run: bool = False) -> int:
        """Remove tombstones older than that (0: every one) and what crashes left; how many tombstones went."""
        return await self._in_thread(lambda: self.sweep_now(older_than_s, dry_run=dry_run))

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
        return await self._in_thread(lambda: self.expire_now(older_than_s))

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
            await self._in_thread(self.close_now)

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
        if self._writer_fd >= 0:
            self._files.close(self._writer_fd)
            self._writer_fd = -1
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
        if self._writer_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._writer_fd)
        self._start()

    # ---- who is alive

    def _live_writer(self) -> str:
        """The identity of this writer; a lock on its file tells others that it is alive, until the kernel drops it."""
        if not self._writer:
            self._running()
            with self._guard:
                if not self._writer:
                    name = os.urandom(8).hex()
                    path = f"{self._layout.writers}/{name}"
                    try:
                        fd = self._files.create(path)
                        self._files.try_lock(fd)
                    except OSError as error:
                        raise durability_error(error, "can't show that this writer is alive", path) from error
                    self._writer_fd, self._writer = fd, name
        return self._writer

    def _is_alive(self, writer: str) -> bool:
        if writer == self._writer:
            return True
        try:
            fd = self._files.open(f"{self._layout.writers}/{writer}")
        except OSError:
            return False
        try:
            return not self._files.try_lock(fd)
        finally:
            self._files.close(fd)

    @contextlib.contextmanager
    def _closing(self, rollout_id: str) -> Generator[bool, None, None]:
        """Show that a freeze waits for open calls; a waiter that dies leaves the rollout as it is."""
        self._running()
        fd = fence.open_fence(self._files, self._layout.rollout(rollout_id))
        if fd is None:
            yield False
            return
        try:
            fence.signal(fd, fence.CLOSING)
            yield True
        finally:
            self._files.close(fd)


class Rollouts:
    """Iterates over `(rollout_id, state)` pairs, in either way."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def __iter__(self) -> Iterator[tuple[str, RolloutState]]:
        for rollout_id, directory in directories(self._store._files, self._store._layout):
            if isinstance(directory, Directory):
                if directory.state != "absent":
                    yield rollout_id, directory.state
            else:
                raise directory

    async def __aiter__(self) -> AsyncIterator[tuple[str, RolloutState]]:
        for pair in await self._store._in_thread(lambda: list(self)):
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


def _size(entry: TokenEntry) -> int:
    experts = entry.routed_experts
    return (
        entry.prompt_token_ids.nbytes
        + entry.generation_token_ids.nbytes
        + entry.generation_log_probs.nbytes
        + (0 if experts is None else experts.nbytes)
        + sum(map(len, entry.pieces or ()))
    )


def _clean(text: str) -> str:
    """Words for people: whatever UTF-8 can't hold is replaced, rather than the statement refused."""
    return str(text).encode("utf-8", "replace").decode()


def _caught(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except TokcapError as error:
        return error


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


os.register_at_fork(after_in_child=_forget_in_child)
