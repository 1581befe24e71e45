"""What every method of a store stands on: its settings, its engine, and what happens at a fork and at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ..errors import ClosedError, InvalidOptionError, ReadOnlyError, StoreNotFoundError
from ..protocol import Pending
from .admission import Admission, Limits
from .ending import End, let_go, let_go_of_dropped
from .engine import Engine
from .files import Files, Modes
from .layout import Layout, absolute
from .liveness import Liveness
from .looking import Looker
from .operations import Begin, Operation, Put, RecordOperation
from .requests import Requests
from .root import (
    boot_id,
    group_id_of,
    is_faster_with_space,
    is_memory,
    kernel_syncs_for,
    open_root,
    read_marker,
    sync_threads_for,
)
from .sweep import Housekeeper
from .waiters import Mailbox, in_thread, start_thread

if TYPE_CHECKING:
    import asyncio

__all__ = ("StoreBase", "raise_first")

_STORES: weakref.WeakSet[StoreBase] = weakref.WeakSet()
"""Only so that a forked child can close what it inherited."""

_ROOTS: set[str] = set()
"""Directories of stores that this process has opened, closed ones included: for the same purpose."""

_HOUR = 3600.0


class StoreBase:
    """A store object without its methods; `FileStore` has the documentation."""

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
        cache_bytes: int = 256 << 20,
        max_pending_bytes: int = 1 << 30,
        max_pending_operations: int = 1 << 16,
        min_free_bytes: int | None = None,
        min_free_inodes: int | None = None,
        sync_threads: int | None = None,
        sweep_every_s: float = _HOUR,
        tombstone_age_s: float = 24 * _HOUR,
        files: Files | None = None,
    ) -> None:
        _check_options(
            dir=dir,
            lock_timeout_s=lock_timeout_s,
            segment_bytes=segment_bytes,
            max_entry_bytes=max_entry_bytes,
            cache_bytes=cache_bytes,
            max_pending_bytes=max_pending_bytes,
            max_pending_operations=max_pending_operations,
            min_free_bytes=0 if min_free_bytes is None else min_free_bytes,
            min_free_inodes=0 if min_free_inodes is None else min_free_inodes,
            sync_threads=1 if sync_threads is None else sync_threads,
            sweep_every_s=sweep_every_s,
            tombstone_age_s=tombstone_age_s,
        )
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
            "max_pending_bytes": max_pending_bytes,
            "max_pending_operations": max_pending_operations,
            "min_free_bytes": min_free_bytes,
            "min_free_inodes": min_free_inodes,
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
            if not os.path.isdir(self._layout.rollouts):
                raise StoreNotFoundError(
                    errno.ENOENT, "there is no tokcap store in this directory; check the path", self._layout.root
                )
            read_marker(self._files, self._layout)
        else:
            self._running()

    def _start(self) -> None:
        """Everything that a fork must not share."""
        self._guard = threading.RLock()  # a signal handler may come in between
        self._engine: Engine | None = None
        self._end = End()
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._requests = Requests(
            require_intent=self._settings["require_intent"], max_entry_bytes=self._settings["max_entry_bytes"]
        )
        self._liveness = Liveness(self._files, self._layout)
        self._signalling: set[int] = set()
        """Descriptors that show others that a freeze waits for open calls."""
        self._mailbox: Mailbox | None = None
        """Of the loop that called last: nearly always there is only one."""
        self._mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()
        self._housekeeper: Housekeeper | None = None

    # ---- the machinery behind every method

    def _running(self) -> Engine:
        if self._closed:
            raise ClosedError(f"the store on {self._layout.root} is closed")
        if sys.is_finalizing():
            raise ClosedError(f"the interpreter is ending, and with it the threads of the store on {self._layout.root}")
        engine = self._engine
        if engine is not None:
            return engine
        if self._settings["read_only"]:
            raise ReadOnlyError(f"{self._layout.root} was opened with read_only=True")
        with self._guard:
            if self._engine is None:
                self._start_engine()
        # A signal handler may have closed it meanwhile.
        return self._running()

    def _start_engine(self) -> None:
        settings = self._settings
        kind = open_root(self._files, self._layout, allow_unsafe_fs=settings["allow_unsafe_fs"])
        _ROOTS.add(self._layout.root)
        limits = Limits(
            settings["max_pending_bytes"],
            settings["max_pending_operations"],
            settings["min_free_bytes"],
            settings["min_free_inodes"],
            settings["lock_timeout_s"],
        )
        root = self._layout.root
        engine = Engine(
            self._files,
            self._layout,
            Admission(root, limits, partial(self._files.free_space, root)),
            boot_id=self._boot_id,
            sync_threads=settings["sync_threads"] or sync_threads_for(kind),
            # Who says how many threads wait for the device wants threads.
            kernel_syncs=0 if settings["sync_threads"] else kernel_syncs_for(kind),
            free_syncs=is_memory(kind),
            cache_bytes=settings["cache_bytes"],
            segment_bytes=settings["segment_bytes"],
            descriptors=_descriptor_budget(),
            lock_timeout_s=settings["lock_timeout_s"],
            spaced=is_faster_with_space(kind),
        )
        if self._engine is not None or self._closed:  # by a signal handler that came in between
            engine.close()
            return
        self._finalizer = weakref.finalize(self, let_go_of_dropped, engine, self._liveness)
        self._finalizer.atexit = False
        self._engine = engine
        if settings["sweep_every_s"]:
            self._housekeeper = Housekeeper(self, type(self)._sweep_if_due, first_s=1.0, then_s=60.0)

    def _looking(self) -> Looker:
        if self._closed:
            raise ClosedError(f"the store on {self._layout.root} is closed")
        return self._looker

    def _future(self, operation: Operation) -> asyncio.Future[Any]:
        """What the running loop awaits for an operation."""
        import asyncio

        loop = asyncio.get_running_loop()
        mailbox = self._mailbox
        if mailbox is None or not mailbox.belongs_to(loop):
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = Mailbox(loop)
            self._mailbox = mailbox
        mailbox.look_again()
        future: asyncio.Future[Any] = loop.create_future()
        operation.waiter = (mailbox, future)
        return future

    async def _await(self, operation: Operation) -> Any:
        engine = self._running()
        try:
            if type(operation) is Put:
                await engine.admission.put_soon(operation)
            else:
                self._let_in(engine.admission, operation)
            future = self._future(operation)
            engine.submit(operation)
        except BaseException:
            engine.admission.leave(operation)
            raise
        try:
            return await future
        finally:
            del future, operation  # an error would hold itself, and entries, until a garbage collection

    def _call(self, operation: Operation) -> Any:
        engine = self._running()
        try:
            self._let_in(engine.admission, operation)
            return engine.call(operation)
        except BaseException:
            engine.admission.leave(operation)
            raise

    @staticmethod
    def _let_in(admission: Admission, operation: Operation) -> None:
        """Count an operation among those that wait for the disk; a put may have to wait, a begin be refused."""
        if isinstance(operation, Put):
            admission.put(operation)
        elif isinstance(operation, Begin):
            admission.begin(operation)
        elif isinstance(operation, RecordOperation):
            admission.count(operation)

    def _sweep_if_due(self) -> None:
        raise NotImplementedError

    # ---- the end, forks, copies

    @property
    def pending(self) -> Pending:
        """What this object has taken in that is not durable yet."""
        engine = self._engine
        return Pending(0, 0, 0) if engine is None else engine.admission.pending

    @property
    def closed(self) -> bool:
        """Whether `close` was called on this object."""
        return self._closed

    async def close(self) -> None:
        """Finish what is queued, seal the segments of this object, free its threads and descriptors. Repeatable."""
        if not self._closed or not self._end.is_over:
            await in_thread(self.close_now)

    def close_now(self) -> None:
        """`close`, blocking. Whoever calls it while another thread, or a signal handler, closes waits for that.

        An exception of a signal handler ends the wait, and not the closing. While the interpreter ends, as in a
        `__del__`, there are no threads that could do it: then the store is left as a killed process leaves it.
        """
        self._closed = True
        if sys.is_finalizing():
            return
        engine, liveness, end = self._engine, self._liveness, self._end
        if self._housekeeper is not None:
            self._housekeeper.stop()
        if engine is None:
            end.close(list)
        elif not end.is_over and threading.current_thread() is threading.main_thread():
            # A signal handler may raise here, or close: the work is done where it can't.
            try:
                start_thread(partial(end.close, partial(let_go, engine, liveness)), "tokcap-close")
            except OSError:
                end.close(partial(let_go, engine, liveness))
        else:
            end.close(partial(let_go, engine, liveness))
        errors = end.wait()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._engine = None
        if errors:
            raise errors[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_now()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self._settings)

    def __repr__(self) -> str:
        return f"FileStore({self._layout.root!r})"

    def _after_fork(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()  # the engine is the parent's
        if self._engine is not None:
            self._engine.abandon()
        self._liveness.abandon()
        for fd in self._signalling:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._start()


_LEAST: dict[str, int] = {
    "segment_bytes": 1,
    "max_entry_bytes": 1,
    "cache_bytes": 0,
    "max_pending_bytes": 1,
    "max_pending_operations": 1,
    "min_free_bytes": 0,
    "min_free_inodes": 0,
    "sync_threads": 1,
}
"""Options that are whole numbers, and the least that they may be; the others are seconds."""


def _check_options(*, dir: str | os.PathLike[str], **numbers: object) -> None:
    if not os.fspath(dir):
        raise InvalidOptionError("dir is empty; give the directory of the store")
    for name, value in numbers.items():
        if name in _LEAST:
            if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST[name]:
                raise InvalidOptionError(f"{name} is {value!r}, expected a whole number from {_LEAST[name]}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise InvalidOptionError(f"{name} is {value!r}, expected seconds, 0 or more")


def _reopen(kind: type[StoreBase], settings: dict[str, Any]) -> StoreBase:
    return kind(**settings)


def _descriptor_budget() -> int:
    """Half of what this process may open, so that the server around us keeps the other half."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft // 2, 8192)) if soft != resource.RLIM_INFINITY else 8192


def raise_first(results: Iterable[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result, results


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
